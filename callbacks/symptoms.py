"""Symptoms of a run in trouble: what a run has shown so far, and what of it is a bad sign."""

import math
import statistics
from collections import deque
from typing import Any

from callbacks.grad_norm import GradNorm, jumped, stuck, vanished
from callbacks.run.trainer import Trainer

# Losses are in nats a token. A log is a logged step, whatever lies between two of them.
FIRST_NATS = 0.3  # between the first loss and that of new weights
FLAT_STEPS, FLAT_NATS = 200, 0.5  # the least that a loss falls in so many steps
FAST_STEPS, FAST_SHARE = 200, 0.25  # of the first loss; so low two logs in a row, so soon
# Above the median of the logs before, two logs in a row. A log of the healthy small run may lie 1.7
# nats or 5.6 deviations above it, alone: it is the loss of 2,048 tokens.
JUMP_LOGS, JUMP_NATS, JUMP_DEVIATIONS = 20, 1.0, 8.0
RESUME_LOGS = 5  # a jump among so many logs after a resume is laid to it
LR_SLACK = 0.2  # share of the rate by which it may miss a straight line
LR_SPAN = 0.05  # share of the run beyond which no straight line foretells a rate
OVERFIT_NATS, OVERFIT_VALIDATIONS = 0.02, 3  # above the best, so many in a row
RECENT = 5  # logs whose median is taken where speed is judged
LOW_MFU = 0.3
SMALL_MODEL_FLOPS = 1e9  # a token: below, a low MFU is the model's size and no fault
LONG_WAIT = 0.1  # share of training time spent waiting for data
TOY_MODEL_FLOPS = 1e6  # a token: below, reading it takes as long as learning from it
EASE = 0.1  # share by which speed must be better than its limit before it is warned of again
FP16_LOGS = 3  # a scaler looks for its scale by skipping updates; so many logs in a row are more


