"""Peers: the processes of a run meet and compare settings before any work; errors appear once."""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

from callbacks.processes.launch import Launch, read_launch
from callbacks.processes.parent import lost_rank

# Seconds: until a wait is announced, between its announcements, for others to tell their error
# and for those that start late to hear of one, for a network file system to show what another
# node wrote, and at most for what listens at the address of rank 0 to answer as a store does.
SILENCE, REPEAT, GRACE, LATE, STALE, ANSWER = 10.0, 60.0, 3.0, 30.0, 5.0, 60.0

# In torchrun's store, where rank 0 serves that of the run.
PORT = "relight/port"

distributed: Any = torch.distributed


class PeerError(RuntimeError):
    """Another process of the run has failed and reports the cause."""


class Peers:
    """All processes of a run, connected by a key-value store that rank 0 serves."""

    current: "Peers | None" = None
    """Those of this process; None until it tries to meet them."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, hint: str) -> None:
        self.address, self.port = address, port
        self.rank, self.world_size = rank, world_size
        self.hint, self.silence = hint, SILENCE
        self.names = [f"rank {other}" for other in range(world_size)]
        self.names[rank] = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        self.children: list[Any] = []
        self._store: Any = None
        # How long an error is held ready for processes that start late; none do after the limit.
        self._patience = LATE
        self._unreachable = False

    def meet(self, limit: float, about: dict[str, Any]) -> None:
        """Wait for all processes and compare what they are about to run.

        Args:
            limit: Seconds to wait for the last of them.
            about: What must be the same for all.

        Raises:
            RuntimeError: some did not come in time.
            ValueError: they differ.
        """
        Peers.current = self
        self._connect(limit)
        host, here = socket.gethostname(), self._own_address()
        if self._store.add(f"rank {self.rank}", 1) > 1:
            raise RuntimeError(
                f"another process has come as rank {self.rank} to {self._place}: set NODE_RANK to "
                "the number of each node; if this one was started again while the others went on, "
                "start them all again"
            )
        me = {"host": host, "process": os.getpid(), "here": here, "offers": _gloo_address()}
        members = self.gather("members", me, limit)
        self.names = [
            f"rank {rank} ({member['host']}, process {member['process']})"
            for rank, member in enumerate(members)
        ]
        if len({(member["host"], member["here"]) for member in members}) > 1:
            check_addresses(self.names, members)
        self.agree("settings", about, limit)
        self._patience = 0.0

    def gather(self, topic: str, mine: Any, limit: float) -> list[Any]:
        """Return the value of each rank for a topic; a collective call."""
        store = self._store
        assert store is not None
        store.set(f"{topic}/{self.rank}", json.dumps(mine, default=str))
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        started, next_line = time.monotonic(), self.silence
        while not store.check(keys):
            if store.add("errors", 0):
                raise PeerError("another process of the run has failed")
            waited = time.monotonic() - started
            if waited >= min(next_line, limit):
                missing = [rank for rank in range(self.world_size) if not store.check([keys[rank]])]
                who = ", ".join(self.names[rank] for rank in missing)
                place = f"{len(missing)} of {self.world_size} processes at {self._place}: {who}"
                if waited >= limit:
                    self._patience = 0.0
                    raise RuntimeError(f"after {limit:g} s without {place}; {self.hint}")
                if self.rank == 0:
                    self._say(f"waiting {waited:.0f} s for {place}; {self.hint}")
                next_line += REPEAT
            time.sleep(0.05)
        return [json.loads(store.get(key)) for key in keys]

    def agree(self, topic: str, mine: dict[str, Any], limit: float) -> None:
        """Compare values of all ranks.

        Raises:
            ValueError: names each key that differs, with its values and their ranks.
        """
        found = self.gather(topic, mine, limit)
        faults = []
        for key in dict.fromkeys(key for each in found for key in each):
            values = [each.get(key) for each in found]
            if any(value != values[0] for value in values):
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                faults.append(
                    f"{key} is {values[0]} on {self.names[0]} and {values[other]} on "
                    f"{self.names[other]}"
                )
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise ValueError(
                f"the processes of the run differ: {'; '.join(faults[:5])}{more}; start all of "
                "them with the same settings, data and code"
            )

    def decide(self, topic: str, choice: Any, limit: float) -> Any:
        """Return the choice of rank 0."""
        return self.gather(topic, choice if self.rank == 0 else None, limit)[0]

    def agree_on_view(self, look: Callable[[], Any], what: str, limit: float) -> None:
        """Check that all ranks see the same in a folder that they must share.

        Raises:
            ValueError: names the ranks that do not.
        """
        seen = look()
        expected = self.decide(f"view of {what}", seen, limit)
        until = time.monotonic() + STALE
        while (seen := json.loads(json.dumps(look()))) != expected and time.monotonic() < until:
            time.sleep(0.2)
        views = self.gather(f"own view of {what}", seen, limit)
        others = [self.names[rank] for rank, view in enumerate(views) if view != expected]
        if others:
            raise ValueError(
                f"{what} on {self.names[0]} is not what {', '.join(others)} see there: all nodes "
                "must share the run folder; set trainer.default_root_dir to a folder of a shared "
                "file system"
            )

    # Connecting

    @property
    def _place(self) -> str:
        return f"{self.address}:{self.port}"

    def _connect(self, limit: float) -> None:
        """Connect to the store of rank 0; torchrun's store holds its port."""
        served = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            served = self._open(self.port, False, limit)
        if self.rank > 0:
            store = self._open(self._wait_for_server(limit, served), False, limit)
        elif served is None:
            store = self._open(self.port, True, limit)
        else:
            store = self._open(0, True, limit)
            served.set(PORT, str(store.port))
        # Torch keeps its own names in the same store.
        self._store = distributed.PrefixStore("relight", store)

    def _open(self, port: int, serve: bool, limit: float) -> Any:
        patience = min(ANSWER, max(limit, GRACE))
        found: list[Any] = []

        def connect() -> None:
            try:
                store = distributed.TCPStore(
                    self.address,
                    port,
                    self.world_size,
                    serve,
                    timedelta(seconds=patience),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
                found.append(store)
            except distributed.DistError as error:
                found.append(_first_line(error))

        # In a thread: the store's own limit does not hold where another program listens, silently.
        attempt = threading.Thread(target=connect, daemon=True)
        attempt.start()
        attempt.join(patience + GRACE)
        if not found:
            found.append(f"no answer for {patience:g} s")
            try:
                socket.getaddrinfo(self.address, port)
            except OSError as error:
                found[0] = f"{error} for {patience:g} s"
        what = found[0]
        if not isinstance(what, str):
            return what
        # The same place would only keep the error's report waiting.
        self._unreachable = True
        raise RuntimeError(
            f"the processes of the run cannot meet at {self._place} ({what}); set MASTER_ADDR to "
            "the first node and MASTER_PORT to a free port there"
        )

    def _wait_for_server(self, limit: float, served: Any) -> int:
        """Port of rank 0, as soon as it listens: a client of the store would wait without a word.

        Nobody listens at a port that an earlier start has left in torchrun's store.
        """
        started, next_line, error = time.monotonic(), self.silence, "it has not begun"
        while (waited := time.monotonic() - started) < limit:
            try:
                if served is None or served.check([PORT]):
                    port = self.port if served is None else int(served.get(PORT))
                    socket.create_connection((self.address, port), timeout=5).close()
                    return port
            except OSError as failure:
                error = failure
            if waited >= next_line:
                self._say(
                    f"rank {self.rank} on {socket.gethostname()} has waited {waited:.0f} s for "
                    f"rank 0 at {self._place} ({error}); {self.hint}"
                )
                next_line += REPEAT
            time.sleep(0.2)
        self._patience = 0.0
        raise RuntimeError(f"no rank 0 at {self._place} for {limit:g} s ({error}); {self.hint}")

    def _own_address(self) -> str:
        """Return the address of this node on the route to rank 0."""
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, self.port))
            return probe.getsockname()[0]
        return ""

    # Errors

    def settle(self, text: str, code: int, lost: bool) -> int:
        """Print an error once for all ranks that have it; return this process's exit code.

        The lowest rank that failed prints what all have told it within a few seconds.

        Args:
            text: Lines to print.
            code: Exit code.
            lost: Whether the error only says that another process is gone.
        """
        # The watcher thread would end this process before the line is printed.
        ranks = list(self.children)
        self.children.clear()
        if self._unreachable:
            self._say(self._own_text(text, lost, []))
            return code
        result: list[int] = []
        # In a thread: where the network is cut, a call of the store returns after minutes.
        talk = threading.Thread(
            target=lambda: result.append(self._settle(text, code, lost, ranks)), daemon=True
        )
        talk.start()
        talk.join(3 * GRACE + self._patience)
        if not result:
            self._say(self._own_text(text, lost, [0] if self.rank else []))
            return code
        return result[0]

    def _settle(self, text: str, code: int, lost: bool, ranks: list[Any]) -> int:
        store = self._store
        try:
            if store is None:
                self._connect(self._patience)
                store = self._store
                assert store is not None
            mine = json.dumps([text, code, lost, self.names[self.rank]])
            # Not over that of another process that has come as this rank.
            store.compare_set(f"error/{self.rank}", "", mine)
            store.add("errors", 1)
            everyone = [f"error/{rank}" for rank in range(self.world_size)]
            _wait(lambda: store.check(["said"]) or store.check(everyone), GRACE)
            known = [rank for rank, key in enumerate(everyone) if store.check([key])]
            if not store.check(["said"]) and known[0] != self.rank:
                _wait(lambda: store.check(["said"]), GRACE)
            if store.check(["said"]):
                said, their_code = json.loads(store.get("said"))
                store.add("heard", 1)
                if lost or text in said:
                    return their_code
                self._say(self._own_text(text, lost, []))
                return code
            told = {rank: json.loads(store.get(everyone[rank])) for rank in known}
            causes = {rank: each for rank, each in told.items() if not each[2]}
            texts: dict[str, list[int]] = {}
            for rank, (line, *_) in causes.items():
                texts.setdefault(line, []).append(rank)
            for line, who in texts.items():
                of_all = len(texts) == 1 and 0 in who
                self._say(line if of_all else _named(line, told[who[0]][3]))
            if not causes:
                silent = [rank for rank in range(self.world_size) if rank not in told]
                ended = lost_rank(ranks)
                self._say(f"error: {ended[0]}" if ended else self._own_text(text, True, silent))
            code = next(iter(causes.values()))[1] if causes else code
            store.set("said", json.dumps([list(texts), code]))
            # Late processes must not wait for a process that has left.
            late = self._patience if self.rank == 0 else 0.0
            hearers = self.world_size if late else len(known)
            _wait(lambda: store.add("heard", 0) >= hearers - 1, max(late, GRACE))
        except RuntimeError:  # the store went with the process that served it
            self._say(self._own_text(text, lost, [0] if self.rank else []))
        return code

    def _own_text(self, text: str, lost: bool, silent: list[int]) -> str:
        if not lost:
            return _named(text, self.names[self.rank])
        who = ", ".join(self.names[rank] for rank in silent)
        gone = f"{who} gives no answer: it was killed, it stalls or the network is cut"
        gone = gone if silent else "the processes of the run have lost each other"
        return (
            f"error: {gone} ({_short(text)}); the same command goes on from the newest checkpoint"
        )

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def check_addresses(names: list[str], members: list[dict[str, Any]]) -> None:
    """Refuse addresses that other nodes cannot reach, as Debian's 127.0.1.1 for a host name.

    Raises:
        ValueError: names the rank, the address and the variable that sets another.
    """
    for name, member in zip(names, members, strict=True):
        if str(member["offers"]).startswith("127."):
            raise ValueError(
                f"{name} would be found at {member['offers']}, for which its host name stands and "
                "which no other node can reach; set GLOO_SOCKET_IFNAME there, and "
                f"NCCL_SOCKET_IFNAME on GPUs, to the interface that has {member['here']} (ip -br "
                "address lists them)"
            )


