"""Token files to batches, in an order that is a function of the step."""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, default_convert

from data.memmap import TokenFile, Windows, check_token_range, open_token_file
from data.order import step_samples
from data.prepare import check_files, load_meta, missing_files, prepare_corpus


class StepBatches:
    """Batch sampler of one rank: the samples of each micro-batch from a step on.

    Its length is always that of the whole run, as Lightning counts batches from step 0; only
    the iteration starts later. A length of what remains would make it train data twice.
    """

    def __init__(
        self,
        *,
        start: int,
        max_steps: int,
        accumulate: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        first_sample: int,
    ) -> None:
        self.start, self.max_steps, self.accumulate = start, max_steps, accumulate
        self.rank, self.world_size = rank, world_size
        self.micro_batch_size, self.first_sample = micro_batch_size, first_sample

    def __len__(self) -> int:
        return self.max_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.max_steps):
            for micro_step in range(self.accumulate):
                yield step_samples(
                    step,
                    micro_step,
                    self.rank,
                    first_sample=self.first_sample,
                    micro_batch_size=self.micro_batch_size,
                    accumulate=self.accumulate,
                    world_size=self.world_size,
                ).tolist()


class LMDataModule(LightningDataModule):
    """Windows of a prepared corpus as batches of `input_ids` and `labels`, both (B, seq_len + 1).

    A label is the id at its own position, or -100 where nothing is to be learned: the module
    shifts. Which samples a step trains on depends on data, seed and step alone.
    """

    def __init__(
        self,
        *,
        path: str,
        corpus: Literal["python", "stdlib"] | None = None,
        seq_len: int = 512,
        micro_batch_size: int = 8,
        windows: Literal["shuffled", "random"] = "shuffled",
        total_tokens: int | None = None,
        epochs: float | None = None,
        eval_train: bool = False,
        num_workers: int = 0,
        allow_batch_change: bool = False,
        allow_data_change: bool = False,
        vocab_size: int = 32000,
        seed: int = 0,
    ) -> None:
        """Settings only: files are opened in `setup`.

        Args:
            path: Folder with train.bin, val.bin, tokenizer.json and meta.json.
            corpus: What to prepare there when files are missing: python (the standard library
                and the installed torch, lightning and numpy) or stdlib. Unset: missing files are
                an error.
            seq_len: Positions of a sample; each also holds the target after its last one.
            micro_batch_size: Sequences of one forward pass on one device.
            windows: shuffled visits windows that do not overlap, each once an epoch, in a new
                order each epoch; random starts anywhere.
            total_tokens: Length of the run in tokens, rounded up to whole steps.
            epochs: Length of the run in passes over the windows, rounded up to whole steps.
            eval_train: Evaluate on as many training batches too, as train/eval_loss.
            num_workers: Processes that read ahead. A read costs microseconds: 0 is rarely slower.
            allow_batch_change: Resume although the sequences of a step changed: the position is
                then carried by the samples seen.
            allow_data_change: Resume although token files or tokenizer changed.
            vocab_size: Ids that the model knows; always model.config.vocab_size.
            seed: Of the order; always seed_everything.
        """
        super().__init__()
        for name, value in (
            ("seq_len", seq_len),
            ("micro_batch_size", micro_batch_size),
            ("total_tokens", total_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"data.{name} is {value}: must be at least 1")
        if epochs is not None and not 0 < epochs < math.inf:
            raise ValueError(f"data.epochs is {epochs}: must be above 0")
        if num_workers < 0:
            raise ValueError(f"data.num_workers is {num_workers}: must be 0 or more")
        self.path = Path(path)
        self.corpus = corpus
        self.seq_len = seq_len
        self.micro_batch_size = micro_batch_size
        self.windows: Literal["shuffled", "random"] = windows
        self.total_tokens = total_tokens
        self.epochs = epochs
        self.eval_train = eval_train
        self.num_workers = num_workers
        self.allow_batch_change = allow_batch_change
        self.allow_data_change = allow_data_change
        self.vocab_size = vocab_size
        self.seed = seed
        self.token_bytes: Tensor | None = None
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
    def tokenizer_path(self) -> Path:
        """The tokenizer that the token files were made with."""
        return self.path / "tokenizer.json"

    def _trainer(self) -> Any:
        assert self.trainer is not None, "attached by the Trainer before any hook"
        return self.trainer

    # Set-up

    def prepare_data(self) -> None:
        missing = missing_files(self.path)
        if not missing:
            return
        lacks = f"data.path is {self.path}, which lacks {', '.join(missing)}"
        if self.corpus is None:
            raise ValueError(
                f"{lacks}, and data.corpus is not set, so nothing is made up there; bring a folder "
                "with these files, or have one made of Python source by lightning prepare "
                "--config FILE --data.corpus python"
            )
        if "meta.json" not in missing:
            raise ValueError(
                f"{lacks} of what its meta.json describes; bring the file back, or make all anew "
                "by lightning prepare --config FILE"
            )
        prepare_corpus(self.corpus, self.path, self.vocab_size, again=False)

    def setup(self, stage: str) -> None:
        self.meta = load_meta(self.path)
        check_files(self.path, self.meta)
        self.token_bytes = torch.zeros(self.vocab_size, dtype=torch.int64)
        lengths = torch.tensor(self.meta["token_bytes"])
        if len(lengths) > self.vocab_size:
            raise ValueError(
                f"model.config.vocab_size is {self.vocab_size}, but the tokenizer of {self.path} "
                f"has {len(lengths)} ids; set model.config.vocab_size to at least {len(lengths)}"
            )
        self.token_bytes[: len(lengths)] = lengths
        if self._validates:
            self.val_windows = Windows(self._open("val"), self.seq_len, order="fixed")
        if stage == "fit" or self.eval_train:
            train = self._open("train")
            self.train_windows = Windows(train, self.seq_len, self.seed, self.windows)
            self.train_eval_windows = Windows(train, self.seq_len, order="fixed")
        if stage == "fit":
            self._given_steps = self._trainer().max_steps
            self._set_length()

    @property
    def _validates(self) -> bool:
        return self._trainer().limit_val_batches != 0

    def _open(self, split: str) -> TokenFile:
        file = open_token_file(self.path / f"{split}.bin", self.meta["dtype"])
        check_token_range(file, self.vocab_size)
        return file

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
                f"the length of the run is given {len(given)} times"
                + (f" ({', '.join(given)})" if given else "")
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
            samples = max(1, round(self.epochs * self.train_windows.n_windows))
            # The last step is averaged over what is left of the last epoch.
            self.train_windows.end = samples
        steps = math.ceil((samples - self._since_sample) / self.global_batch_size)
        trainer.fit_loop.epoch_loop.max_steps = self._since_step + steps

    # Batches

    def train_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        return self._loader(
            self.train_windows,
            start=self._start_step,
            max_steps=trainer.max_steps,
            accumulate=trainer.accumulate_grad_batches,
            first_sample=self._since_sample - self._since_step * self.global_batch_size,
        )

    def val_dataloader(self) -> list[DataLoader]:
        if not self._validates:
            return []
        windows = [self.val_windows] + ([self.train_eval_windows] if self.eval_train else [])
        return [self._evaluation_loader(each) for each in windows]

    def _evaluation_loader(self, windows: Windows) -> DataLoader:
        # The bound counts micro-batches over all ranks, so that any number of ranks evaluates
        # the same windows: rows past them carry no target.
        trainer = self._trainer()
        batches = math.ceil(self.val_windows.n_windows / self.micro_batch_size)
        limit = trainer.limit_val_batches
        batches = min(batches, limit) if isinstance(limit, int) else math.ceil(batches * limit)
        windows.end = min(windows.n_windows, batches * self.micro_batch_size)
        each = math.ceil(batches / trainer.world_size)
        return self._loader(windows, start=0, max_steps=each, accumulate=1, first_sample=0)

    def _loader(
        self, windows: Windows, start: int, max_steps: int, accumulate: int, first_sample: int
    ) -> DataLoader:
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
        return DataLoader(
            windows,
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

    def step_figures(self) -> dict[str, int]:
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
        return {
            "data.path": str(self.path),
            "data.seq_len": self.seq_len,
            "data.windows": self.windows,
            "data.micro_batch_size": self.micro_batch_size,
            "data fingerprint": self.meta["train"]["fingerprint"],
            "tokenizer fingerprint": self.meta["tokenizer_fingerprint"],
            "global batch size": self.global_batch_size,
        }

    def refused_changes(self, old: dict[str, Any]) -> list[str]:
        """What of a checkpoint's contract does not allow this run to go on from it."""
        new = self.contract()
        faults = [
            f"{key} was {old[key]} and is {new[key]} now"
            for key in ("data.seq_len", "data.windows")
            if old[key] != new[key]
        ]
        faults += [
            f"the {key} was {old[key][:12]} and is {new[key][:12]} now (data.allow_data_change "
            "true goes on with it)"
            for key in ("data fingerprint", "tokenizer fingerprint")
            if old[key] != new[key] and not self.allow_data_change
        ]
        if old["global batch size"] != self.global_batch_size and not self.allow_batch_change:
            faults.append(self._batch_fault(old))
        return faults

    def _batch_fault(self, old: dict[str, Any]) -> str:
        trainer, was = self._trainer(), old["global batch size"]
        each = self.micro_batch_size * trainer.world_size
        way_out = (
            f"set trainer.accumulate_grad_batches {was // each} to keep it"
            if was % each == 0
            else f"{was} is no multiple of {each}: change data.micro_batch_size"
        )
        return (
            f"the global batch was {old['data.micro_batch_size']} × "
            f"{old['trainer.accumulate_grad_batches']} × {old['trainer.world_size']} = {was} "
            f"sequences a step and is {self.micro_batch_size} × "
            f"{trainer.accumulate_grad_batches} × {trainer.world_size} = {self.global_batch_size} "
            f"now ({way_out}, or data.allow_batch_change true)"
        )
