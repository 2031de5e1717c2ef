"""Recovery: the command that continues after divergence."""

import shlex
from itertools import count
from pathlib import Path

from callbacks.checkpoint.files import checkpoints
from lm.optim import lower_rate


def after_non_finite(root: Path, step: int, lr: float, every_n_steps: int) -> str:
    """Return a line with the command that continues from an earlier checkpoint at a lower rate.

    Args:
        root: Folder of the run.
        step: First bad step. The update of the step before it may have broken the weights.
        lr: Peak learning rate that the run had.
        every_n_steps: Steps between saves.
    """
    before = [(number, path) for number, path in checkpoints(root) if number < step]
    older = [path for number, path in before if number < step - 1 or number > every_n_steps]
    command = ["lightning", "fit", "--config", str(root / "config.yaml")]
    rate = ["--model.optim.lr", f"{lower_rate(lr):.2g}"]
    if older:
        what = "go on from a checkpoint before that, with a lower learning rate"
        command += ["--ckpt_path", str(older[0])]
    else:
        what = "no checkpoint is old enough; start another run with a lower learning rate"
        free = next(place for n in count(2) if not (place := Path(f"{root}-{n}")).exists())
        command += ["--ckpt_path", "null", "--trainer.default_root_dir", str(free)]
    return f"{what}: {shlex.join([*command, *rate])}"
