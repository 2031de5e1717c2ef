"""Arguments of the Trainer: allowed values, and the rule that an error message gives."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry

from callbacks.run.devices import ACCELERATORS, is_devices

# Strategies that split the model between devices and save it in ways of their own.
SHARDED = ("fsdp", "deepspeed", "modelparallel", "xla")
PROFILERS = ("simple", "advanced", "pytorch")
STRATEGIES = ("auto", *StrategyRegistry.available_strategies())

# Argument, check, and the rule that the error message gives.
RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "max_epochs",
        lambda value: value == -1,
        "to Lightning a run is one endless epoch; give its length by trainer.max_steps, "
        "data.total_tokens or data.epochs",
    ),
    (
        "limit_train_batches",
        lambda value: value is None or (isinstance(value, float) and value == 1.0),
        "it would change which data a step sees; shorten the run by trainer.max_steps",
    ),
    (
        "overfit_batches",
        lambda value: not value,
        "it would change which data a step sees; shorten the run by trainer.max_steps",
    ),
    (
        "limit_val_batches",
        lambda value: value is None or value in (0, 1.0) or (isinstance(value, int) and value > 0),
        "it must be 0 for no validation, a number of micro-batches, or null; data.val_sequences "
        "bounds a validation by sequences",
    ),
    (
        "gradient_clip_algorithm",
        lambda value: value in (None, "norm"),
        "gradients are clipped by their total norm only; leave it out",
    ),
    (
        "gradient_clip_val",
        lambda value: value is None or value > 0,
        "it must be above 0; null turns clipping off",
    ),
    (
        "reload_dataloaders_every_n_epochs",
        lambda value: value == 0,
        "it would restart the data order; leave it out",
    ),
    (
        "use_distributed_sampler",
        lambda value: not value,
        "the data order gives each rank its own; leave it out",
    ),
    (
        "check_val_every_n_epoch",
        lambda value: value is None,
        "intervals count optimizer steps; use trainer.val_check_interval",
    ),
    (
        "num_sanity_val_steps",
        lambda value: value == 0,
        "the data is checked at the start anyway; leave it out",
    ),
    (
        "enable_checkpointing",
        lambda value: value is not False,
        "a run that cannot resume is not ours; a trial run is trainer.fast_dev_run",
    ),
    ("barebones", lambda value: not value, "it turns off what makes a run resume; leave it out"),
    ("num_nodes", lambda value: value >= 1, "it must be at least 1; leave it out for one machine"),
    (
        "accelerator",
        lambda value: value in ACCELERATORS,
        "it must be one of " + ", ".join(ACCELERATORS),
    ),
    (
        "devices",
        lambda value: is_devices(value),
        "it must be a number above 0, auto or -1 for all, or a list of the numbers of GPUs",
    ),
    (
        "strategy",
        lambda value: not any(name in str(value).lower() for name in SHARDED),
        "sharded strategies cannot be resumed exactly yet; use auto or ddp",
    ),
    (
        "strategy",
        lambda value: "spawn" not in str(value).lower(),
        "spawned processes would need a pickled Trainer; use auto or ddp",
    ),
    (
        "strategy",
        lambda value: not isinstance(value, str) or value in STRATEGIES,
        "it must be auto, ddp, or a class, written as class_path: DDPStrategy",
    ),
    (
        "plugins",
        lambda value: (
            not any(
                isinstance(each, Precision)
                for each in (value if isinstance(value, list) else [value])
            )
        ),
        "the precision is that of trainer.precision; leave the plugin out",
    ),
    (
        "profiler",
        lambda value: not isinstance(value, str) or value.lower() in PROFILERS,
        f"it must be one of {', '.join(PROFILERS)}, null, or the class path of a Profiler",
    ),
    ("min_steps", lambda value: value is None or value >= 0, "it must be 0 or more; leave it out"),
    *(
        (name, lambda value: value >= 1, "it must be at least 1")
        for name in ("accumulate_grad_batches", "val_check_interval", "log_every_n_steps")
    ),
    ("fast_dev_run", lambda value: value >= 0, "it must be 0 or more optimizer steps"),
)


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse Trainer arguments that would break exact resume or change which data a step sees.

    Raises:
        ValueError: names the argument, the value found, the rule and the way out.
    """
    for name, allowed, rule in RULES:
        if not allowed(arguments[name]):
            raise ValueError(f"trainer.{name} is {in_short(arguments[name])}: {rule}")


def in_short(value: Any) -> str:
    """Return a value as an error shows it: an object by the name of its class."""
    if isinstance(value, list):
        return f"[{', '.join(map(in_short, value))}]"
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else str(value)


def seconds_of(max_time: str | timedelta | dict[str, int] | None) -> float | None:
    """Return trainer.max_time in seconds.

    Raises:
        ValueError: it is not a positive duration.
    """
    try:
        seconds = Timer(max_time).time_remaining()  # pyright: ignore[reportArgumentType]
    except (MisconfigurationException, TypeError, OverflowError) as error:
        raise ValueError(
            f"trainer.max_time is {max_time}: it must be DD:HH:MM:SS, as in 00:12:00:00"
        ) from error
    if seconds is not None and seconds <= 0:
        raise ValueError(f"trainer.max_time is {max_time}: it must be above 0")
    return seconds


def check_peer_timeout(seconds: float | None) -> None:
    """Check trainer.peer_timeout.

    Raises:
        ValueError: it is not a positive number of seconds.
    """
    if seconds is not None and not 0 < seconds < 1e8:
        raise ValueError(
            f"trainer.peer_timeout is {seconds}: it must be a number of seconds above 0; "
            "leave it out for 1800"
        )
