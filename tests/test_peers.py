"""Processes of one run: they meet, agree, and report an error once."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Lightning, RunYaml, cut_back, source_text
from test_ddp import ENDLESS, ENVIRONMENT, ROOT, started, wait_for_a_step

from callbacks.processes.peers import PORT, PeerError, Peers, check_addresses, distributed, is_lost

HERE = f"({socket.gethostname()}, process {os.getpid()})"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Peers, "current", None)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def each_rank(*tasks: Callable[[Peers], Any]) -> list[Any]:
    """Runs one task a rank, in threads of this process; returns results or exceptions."""
    port = free_port()
    ranks = [Peers("127.0.0.1", port, rank, len(tasks), "start it") for rank in range(len(tasks))]
    with ThreadPoolExecutor(len(tasks)) as pool:
        jobs = [pool.submit(task, peers) for task, peers in zip(tasks, ranks, strict=True)]
        return [job.exception() or job.result() for job in jobs]


def meeting(**about: Any) -> Callable[[Peers], None]:
    return lambda peers: peers.meet(20, about)


def failing(text: str, code: int, lost: bool = False) -> Callable[[Peers], int]:
    return lambda peers: peers.settle(f"error: {text}", code, lost)


def test_ranks_that_agree_go_on():
    assert each_rank(meeting(lr=1, seed=2), meeting(lr=1, seed=2)) == [None, None]


def test_every_rank_refuses_a_setting_that_differs_on_one():
    found = each_rank(meeting(lr=1, seed=2), meeting(lr=1, seed=2), meeting(lr=3, seed=2))
    assert [str(error) for error in found] == 3 * [
        f"the processes of the run differ: lr is 1 on rank 0 {HERE} and 3 on rank 2 {HERE}; start "
        "all of them with the same settings, data and code"
    ]


def test_rank_that_does_not_come_is_named(capsys: pytest.CaptureFixture[str]):
    peers = Peers("127.0.0.1", free_port(), 0, 2, "start it")
    peers.silence = 0.1
    with pytest.raises(RuntimeError) as caught:
        peers.meet(0.3, {})
    place = f"1 of 2 processes at 127.0.0.1:{peers.port}: rank 1; start it"
    assert str(caught.value) == f"after 0.3 s without {place}"
    assert capsys.readouterr().err == f"waiting 0 s for {place}\n"


def test_first_rank_that_does_not_come_is_named():
    peers = Peers("127.0.0.1", free_port(), 1, 2, "start it")
    refused = r"no rank 0 at 127.0.0.1:\d+ for 0.3 s \(.*Connection refused\); start it"
    with pytest.raises(RuntimeError, match=refused):
        peers.meet(0.3, {})


def test_program_that_listens_in_place_of_rank_0_is_named_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("callbacks.processes.peers.GRACE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        peers = Peers("127.0.0.1", port, 1, 2, "start it")
        rule = f"cannot meet at 127.0.0.1:{port} .no answer for 1 s.; set"
        with pytest.raises(RuntimeError, match=rule):
            peers.meet(1, {})


def test_second_process_of_a_rank_is_refused():
    port = free_port()
    first, second = (Peers("127.0.0.1", port, 0, 2, "start it") for _ in range(2))
    with pytest.raises(RuntimeError, match=r"^after 0.1 s without 1 of 2 processes"):
        first.meet(0.1, {})
    with pytest.raises(RuntimeError, match=r"^another process has come as rank 0 .* NODE_RANK to"):
        second.meet(0.1, {})


def test_ranks_of_torchrun_meet_none_of_an_earlier_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set(PORT, str(free_port()))
    with ThreadPoolExecutor(2) as pool:
        ranks = [Peers("127.0.0.1", agent.port, rank, 2, "start it") for rank in (0, 1)]
        late = pool.submit(ranks[1].meet, 20, {})
        assert (ranks[0].meet(20, {}), late.result()) == (None, None)


def test_error_of_all_ranks_is_printed_once(capsys: pytest.CaptureFixture[str]):
    assert each_rank(*3 * [failing("lr is -1", 2)]) == [2, 2, 2]
    assert capsys.readouterr().err == "error: lr is -1\n"


def test_error_of_one_rank_is_told_by_name_and_ends_the_others(
    capsys: pytest.CaptureFixture[str],
):
    def met(peers: Peers) -> int:
        with pytest.raises(PeerError) as caught:
            peers.meet(20, {})
        return peers.settle(f"error: {caught.value}", 1, is_lost(caught.value))

    assert each_rank(met, failing("no such file", 2)) == [2, 2]
    assert capsys.readouterr().err == f"error: on rank 1 {HERE}: no such file\n"


def test_rank_that_gives_no_answer_is_named(capsys: pytest.CaptureFixture[str]):
    gloo = "[/x/third_party/gloo/gloo/pair.cc:553] Connection closed by peer. This is typically …"

    def left(peers: Peers) -> int:
        peers.meet(20, {})
        return peers.settle(f"error: {gloo}", 1, is_lost(RuntimeError(gloo)))

    assert each_rank(left, left, meeting()) == [1, 1, None]
    assert capsys.readouterr().err == (
        f"error: rank 2 {HERE} gives no answer: it was killed, it stalls or the network is cut "
        "(Connection closed by peer); the same command goes on from the newest checkpoint\n"
    )


def test_ranks_must_see_the_folder_of_the_first():
    def look(seen: str) -> Callable[[Peers], None]:
        def task(peers: Peers) -> None:
            peers.meet(20, {})
            peers.agree_on_view(lambda: [seen], "runs/x", 20)

        return task

    assert each_rank(look("a"), look("a")) == [None, None]
    found = each_rank(look("a"), look("b"))
    assert [str(error) for error in found] == 2 * [
        f"runs/x on rank 0 {HERE} is not what rank 1 {HERE} see there: all nodes must share the "
        "run folder; set trainer.default_root_dir to a folder of a shared file system"
    ]


def test_address_that_no_other_node_reaches_is_refused():
    members = [{"here": f"10.0.0.{n}", "offers": f"{n}7.0.1.1"} for n in (1, 12)]
    with pytest.raises(
        ValueError, match=r"^two would be found at 127.0.1.1, .* has 10.0.0.12 \(ip"
    ):
        check_addresses(["one", "two"], members)


# Whole programs


def nodes(*paths: Path, **variables: str) -> list[subprocess.Popen]:
    """One process a node, which are all on this machine."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "cli", "fit", "--config", path],
            cwd=ROOT,
            env=ENVIRONMENT | place | {"NODE_RANK": str(node)} | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, path in enumerate(paths)
    ]


