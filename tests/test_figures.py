"""FIGURES.md names what a run logs."""

import csv
import re
from pathlib import Path

from conftest import Lightning, RunYaml, page

ROOT = Path(__file__).resolve().parent.parent
KEYS = re.findall(r"^\| `([\w/<>]+)` \|", (ROOT / "FIGURES.md").read_text("utf-8"), re.MULTILINE)
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


def test_every_figure_is_described_once_and_every_description_has_a_figure(
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
