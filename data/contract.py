"""Properties of the data that must not change between two starts of a run."""

from typing import Any

from data.tokens.source import short

FIXED = ("data.seq_len", "data.windows", "data.rows")
"""Keys that decide what a sample is."""


def refused_changes(old: dict[str, Any], new: dict[str, Any], allow_data_change: bool) -> list[str]:
    """Differences of a checkpoint's contract and today's that do not allow to go on from it.

    A key that the checkpoint does not know yet was unset.
    """
    faults = [
        f"{key} was {old.get(key)} and is {new[key]} now"
        for key in FIXED
        if old.get(key) != new[key]
    ]
    if allow_data_change:
        return faults
    allow = "now (data.allow_data_change true goes on with it)"
    before, after = old.get("data.mixture"), new["data.mixture"]
    if before != after:
        faults.append(f"data.mixture was {before} and is {after} {allow}")
    return faults + [
        f"the {key} was {short(old[key])} and is {short(new[key])} {allow}"
        for key in new
        if "fingerprint" in key and key in old and old[key] != new[key]
    ]


def batch_fault(old: dict[str, Any], micro_batch_size: int, accumulate: int, world: int) -> str:
    """Why another number of sequences a step is refused, with the value that keeps it."""
    was, each = old["global batch size"], micro_batch_size * world
    way_out = (
        f"set trainer.accumulate_grad_batches {was // each} to keep it"
        if was % each == 0
        else f"{was} is no multiple of {each}: change data.micro_batch_size"
    )
    return (
        f"the global batch was {old['data.micro_batch_size']} × "
        f"{old['trainer.accumulate_grad_batches']} × {old['trainer.world_size']} = {was} "
        f"sequences a step and is {micro_batch_size} × {accumulate} × {world} = "
        f"{each * accumulate} now ({way_out}, or data.allow_batch_change true)"
    )