def outcomes(runs: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        errors = [run.communicate(timeout=300)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [(run.returncode, error) for run, error in zip(runs, errors, strict=True)]


TWO = {"trainer.num_nodes": 2, "trainer.strategy": "ddp"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"trainer.max_steps": 7}, "trainer.max_steps is 6 on rank 0"),
        ({"trainer.default_root_dir": "elsewhere"}, "trainer.default_root_dir is "),
    ],
)
def test_nodes_with_other_settings_do_not_train_together(
    run_yaml: RunYaml, tmp_path: Path, other: dict[str, Any], key: str
):
    paths = run_yaml(TWO), run_yaml(TWO | other, name="other.yaml")
    (code, told), (other_code, nothing) = outcomes(nodes(*paths))
    assert (code, other_code, nothing) == (2, 2, "")
    assert key in told
    assert len(told.splitlines()) == 1


@pytest.mark.slow
def test_nodes_with_other_data_do_not_train_together(
    lightning: Lightning, run_yaml: RunYaml, corpus: Path, tmp_path: Path
):
    train, val, other = tmp_path / "train.txt", tmp_path / "val.txt", tmp_path / "other"
    train.write_text(source_text(98) * 9, encoding="utf-8")
    val.write_text(source_text(99), encoding="utf-8")
    words = ["--input", train, "--val_input", val, "--tokenizer", corpus / "tokenizer.json"]
    assert lightning("prepare", *words, "--output", other)[0] == 0
    paths = run_yaml(TWO), run_yaml(TWO | {"data.path": str(other)}, name="other.yaml")
    (code, told), (other_code, nothing) = outcomes(nodes(*paths))
    assert (code, other_code, nothing) == (2, 2, "")
    assert "error: the processes of the run differ: data fingerprint is " in told


@pytest.mark.slow
def test_nodes_train_together_and_resume(run_yaml: RunYaml, tmp_path: Path):
    path = run_yaml(TWO)
    assert [code for code, _ in outcomes(nodes(path, path))] == [0, 0]
    cut_back(tmp_path / "run", 4)
    (code, told), (other, nothing) = outcomes(nodes(path, path))
    assert (code, other, nothing) == (0, 0, "")
    assert "resuming from" in told


@pytest.mark.slow
def test_killed_rank_costs_one_line_that_says_how_to_go_on(run_yaml: RunYaml, tmp_path: Path):
    path = run_yaml(TWO | ENDLESS | {"trainer.num_nodes": 1, "trainer.devices": 2})
    with started(path) as run:
        wait_for_a_step(run)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text(encoding="ascii")
        os.kill(int(children.split()[0]), 9)
        rest = run.communicate(timeout=60)[1]
    assert run.returncode == 1
    [line] = [line for line in rest.splitlines() if not line.startswith("step ")]
    assert line.startswith("error: rank 1 (process ")
    assert line.endswith("out; the same command goes on from the newest checkpoint")
