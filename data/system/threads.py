"""Long native calls in threads, so that the main thread hears signals while they run."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

# Seconds that a stopped process waits for its threads; one native call may take longer.
PATIENCE = 0.25

T = TypeVar("T")


class Stopped(Exception):
    """The main thread has left the work that a thread was doing."""


class Threads:
    """Calls in threads that do not keep the process from ending.

    They are told to stop where the `with` block is left by an error or a signal.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._running: set[Future] = set()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """The outcome of a call."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._running.add(future)
        future.add_done_callback(self._running.discard)
        threading.Thread(target=run, daemon=True).start()
        return future

    def check(self) -> None:
        """Leave the work of this thread if it is to stop.

        Raises:
            Stopped: it is.
        """
        if self._stop.is_set():
            raise Stopped

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each after a check."""
        for item in items:
            self.check()
            yield item

    def __enter__(self) -> "Threads":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
            wait([*self._running], PATIENCE)


def in_thread(call: Callable[[], T]) -> T:
    """What a call returns, made in a thread so that the main thread hears signals."""
    with Threads() as threads:
        return threads.start(call).result()
