"""Pipes and standard input as inputs: read once, to the same tokens as a file."""

import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from data.prepare import pipes
from data.prepare.readers import InputFile, find_inputs
from data.prepare.texts import ReadOptions

ROOT = Path(__file__).resolve().parent.parent
ROWS = b'{"text":"abc"}\n{"text":"de"}\n{"text":"f"}\n'


@pytest.fixture
def pipe(tmp_path):
    """Factory: a named pipe into which a thread writes."""
    threads = []

    def make(name: str, content: bytes) -> Path:
        os.mkfifo(tmp_path / name)
        thread = threading.Thread(target=(tmp_path / name).write_bytes, args=[content])
        thread.start()
        threads.append(thread)
        return tmp_path / name

    yield make
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("p.jsonl", ROWS, ["abc", "de", "f"]),
        ("p", ROWS, ["abc", "de", "f"]),
        ("p", gzip.compress(b"\xef\xbb\xbf\n" + ROWS, mtime=0), ["abc", "de", "f"]),
        ("p", b"plain\n" * 50_000, ["plain\n" * 50_000]),
        ("p.txt", ROWS, [ROWS.decode()]),
        ("p", b"", []),
    ],
)
def test_pipe_is_read_as_often_as_needed(pipe, tmp_path, name, content, texts):
    found = InputFile(pipe(name, content), ReadOptions(), tmp_path / "copies")
    for _ in range(2):
        assert [item for item in found if isinstance(item, str)] == texts
    assert list((tmp_path / "copies").iterdir()) == []  # a kill leaves nothing either


def test_same_content_of_a_pipe_is_the_same_input(pipe, tmp_path):
    first, second, other = (
        InputFile(pipe(f"{i}.jsonl", content), ReadOptions(), tmp_path).identity
        for i, content in enumerate([ROWS, ROWS, ROWS[:-1]])
    )
    assert first == second != other


def test_pipe_without_a_writer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(pipes, "WAIT_SECONDS", 0.01)
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        find_inputs([str(tmp_path / "p.txt")], ReadOptions())
    assert str(caught.value) == (
        f"{tmp_path / 'p.txt'} is a pipe that nothing has opened for writing in 0.01 seconds: "
        "start what writes into it"
    )


def test_writer_may_be_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(pipes, "WAIT_SECONDS", 0.01)
    os.mkfifo(tmp_path / "p.txt")
    writer = os.open(tmp_path / "p.txt", os.O_RDWR)  # waits for no reader
    thread = threading.Timer(0.1, lambda: (os.write(writer, b"late"), os.close(writer)))
    thread.start()
    assert list(InputFile(tmp_path / "p.txt", ReadOptions())) == ["late"]
    thread.join()


@pytest.mark.parametrize("word", ["-", "/dev/stdin"])
@pytest.mark.parametrize("redirected", [False, True])
def test_standard_input_is_read(tmp_path, word, redirected):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    code = (
        f"from data.prepare.readers import *; print([*find_inputs(['{word}'], ReadOptions())[0]])"
    )
    command = [sys.executable, "-c", code]
    with (tmp_path / "a.jsonl").open("rb") as file:
        start = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        given = file if redirected else start.stdout
        done = subprocess.run(command, cwd=ROOT, stdin=given, capture_output=True, text=True)
    start.communicate()
    assert done.stdout.strip() == "['abc', 'de', 'f']", done.stderr
