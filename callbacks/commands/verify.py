"""`lightning verify`: integrity of checkpoints and weights files."""

import os
from pathlib import Path

from callbacks.config.options import LineParser, local_path


def verify(argv: list[str]) -> None:
    """Check that the checkpoints and weights of a run are intact."""
    parser = LineParser(verify)
    parser.add_argument(
        "--ckpt_path", required=True, type=local_path, help="run folder or checkpoint file"
    )
    place = Path(parser.parse_args(argv).ckpt_path)

    from callbacks.checkpoint.files import WEIGHTS, checkpoints, reason, unusable
    from lm.trained import has_checksum

    if not place.exists():
        raise ValueError(f"--ckpt_path {place} does not exist; give a run folder or a checkpoint")
    files = [path for _, path in checkpoints(place)] if place.is_dir() else [place]
    if (weights := place / WEIGHTS).is_file():
        files.append(weights)
    if not files:
        raise ValueError(f"{place} holds no checkpoint; give a run folder or a file")
    read = bad = 0
    for path in files:
        try:
            fault = unusable(path)
        except (OSError, ValueError) as error:
            fault = reason(error).removeprefix(f"{path} ")
        if fault is not None and place.is_dir() and not os.path.lexists(path):
            continue  # the run goes on, and keeps it no more
        whole = "whole"
        if path.suffix == ".safetensors" and fault is None and not has_checksum(path):
            whole = "readable (from before these files had a checksum)"
        print(f"{path}: {fault or whole}")
        read, bad = read + 1, bad + (fault is not None)
    if not read:
        return verify(argv)
    if bad:
        raise RuntimeError(f"{bad} of {read} files are damaged or unreadable")
