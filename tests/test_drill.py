"""The fire drill: what it finds, what it covers, and that runs pass it."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import Lightning, RunYaml

from callbacks.checkpoint.files import checkpoints, read_newest
from callbacks.drill import drill
from callbacks.drill import kill_points as moments
from callbacks.drill.drill import Outcome, Start, compare, differences, other_split, plan_kills
from callbacks.drill.kill_points import MOMENTS, VARIABLE
from callbacks.processes.stop_requests import StopRequests
from lm.softmax import find_compiler

ROOT = Path(__file__).resolve().parent.parent


def found(one: object, other: object) -> list[tuple[str, int]]:
    return list(differences(one, other))


def test_equal_containers_do_not_differ():
    nested = {"a": [torch.ones(3), (1, "x")], "b": None}
    assert found(nested, {"a": [torch.ones(3), (1, "x")], "b": None}) == []


def test_single_flipped_bit_is_found_and_counted():
    one = torch.arange(12.0).view(3, 4)
    other = one.clone()
    other.view(torch.int32)[2, 3] ^= 1
    assert found({"w": one}, {"w": other}) == [("w", 1)]


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b"),
        ({"a": [1, 2]}, {"a": [1]}, "a"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, "a"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).double()}, "a"),
        ({"a": 1}, {"b": 1}, ""),
        ({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([-0.0, 1.0])}, "a"),
    ],
)
def test_every_kind_of_difference_is_found(one: object, other: object, where: str):
    assert [place for place, bits in found(one, other) if bits > 0] == [where]


def test_compared_are_the_figures_and_the_weights_of_two_runs(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    one, other = tmp_path / "run", tmp_path / "other"
    lightning("fit", "--config", run_yaml())
    shutil.copytree(one, other)
    assert compare(one, other) == []
    path = read_newest(other, print)[0]
    checkpoint = torch.load(path, weights_only=True)
    name, weight = next(iter(checkpoint["state_dict"].items()))
    weight.view(torch.int32)[1, 2] ^= 5
    torch.save(checkpoint, path)
    figures = other / "metrics.csv"
    figures.write_text(re.sub(r"(?m)^4,([^,]*)", "4,9.5", figures.read_text(encoding="utf-8")))
    [(row, one_bit), *weights] = compare(one, other)
    assert re.fullmatch(r"step 4 train/loss: 5\.\d+ and 9\.5", row)
    assert (one_bit, weights) == (1, [(f"state_dict.{name}", 2)])


# Moments


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("before fsync:1", [0]),
        ("before fsync:3", [4]),
        ("before fsync:1:after a save", [4]),
        ("before fsync:2:after a save", [6]),
        ("before retention:1:after a save", [2]),
        ("during validation:1:after a save", [3]),
        ("start-up:1", []),
    ],
)
def test_kill_comes_at_the_nth_time_from_the_first_save_where_asked(
    monkeypatch: pytest.MonkeyPatch, asked: str, expected: list[int]
):
    passed, kills = list[str](), list[int]()
    monkeypatch.setattr(os, "kill", lambda *_: kills.append(len(passed)))
    monkeypatch.setattr(moments, "_reached", Counter())
    monkeypatch.setattr(moments, "_saved", threading.Event())
    monkeypatch.setenv(VARIABLE, asked)
    fsync, saved, validation = "before fsync", "before retention", "during validation"
    for moment in (fsync, fsync, saved, validation, fsync, saved, fsync):
        moments.reach(moment)
        passed.append(moment)
    assert kills == expected


@pytest.mark.parametrize("rank", ["0", "1"])
def test_first_process_alone_is_killed(monkeypatch: pytest.MonkeyPatch, rank: str):
    kills: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: kills.append(pid))
    monkeypatch.setattr(moments, "_reached", Counter())
    monkeypatch.setenv(VARIABLE, "start-up:1")
    monkeypatch.setenv("LOCAL_RANK", rank)
    moments.reach("start-up")
    assert kills == [os.getpid()] * (rank == "0")


# What a drill does


def test_drill_covers_every_moment_in_turn_and_random_times():
    plan = plan_kills(8, random.Random(0), accumulates=True, validates=True)
    assert {moment.split(":")[0] for moment in plan} == {*MOMENTS, "random"}


def test_moment_that_the_run_does_not_have_is_not_planned():
    plan = plan_kills(20, random.Random(0), accumulates=False, validates=False)
    moments = {moment.split(":")[0] for moment in plan}
    assert moments == {*MOMENTS, "random"} - {"inside accumulation", "during validation"}


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("validates", [True, False])
def test_each_moment_is_planned_with_and_without_a_save_before_it(
    accumulates: bool, validates: bool
):
    ways: dict[str, set[bool]] = {}
    for planned in plan_kills(16, random.Random(0), accumulates, validates):
        ways.setdefault(planned.split(":")[0], set()).add(planned.endswith(":after a save"))
    assert (ways.pop("start-up"), ways.pop("random")) == ({False}, {False})
    assert ways == {name: {False, True} for name in ways}


@pytest.mark.parametrize(
    ("split", "other"),
    [
        ((2, 3, 1), (6, 1, 1)),
        ((8, 2, 4), (8, 8, 1)),
        ((6, 1, 1), (3, 2, 1)),
        ((3, 1, 1), (1, 3, 1)),
    ],
)
def test_other_split_has_as_many_sequences(
    split: tuple[int, int, int], other: tuple[int, int, int]
):
    assert other_split(*split) == other


def test_step_of_one_sequence_has_no_other_split():
    with pytest.raises(ValueError, match="--elastic") as refusal:
        other_split(1, 1, 1)
    assert str(refusal.value) == (
        "--elastic: a step of one sequence has no other split; enlarge the batch"
    )


def test_drill_that_finds_a_difference_names_it_and_fails(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    starts = [
        Start(moment="before fsync:2", code=-9, resumed_from="step 0", last_step="4"),
        Start(moment="", code=0, resumed_from="step 2", last_step="6"),
    ]
    found = [("step 3 val/loss: 1.5 and 2.5", 1), ("state", 6)]
    monkeypatch.setattr(drill, "drill", lambda *_: Outcome(starts=starts, found=found))
    code, out, err = lightning("drill", "--config", run_yaml(), "--elastic")
    assert out.splitlines()[-3:] == [
        "differs: step 3 val/loss: 1.5 and 2.5: 1 bits",
        "differs: state: 6 bits",
        "drill: 1 kills, 7 differing bits",
    ]
    last = f"error: the runs differ in 2 places; they are in {tmp_path / 'run-drill'}\n"
    assert (code, err) == (1, last)


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is on the path")
@pytest.mark.parametrize(("steps", "compiled"), [(50, "false"), (10**8, "true")])
def test_shortened_drill_compiles_as_the_whole_run_would(
    lightning: Lightning,
    run_yaml: RunYaml,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    compiled: str,
):
    given: list[str] = []

    def stop(arguments: list[str], *_: object) -> Outcome:
        given.extend(arguments)
        return Outcome(starts=[], found=[])

    monkeypatch.setattr(drill, "drill", stop)
    config = run_yaml({"model.compile": "auto", "trainer.max_steps": steps})
    lightning("drill", "--config", config, "--steps", 6)
    assert given[-1] == f"--model.compile={compiled}"


@pytest.mark.slow
def test_run_that_ends_before_the_last_kill_is_begun_anew(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch
):
    # After the sixth save nothing is left in which the second kill could fall.
    plan = ["before retention:6", "during validation:2"]
    monkeypatch.setattr(drill, "plan_kills", lambda *_, **__: list(plan))
    code, out, err = lightning("drill", "--config", run_yaml(), "--steps", 6, "--kills", 2)
    assert code == 0, err
    assert out.count("ran to its end") == 2
    assert out.splitlines()[-1] == "drill: 2 kills, 0 differing bits"


@pytest.mark.slow
def test_run_goes_on_under_another_split_with_the_same_samples(
    lightning: Lightning, run_yaml: RunYaml
):
    config = run_yaml({"trainer.accumulate_grad_batches": 3})
    code, out, err = lightning("drill", "--config", config, "--kills", 1, "--elastic")
    assert code == 0, err
    told, last = out.splitlines()[-2:]
    assert re.fullmatch(
        r"elastic: 2 × 3 × 1 until step \d, then 6 × 1 × 1 \(micro-batch × accumulate × devices\): "
        r"the same samples in 6 of 6 steps, losses within \de-\d+ of each other",
        told,
    )
    assert last == "drill: 1 kills, 0 differing bits"


@pytest.mark.slow
def test_run_killed_at_every_moment_ends_with_the_same_bits(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    overrides = {
        "trainer.accumulate_grad_batches": 3,
        "trainer.max_steps": 40,
        "model.config.dropout": 0.1,
        "checkpoint.every_n_steps": 4,
    }
    code, out, err = lightning("drill", "--config", run_yaml(overrides), "--kills", 8)
    assert code == 0, err
    assert out.splitlines()[-1] == "drill: 8 kills, 0 differing bits"
    names = {path.name for path in (tmp_path / "run-drill").iterdir()}
    assert names >= {".drill", "killed", "whole"}


def test_number_of_kills_must_be_one(lightning: Lightning, run_yaml: RunYaml):
    code, _, err = lightning("drill", "--config", run_yaml(), "--kills", 0)
    assert code == 2
    assert err == "error: --kills is 0: must be at least 1\n"


def test_drill_of_too_few_steps_is_refused(lightning: Lightning, run_yaml: RunYaml):
    code, _, err = lightning("drill", "--config", run_yaml(), "--steps", 3)
    assert code == 2
    assert err == "error: --steps is 3: must be at least 6, to save and validate\n"


@pytest.mark.slow
def test_kill_matrix_in_short_finds_no_differing_bit():
    script = ROOT / "benchmarks" / "kill_matrix.py"
    cells = ["--ranks", "1", "4", "--accumulate", "3", "--workers", "2", "--kills", "7"]
    run = subprocess.run(
        [sys.executable, script, *cells], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"(\d+) kills, 0 differing bits, 0 runs that could not go on", run.stdout)
    assert found
    assert int(found[1]) >= 12


# lightning verify


def test_verify_says_of_each_file_whether_it_is_whole(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"checkpoint.every_n_steps": 3}))
    code, out, _ = lightning("verify", "--ckpt_path", tmp_path / "run")
    names = [f"{tmp_path}/run/checkpoints/step-0000000{step}.ckpt" for step in (6, 3)]
    names.append(f"{tmp_path}/run/weights.safetensors")
    assert (code, out.splitlines()) == (0, [f"{name}: whole" for name in names])


def test_verify_fails_on_a_damaged_file_and_says_why(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    lightning("fit", "--config", run_yaml({"checkpoint.every_n_steps": 3}))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006.ckpt"
    newest.write_bytes(newest.read_bytes()[:2000])
    code, out, err = lightning("verify", "--ckpt_path", tmp_path / "run")
    assert code == 1
    assert out.startswith(f"{newest}: truncated or corrupt at 2000 bytes")
    assert err == "error: 1 of 3 files are damaged or unreadable\n"


def test_verify_passes_over_files_that_the_run_removes_meanwhile(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lightning("fit", "--config", run_yaml())
    newest, *older = [path for _, path in checkpoints(tmp_path / "run")]
    testzip = zipfile.ZipFile.testzip

    def and_retention_at_work(archive: zipfile.ZipFile) -> str | None:
        for path in older:
            path.unlink(missing_ok=True)
        return testzip(archive)

    monkeypatch.setattr(zipfile.ZipFile, "testzip", and_retention_at_work)
    code, out, err = lightning("verify", "--ckpt_path", tmp_path / "run")
    weights = tmp_path / "run" / "weights.safetensors"
    assert (code, out, err) == (0, f"{newest}: whole\n{weights}: whole\n", "")


def test_newest_checkpoint_is_looked_for_again_where_the_run_replaced_it_meanwhile(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lightning("fit", "--config", run_yaml({"checkpoint.keep_last": 1}))
    [(_, path)] = checkpoints(tmp_path / "run")
    older = path.rename(path.with_name("step-00000005.ckpt"))
    is_dir = Path.is_dir

    def and_the_next_save(place: Path) -> bool:
        if place == older and older.exists():
            older.rename(path)
        return is_dir(place)

    monkeypatch.setattr(Path, "is_dir", and_the_next_save)
    assert read_newest(tmp_path / "run", print)[0] == path


def test_verify_of_nothing_is_refused(lightning: Lightning, tmp_path: Path):
    code, _, err = lightning("verify", "--ckpt_path", tmp_path)
    assert (code, err) == (
        2,
        f"error: {tmp_path} holds no checkpoint; give a run folder or a file\n",
    )


# The folder of a drill


@pytest.fixture
def drilled(tmp_path: Path) -> Path:
    """The folder of an earlier drill, with a file that someone put beside its runs."""
    root = tmp_path / "run-drill"
    with drill.claim(root):
        pass
    (root / "whole").mkdir()
    (root / "whole" / "metrics.csv").touch()
    (root / "killed").symlink_to(tmp_path, target_is_directory=True)
    (root / "notes.txt").touch()
    return root


def test_drill_removes_the_runs_of_an_earlier_one_alone(drilled: Path, tmp_path: Path):
    with drill.claim(drilled):
        names = {path.name for path in drilled.iterdir() if not path.name.startswith(".lock")}
    assert names == {".drill", "notes.txt"}
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["notes.txt", "whole", "metrics.csv", ".hidden"])
def test_drill_leaves_a_folder_that_is_not_its_own(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, name: str
):
    other = tmp_path / "run-drill" / name
    other.parent.mkdir()
    other.touch()
    code, out, err = lightning("drill", "--config", run_yaml(), "--steps", 6)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {other.parent} is there already, and no drill made it; move it away, or give "
        "another trainer.default_root_dir\n"
    )
    assert other.exists()


def test_drill_takes_an_empty_folder_and_that_of_an_interrupted_call(tmp_path: Path):
    with drill.claim(tmp_path):
        (tmp_path / ".drill").unlink()
    with drill.claim(tmp_path):
        assert (tmp_path / ".drill").is_file()


def test_two_drills_in_one_folder_are_refused(tmp_path: Path):
    again = drill.claim(tmp_path)
    with (
        drill.claim(tmp_path),
        pytest.raises(ValueError, match="is in use by another run"),
        again,
    ):
        pass


def test_signal_to_a_drill_ends_its_run_at_once():
    told: list[str] = []

    def stop(line: str) -> None:
        told.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    endless = "import os, sys, time; print('step', os.getpid(), file=sys.stderr); time.sleep(600)"
    with StopRequests(), pytest.raises(SystemExit):
        drill.run_to_the_end([sys.executable, "-uc", endless], "", 0.0, stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told[0].split()[1]), 0)


@pytest.mark.slow
def test_run_of_a_killed_drill_ends_with_it():
    endless = (
        "import os, sys, time; from callbacks.processes.parent import die_with_parent; "
        "die_with_parent(); print('step 1', file=sys.stderr); time.sleep(600)"
    )
    killed = (
        "import os, sys; from callbacks.drill.drill import run_to_the_end as start; "
        f"start([sys.executable, '-uc', {endless!r}], '', 0.0, lambda _: os.kill(os.getpid(), 9))"
    )
    # The run holds the pipe of its output for as long as it lives.
    ended = subprocess.run([sys.executable, "-c", killed], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -signal.SIGKILL
