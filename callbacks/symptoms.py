"""Symptoms of a run in trouble: the history of its metrics, and detectors over that history."""

import math
import statistics
from collections import deque
from typing import Any

from callbacks.grad_norm import BASE_STEPS, GradNorm
from callbacks.run.trainer import Trainer

# Losses are in nats a token. A log is a logged step, whatever lies between two of them.
FIRST_NATS = 0.3  # between the first loss and that of new weights
FIRST_TARGETS = 16  # the loss of fewer varies by more than that
FLAT_STEPS, FLAT_NATS = 200, 0.5  # the least that a loss falls in so many steps
FAST_STEPS, FAST_SHARE = 200, 0.25  # of the first loss; so low two logs in a row, so soon
# Above the median of the logs before, two logs in a row. A log of the healthy small run may lie 1.7
# nats or 5.6 deviations above it, alone: it is the loss of 2,048 tokens.
JUMP_LOGS, JUMP_NATS, JUMP_DEVIATIONS = 20, 1.0, 8.0
RESUME_LOGS = 5  # a jump among so many logs after a resume is laid to it
LR_SLACK = 0.2  # share of the rate by which it may miss a straight line
LR_SPAN = 0.05  # share of the run beyond which a rate is not extrapolated
OVERFIT_NATS, OVERFIT_VALIDATIONS = 0.02, 3  # above the best, so many in a row
RECENT = 5  # logs whose median is taken where speed is judged
LOW_MFU = 0.3
SMALL_MODEL_FLOPS = 1e9  # a token: below, a low MFU is the model's size and no fault
LONG_WAIT = 0.1  # share of training time spent waiting for data
TOY_MODEL_FLOPS = 1e6  # a token: below, reading it takes as long as learning from it
EASE = 0.1  # share by which speed must be better than its limit before it is warned of again
# A median of 1.3 to 1.6 times the clip value is normal: that of a healthy small run throughout.
NORM_STUCK = 10.0  # times the clip value
NORM_JUMP = 10.0  # as a norm, and times the median of the norms before it
NORM_ZERO = 1e-3  # healthy norms are tenths and more
FP16_LOGS = 3  # a scaler looks for its scale by skipping updates; so many logs in a row are more


