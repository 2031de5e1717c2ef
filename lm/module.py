"""LMModule: loss, optimizer, schedule and metrics as hooks of Lightning."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Int
from lightning.pytorch import LightningModule
from torch import Tensor

from lm.compile import Compilation
from lm.config import ModelConfig, OptimConfig
from lm.cpu import give_back_freed_memory
from lm.evaluate import validation_metrics
from lm.experts import balance_loss, expert_metrics
from lm.finite import few
from lm.flops import flops_per_token
from lm.generate import generate
from lm.gradients import SkippedUpdates, clipped, is_fused, skip_if_not_finite, total_norm
from lm.loss import IGNORE_INDEX, cross_entropy_sum, shift, softmax_step
from lm.model import LM, plain_keys
from lm.optim import build_optimizer, layout, override_stored_settings, use_fused
from lm.schedule import warmup_cosine, warmup_steps
from lm.softmax import native_softmax_step
from lm.trained import unlike, write_weights_file

# Steps between reads of counts on CUDA: each read is a host/device synchronization.
CUDA_CHECK_STEPS = 10


def stream_seed(*values: int) -> int:
    """Return the seed of the random stream that belongs to these integers."""
    digest = hashlib.blake2b(repr(values).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class LMModule(LightningModule):
    """Causal language model that learns by next-token cross-entropy.

    Loss and gradient are means over all targets of an optimizer step, independent of ranks,
    micro-batches and padding. Only the balance loss of experts is computed per micro-batch and
    weighted by the number of targets.
    """

    net: LM

    def __init__(
        self,
        *,
        config: ModelConfig = ModelConfig(),
        optim: OptimConfig = OptimConfig(),
        compile: bool | Literal["auto"] = "auto",
        max_skipped_steps: int = 10,
        from_weights: str | None = None,
        grow_vocab: bool = False,
        seed: int = 0,
    ) -> None:
        """Store the settings; `configure_model` builds the network.

        Args:
            config: Shape of the network.
            optim: Optimizer and schedule.
            compile: Compile the network and the loss for training. auto: if a compiler is
                installed and, on a CPU, the run is long enough to make up for the time that
                compiling takes (5e13 FLOPs, about two minutes). false gives readable errors.
            max_skipped_steps: Stop after this many updates in a row with a non-finite gradient.
                Such updates are skipped: weights and optimizer state do not change.
            from_weights: Start from these weights with a new optimizer at step 0: a run folder, a
                checkpoint, a weights-only file, or a Hugging Face folder of a Llama, Qwen3,
                Mixtral or Qwen3-MoE model. A resumed run does not read it.
            grow_vocab: Allow a larger vocabulary than that of the weights; new rows are
                initialized as in a new model.
            seed: Seed of initial weights and dropout; always seed_everything.
        """
        super().__init__()
        if max_skipped_steps < 1:
            raise ValueError(
                f"model.max_skipped_steps is {max_skipped_steps}: must be at least 1, or the run "
                "would stop before its first update"
            )
        self.config = config
        self.optim_config = optim
        self.compilation = Compilation(compile)
        self.max_skipped_steps = max_skipped_steps
        self.from_weights, self.grow_vocab = from_weights, grow_vocab
        self.starting_weights: Callable[[], dict[str, Tensor]] | None = None
        self.seed = seed
        self.fused = False
        self.token_bytes: Tensor | None = None
        self.source_names: Sequence[str] = ()
        self.validation_metrics: dict[str, float] = {}
        self.loss_step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_step
        self.grad_norm = self.grad_scale = torch.zeros(())
        self.targets_seen = self._without_targets = self._step_targets = torch.zeros(())
        self._step_metrics: dict[str, Tensor | float] = {}
        self._window = torch.zeros(0)  # sums over the step's micro-batches: loss, targets
        self._routing: Tensor | None = None  # mean over the step's micro-batches
        self._divisor = 0
        self._skipped = SkippedUpdates()
        self._totals = torch.zeros(0)  # per validation loader: loss, targets, bytes of targets
        self._loaded_losses: dict[str, float | None] = {}
        self._optimizer_layout: dict[str, Any] = {}

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token."""
        return flops_per_token(self.config, self.config.max_seq_len)

    @property
    def expected_first_loss(self) -> float | None:
        """Loss in nats per token before the first update; None if weights are loaded."""
        return self.net.expected_first_loss if self.from_weights is None else None

    @property
    def compiled(self) -> bool:
        """Whether compiled code is in use."""
        return self.compilation.active

    @property
    def how_compiled(self) -> str:
        """One phrase for the console: compiled or not, and why."""
        return self.compilation.summary

    def contract(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share, by configuration key."""
        # max_seq_len is always data.seq_len, which the contract holds already.
        config = dataclasses.asdict(self.config)
        del config["max_seq_len"]
        optim = dataclasses.asdict(self.optim_config) | {"betas": list(self.optim_config.betas)}
        return {
            **{f"model.config.{name}": value for name, value in config.items()},
            **{f"model.optim.{name}": value for name, value in optim.items() if name != "fused"},
            "model.optim.fused": self.fused,
            "model.compile": self.compiled,
            "softmax of the loss": "C++" if self.loss_step is native_softmax_step else "torch",
            "seed_everything": self.seed,
        }

    # Set-up

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device.type
        source: Any = getattr(self.trainer, "datamodule", None)
        self.token_bytes = getattr(source, "token_bytes", None)
        self.source_names = getattr(source, "source_names", ())
        if stage != "fit":
            return
        give_back_freed_memory()
        self.fused = use_fused(self.optim_config.fused, device, str(self.trainer.precision))
        # A warm-up longer than the run fails here, before the network is built.
        warmup_steps(self.optim_config.warmup, self.trainer.max_steps)
        tokens = getattr(source, "tokens_per_step", 0) * self.trainer.max_steps
        self.compilation.decide(device, self.flops_per_token * tokens)

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        # Initialized on the CPU by a generator of its own: equal weights on all devices and ranks.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            self.net = LM(self.config)
        if self.starting_weights is not None:
            self._load_starting_weights(self.starting_weights())
            self.starting_weights = None  # frees them
        if self.compiled:
            # Compiling a method instead of the module keeps the keys of the state dict.
            trunk = self.net.model
            trunk.apply_blocks = self.compilation.compile(trunk.apply_blocks)
            device = self.trainer.strategy.root_device.type
            self.loss_step = self.compilation.loss_kernel(device)

    @torch.no_grad()
    def _load_starting_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.net.state_dict().items():
            # A smaller vocabulary has fewer rows.
            tensor[: len(weights[name])] = weights[name]

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.net, self.optim_config, self.fused)
        self._optimizer_layout = layout(self.net, optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_multiplier())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_multiplier(self) -> Callable[[int], float]:
        max_steps = self.trainer.max_steps
        return functools.partial(
            warmup_cosine,
            warmup=warmup_steps(self.optim_config.warmup, max_steps),
            max_steps=max_steps,
            min_ratio=self.optim_config.min_lr_ratio,
        )

    # Training

    def loss(
        self, batch: dict[str, Int[Tensor, "B L"]]
    ) -> tuple[Tensor, Int[Tensor, "B T"], Tensor | None]:
        """Return the sum of cross-entropies in nats, the targets, and the use of experts."""
        inputs, targets = shift(batch["input_ids"], batch["labels"])
        hidden, routing = self.net.model.forward_with_routing(inputs)
        total = cross_entropy_sum(hidden, self.net.head_weight, targets, step=self.loss_step)
        return total, targets, routing

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        micro_step = batch_idx % self.trainer.accumulate_grad_batches
        if self.config.dropout:
            # Seeded by the step: no random state to store, and nothing else can change it.
            torch.manual_seed(
                stream_seed(self.seed, self.trainer.global_step, micro_step, self.global_rank)
            )
        total, targets, routing = self.loss(batch)
        n_real = (targets != IGNORE_INDEX).sum()
        if micro_step == 0:
            self._window = torch.zeros(2, dtype=self._wide, device=self.device)
            self._routing = None
        self._window += torch.stack((total.detach(), n_real))
        if routing is not None:
            share = routing.detach() / self.trainer.accumulate_grad_batches
            self._routing = share if self._routing is None else self._routing + share
            # Weighted by targets, because the step's loss is a mean over targets.
            total = total + self.config.aux_loss_coef * balance_loss(routing) * n_real
        # Every micro-batch has the same divisor; `configure_gradient_clipping` replaces it by the
        # number of targets of the whole step.
        self._divisor = targets.numel() * self.trainer.accumulate_grad_batches
        return total / targets.numel()

    @property
    def _wide(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Turn raw gradients into those of the token mean, clip them, and record the metrics.

        Both factors are applied in one pass over the gradients.
        """
        named = {n: p for n, p in self.net.named_parameters() if p.grad is not None}
        gradients = [cast(Tensor, p.grad) for p in named.values()]
        total, targets = self._sum_over_devices()
        scale = self._token_mean_scale(targets)
        norm = total_norm(gradients) * scale
        factor = clipped(scale, norm, gradient_clip_val)
        finite = torch.isfinite(norm)
        self._skipped.count(finite)
        self._check_progress(named, fused=is_fused(optimizer))
        skip_if_not_finite(optimizer, [*named.values()], finite)
        # On a CPU reading the factor costs nothing, unlike a pass over all gradients.
        if self.device.type != "cpu" or factor != 1:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        self.grad_norm, self.grad_scale = torch.where(targets > 0, norm, math.nan), scale
        self._step_metrics = {
            "train/loss": total / targets.clamp(min=1),
            "optim/lr": optimizer.param_groups[0]["lr"],
            "optim/grad_norm": norm,
        }

    def _sum_over_devices(self) -> Tensor:
        """Sum the step's loss and targets, and average the routing, over all devices."""
        if self.trainer.world_size > 1:
            # Queued on the device; Lightning's `reduce` would wait for all devices.
            torch.distributed.all_reduce(self._window)
            if self._routing is not None:
                torch.distributed.all_reduce(self._routing)
                self._routing = self._routing / self.trainer.world_size
        self._step_targets = self._window[1]
        self.targets_seen = self.targets_seen + self._step_targets
        self._without_targets = self._without_targets + (self._step_targets == 0)
        return self._window

    def _token_mean_scale(self, targets: Tensor) -> Tensor:
        """Return the factor from raw gradients to those of the mean over the step's targets."""
        # The backward passes divided by `_divisor`, and DDP by the world size.
        return (self._divisor * self.trainer.world_size / targets.clamp(min=1)).float()

    def _check_progress(self, named: dict[str, torch.nn.Parameter], *, fused: bool) -> None:
        """Stop a run that cannot learn.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
            RuntimeError: no step since the start had a target.
        """
        step = self.trainer.global_step + 1
        last = step == self.trainer.max_steps
        on_cuda, between = self.device.type == "cuda", step % CUDA_CHECK_STEPS != 0
        if not (on_cuda and fused and between):
            self._skipped.check(self.max_skipped_steps, step, named)
        if on_cuda and between and not last:
            return
        empty = int(self._without_targets)
        if (last or empty >= self.max_skipped_steps) and not self.targets_seen:
            raise RuntimeError(
                f"none of the {empty} steps since the start had a target, so nothing is learned: "
                "all labels are -100; look at the samples by lightning peek"
            )

    @property
    def skipped_in_row(self) -> int:
        """Updates skipped since the last one that was not."""
        return self._skipped.in_row

    def on_train_end(self) -> None:
        SkippedUpdates.check_end(self._skipped.in_row, self.trainer.global_step)

    def step_metrics(self) -> dict[str, float]:
        """Return loss, learning rate and gradient norm before clipping of the last finished step.

        A step without targets has no loss and no norm.
        """
        metrics = {name: float(value) for name, value in self._step_metrics.items()}
        if not self._step_targets:
            metrics.pop("train/loss", None)
            metrics.pop("optim/grad_norm", None)
        if self._routing is not None:
            metrics |= expert_metrics(self._routing)
        if skipped := self._skipped.in_total:
            metrics["optim/skipped_steps"] = skipped
        if empty := int(self._without_targets):
            metrics["optim/steps_without_targets"] = empty
        return metrics

    # Validation

    def on_validation_start(self) -> None:
        loaders = self.trainer.num_val_batches
        self._totals = torch.zeros(len(loaders), 3, dtype=self._wide, device=self.device)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        total, targets, _ = self.loss(batch)
        # Masked: selecting the targets would synchronize with a GPU.
        real = targets != IGNORE_INDEX
        n_bytes = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.token_bytes is not None:
            self.token_bytes = self.token_bytes.to(self.device)
            n_bytes = (self.token_bytes[targets.clamp(min=0)] * real).sum()
        self._totals[dataloader_idx] += torch.stack((total, real.sum(), n_bytes))

    def on_validation_epoch_end(self) -> None:
        totals = cast(Tensor, self.trainer.strategy.reduce(self._totals, reduce_op="sum")).tolist()
        self.validation_metrics = validation_metrics(totals, self.source_names)
        # For callbacks that watch a metric, such as early stopping, which fail if it is missing;
        # loggers receive metrics from the progress callback.
        self.log_dict({"val/loss": math.inf} | self.validation_metrics, logger=False)

    # Sampling

    def continue_ids(
        self,
        ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        eos_id: int | None,
        n_tokens: int,
        holes: Sequence[int] = (),
    ) -> list[int]:
        """Return the ids that the model generates after a prompt; they depend on the seed alone."""
        trunk = self.net.model
        # Runs eagerly: the length changes with every token, and each would be compiled for.
        compiled = vars(trunk).pop("apply_blocks", None)
        try:
            new = generate(
                self.net,
                ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=None,
                top_p=None,
                seed=self.seed,
                eos_id=eos_id,
                n_tokens=n_tokens,
                holes=holes,
            )
            return list(new)
        finally:
            if compiled is not None:
                trunk.apply_blocks = compiled

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["model_config"] = dataclasses.asdict(self.config)
        checkpoint["optimizer"] = self._optimizer_layout
        checkpoint["skipped_steps"] = self._skipped.counts.tolist()
        # Before its first step or validation a resumed run has only the checkpoint's losses.
        losses = self._loaded_losses
        checkpoint["train_loss"] = self.step_metrics().get("train/loss", losses.get("train_loss"))
        checkpoint["val_loss"] = self.validation_metrics.get("val/loss", losses.get("val_loss"))

    def write_weights(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Write a weights-only file.

        Args:
            checkpoint: Step and contract, stored beside the weights.
        """
        self.on_save_checkpoint(checkpoint)
        write_weights_file(self.net.state_dict(), checkpoint, path)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = plain_keys(checkpoint["state_dict"])
        if faults := unlike(checkpoint["state_dict"], self.state_dict()):
            raise ValueError(
                f"the checkpoint does not hold the weights of this model: {few(faults)}; give a "
                "checkpoint of this run"
            )
        self._loaded_losses = {name: checkpoint.get(name) for name in ("train_loss", "val_loss")}
        in_row, in_all = checkpoint.get("skipped_steps", [0, 0])
        if self.trainer.training and checkpoint["global_step"] == self.trainer.max_steps:
            SkippedUpdates.check_end(in_row, self.trainer.max_steps)
        # The count in a row starts anew, or a restart would stop after one or two more.
        self._skipped = SkippedUpdates(in_total=in_all)
        if self.trainer.training:
            # An optimizer without state costs nothing.
            own = build_optimizer(self.net, self.optim_config, self.fused)
            override_stored_settings(checkpoint, self.net, own, self._lr_multiplier())
