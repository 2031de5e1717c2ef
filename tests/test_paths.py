"""Which files folders, links and patterns stand for, and what is said of the rest."""

import os
import re
import socket
from pathlib import Path

import pytest

from data.prepare.paths import named_files
from data.tokens.foreign import find_files

TREE = ("in/real/a.txt", "in/real/sub/b.txt", "out/c.txt", "out/deep/d.txt", "in/.hidden/e.txt")
LINKS = {"in/aa": "../out", "in/alias": "real", "in/real/up": "..", "in/real/loop": "../../in"}
ALL = ["in/aa/c.txt", "in/aa/deep/d.txt", "in/real/a.txt", "in/real/sub/b.txt"]


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    """Two folders; the first has links into the second, to its own folders and back up."""
    monkeypatch.chdir(tmp_path)
    for name in TREE:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name, encoding="utf-8")
    for name, target in LINKS.items():
        Path(name).symlink_to(target)


@pytest.mark.parametrize("word", ["in", "in/", "in/*", "in/**", "in/**/*.txt", "**/in/**/?.txt"])
def test_links_to_folders_are_followed_and_each_file_counts_once(word):
    assert sorted(map(str, named_files(word))) == ALL


@pytest.mark.parametrize("word", ["", "no/*", "in/*.md", "in/real/a.txt/**"])
def test_word_may_name_nothing(word):
    assert named_files(word) == []


def test_link_to_a_folder_may_be_named_itself():
    assert [*map(str, named_files("in/aa"))] == ["in/aa/c.txt", "in/aa/deep/d.txt"]


def test_pattern_with_an_absolute_path_gives_absolute_paths(tmp_path):
    assert named_files(f"{tmp_path}/out/**/*.txt") == [
        tmp_path / "out/c.txt", tmp_path / "out/deep/d.txt"
    ]  # fmt: skip


def test_pattern_of_token_files_ends_too():
    for place in ("in/real/train-1.bin", "out/train-2.bin"):
        Path(place).write_bytes(b"\1\0")
    found = find_files("in/**/*.bin")["train"]
    assert [*map(str, found)] == ["in/aa/train-2.bin", "in/real/train-1.bin"]


def test_hidden_files_and_links_to_read_files_are_told(capsys):
    Path("in/a-link.txt").symlink_to("real/a.txt")
    assert len(named_files("in")) == 4
    assert capsys.readouterr().err.splitlines() == [
        "in: not read: in/.hidden (hidden; name it to read it)",
        "in: not read: in/a-link.txt (a link to a file that is read already)",
    ]
    assert [*map(str, named_files("in/.hidden"))] == ["in/.hidden/e.txt"]


@pytest.mark.parametrize("word", ["in", "in/**/*"])
def test_leftovers_of_other_programs_are_counted_and_not_read(capsys, word):
    before = named_files(word)
    capsys.readouterr()
    for name in ("_SUCCESS", "a.txt~", "#a.txt#", "a.jsonl.tmp", "part-0.crc", "Thumbs.db"):
        Path("in/real", name).write_bytes(b"x")
    assert named_files(word) == before
    line = f"{word}: not read: in/real/#a.txt# and 5 more (left by another program)"
    assert line in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("target", ["nowhere", "x.txt"])
@pytest.mark.parametrize("word", ["in", "in/x.txt", "in/*.txt"])
def test_link_that_leads_nowhere_is_refused(word, target):
    Path("in/x.txt").symlink_to(target)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        named_files(word)
    assert str(caught.value) == (
        f"in/x.txt is a link to {target}, which does not exist: bring that back, or remove the link"
    )


def test_pipe_in_a_folder_is_refused():
    os.mkfifo("in/x.txt")
    message = "in/x.txt is a pipe: a pipe is read where --input names it by itself; move it else"
    with pytest.raises(ValueError, match=re.escape(message)):
        named_files("in")
    assert named_files("in/x.txt") == [Path("in/x.txt")]


@pytest.mark.parametrize("word", ["/dev/null", "/dev/zero"])
def test_device_is_refused(word):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        named_files(word)
    assert str(caught.value) == f"{word} is a device: name files, folders or pipes"


def test_socket_is_refused():
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("in/x.txt")
        with pytest.raises(ValueError, match=r"^in/x\.txt is a socket: name files, folders or"):
            named_files("in")


def test_folder_that_cannot_be_read_is_an_error(monkeypatch):
    scan = os.scandir

    def denied(place):
        if str(place).endswith("sub"):  # as for a user other than root
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="in/real/sub"):
        named_files("in")
