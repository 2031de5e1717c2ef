"""Lock on a folder: one owner at a time, within a machine and between nodes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from data.system import lock
from data.system.lock import Owner, held

ROOT = Path(__file__).parent.parent
HOLD = """
import sys
from pathlib import Path
from data.system.lock import held
with held(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""
FAR = replace(Owner.this_process(), boot="another", host="node7", process=41)


class BusyError(Exception):
    """The lock is a living owner's."""


def refuse(owner: Owner) -> None:
    raise BusyError(str(owner))


@pytest.fixture(params=["flock", "no flock"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system that has flock, and one that has not, as Lustre by default."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "no flock":
        monkeypatch.setattr(fcntl, "flock", fail)
    return request.param


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life every tenth of a second, and silence after half of one."""
    monkeypatch.setattr(lock, "BEAT", 0.1)
    monkeypatch.setattr(lock, "SILENCE", 0.5)


@pytest.fixture
def owner_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process of this machine that holds `tmp_path / "run"`."""
    command, pipe = [sys.executable, "-c", HOLD, tmp_path / "run"], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "held\n"
        yield owner
        owner.kill()


def leave(folder: Path, content: str) -> Path:
    path = folder / ".lock"
    path.write_text(content, encoding="utf-8")
    return path


def test_folder_is_refused_while_its_owner_lives_and_free_after_its_sigkill(
    tmp_path, owner_process, system
):
    with pytest.raises(BusyError) as refusal, held(tmp_path / "run", refuse):
        pass
    owner_process.send_signal(signal.SIGKILL)
    owner_process.wait()
    assert str(refusal.value) == f"process {owner_process.pid}"
    with held(tmp_path / "run", refuse, refuse_to_wait):
        pass


def refuse_to_wait(line: str) -> None:
    raise AssertionError(line)


def test_folder_is_made_and_the_lock_leaves_nothing(tmp_path, system):
    with held(tmp_path / "runs" / "new", refuse):
        names = [path.name for path in (tmp_path / "runs" / "new").iterdir()]
    assert names == [".lock"]
    assert list((tmp_path / "runs" / "new").iterdir()) == []


def test_lock_names_its_owner(tmp_path):
    with held(tmp_path, refuse):
        content = json.loads((tmp_path / ".lock").read_text(encoding="utf-8"))
    assert content == asdict(Owner.this_process())


@pytest.mark.parametrize(
    "content",
    ["999999999\n", "", "junk\0\n", "[]\n", '{"x": 1}\n', "unknown\n"],
    ids=["earlier form", "empty", "junk", "list", "other keys", "word"],
)
def test_lock_file_of_nobody_is_taken(tmp_path, content):
    os.utime(leave(tmp_path, content), (1e9, 1e9))
    with held(tmp_path, refuse, refuse_to_wait):
        assert "boot" in (tmp_path / ".lock").read_text(encoding="utf-8")


def test_owner_on_another_node_that_gives_signs_is_respected(tmp_path, quick, system):
    path, over = leave(tmp_path, json.dumps(asdict(FAR))), threading.Event()
    beat = threading.Thread(target=lock._beat, args=(path, json.dumps(asdict(FAR)), over))
    beat.start()
    with pytest.raises(BusyError) as refusal, held(tmp_path, refuse):
        pass
    over.set()
    beat.join()
    assert str(refusal.value) == "process 41 on node7"
    assert json.loads(path.read_text(encoding="utf-8"))["host"] == "node7"


def test_owner_on_another_node_that_is_silent_is_replaced(tmp_path, quick, system):
    leave(tmp_path, json.dumps(asdict(FAR)))
    lines: list[str] = []
    with held(tmp_path, refuse, lines.append):
        content = json.loads((tmp_path / ".lock").read_text(encoding="utf-8"))
    told = f"{tmp_path} was in use by process 41 on node7: waiting up to 0 s for a sign of it"
    assert (content["process"], lines) == (os.getpid(), [told])


def test_owner_on_another_node_that_was_silent_for_hours_is_replaced_at_once(tmp_path, system):
    os.utime(leave(tmp_path, json.dumps(asdict(FAR))), (1e9, 1e9))
    with held(tmp_path, refuse, refuse_to_wait):
        pass


def test_process_number_that_another_process_has_now_is_no_owner(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    earlier = replace(Owner.this_process(), started=Owner.this_process().started + "0")
    leave(tmp_path, json.dumps(asdict(earlier)))
    with held(tmp_path, refuse, refuse_to_wait):
        pass


def test_lock_is_waited_for_where_that_is_asked_for(tmp_path, owner_process):
    told: list[Owner] = []

    def wait(owner: Owner) -> None:
        told.append(owner)
        owner_process.kill()

    with held(tmp_path / "run", wait):
        pass
    assert told[0].process == owner_process.pid


def test_owner_that_was_replaced_ends_before_it_overwrites_anything(
    tmp_path, quick, monkeypatch, capsys
):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    with held(tmp_path, refuse):
        leave(tmp_path, json.dumps(asdict(FAR)))
        assert ended.wait(10)
    assert f"error: {tmp_path} was taken over by another process" in capsys.readouterr().err
    assert json.loads((tmp_path / ".lock").read_text(encoding="utf-8"))["host"] == "node7"


def test_only_one_of_many_that_find_a_dead_owner_gets_the_lock(tmp_path, system):
    os.utime(leave(tmp_path, json.dumps(asdict(FAR))), (1e9, 1e9))
    inside: list[int] = []
    most: list[int] = []

    def enter() -> None:
        with held(tmp_path, lambda _: None):
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    run_together([enter] * 12)
    assert most == [1] * 12


def run_together(targets: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_folder_in_the_place_of_the_lock_is_named(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ValueError, match="is a folder") as refusal, held(tmp_path, refuse):
        pass
    place = tmp_path / ".lock"
    assert str(refusal.value) == f"{place} is a folder: the lock is a file there; remove it"