class Seen:
    """What a run has shown so far."""

    kept = ("lowest", "best", "loss_at_best", "above_best", "skipped")
    """What a resumed run knows of its past, beside its logs."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.figures: dict[str, float] = {}
        # Step, loss and learning rate of the logs whose loss is finite.
        self.logs: deque[tuple[int, float, float]] = deque(maxlen=JUMP_LOGS + 2)
        self.lowest = math.inf  # loss
        self.forget_validations()
        self.skipped = self.newly_skipped = 0
        self.skipping = 0  # logs in a row
        self.empty = self.newly_empty = 0  # steps of this process without a target
        self.resumed_at = 0
        self.rate_changed = self.validation_changed = False  # with an announcement
        self.mfu: deque[float] = deque(maxlen=RECENT)
        self.data_wait: deque[float] = deque(maxlen=RECENT)
        self.active: set[Any] = set()  # detectors of what was told and is still there

    def forget_validations(self) -> None:
        """Begin with no past of validations."""
        self.best = self.loss_at_best = math.inf  # validation loss, and the train loss then
        self.above_best = 0  # validations in a row

    def take(self, trainer: Trainer, figures: dict[str, float]) -> None:
        """Take in the figures of a logged step or of a validation."""
        self.trainer, self.figures = trainer, figures
        for name, values in (("mfu", self.mfu), ("data_wait", self.data_wait)):
            if (key := f"throughput/{name}") in figures:
                values.append(figures[key])
        if "optim/lr" in figures:
            count = int(figures.get("optim/steps_without_targets", 0))
            self.newly_empty, self.empty = count - self.empty, count
        if "train/loss" in figures:
            self._take_step(figures["train/loss"])
        if "val/loss" in figures:
            self._take_validation(figures["val/loss"])

    def _take_step(self, loss: float) -> None:
        count = int(self.figures.get("optim/skipped_steps", 0))
        self.newly_skipped, self.skipped = count - self.skipped, count
        self.skipping = self.skipping + 1 if self.newly_skipped > 0 else 0
        if math.isfinite(loss):
            self.logs.append((self.trainer.global_step, loss, self.figures["optim/lr"]))
            self.lowest = min(self.lowest, loss)

    def _take_validation(self, loss: float) -> None:
        if loss < self.best:
            self.best, self.loss_at_best = loss, self.train_loss()
        self.above_best = self.above_best + 1 if loss > self.best + OVERFIT_NATS else 0

    @property
    def losses(self) -> list[float]:
        """Train losses of the logs."""
        return [loss for _, loss, _ in self.logs]

    def train_loss(self) -> float:
        """Median of `losses`."""
        return statistics.median(self.losses) if self.logs else math.inf

    @property
    def expected(self) -> float | None:
        """Loss of new weights; None where the run began with others."""
        return self.trainer.lightning_module.expected_first_loss

    @property
    def logs_since_resume(self) -> int:
        """Logs since the run was resumed; 0 where none are known from before."""
        new = sum(step > self.resumed_at for step, _, _ in self.logs)
        return new if new < len(self.logs) else 0

    def state(self) -> dict[str, Any]:
        """What is kept for a resume, as plain types."""
        state = {name: getattr(self, name) for name in self.kept}
        return state | {"logs": [list(log) for log in self.logs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        for name in self.kept:
            setattr(self, name, state[name])
        self.logs.extend((step, loss, rate) for step, loss, rate in state["logs"])

    def norms(self) -> tuple[list[float], int]:
        """Gradient norms before clipping of the last steps, and how many are kept at most."""
        for callback in self.trainer.callbacks:
            if isinstance(callback, GradNorm):
                return list(callback.norms), callback.norms.maxlen or 0
        return [], 1


# Detectors: what is seen, with numbers, or None.


def non_finite(seen: Seen) -> str | None:
    """Loss or gradient is NaN or infinite."""
    if not math.isfinite(loss := seen.figures["train/loss"]):
        return f"the loss is {loss}"
    fp16 = str(seen.trainer.precision).startswith("16")
    if seen.skipping < (FP16_LOGS if fp16 else 1):
        return None
    return (
        f"the gradient was not finite: {seen.newly_skipped} updates skipped since the last logged "
        f"step, {seen.skipped} in all"
    )


def no_targets(seen: Seen) -> str | None:
    """Steps have nothing to learn."""
    if seen.newly_empty <= 0:
        return None
    return (
        f"{seen.newly_empty} of the steps since the last log had no target, and so nothing to "
        f"learn; {seen.empty} since the start"
    )


def first_loss(seen: Seen) -> str | None:
    """The first step does not start where new weights do."""
    loss = seen.figures["train/loss"]
    if seen.expected is None or seen.trainer.global_step != 1:
        return None
    if not FIRST_NATS < abs(loss - seen.expected) < math.inf:
        return None
    return f"the first loss is {loss:.2f}, that of new weights is {seen.expected:.2f}"


def flat(seen: Seen) -> str | None:
    """The loss has not fallen, and the warm-up is over."""
    if seen.expected is None or seen.trainer.global_step < FLAT_STEPS or len(seen.logs) < 2:
        return None
    warms_up = seen.logs[-1][2] > seen.logs[-2][2]
    if warms_up or seen.lowest < seen.expected - FLAT_NATS:
        return None
    return (
        f"the loss is {seen.losses[-1]:.2f} and has never been below {seen.lowest:.2f}, while new "
        f"weights start at {seen.expected:.2f}"
    )


def too_fast(seen: Seen) -> str | None:
    """The loss is too good to be true."""
    if seen.expected is None:
        return None
    limit, losses = FAST_SHARE * seen.expected, seen.losses[-2:]
    if seen.trainer.global_step > FAST_STEPS or len(losses) < 2 or max(losses) >= limit:
        return None
    return (
        f"the loss is {losses[-1]:.2f} already, below a quarter of the {seen.expected:.2f} that "
        "new weights start at"
    )


def loss_jump(seen: Seen, after_resume: bool = False) -> str | None:
    """The loss leaps up and stays there."""
    if len(seen.logs) < 3 or after_resume != (0 < seen.logs_since_resume <= RESUME_LOGS):
        return None
    *before, one, two = seen.losses
    if len(before) < JUMP_LOGS:
        if seen.expected is None:
            return None
        # Too little of a past; but no loss should be far above that of knowing nothing.
        middle, spread, past = seen.expected, 0.0, "of new weights"
    else:
        middle, past = statistics.median(before), f"in the median of {JUMP_LOGS} logged steps"
        spread = statistics.median(abs(loss - middle) for loss in before)
    limit = middle + max(JUMP_NATS, JUMP_DEVIATIONS * spread)
    # Told at its start: later the jump itself is part of what was before.
    if min(one, two) <= limit or before[-1] > limit:
        return None
    where = f" right after the resume at step {seen.resumed_at}" if after_resume else ""
    return f"the loss went up to {one:.2f} and {two:.2f}{where}, from {middle:.2f} {past}"


def loss_jump_after_resume(seen: Seen) -> str | None:
    """The loss does not go on where it was before a resume."""
    return loss_jump(seen, after_resume=True)


def rate_jump(seen: Seen) -> str | None:
    """The learning rate does not go on where it was before a resume."""
    if seen.rate_changed or seen.logs_since_resume != 1 or len(seen.logs) < 3:
        return None
    (start, _, old), (before, _, rate), (now, _, new) = list(seen.logs)[-3:]
    if now - before > LR_SPAN * seen.trainer.max_steps:
        return None
    # From the last rate to where the line through the last two leads: warm-up may end between.
    foretold = max(0.0, rate + (rate - old) * (now - before) / (before - start))
    low, high = sorted((rate, foretold))
    if low - LR_SLACK * high <= new <= high + LR_SLACK * high:
        return None
    return (
        f"the learning rate is {new:.2e} right after the resume at step {seen.resumed_at}, it was "
        f"{rate:.2e} before"
    )


def overfit(seen: Seen) -> str | None:
    """Validation loss rises while train loss falls."""
    if seen.above_best < OVERFIT_VALIDATIONS or seen.train_loss() >= seen.loss_at_best:
        return None
    return (
        f"val loss is {seen.figures['val/loss']:.3f}, above its best of {seen.best:.3f} for "
        f"{seen.above_best} validations, while train loss fell from {seen.loss_at_best:.3f} to "
        f"{seen.train_loss():.3f}"
    )


def low_mfu(seen: Seen) -> str | None:
    """A model that could fill the device leaves most of it idle."""
    small = seen.trainer.lightning_module.flops_per_token < SMALL_MODEL_FLOPS
    if small or seen.trainer.strategy.root_device.type == "cpu" or len(seen.mfu) < RECENT:
        return None
    limit = LOW_MFU * (1 + EASE) if low_mfu in seen.active else LOW_MFU
    median = statistics.median(seen.mfu)
    if median >= limit:
        return None
    return f"MFU is {median:.1%}"


def long_wait(seen: Seen) -> str | None:
    """Training waits for its batches."""
    toy = seen.trainer.lightning_module.flops_per_token < TOY_MODEL_FLOPS
    if toy or len(seen.data_wait) < RECENT:
        return None
    limit = LONG_WAIT * (1 - EASE) if long_wait in seen.active else LONG_WAIT
    median = statistics.median(seen.data_wait)
    if median <= limit:
        return None
    return f"{median:.0%} of the time goes by waiting for data"


def norm_stuck(seen: Seen) -> str | None:
    """The gradient is far above its clip value all along."""
    norms, window = seen.norms()
    return stuck(norms, seen.trainer.gradient_clip_val, window)


def norm_jump(seen: Seen) -> str | None:
    """The gradient grows out of all proportion."""
    return jumped(seen.norms()[0])


def norm_zero(seen: Seen) -> str | None:
    """The gradient is gone."""
    return vanished(seen.norms()[0])
