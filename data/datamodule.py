"""Token files to batches, in an order that is a function of the step."""

import functools
import math
import sys
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, default_convert

from data.contract import batch_fault, refused_changes
from data.loader import StepBatches, TimedLoader
from data.mixture import Mixture, named_sources
from data.prepare.prepare import prepare_corpus
from data.rows import RowKind, Rows
from data.text.tokenizer import TextTokenizer
from data.tokens.folder import missing_files
from data.tokens.foreign import is_foreign
from data.tokens.source import (
    Source,
    check_alike,
    known_rows,
    known_sizes,
    open_source,
    require,
    short,
)
from data.windows import Order, Samples, Windows

NOT_OF_A_MIXTURE = {
    "corpus": "the folders of a mixture are not made up; prepare them one by one",
    "epochs": "each source goes through epochs of its own; give trainer.max_steps or "
    "data.total_tokens",
}
"""Settings that a mixture cannot have, and why."""


class LMDataModule(LightningDataModule):
    """Batches of `input_ids` and `labels`, both (B, seq_len + 1), of token files.

    A label is the id at its own position, or -100 where nothing is to be learned: the module
    shifts. Which samples a step trains on depends on data, seed and step alone.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        mixture: dict[str, float] | None = None,
        corpus: Literal["python", "stdlib"] | None = None,
        dtype: Literal["uint16", "uint32"] | None = None,
        tokenizer: str | None = None,
        seq_len: int = 512,
        micro_batch_size: int = 8,
        windows: Literal["shuffled", "random"] = "shuffled",
        rows: RowKind | None = None,
        total_tokens: int | None = None,
        epochs: float | None = None,
        val_sequences: int | None = None,
        eval_train: bool = False,
        num_workers: int = 0,
        allow_batch_change: bool = False,
        allow_data_change: bool = False,
        vocab_size: int = 32000,
        seed: int = 0,
    ) -> None:
        """Settings only: files are opened in `setup`.

        Args:
            path: Folder made by prepare; or token files of others, as a folder, a file or a
                pattern: nanoGPT's train.bin and val.bin, shards of llm.c, one-dimensional .npy.
            mixture: Several such paths instead of one, each with its weight in the samples.
            corpus: What to prepare at path when files are missing: python (the standard library
                and the installed torch, lightning and numpy) or stdlib. Unset: missing files are
                an error.
            dtype: Type of token files of others that do not tell it themselves.
            tokenizer: A tokenizer.json for token files of others. Unset: no bits per byte, no text.
            seq_len: Positions of a sample; each also holds the target after its last one.
            micro_batch_size: Sequences of one forward pass on one device.
            windows: shuffled visits windows that do not overlap, each once an epoch, in a new
                order each epoch; random starts anywhere.
            rows: Train on documents one by one, padded, instead of windows. split makes as many
                rows of a long one as it needs; truncate makes one and drops the rest.
            total_tokens: Length of the run in positions, rounded up to whole steps.
            epochs: Length of the run in passes over windows or rows, rounded up to whole steps.
            val_sequences: Sequences to validate on, of each source: the same ones for every seed,
                micro-batch and number of devices. Unset: all.
            eval_train: Evaluate on as many training sequences too, as train/eval_loss.
            num_workers: Processes that read ahead. A read costs microseconds: 0 is rarely slower.
            allow_batch_change: Resume although the sequences of a step changed: the position is
                then carried by the samples seen.
            allow_data_change: Resume although token files, tokenizer or mixture changed.
            vocab_size: Ids that the model knows; always model.config.vocab_size.
            seed: Of the order; always seed_everything.
        """
        super().__init__()
        for name, value in (
            ("seq_len", seq_len),
            ("micro_batch_size", micro_batch_size),
            ("total_tokens", total_tokens),
            ("val_sequences", val_sequences),
        ):
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}: must be at least 1")
        if epochs is not None and not 0 < epochs < math.inf:
            raise ValueError(f"data.epochs is {epochs}: must be above 0")
        if num_workers < 0:
            raise ValueError(f"data.num_workers is {num_workers}: must be 0 or more")
        for other, value in (("corpus", corpus), ("epochs", epochs)):
            if mixture is not None and value is not None:
                raise ValueError(
                    f"data.{other} is {value} and data.mixture is given: {NOT_OF_A_MIXTURE[other]}"
                )
        if rows is not None and windows == "random":
            raise ValueError(
                f"data.rows is {rows} and data.windows is random: rows are whole documents, each "
                "once an epoch; leave data.windows out"
            )
        self.path = None if path is None else Path(path)
        self.paths, self.weights = named_sources(path, mixture)
        self.mixed = mixture is not None
        self.corpus = corpus
        self.dtype = dtype
        self.given_tokenizer = tokenizer
        self.seq_len = seq_len
        self.micro_batch_size = micro_batch_size
        self.windows: Literal["shuffled", "random"] = windows
        self.rows: RowKind | None = rows
        self.total_tokens = total_tokens
        self.epochs = epochs
        self.val_sequences = val_sequences
        self.eval_train = eval_train
        self.num_workers = num_workers
        self.allow_batch_change = allow_batch_change
        self.allow_data_change = allow_data_change
        self.vocab_size = vocab_size
        self.seed = seed
        self.token_bytes: Tensor | None = None
        self._train_loader: TimedLoader | None = None
        self._micro_step = self._rows_crc = 0
        # Where the current batch size began: step and samples taken before it.
        self._since_step = self._since_sample = self._start_step = 0

    @property
    def global_batch_size(self) -> int:
        """Sequences of an optimizer step, over all devices."""
        trainer = self._trainer()
        return self.micro_batch_size * trainer.accumulate_grad_batches * trainer.world_size

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step, over all devices."""
        return self.global_batch_size * self.seq_len

    @property
    def source_names(self) -> list[str]:
        """Names of the sources that are also validated separately: those of a mixture."""
        return list(self.paths) if self.mixed else []

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer that the token files were made with, where there is one."""
        return self._first_source.tokenizer_path

    @property
    def _first_source(self) -> Source:
        return next(iter(self.sources.values()))

    @property
    def begins_with_bos(self) -> bool:
        """Whether documents begin with a bos, stored or put before each row."""
        specials = self._first_source.specials
        if specials is None or specials.bos is None:
            return False
        return specials.bos_stored or self.rows is not None

    @functools.cached_property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the data.

        Raises:
            ValueError: the token files are of others, and nothing names their tokenizer.
        """
        if self.tokenizer_path is None:
            raise ValueError(
                f"{self._first_source.name} holds token files without a tokenizer, so there is no "
                "text to read or write; name their tokenizer.json by data.tokenizer"
            )
        return TextTokenizer.load(self.tokenizer_path)

    def known_sizes(self) -> dict[str, int | None]:
        """Sizes that a plan rests on, None where the data does not tell them yet.

        Training and validation tokens, ids of the tokenizer, and samples of an epoch where those
        are rows.
        """
        each = [known_sizes(path, self.vocab_size, self.dtype) for path in self.paths.values()]

        def total(counts: list[int | None]) -> int | None:
            known = [count for count in counts if count is not None]
            return sum(known) if len(known) == len(counts) else None

        tokens, rows = total([sizes.get("train") for sizes in each]), None
        if self.rows is not None:
            paths = self.paths.values()
            rows = total([known_rows(path, self.seq_len, self.rows) for path in paths])
            # Positions of rows are padded too, so tokens alone say nothing of a pass.
            tokens = None if rows is None else tokens
        return {
            "data_tokens": tokens,
            "val_tokens": total([sizes.get("val") for sizes in each]),
            "tokenizer_size": each[0].get("tokenizer"),
            "epoch_samples": rows,
        }

    def _trainer(self) -> Any:
        assert self.trainer is not None, "attached by the Trainer before any hook"
        return self.trainer

    # Set-up

    def prepare_data(self) -> None:
        for path in self.paths.values():
            if self.corpus is None or is_foreign(path):
                require(path, "data.mixture names" if self.mixed else "data.path is")
            elif missing := missing_files(Path(path)):
                if "meta.json" not in missing:
                    require(path, "data.path is")
                prepare_corpus(self.corpus, Path(path), self.vocab_size, made_already=True)

    def _open_sources(self) -> list[Source]:
        self.sources = {
            name: open_source(path, self.vocab_size, self.dtype, self.given_tokenizer)
            for name, path in self.paths.items()
        }
        sources = list(self.sources.values())
        check_alike(sources)
        return sources

    def training_samples(self) -> Samples:
        """Return the training samples; needs no Trainer."""
        self._open_sources()
        return self._mixture(self.windows)

    def setup(self, stage: str) -> None:
        sources = self._open_sources()
        if (lengths := sources[0].token_bytes) is not None:
            self.token_bytes = torch.zeros(self.vocab_size, dtype=torch.int64)
            self.token_bytes[: len(lengths)] = torch.tensor(lengths)
        if self._validates:
            self.val_samples = [self._samples(source, "val", "fixed") for source in sources]
        if self.eval_train:
            self.train_eval_samples = self._mixture("fixed")
        if stage == "fit":
            self.train_samples = self._mixture(self.windows)
            self._given_steps = self._trainer().max_steps
            self._set_length()
            if self._trainer().global_rank == 0:
                splits = ("train", "val") if self._validates else ("train",)
                lines = [line for source in sources for line in source.warnings(splits)]
                lines += self.train_samples.start_lines
                print("\n".join(lines), file=sys.stderr, flush=True)

    @property
    def _validates(self) -> bool:
        return self._trainer().limit_val_batches != 0

    def _mixture(self, order: Order) -> Samples:
        samples = [self._samples(source, "train", order) for source in self.sources.values()]
        if not self.mixed:
            return samples[0]
        return Mixture(samples, list(self.weights.values()), self.seed, order)

    def _samples(self, source: Source, split: str, order: Order) -> Samples:
        stream = source.stream(split, self.vocab_size)
        if self.rows is None:
            return Windows(stream, self.seq_len, self.seed, order)
        docs, specials = source.documents(split)
        return Rows(stream, docs, self.seq_len, self.rows, specials, self.seed, order)

    def _set_length(self) -> None:
        """Give the Trainer the number of optimizer steps of the whole run."""
        trainer = self._trainer()
        lengths = {
            "trainer.max_steps": self._given_steps if self._given_steps != -1 else None,
            "data.total_tokens": self.total_tokens,
            "data.epochs": self.epochs,
        }
        given = [f"{name} {value}" for name, value in lengths.items() if value is not None]
        if trainer.fast_dev_run:
            return
        if len(given) != 1:
            raise ValueError(
                "the length of the run is "
                + (f"given {len(given)} times ({', '.join(given)})" if given else "not given")
                + f": give exactly one of {', '.join(lengths)}"
            )
        if self._given_steps != -1:
            if self._given_steps < 1:
                raise ValueError(f"trainer.max_steps is {self._given_steps}: must be at least 1")
            return
        if self.total_tokens is not None:
            samples = math.ceil(self.total_tokens / self.seq_len)
        elif self.windows == "random":
            raise ValueError(
                "data.epochs is given and data.windows is random: random windows have no epochs; "
                "give trainer.max_steps or data.total_tokens, or use shuffled"
            )
        else:
            assert self.epochs is not None
            samples = max(1, round(self.epochs * self.train_samples.epoch_size))
            # The last step is averaged over what is left of the last epoch.
            self.train_samples.end = samples
        steps = math.ceil((samples - self._since_sample) / self.global_batch_size)
        trainer.fit_loop.epoch_loop.max_steps = self._since_step + steps

    # Batches

    @property
    def seconds_waited(self) -> float:
        """How long training has waited for its batches since the start."""
        return 0.0 if self._train_loader is None else self._train_loader.seconds_waited

    def train_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        self._train_loader = self._loader(
            self.train_samples,
            start=self._start_step,
            max_steps=trainer.max_steps,
            accumulate=trainer.accumulate_grad_batches,
            first_sample=self._since_sample - self._since_step * self.global_batch_size,
        )
        return self._train_loader

    def val_dataloader(self) -> list[DataLoader]:
        if not self._validates:
            return []
        sizes = [samples.epoch_size for samples in self.val_samples]
        loaders = list(map(self._evaluation_loader, self.val_samples, sizes))
        if self.eval_train:
            loaders.append(self._evaluation_loader(self.train_eval_samples, sum(sizes)))
        return loaders

    @property
    def _val_bound(self) -> int | None:
        """Most sequences of a source that are validated on."""
        limit = self._trainer().limit_val_batches
        return limit * self.micro_batch_size if isinstance(limit, int) else self.val_sequences

    def _evaluation_loader(self, samples: Samples, most: int) -> DataLoader:
        # A bound on sequences over all ranks, so that any number of ranks and any micro-batch
        # evaluate the same: what is past it carries no target.
        samples.end = min(samples.epoch_size, most, self._val_bound or most)
        batches = math.ceil(samples.end / self.micro_batch_size)
        each = math.ceil(batches / self._trainer().world_size)
        return self._loader(samples, start=0, max_steps=each, accumulate=1, first_sample=0)

    def _loader(
        self, samples: Samples, start: int, max_steps: int, accumulate: int, first_sample: int
    ) -> TimedLoader:
        trainer = self._trainer()
        batches = StepBatches(
            start=start,
            max_steps=max_steps,
            accumulate=accumulate,
            rank=trainer.global_rank,
            first_sample=first_sample,
            micro_batch_size=self.micro_batch_size,
            world_size=trainer.world_size,
        )
        return TimedLoader(
            samples,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=default_convert,
            # Pinned here and copied without blocking by Lightning: one without the other waits.
            pin_memory=trainer.strategy.root_device.type == "cuda",
            persistent_workers=self.num_workers > 0,
        )

    def on_before_batch_transfer(
        self, batch: dict[str, Tensor], dataloader_idx: int
    ) -> dict[str, Tensor]:
        trainer = self._trainer()
        if trainer.training:
            if self._micro_step % trainer.accumulate_grad_batches == 0:
                self._rows_crc = 0
            self._micro_step += 1
            self._rows_crc += sum(zlib.crc32(row.numpy().tobytes()) for row in batch["input_ids"])
        return batch

    def step_metrics(self) -> dict[str, int]:
        """Sum of the CRC32 of each row that the step trained on, over all devices.

        Equal for any split of a global batch, and the trace by which two runs can be compared.
        """
        device = self._trainer().strategy.root_device
        crc = torch.tensor(self._rows_crc, dtype=torch.int64, device=device)
        return {"data/rows_crc32": int(self._trainer().strategy.reduce(crc, reduce_op="sum"))}

    def dummy_batch(self) -> dict[str, Tensor]:
        """A batch of the training shape whose ids are all 0."""
        ids = torch.zeros(self.micro_batch_size, self.seq_len + 1, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}

    # Position

    def state_dict(self) -> dict[str, Any]:
        steps = self._trainer().global_step - self._since_step
        return {
            "samples": self._since_sample + steps * self.global_batch_size,
            "step": self._trainer().global_step,
            "since_step": self._since_step,
            "since_sample": self._since_sample,
            "global_batch_size": self.global_batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._trainer().state.fn != "fit":
            return
        same = state_dict["global_batch_size"] == self.global_batch_size
        step, sample = ("since_step", "since_sample") if same else ("step", "samples")
        self._since_step, self._since_sample = state_dict[step], state_dict[sample]
        self._start_step = state_dict["step"]
        self._set_length()

    def contract(self) -> dict[str, Any]:
        """Settings that a resumed run is compared by, under their configuration keys."""
        prints = {
            f"data fingerprint of {name}" if self.mixed else "data fingerprint": source
            for name, source in self.sources.items()
        }
        validated = getattr(self, "val_samples", [])
        sizes = [samples.epoch_size for samples in validated]
        return {
            "data.path": None if self.path is None else str(self.path),
            "data.mixture": dict(self.weights) if self.mixed else None,
            "data.seq_len": self.seq_len,
            "data.windows": self.windows,
            "data.rows": self.rows,
            "data.micro_batch_size": self.micro_batch_size,
            **{key: source.fingerprints["train"] for key, source in prints.items()},
            "tokenizer fingerprint": self._first_source.tokenizer_fingerprint,
            "documents begin with bos": self.begins_with_bos,
            "global batch size": self.global_batch_size,
            "validation sequences": sum(min(size, self._val_bound or size) for size in sizes),
            "validation data": " ".join(
                short(source.fingerprints["val"]) for source in prints.values() if validated
            ),
        }

    def refused_changes(self, old: dict[str, Any]) -> list[str]:
        """Return the differences from a checkpoint's contract that forbid resuming from it."""
        trainer = self._trainer()
        faults = refused_changes(old, self.contract(), self.allow_data_change)
        if old["global batch size"] != self.global_batch_size and not self.allow_batch_change:
            split = (trainer.accumulate_grad_batches, trainer.world_size)
            faults.append(batch_fault(old, self.micro_batch_size, *split))
        return faults
