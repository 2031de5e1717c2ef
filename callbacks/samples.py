"""Samples from fixed prompts during training."""

from typing import Any

from lightning.pytorch import Callback

from callbacks.run.announce import announce
from callbacks.run.steps import at_step_edge
from callbacks.run.trainer import Trainer
from callbacks.throughput import pause_clock
from data.text.continuation import continuation
from lm.finite import NonFiniteError
from lm.module import LMModule


class PromptSamples(Callback):
    """Continues fixed prompts every n steps; TensorBoard shows the result under Text.

    The seed is the same at every step, so only the model changes the text.
    """

    def __init__(
        self,
        *,
        prompts: list[str] | None = None,
        every_n_steps: int = 1000,
        max_new_tokens: int = 100,
        temperature: float = 0.8,
    ) -> None:
        """Set up the samples.

        Args:
            prompts: Texts to continue; unset: none.
            every_n_steps: Optimizer steps between two samples.
            max_new_tokens: Most tokens after each prompt.
            temperature: Divides the logits; 0 takes the likeliest token.
        """
        if every_n_steps < 1:
            raise ValueError(f"samples.every_n_steps is {every_n_steps}: must be at least 1")
        if max_new_tokens < 1:
            raise ValueError(f"samples.max_new_tokens is {max_new_tokens}: must be at least 1")
        if not temperature >= 0:
            raise ValueError(f"samples.temperature is {temperature}: must be 0 or above")
        self.prompts = prompts or []
        self.every_n_steps = every_n_steps
        self.options = {"max_new_tokens": max_new_tokens, "temperature": temperature}

    def on_fit_start(self, trainer: Trainer, pl_module: LMModule) -> None:
        if self.prompts:
            # Refused now where token files came without a tokenizer, and not at the first sample.
            trainer.datamodule.tokenizer  # noqa: B018

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LMModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        due = at_step_edge(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0
        if not (due and self.prompts and trainer.is_global_zero):
            return
        pause_clock(trainer)
        try:
            texts = self.write(trainer, pl_module)
        except NonFiniteError as error:  # training has a rule of its own for it
            announce(f"warning: no samples at step {trainer.global_step}: {error}")
            return
        for prompt, text in texts.items():
            for logger in trainer.loggers:
                if (show := getattr(logger, "show_text", None)) is not None:
                    show(f"samples/{prompt}", text, trainer.global_step)

    def write(self, trainer: Trainer, pl_module: LMModule) -> dict[str, str]:
        """Return the continued text of each prompt."""
        data = trainer.datamodule
        tokenizer, texts = data.tokenizer, {}
        for prompt in self.prompts:
            ids = tokenizer.encode(prompt)
            new = pl_module.continue_ids(
                tokenizer.start_ids(data.begins_with_bos) + ids or [tokenizer.eos_id],
                eos_id=tokenizer.eos_id,
                n_tokens=tokenizer.size,
                holes=tokenizer.holes,
                **self.options,
            )
            texts[prompt] = prompt + "".join(continuation(tokenizer, ids, new))
        return texts