class RunHistory:
    """Metrics of a run so far, as far as the detectors need them."""

    kept = ("lowest", "best", "loss_at_best", "above_best", "skipped")
    """Attributes that a checkpoint stores, beside `logs`."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.metrics: dict[str, float] = {}
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
        self.active: set[Any] = set()  # detectors whose warning was shown and still holds

    def forget_validations(self) -> None:
        """Forget all validations so far."""
        self.best = self.loss_at_best = math.inf  # validation loss, and the train loss then
        self.above_best = 0  # validations in a row

    def add(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add the metrics of a logged step or of a validation."""
        self.trainer, self.metrics = trainer, metrics
        for name, values in (("mfu", self.mfu), ("data_wait", self.data_wait)):
            if (key := f"throughput/{name}") in metrics:
                values.append(metrics[key])
        if "optim/lr" in metrics:
            count = int(metrics.get("optim/steps_without_targets", 0))
            self.newly_empty, self.empty = count - self.empty, count
        if "train/loss" in metrics:
            self._add_step(metrics["train/loss"])
        if "val/loss" in metrics:
            self._add_validation(metrics["val/loss"])

    def _add_step(self, loss: float) -> None:
        count = int(self.metrics.get("optim/skipped_steps", 0))
        self.newly_skipped, self.skipped = count - self.skipped, count
        self.skipping = self.skipping + 1 if self.newly_skipped > 0 else 0
        if math.isfinite(loss):
            self.logs.append((self.trainer.global_step, loss, self.metrics["optim/lr"]))
            self.lowest = min(self.lowest, loss)

    def _add_validation(self, loss: float) -> None:
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
        """Expected loss of new weights; None where the run started from other weights."""
        return self.trainer.lightning_module.expected_first_loss

    @property
    def logs_since_resume(self) -> int:
        """Logs since the run was resumed; 0 if no earlier log is known."""
        new = sum(step > self.resumed_at for step, _, _ in self.logs)
        return new if new < len(self.logs) else 0

    def state(self) -> dict[str, Any]:
        """Return the part that a checkpoint stores, as plain types."""
        state = {name: getattr(self, name) for name in self.kept}
        return state | {"logs": [list(log) for log in self.logs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        for name in self.kept:
            setattr(self, name, state[name])
        self.logs.extend((step, loss, rate) for step, loss, rate in state["logs"])

    def norms(self) -> tuple[list[float], int]:
        """Gradient norms of the last steps before clipping, and the most that are kept."""
        for callback in self.trainer.callbacks:
            if isinstance(callback, GradNorm):
                return list(callback.norms), callback.norms.maxlen or 0
        return [], 1


# Detectors: each returns its observation, with numbers, or None.


def non_finite(run: RunHistory) -> str | None:
    """Loss or gradient is NaN or infinite."""
    if not math.isfinite(loss := run.metrics["train/loss"]):
        return f"the loss is {loss}"
    fp16 = str(run.trainer.precision).startswith("16")
    if run.skipping < (FP16_LOGS if fp16 else 1):
        return None
    return (
        f"the gradient was not finite: {run.newly_skipped} updates skipped since the last logged "
        f"step, {run.skipped} in all"
    )


def no_targets(run: RunHistory) -> str | None:
    """Steps have no targets."""
    if run.newly_empty <= 0:
        return None
    return (
        f"{run.newly_empty} of the steps since the last log had no target, and so nothing to "
        f"learn; {run.empty} since the start"
    )


def first_loss(run: RunHistory) -> str | None:
    """The first loss is not that of new weights."""
    loss = run.metrics["train/loss"]
    if run.expected is None or run.trainer.global_step != 1:
        return None
    if run.trainer.lightning_module.targets_seen < FIRST_TARGETS:
        return None
    if not FIRST_NATS < abs(loss - run.expected) < math.inf:
        return None
    return f"the first loss is {loss:.2f}, that of new weights is {run.expected:.2f}"


def flat(run: RunHistory) -> str | None:
    """The loss has not fallen, and the warm-up is over."""
    if run.expected is None or run.trainer.global_step < FLAT_STEPS or len(run.logs) < 2:
        return None
    warms_up = run.logs[-1][2] > run.logs[-2][2]
    if warms_up or run.lowest < run.expected - FLAT_NATS:
        return None
    return (
        f"the loss is {run.losses[-1]:.2f} and has never been below {run.lowest:.2f}, while new "
        f"weights start at {run.expected:.2f}"
    )


def too_fast(run: RunHistory) -> str | None:
    """The loss falls implausibly fast."""
    if run.expected is None:
        return None
    limit, losses = FAST_SHARE * run.expected, run.losses[-2:]
    if run.trainer.global_step > FAST_STEPS or len(losses) < 2 or max(losses) >= limit:
        return None
    return (
        f"the loss is {losses[-1]:.2f} already, below a quarter of the {run.expected:.2f} that "
        "new weights start at"
    )


def loss_jump(run: RunHistory, after_resume: bool = False) -> str | None:
    """The loss jumps up and stays there."""
    if len(run.logs) < 3 or after_resume != (0 < run.logs_since_resume <= RESUME_LOGS):
        return None
    *before, one, two = run.losses
    if len(before) < JUMP_LOGS:
        if run.expected is None:
            return None
        # Too few logs; but no loss should be far above that of new weights.
        middle, spread, past = run.expected, 0.0, "of new weights"
    else:
        middle, past = statistics.median(before), f"in the median of {JUMP_LOGS} logged steps"
        spread = statistics.median(abs(loss - middle) for loss in before)
    limit = middle + max(JUMP_NATS, JUMP_DEVIATIONS * spread)
    # Only at its start: later the jump itself is among the logs before.
    if min(one, two) <= limit or before[-1] > limit:
        return None
    where = f" right after the resume at step {run.resumed_at}" if after_resume else ""
    return f"the loss went up to {one:.2f} and {two:.2f}{where}, from {middle:.2f} {past}"


def loss_jump_after_resume(run: RunHistory) -> str | None:
    """The loss jumps up right after a resume."""
    return loss_jump(run, after_resume=True)


def rate_jump(run: RunHistory) -> str | None:
    """The learning rate jumps right after a resume."""
    if run.rate_changed or run.logs_since_resume != 1 or len(run.logs) < 3:
        return None
    (start, _, old), (before, _, rate), (now, _, new) = list(run.logs)[-3:]
    if now - before > LR_SPAN * run.trainer.max_steps:
        return None
    # Between the last rate and the extrapolation of the last two: warm-up may end in between.
    expected = max(0.0, rate + (rate - old) * (now - before) / (before - start))
    low, high = sorted((rate, expected))
    if low - LR_SLACK * high <= new <= high + LR_SLACK * high:
        return None
    return (
        f"the learning rate is {new:.2e} right after the resume at step {run.resumed_at}, it was "
        f"{rate:.2e} before"
    )


def overfit(run: RunHistory) -> str | None:
    """Validation loss rises while train loss falls."""
    if run.above_best < OVERFIT_VALIDATIONS or run.train_loss() >= run.loss_at_best:
        return None
    return (
        f"val loss is {run.metrics['val/loss']:.3f}, above its best of {run.best:.3f} for "
        f"{run.above_best} validations, while train loss fell from {run.loss_at_best:.3f} to "
        f"{run.train_loss():.3f}"
    )


def low_mfu(run: RunHistory) -> str | None:
    """A model that could fill the device leaves most of it idle."""
    small = run.trainer.lightning_module.flops_per_token < SMALL_MODEL_FLOPS
    if small or run.trainer.strategy.root_device.type == "cpu" or len(run.mfu) < RECENT:
        return None
    limit = LOW_MFU * (1 + EASE) if low_mfu in run.active else LOW_MFU
    median = statistics.median(run.mfu)
    if median >= limit:
        return None
    return f"MFU is {median:.1%}"


def long_wait(run: RunHistory) -> str | None:
    """Training waits for its batches."""
    toy = run.trainer.lightning_module.flops_per_token < TOY_MODEL_FLOPS
    if toy or len(run.data_wait) < RECENT:
        return None
    limit = LONG_WAIT * (1 - EASE) if long_wait in run.active else LONG_WAIT
    median = statistics.median(run.data_wait)
    if median <= limit:
        return None
    return f"{median:.0%} of the time goes by waiting for data"


def norm_stuck(run: RunHistory) -> str | None:
    """A whole window of gradient norms is far above the clip value."""
    norms, window = run.norms()
    clip = run.trainer.gradient_clip_val
    if not clip or len(norms) < window:
        return None
    if (median := statistics.median(norms)) <= NORM_STUCK * clip:
        return None
    return f"the gradient norm is {median:.3g} in the median of {window} steps, clipped to {clip:g}"


def norm_jump(run: RunHistory) -> str | None:
    """A gradient norm is large, and far above those before it."""
    norms, _ = run.norms()
    for i in range(BASE_STEPS, len(norms)):
        if norms[i] <= NORM_JUMP:
            continue
        if norms[i] > NORM_JUMP * (median := statistics.median(norms[:i])):
            return f"the gradient norm jumped to {norms[i]:.3g} from a median of {median:.3g}"
    return None


def norm_zero(run: RunHistory) -> str | None:
    """The gradient has all but vanished."""
    newest = run.norms()[0][-BASE_STEPS:]
    if len(newest) < BASE_STEPS or (median := statistics.median(newest)) >= NORM_ZERO:
        return None
    return f"the gradient norm is {median:.2g} in the median of {BASE_STEPS} steps"
