"""Native calls in threads: their outcome arrives, and a signal does not wait for them."""

import random
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from data.prepare.vocabulary import byte_tokenizer, train_bpe
from data.system.threads import Stopped, Threads, in_thread

ROOT = Path(__file__).parents[1]


def test_outcome_of_a_call_arrives():
    assert in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0)


def test_threads_stop_where_the_block_is_left_by_an_error():
    begun = threading.Event()

    def endless():
        while True:
            yield begun.set()

    threads = Threads()
    future = threads.start(lambda: list(threads.checked(endless())))
    with pytest.raises(SystemExit), threads:  # noqa: PT012
        begun.wait()
        raise SystemExit
    assert isinstance(future.exception(timeout=9), Stopped)


def test_fault_of_a_text_is_the_error_of_training():
    def texts():
        yield "a"
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        train_bpe(texts(), 300)


def test_encoding_of_a_long_text_does_not_hold_up_other_threads():
    with Threads() as threads:
        rows = threads.start(lambda: byte_tokenizer().encode_batch(["some words " * 150_000]))
        moments = [time.monotonic()]
        while not rows.done():
            time.sleep(0.001)
            moments.append(time.monotonic())
    waits = [after - before for before, after in pairwise(moments)]
    assert sum(wait for wait in waits if wait > 0.04) < 0.5 * sum(waits)


@pytest.mark.slow
# After SIGINT the program dies of that signal, which a shell shows as 130.
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_training_a_vocabulary_hears_a_signal(tmp_path: Path, number: signal.Signals, code: int):
    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=4_000_000)
    (tmp_path / "a.txt").write_text("".join(letters))
    (tmp_path / "v.txt").write_text("abc")
    words = [sys.executable, "-m", "cli", "prepare", "--input", tmp_path / "a.txt"]
    words += ["--val_input", tmp_path / "v.txt", "--output", tmp_path / "o", "--vocab_size", "9000"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        # All texts are read: what follows is one native call.
        assert "done" in next(line for line in run.stderr if "done" in line)
        run.send_signal(number)
        assert run.wait(timeout=5) == code
