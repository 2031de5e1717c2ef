"""What of an output folder prepare replaces, and what it leaves alone."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import Lightning

from data.prepare import prepare, work
from data.prepare.vocabulary import byte_tokenizer

PREPARE = ("prepare", "--input", "a.jsonl", "--output", "o", "--tokenizer", "byte", "--val_input")
WAY_OUT = "name another folder, or replace them by lightning prepare --overwrite"


@pytest.fixture
def run(lightning: Lightning, tmp_path, monkeypatch):
    """Factory: prepares a.jsonl into o; returns the exit code and the last line of stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.jsonl").write_text('{"text":"z"}', encoding="utf-8")

    def call(text: str, *options: str) -> tuple[int, str]:
        content = json.dumps({"text": text})
        path = tmp_path / "a.jsonl"
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
        code, _, err = lightning(*PREPARE, "v.jsonl", *options)
        return code, err.rstrip().rpartition("\n")[2]

    return call


def _held(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("names", "held"),
    [
        (["train.bin", "val.bin", "meta.json"], "meta.json, train.bin and val.bin"),
        (["tokenizer.json"], "tokenizer.json"),
        (["meta.json"], "meta.json"),
        (["train.bin"], "train.bin"),
        (["val.docs.npy"], "val.docs.npy"),
        (["train-00007.bin", "meta.json"], "meta.json and train-00007.bin"),
        (["x1.npy", "x2.npy", "x3.bin"], "x1.npy, x2.npy and x3.bin"),
        ([f"train-0000{i}.bin" for i in range(6)],
         "train-00000.bin, train-00001.bin, train-00002.bin and 3 more files"),
    ],
)  # fmt: skip
def test_files_of_another_program_are_replaced_on_request_alone(run, tmp_path, names, held):
    (tmp_path / "o").mkdir()
    for name in names:
        (tmp_path / "o" / name).write_bytes(b'{"stoi": {"a": 0}, "itos": ["a"]}')
    before = _held(tmp_path / "o")
    line = f"error: o holds {held} that prepare did not make: {WAY_OUT}"
    assert (run("abc"), _held(tmp_path / "o")) == ((2, line), before)
    assert run("abc", "--overwrite")[0] == 0
    assert (tmp_path / "o" / "train.bin").read_bytes() == b"a\0b\0c\0\0\1"


@pytest.mark.parametrize("target", [None, "nowhere"])
def test_output_that_is_no_folder_is_refused(run, tmp_path, target):
    place = tmp_path / "o"
    place.write_bytes(b"") if target is None else place.symlink_to(target)
    assert run("abc") == (2, "error: --output o is there and is no folder: name a folder")


def test_finished_work_is_not_done_again(run, tmp_path):
    run("abc")
    before = _held(tmp_path / "o")
    assert run("abc") == (0, "nothing to do: o is prepared from the same inputs")
    assert _held(tmp_path / "o") == before
    # No row was bad, so nothing would be skipped.
    assert run("abc", "--on_bad_row", "skip")[1].startswith("nothing to do: ")


@pytest.mark.parametrize(
    ("text", "options", "changes"),
    [
        ("xyz", [], "its inputs are others, or changed since"),
        ("abc", ["--bos"], "--bos was False, is True"),
        ("abc", ["--field", "t", "--pad", "a"], "--pad was None, is a, --field was text, is t"),
    ],
)
def test_corpus_of_something_else_is_replaced_on_request_alone(
    run, tmp_path, text, options, changes
):
    run("abc")
    before = _held(tmp_path / "o")
    line = f"error: o holds another prepared corpus ({changes}): {WAY_OUT}"
    assert (run(text, *options), _held(tmp_path / "o")) == ((2, line), before)


def test_corpus_of_other_text_is_replaced_on_request(run, tmp_path):
    run("abc")
    assert run("xyz", "--overwrite")[0] == 0
    assert (tmp_path / "o" / "train.bin").read_bytes()[:6] == b"x\0y\0z\0"


@pytest.mark.parametrize("place", ["./", "{here}/", "link/", "{here}/link/"])
def test_another_spelling_of_the_paths_is_the_same_corpus(lightning, run, tmp_path, place):
    (tmp_path / "link").symlink_to(tmp_path)
    assert run("ab")[0] == 0
    words = [(place + name).format(here=tmp_path) for name in ("a.jsonl", "v.jsonl")]
    options = ("--output", "o", "--tokenizer", "byte", "--val_input", words[1])
    code, _, err = lightning("prepare", "--input", words[0], *options)
    assert (code, err) == (0, "nothing to do: o is prepared from the same inputs\n")