def _named(text: str, name: str) -> str:
    return text.replace("error: ", f"error: on {name}: ", 1)


def _wait(until: Callable[[], bool], limit: float) -> None:
    end = time.monotonic() + limit
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


def _gloo_address() -> str | None:
    """Address under which gloo offers this process to others; None where a variable says which."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"  # as gloo does


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _short(text: str) -> str:
    """Return an error of gloo without source locations."""
    text = re.sub(r"^error: |\[[^\]]*\.(cc|cpp|h):\d+\] ", "", text)
    return text.partition(". This is typically")[0]


def is_lost(error: BaseException) -> bool:
    """Whether an error only reports that another process ended or does not answer."""
    if isinstance(error, PeerError | distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        name in str(error) for name in ("third_party/gloo", "gloo::", "NCCL")
    )


def started_with_others() -> Peers | None:
    """The peers of this process, known or as its launcher tells; None where it is alone."""
    if Peers.current is not None:
        return Peers.current
    try:
        launch = read_launch()
    except ValueError:
        return None
    rank, world_size = launch.rank, launch.world_size
    if rank is None or world_size is None or not rank < world_size > 1:
        return None
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if launch.kind == "srun":
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        environment = SLURMEnvironment()
        address, port = environment.main_address, environment.main_port
    if not address or not port:
        return None
    return Peers(address, int(port), rank, world_size, hint(launch))


def hint(launch: Launch) -> str:
    """Return advice for processes that do not arrive."""
    if launch.kind == "torchrun":
        return "start torchrun on the other nodes too, with the same rendezvous"
    if launch.kind == "srun":
        if "SLURM_STEP_ID" not in os.environ:
            return "srun did not start this process: put srun before the command"
        return "see why srun did not start the others"
    return (
        "start the others with the same MASTER_ADDR and MASTER_PORT and NODE_RANKs of their own, "
        "or set trainer.devices and trainer.num_nodes to what there is"
    )
