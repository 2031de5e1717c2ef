"""Names that users see: METRICS.md describes each metric, public_names.txt lists all names."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from conftest import Lightning, RunYaml, page

ROOT = Path(__file__).resolve().parent.parent
KEYS = re.findall(r"^\| `([\w/<>]+)` \|", (ROOT / "METRICS.md").read_text("utf-8"), re.MULTILINE)
# All metric names and configuration keys; a change here breaks configurations and scripts of users.
NAMES = (ROOT / "tests/public_names.txt").read_text("utf-8").splitlines()
# Of a GPU, of padding, of a mixture and of trouble, which this run has none of.
ELSEWHERE = {"memory/reserved_gib", "throughput/targets_per_sec", "val/loss/<name>"}
ELSEWHERE |= {"optim/skipped_steps", "optim/steps_without_targets"}


def logged(root: Path) -> tuple[set[str], set[str]]:
    """Keys in metrics.csv and on TensorBoard, parts of the network under one name."""
    with (root / "metrics.csv").open(encoding="utf-8", newline="") as file:
        columns = set(csv.DictReader(file).fieldnames or []) - {"step"}
    curves = set(page(root).Tags()["scalars"])
    return by_part(columns), by_part(curves)


def by_part(keys: set[str]) -> set[str]:
    keys = {re.sub(r"^grad_norm/.*", "grad_norm/<part>", key) for key in keys}
    return {re.sub(r"^moe/load/\d+$", "moe/load/<i>", key) for key in keys}


def test_every_metric_is_described_once_and_every_description_has_a_metric(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    everything = {
        "data.eval_train": True,
        "grad_norm.per_layer_every_n_steps": 1,
        "trainer.gradient_clip_val": 1.0,
        "model.config.n_experts": 3,
    }
    code, _, err = lightning("fit", "--config", run_yaml(everything))
    assert code == 0, err
    columns, curves = logged(tmp_path / "run")
    assert len(KEYS) == len(set(KEYS))
    assert columns == set(KEYS) - ELSEWHERE
    assert curves == columns - {"data/rows_crc32"}


def flatten(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_names_that_users_see_are_unchanged(lightning: Lightning):
    code, out, err = lightning("fit", "--config", ROOT / "configs/tiny.yaml", "--print_config")
    assert code == 0, err
    keys = [f"config {key}" for key in flatten(yaml.safe_load(out))]
    assert sorted([f"metric {key}" for key in KEYS] + keys) == NAMES