def test_copied_input_is_another_one(lightning, run, tmp_path):
    assert run("ab")[0] == 0
    shutil.copy2(tmp_path / "a.jsonl", tmp_path / "copy.jsonl")
    code, _, err = lightning(*PREPARE, "v.jsonl", "--input", "copy.jsonl")
    assert (code, "(its inputs are others, or changed since)" in err) == (2, True)


def test_corpus_of_a_version_without_real_paths_is_known(run, tmp_path):
    assert run("ab")[0] == 0
    meta = json.loads((tmp_path / "o" / "meta.json").read_text(encoding="utf-8"))
    del meta["made_from"]["real_inputs"]
    (tmp_path / "o" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert run("ab") == (0, "nothing to do: o is prepared from the same inputs")


def test_corpus_that_does_not_tell_its_inputs_is_replaced_on_request(run, tmp_path):
    run("abc")
    meta = json.loads((tmp_path / "o" / "meta.json").read_text(encoding="utf-8"))
    del meta["made_from"]
    (tmp_path / "o" / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    line = f"error: o holds another prepared corpus (an older version made it): {WAY_OUT}"
    assert run("abc") == (2, line)
    assert run("abc", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, " does not exist"),
        ("{", " is damaged (Expecting property name enclosed in double quotes: line 1 column 2"
         " (char 1))"),
        ('{"format": 3}', ": format is 3, must be 2"),
    ],
)  # fmt: skip
def test_files_of_prepare_without_their_meta_are_replaced_on_request(run, tmp_path, content, why):
    run("abc")
    path = tmp_path / "o" / "meta.json"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    line = f"error: o/meta.json{why}, so the inputs of the files beside it are unknown: {WAY_OUT}"
    assert run("abc") == (2, line)
    assert run("abc", "--overwrite")[0] == 0


def test_changed_token_file_is_replaced_on_request(run, tmp_path):
    run("abc")
    (tmp_path / "o" / "val.bin").write_bytes(b"\1\0\2\0")
    assert run("abc") == (
        2,
        "error: o/val.bin has other content than meta.json says: prepare the data again by "
        "lightning prepare as before, with --overwrite",
    )
    assert run("abc", "--overwrite")[0] == 0


@pytest.mark.parametrize("name", ["val.bin", "tokenizer.json", "meta.json"])
def test_lost_file_is_made_again_from_the_same_inputs(run, tmp_path, name):
    run("abc")
    whole = (tmp_path / "o" / name).read_bytes()
    (tmp_path / "o" / name).unlink()
    options = ["--overwrite"] if name == "meta.json" else []  # which told whose files these are
    assert run("abc", *options)[0] == 0
    assert (tmp_path / "o" / name).read_bytes() == whole


def test_tokenizer_of_the_job_may_lie_in_the_folder(run, tmp_path):
    (tmp_path / "o").mkdir()
    byte_tokenizer().save(tmp_path / "o" / "tokenizer.json")
    assert run("abc", "--tokenizer", "o/tokenizer.json")[0] == 0


def test_kill_while_files_are_renamed_asks_for_no_permission(run, tmp_path, monkeypatch):
    run("abc")

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(work.Work, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            run("xyz", "--overwrite")
    assert not (tmp_path / "o" / "meta.json").exists()
    assert run("xyz")[0] == 0
    assert (tmp_path / "o" / "train.bin").read_bytes()[:6] == b"x\0y\0z\0"


def test_corpus_of_a_configuration_follows_the_same_rule(
    lightning, run_yaml, tmp_path, monkeypatch
):
    sources = [(f"{i}.py", tmp_path / f"{i}.py") for i in range(292, 300)]
    for _, path in sources:
        path.write_text("x = 1\n", encoding="utf-8")
    sources[0] = ("doc292.py", sources[0][1])  # for validation, by its hash
    monkeypatch.setattr(prepare, "python_files", lambda _: sources)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "tokenizer.json").write_text("{}", encoding="utf-8")
    path = run_yaml({"data.path": str(tmp_path / "c"), "data.corpus": "stdlib"})
    refused = f"error: {tmp_path / 'c'} holds tokenizer.json that prepare did not make: {WAY_OUT}"
    for command in ("fit", "prepare"):
        code, _, err = lightning(command, "--config", path)
        assert (code, err.splitlines()[-1]) == (2, refused)
    assert lightning("prepare", "--config", path, "--overwrite")[0] == 0
    code, _, err = lightning("prepare", "--config", path)
    assert (code, err.partition(":")[0]) == (0, "nothing to do")
