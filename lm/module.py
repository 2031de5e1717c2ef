"""The causal LM as a LightningModule: loss, optimizer, schedule and the figures of a step."""

import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from jaxtyping import Int
from lightning.pytorch import LightningModule
from torch import Tensor

from lm.config import ModelConfig, OptimConfig
from lm.cpu import give_back_freed_memory
from lm.evaluate import bits_per_byte
from lm.experts import balance_loss, expert_figures
from lm.finite import NonFiniteError, few
from lm.flops import flops_per_token
from lm.generate import generate
from lm.gradients import total_norm
from lm.loss import IGNORE_INDEX, cross_entropy_sum, shift, softmax_step
from lm.model import LM, plain_keys
from lm.optim import build_optimizer, use_fused
from lm.schedule import warmup_cosine, warmup_steps
from lm.softmax import find_compiler, library, native_softmax_step
from lm.trained import unlike, write_weights_file

# On CUDA the count of skipped updates is looked at every so many steps: a look is a sync.
CUDA_CHECK_STEPS = 10


class TokenSource(Protocol):
    """What the module asks of a datamodule, if it has it."""

    token_bytes: Tensor | None
    """UTF-8 bytes of each token id (V,), for bits per byte."""
    source_names: list[str]
    """What the first validation loaders are of, where there are several sources."""
    tokens_per_step: int
    """Positions of an optimizer step over all devices."""


# Two cores do this without compiling in about two minutes, of which compiling could save a third;
# it takes 13 to 40 seconds where nothing is cached.
COMPILE_FLOPS = 5e13


def stream_seed(*values: int) -> int:
    """Seed of the random stream that belongs to these integers alone."""
    digest = hashlib.blake2b(repr(values).encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def can_compile(device: str) -> bool:
    """Whether torch.compile finds what it needs: a C++ compiler on a CPU, Triton and a C compiler
    on CUDA.
    """
    if device == "cuda":
        compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
        return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))
    return device == "cpu" and find_compiler() is not None


def why_not_compiled(setting: bool | str, device: str, run_flops: int) -> str | None:
    """What speaks against compiling a run of so much arithmetic (0 is not known); None: nothing."""
    if setting is False:
        return "model.compile is false"
    if not can_compile(device):
        return "no compiler is found"
    if setting == "auto" and device == "cpu" and 0 < run_flops < COMPILE_FLOPS:
        return f"{run_flops:.1e} FLOPs in all are too few to make up for compiling"
    return None


