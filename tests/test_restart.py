"""RESTART.md: its scripts act on exit codes and signals as the page says."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "RESTART.md").read_text(encoding="utf-8")
LOOP, UNIT, SRUN, TORCHRUN = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Folder of stand-ins, first on the path; `calls` there gets a line for each call of one."""
    for name in ("sleep", "scontrol"):
        stand_in(tmp_path, name, "exit 0")
    return tmp_path


def stand_in(folder: Path, name: str, end: str) -> None:
    program = folder / name
    program.write_text(f'#!/bin/bash\necho {name} "$@" >> {folder}/calls\n{end}\n', "utf-8")
    program.chmod(0o755)


def start(script: str, folder: Path) -> subprocess.Popen:
    path = f"{folder}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "7"}
    return subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)


def calls(folder: Path) -> list[str]:
    """Names of the programs called, in order."""
    return [line.split()[0] for line in (folder / "calls").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("end", ["exit 0", "exit 2", "exit 130", "kill -INT $$"])
def test_loop_ends_where_another_start_would_not_help(end, programs):
    stand_in(programs, "lightning", end)
    start(LOOP, programs).wait(60)
    assert calls(programs) == ["lightning"]


@pytest.mark.parametrize("end", ["exit 1", "exit 143", "kill -KILL $$"])
def test_loop_starts_again_after_a_failure_and_a_stop(end, programs):
    stand_in(programs, "lightning", f"[ $(grep -c lightning {programs}/calls) -eq 3 ] || {end}")
    start(LOOP, programs).wait(60)
    assert calls(programs) == ["lightning", "sleep", "lightning", "sleep", "lightning"]


@pytest.mark.parametrize(
    ("code", "called"), [(0, []), (1, []), (2, []), (143, ["scontrol"])], ids=str
)
def test_job_is_queued_again_after_a_stop_alone(code, called, programs):
    stand_in(programs, "srun", f"exit {code}")
    start(SRUN, programs).wait(60)
    assert calls(programs) == ["srun", *called]


def test_job_of_torchrun_passes_the_signal_on_waits_and_is_queued_again(programs):
    os.mkfifo(programs / "started")
    trap = f"trap 'echo saved >> {programs}/calls; exit 1' TERM; echo > {programs}/started"
    wait = f"for try in {{1..60}}; do read -t 1 <> {programs}/started; done"  # no longer
    stand_in(programs, "srun", f"{trap}; {wait}")
    job = start(TORCHRUN, programs)
    with (programs / "started").open(encoding="ascii") as started:
        started.readline()
    job.send_signal(signal.SIGUSR1)
    job.wait(60)
    assert calls(programs) == ["srun", "saved", "scontrol"]


def test_job_of_torchrun_that_ends_by_itself_is_not_queued_again(programs):
    stand_in(programs, "srun", "exit 1")
    start(TORCHRUN, programs).wait(60)
    assert calls(programs) == ["srun"]


def test_unit_starts_again_after_a_stop_but_not_after_a_mistake():
    assert "Restart=on-failure\n" in UNIT
    assert "RestartPreventExitStatus=2\n" in UNIT