class LMModule(LightningModule):
    """Causal language model that learns by next-token cross-entropy.

    Loss and gradient are means over the real targets of a whole optimizer step, however it was
    cut into ranks, micro-batches and padding. The balance loss of experts alone is not: it is that
    of each micro-batch, weighted by its targets.
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
        """Settings only: the network is built in `configure_model`.

        Args:
            config: Shape of the network.
            optim: Optimizer and schedule.
            compile: Compile the network and the loss for training. auto: where there is a
                compiler and, on a CPU, the run is long enough to make up for the time that
                compiling takes (5e13 FLOPs, two minutes or so). Off gives readable errors.
            max_skipped_steps: Stop after this many updates in a row with a gradient that is not
                finite. Such updates are skipped: weights and moments stay as they were.
            from_weights: Begin with these weights, a new optimizer and step 0: a run folder, a
                checkpoint, a weights-only file, or a folder of Hugging Face's form with a Llama,
                Qwen3, Mixtral or Qwen3-MoE. A resumed run does not read it.
            grow_vocab: Allow a vocabulary that goes on after that of the weights; new rows are
                drawn as for a new model.
            seed: Of initial weights and dropout; always seed_everything.
        """
        super().__init__()
        if max_skipped_steps < 1:
            raise ValueError(
                f"model.max_skipped_steps is {max_skipped_steps}: must be at least 1, or the run "
                "would stop before its first update"
            )
        self.config = config
        self.optim_config = optim
        self.compile_setting = compile
        self.max_skipped_steps = max_skipped_steps
        self.from_weights, self.grow_vocab = from_weights, grow_vocab
        self.starting_weights: Callable[[], dict[str, Tensor]] | None = None
        self.seed = seed
        self.fused = self._skips_itself = False
        self.compiled, self.how_compiled = False, ""
        self.token_bytes: Tensor | None = None
        self.source_names: list[str] = []
        self.validation_figures: dict[str, float] = {}
        self.loss_step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = softmax_step
        self.grad_norm = self.grad_scale = torch.zeros(())
        self.targets_seen = self._without_targets = self._step_targets = torch.zeros(())
        self._step_figures: dict[str, Tensor | float] = {}
        self._window = self._totals = torch.zeros(0)
        self._routing: Tensor | None = None  # of a step, mean over its micro-batches
        self._divisor = 0
        self._skipped = torch.zeros(2, dtype=torch.int64)  # in a row, in all
        self._loaded_losses: dict[str, float | None] = {}

    @property
    def flops_per_token(self) -> int:
        """FLOPs to learn from one token."""
        return flops_per_token(self.config, self.config.max_seq_len)

    @property
    def expected_first_loss(self) -> float | None:
        """Loss in nats a token before the first update; None where weights come from elsewhere."""
        return self.net.expected_first_loss if self.from_weights is None else None

    def contract(self) -> dict[str, Any]:
        """Settings that a resumed run is compared by, under their configuration keys."""
        # The context length is data.seq_len; one fact is compared once.
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
        source = cast(TokenSource | None, getattr(self.trainer, "datamodule", None))
        self.token_bytes = getattr(source, "token_bytes", None)
        self.source_names = getattr(source, "source_names", [])
        if stage != "fit":
            return
        give_back_freed_memory()
        self.fused = use_fused(self.optim_config.fused, device, str(self.trainer.precision))
        # Fails here, before the network is built, where the warm-up does not fit the run.
        warmup_steps(self.optim_config.warmup, self.trainer.max_steps)
        if self.compile_setting is True and not can_compile(device):
            raise ValueError(
                f"model.compile is true, but torch.compile finds no compiler for {device} (a C++ "
                "compiler on a CPU, Triton and a C compiler on CUDA); install one or set "
                "model.compile to false"
            )
        per_step = getattr(source, "tokens_per_step", 0)
        run_flops = self.flops_per_token * per_step * self.trainer.max_steps
        why_not = why_not_compiled(self.compile_setting, device, run_flops)
        self.compiled = why_not is None
        self.how_compiled = (
            f"not compiled ({why_not})" if why_not else "compiled (the first step takes a while)"
        )

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        # On the CPU whatever the device, from a generator of its own: equal weights everywhere.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            self.net = LM(self.config)
        if self.starting_weights is not None:
            self._begin_with(self.starting_weights())
            self.starting_weights = None  # it holds them all
        if self.compiled:
            # A method and no module, so that no key of the state dict carries a prefix.
            trunk = self.net.model
            trunk.decode = self._compile(trunk.decode)
            self.loss_step = self._fast_loss_step()

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled; where `auto` chose that and it fails, the plain one and a line."""
        # Its import takes a second, which runs that are not compiled need not wait.
        from torch._dynamo.exc import TorchDynamoException

        fast = torch.compile(function, dynamic=False)
        if self.compile_setting is True:
            return fast
        # With the forward pass, where a failure can still be answered.
        torch._functorch.config.force_non_lazy_backward_lowering = True  # pyright: ignore

        def call(*args: Any) -> Any:
            if not self.compiled:
                return function(*args)
            try:
                return fast(*args)
            except TorchDynamoException as error:
                self.compiled = False
                # The first line names the backend, the next one what it says.
                why = " ".join(str(error).split("\n")[:2]) or type(error).__name__
                print(f"compile: failed, so the run is not compiled: {why}", file=sys.stderr)
                return function(*args)

        return call

    @torch.no_grad()
    def _begin_with(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in self.net.state_dict().items():
            # Fewer rows are those of a smaller vocabulary.
            tensor[: len(weights[name])] = weights[name]

    def _fast_loss_step(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if self.trainer.strategy.root_device.type != "cpu":
            return self._compile(softmax_step)
        try:
            library()
        except OSError as error:
            print(f"loss: {error}; torch's own operations are used", file=sys.stderr)
            return softmax_step
        return native_softmax_step

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.net, self.optim_config, self.fused)
        # Only a fused kernel looks at `found_inf`, and another optimizer may have none.
        self._skips_itself = all(group.get("fused") for group in optimizer.param_groups)
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
        """Sum of cross-entropies in nats of a batch, its targets, and how experts were used."""
        inputs, targets = shift(batch["input_ids"], batch["labels"])
        hidden, routing = self.net.model.routed(inputs)
        total = cross_entropy_sum(hidden, self.net.head_weight, targets, step=self.loss_step)
        return total, targets, routing

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        micro_step = batch_idx % self.trainer.accumulate_grad_batches
        if self.config.dropout:
            # The step is the random state: nothing to store, nothing else can disturb it.
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
            # A mean over targets, as the loss is in the end.
            total = total + self.config.aux_loss_coef * balance_loss(routing) * n_real
        # The divisor is the same for every micro-batch; `configure_gradient_clipping` corrects
        # it to the number of real targets of the whole step.
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
        """Measure the total L2 norm, then scale gradients once: token mean and clip together.

        A step whose norm is not finite is skipped. The fused optimizer is told by its `found_inf`
        tensor, without a sync; for the others the gradients are taken away.
        """
        named = [(n, p) for n, p in self.net.named_parameters() if p.grad is not None]
        gradients = [cast(Tensor, p.grad) for _, p in named]
        total, targets = self._over_devices(self._window)
        if self._routing is not None:
            self._routing = self._over_devices(self._routing) / self.trainer.world_size
        self.targets_seen = self.targets_seen + targets
        self._without_targets = self._without_targets + (targets == 0)
        # Undo what the backward passes divided by (DDP adds the world size) and divide rightly.
        scale = (self._divisor * self.trainer.world_size / targets.clamp(min=1)).float()
        norm = total_norm(gradients) * scale
        # Of this step: the norm before clipping, and what turns a raw gradient into that of the
        # token mean.
        self.grad_norm = torch.where(targets > 0, norm, math.nan)
        self.grad_scale = scale
        factor = scale
        if gradient_clip_val:
            factor = scale * (gradient_clip_val / (norm + 1e-6)).clamp(max=1.0)
        finite = torch.isfinite(norm)
        self._count_skipped(finite, named)
        self._refuse_to_learn_nothing()
        if self._skips_itself:
            optimizer.found_inf = (~finite).float()  # pyright: ignore[reportAttributeAccessIssue]
        elif not finite:
            for _, parameter in named:
                parameter.grad = None
        # On a CPU the look at the factor is free and the pass over all gradients is not.
        if self.device.type != "cpu" or factor != 1:
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
        self._step_figures = {
            "train/loss": total / targets.clamp(min=1),
            "optim/lr": optimizer.param_groups[0]["lr"],
            "optim/grad_norm": norm,
        }
        self._step_targets = targets

    def _over_devices(self, tensor: Tensor) -> Tensor:
        """Sum of all devices' tensors, queued, where Lightning's `reduce` waits for all of them."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def _count_skipped(self, finite: Tensor, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        self._skipped = self._skipped.to(finite.device)
        in_row, in_all = self._skipped
        self._skipped = torch.stack(
            (torch.where(finite, 0, in_row + 1), in_all + (~finite).to(torch.int64))
        )
        step = self.trainer.global_step + 1
        if finite.device.type == "cuda" and self._skips_itself and step % CUDA_CHECK_STEPS:
            return
        skipped = int(self._skipped[0])
        if skipped >= self.max_skipped_steps:
            bad = [n for n, p in named if p.grad is not None and not p.grad.isfinite().all()]
            raise NonFiniteError(
                f"the gradient was not finite in {skipped} steps in a row (bad now: {few(bad)}); "
                f"the last finite step was {step - skipped}",
                step - skipped + 1,
            )

    @property
    def skipped_in_row(self) -> int:
        """Updates that were skipped up to now without one in between."""
        return int(self._skipped[0])

    def on_train_end(self) -> None:
        self._refuse_skips_at_the_end(self.trainer.global_step, self.skipped_in_row)

    def _refuse_skips_at_the_end(self, step: int, skipped: int) -> None:
        # An outlier, or an overflow of the scaled loss in fp16, costs a step or two.
        if skipped > 2:
            raise NonFiniteError(
                f"the run ended at step {step}; the last {skipped} updates were skipped because "
                "the gradient was not finite",
                step - skipped + 1,
            )

    def _refuse_to_learn_nothing(self) -> None:
        step = self.trainer.global_step + 1
        last = step == self.trainer.max_steps
        if self.device.type == "cuda" and step % CUDA_CHECK_STEPS and not last:
            return
        empty = int(self._without_targets)
        if (last or empty >= self.max_skipped_steps) and not self.targets_seen:
            raise RuntimeError(
                f"none of the {empty} steps since the start had a target, so nothing is learned: "
                "all labels are -100; look at the samples by lightning peek"
            )

    def step_figures(self) -> dict[str, float]:
        """Loss, learning rate and gradient norm before clipping of the last finished step.

        A step without a target has no loss and no norm.
        """
        figures = {name: float(value) for name, value in self._step_figures.items()}
        if not self._step_targets:
            figures.pop("train/loss", None)
            figures.pop("optim/grad_norm", None)
        if self._routing is not None:
            figures |= expert_figures(self._routing)
        if skipped := int(self._skipped[1]):
            figures["optim/skipped_steps"] = skipped
        if empty := int(self._without_targets):
            figures["optim/steps_without_targets"] = empty
        return figures

    # Validation

    def on_validation_start(self) -> None:
        loaders = self.trainer.num_val_batches
        # Of each loader: loss in nats, targets, bytes of the targets.
        self._totals = torch.zeros(len(loaders), 3, dtype=self._wide, device=self.device)

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        total, targets, _ = self.loss(batch)
        # By masks: on a GPU to pick the real targets out would wait for their number.
        real = targets != IGNORE_INDEX
        n_bytes = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.token_bytes is not None:
            self.token_bytes = self.token_bytes.to(self.device)
            n_bytes = (self.token_bytes[targets.clamp(min=0)] * real).sum()
        self._totals[dataloader_idx] += torch.stack((total, real.sum(), n_bytes))

    def on_validation_epoch_end(self) -> None:
        totals = cast(Tensor, self.trainer.strategy.reduce(self._totals, reduce_op="sum")).tolist()
        sources = totals[: max(len(self.source_names), 1)]
        loss, targets, n_bytes = map(sum, zip(*sources, strict=True))
        figures: dict[str, float] = {}
        if targets:
            mean = loss / targets
            # Where e to the loss is no number any more, it is infinite.
            perplexity = math.exp(mean) if mean < 700 else mean * math.inf
            figures = {"val/loss": mean, "val/perplexity": perplexity}
        for name, (total, count, _) in zip(self.source_names, sources, strict=False):
            if count:
                figures[f"val/loss/{name}"] = total / count
        if targets and n_bytes:
            # Losses of all targets, ends of documents too, over the bytes of the text alone.
            figures["val/bits_per_byte"] = bits_per_byte(loss, int(n_bytes))
        for total, count, _ in totals[len(sources) :]:
            if count:
                figures["train/eval_loss"] = total / count
        self.validation_figures = figures
        # For callbacks that watch a metric, such as early stopping, which stop the run where it is
        # missing; loggers get them elsewhere.
        self.log_dict({"val/loss": math.inf} | figures, logger=False)

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
        """Ids that the model writes after others, by draws that depend on the seed alone."""
        trunk = self.net.model
        # Lengths change with every token, and each would be compiled for.
        compiled = vars(trunk).pop("decode", None)
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
                trunk.decode = compiled

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["model_config"] = dataclasses.asdict(self.config)
        checkpoint["skipped_steps"] = self._skipped.tolist()
        # A start that has not trained or validated yet knows only those of its checkpoint.
        losses = self._loaded_losses
        checkpoint["train_loss"] = self.step_figures().get("train/loss", losses.get("train_loss"))
        checkpoint["val_loss"] = self.validation_figures.get("val/loss", losses.get("val_loss"))

    def write_weights(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Write the weights alone, with what belongs to them.

        Args:
            checkpoint: step and contract.
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
            self._refuse_skips_at_the_end(self.trainer.max_steps, in_row)
        # A new start gets all its chances: the count in a row would end it after a step or two.
        self._skipped = torch.tensor([0, in_all])
        if self.trainer.training:
            self._keep_own_settings(checkpoint)

    def _keep_own_settings(self, checkpoint: dict[str, Any]) -> None:
        """Put today's settings over the stored ones, which restoring would bring back silently.

        Raises:
            ValueError: today's optimizer has other groups of parameters.
        """
        # It holds no state yet, so that it costs nothing.
        own = build_optimizer(self.net, self.optim_config, self.fused).param_groups
        multiplier = self._lr_multiplier()(checkpoint["global_step"])
        rates = [group["lr"] for group in own]
        for state in checkpoint["optimizer_states"]:
            was, sizes = ([len(g["params"]) for g in gs] for gs in (state["param_groups"], own))
            if was != sizes:
                raise ValueError(
                    f"the optimizer has groups of {sizes} tensors, in the checkpoint of {was}: "
                    "build_optimizer in lm/optim.py was changed; change it back, or begin a new "
                    "run with these weights by model.from_weights"
                )
            for stored, group, rate in zip(state["param_groups"], own, rates, strict=True):
                stored |= {name: value for name, value in group.items() if name != "params"}
                stored |= {"lr": rate * multiplier, "initial_lr": rate}
        for schedule in checkpoint["lr_schedulers"]:
            schedule |= {"base_lrs": rates, "_last_lr": [rate * multiplier for rate in rates]}
