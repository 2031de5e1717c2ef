"""Batches of a run: which windows a step sees, on any split, and how long a run is."""

import json
import re
import shutil
import zlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Lightning, RunYaml

from data.datamodule import LMDataModule
from data.loader import StepBatches
from data.tokens.memmap import content_fingerprint

SEQ_LEN = 16


class StubTrainer(SimpleNamespace):
    """What a datamodule asks of a Trainer."""

    def __init__(self, **given: Any) -> None:
        defaults = {
            "accumulate_grad_batches": 1,
            "world_size": 1,
            "global_rank": 0,
            "max_steps": 3,
            "limit_val_batches": 1.0,
            "fast_dev_run": 0,
            "global_step": 0,
            "state": SimpleNamespace(fn="fit"),
            "strategy": SimpleNamespace(
                root_device=torch.device("cpu"), reduce=lambda value, reduce_op: value
            ),
        }
        super().__init__(**defaults | given)
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    @property
    def steps(self) -> int:
        return getattr(self.fit_loop.epoch_loop, "max_steps", self.max_steps)


@pytest.fixture
def windows_folder(corpus: Path, tmp_path: Path):
    """Factory: a prepared folder whose train.bin counts up over so many tokens."""

    def make(n_tokens: int, val_tokens: int = 113) -> Path:
        folder = tmp_path / f"counting-{n_tokens}"
        shutil.copytree(corpus, folder)
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for split, count in (("train", n_tokens), ("val", val_tokens)):
            (np.arange(count) % 300).astype("<u2").tofile(folder / f"{split}.bin")
            fingerprint = content_fingerprint(folder / f"{split}.bin")
            meta[split] |= {"tokens": count, "fingerprint": fingerprint}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        return folder

    return make


def open_data(folder: Path | None, trainer: StubTrainer, **options: Any) -> LMDataModule:
    defaults: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "micro_batch_size": 2,
        "vocab_size": 300,
        "seed": 3,
    }
    data = LMDataModule(path=None if folder is None else str(folder), **(defaults | options))
    data.trainer = trainer  # pyright: ignore[reportAttributeAccessIssue]
    data.setup("fit")
    trainer.max_steps = trainer.steps
    return data


def firsts(loader: Any) -> list[list[int]]:
    """First id of each real row, by micro-batch."""
    return [
        [int(ids[0]) for ids, labels in zip(b["input_ids"], b["labels"], strict=True)
         if (labels != -100).any()]
        for b in loader
    ]  # fmt: skip


def flat(batches: list[list[int]]) -> list[int]:
    return [first for batch in batches for first in batch]


def test_batch_has_ids_and_labels_of_one_position_more(windows_folder):
    data = open_data(windows_folder(193), StubTrainer())
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (2, SEQ_LEN + 1)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_epoch_sees_each_window_once_in_an_order_of_its_own(windows_folder):
    data = open_data(windows_folder(193), StubTrainer(max_steps=12))
    seen = flat(firsts(data.train_dataloader()))
    every = [SEQ_LEN * window for window in range(12)]
    assert sorted(seen[:12]) == sorted(seen[12:]) == every
    assert seen[:12] != seen[12:]


@pytest.mark.parametrize(
    ("size", "accumulate", "world"), [(12, 1, 1), (2, 6, 1), (3, 2, 2), (2, 2, 3), (1, 3, 4)]
)
def test_any_split_of_a_global_batch_sees_the_same_samples_in_a_step(
    windows_folder, size: int, accumulate: int, world: int
):
    folder, seen = windows_folder(400), []
    for rank in range(world):
        trainer = StubTrainer(
            accumulate_grad_batches=accumulate, world_size=world, global_rank=rank, max_steps=1
        )
        seen += flat(firsts(open_data(folder, trainer, micro_batch_size=size).train_dataloader()))
    whole = open_data(folder, StubTrainer(max_steps=1), micro_batch_size=12)
    assert sorted(seen) == sorted(flat(firsts(whole.train_dataloader())))


def test_ranks_see_disjoint_windows_and_together_all(windows_folder):
    folder = windows_folder(193)
    seen = [
        flat(
            firsts(
                open_data(folder, StubTrainer(world_size=2, global_rank=rank)).train_dataloader()
            )
        )
        for rank in (0, 1)
    ]
    assert set(seen[0]) & set(seen[1]) == set()
    assert sorted(seen[0] + seen[1]) == [SEQ_LEN * window for window in range(12)]


@pytest.mark.parametrize("start", range(4))
def test_sampler_starts_anywhere_and_is_as_long_as_the_run(start: int):
    run = {"max_steps": 4, "accumulate": 3, "micro_batch_size": 2}
    split = {"rank": 0, "first_sample": 0, "world_size": 1}
    whole = list(StepBatches(start=0, **run, **split))
    later = StepBatches(start=start, **run, **split)
    assert list(later) == whole[start * 3 :]
    assert len(later) == len(whole) == 12


@pytest.mark.parametrize(("size", "accumulate"), [(6, 1), (3, 2), (1, 6)])
def test_trace_of_a_step_is_that_of_its_rows_whatever_the_split(
    windows_folder, size: int, accumulate: int
):
    trainer = StubTrainer(accumulate_grad_batches=accumulate, max_steps=2, training=True)
    data = open_data(windows_folder(400), trainer, micro_batch_size=size)
    traces = []
    for micro_step, batch in enumerate(data.train_dataloader(), 1):
        data.on_before_batch_transfer(batch, 0)
        if micro_step % accumulate == 0:
            traces.append(data.step_metrics()["data/rows_crc32"])
    whole = open_data(windows_folder(401), StubTrainer(max_steps=2), micro_batch_size=6)
    rows = [batch["input_ids"] for batch in whole.train_dataloader()]
    assert traces == [sum(zlib.crc32(row.numpy().tobytes()) for row in step) for step in rows]


# Length


@pytest.mark.parametrize(
    ("world", "steps"), [(4, 9537), (1, 38147)], ids=["four devices", "one device"]
)
def test_base_run_of_ten_billion_tokens_has_its_published_steps(
    windows_folder, world: int, steps: int
):
    trainer = StubTrainer(accumulate_grad_batches=16, world_size=world, max_steps=-1)
    options = {"seq_len": 2048, "micro_batch_size": 8, "total_tokens": 10_000_000_000}
    data = open_data(windows_folder(2049, 2049), trainer, **options)
    assert trainer.max_steps == steps
    assert data.tokens_per_step == 262_144 * world


def test_epochs_end_with_a_step_over_what_is_left(windows_folder):
    # 7 windows at 2 a micro-batch and 2 micro-batches a step: 4, then 3.
    trainer = StubTrainer(max_steps=-1, accumulate_grad_batches=2)
    data = open_data(windows_folder(113), trainer, epochs=1.0)
    batches = firsts(data.train_dataloader())
    assert trainer.max_steps == 2
    assert [len(batch) for batch in batches] == [2, 2, 2, 1]
    assert sorted(flat(batches)) == [SEQ_LEN * window for window in range(7)]


def test_forty_five_micro_batches_at_accumulate_eight_are_six_updates(windows_folder):
    trainer = StubTrainer(max_steps=-1, accumulate_grad_batches=8)
    data = open_data(windows_folder(45 * SEQ_LEN + 1), trainer, epochs=1.0, micro_batch_size=1)
    sizes = [len(batch) for batch in firsts(data.train_dataloader())]
    assert trainer.max_steps == 6
    assert sizes == [1] * 45 + [0] * 3


@pytest.mark.parametrize(
    ("trainer", "options", "part"),
    [
        ({"max_steps": -1}, {}, "is not given: give exactly one of"),
        ({}, {"epochs": 1.0}, "given 2 times (trainer.max_steps 3, data.epochs 1.0)"),
        ({"max_steps": -1}, {"epochs": 1.0, "windows": "random"}, "random windows have no epochs"),
        ({"max_steps": -5}, {}, "trainer.max_steps is -5: must be at least 1"),
    ],
)
def test_length_that_is_no_length_is_refused(
    windows_folder, trainer: dict, options: dict, part: str
):
    with pytest.raises(ValueError, match=re.escape(part)):
        open_data(windows_folder(193), StubTrainer(**trainer), **options)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"seq_len": 0}, "data.seq_len is 0: must be at least 1"),
        ({"micro_batch_size": -1}, "data.micro_batch_size is -1"),
        ({"total_tokens": 0}, "data.total_tokens is 0"),
        ({"epochs": 0.0}, "data.epochs is 0.0: must be above 0"),
        ({"val_sequences": 0}, "data.val_sequences is 0: must be at least 1"),
        ({"num_workers": -2}, "data.num_workers is -2: must be 0 or more"),
    ],
)
def test_setting_against_its_rule_is_refused(option: dict, text: str):
    with pytest.raises(ValueError, match=re.escape(text)):
        LMDataModule(path="anywhere", **option)


# Validation


def test_bounded_validation_is_a_fixed_sample_of_the_whole(windows_folder):
    folder = windows_folder(193)
    bounded = StubTrainer(limit_val_batches=2)
    [loader] = open_data(folder, bounded, seed=1).val_dataloader()
    [other] = open_data(folder, bounded, seed=2).val_dataloader()
    assert flat(firsts(loader)) == flat(firsts(other))
    assert len(flat(firsts(loader))) == 4


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1.0, 3])
def test_any_number_of_ranks_evaluates_the_same_windows(
    windows_folder, world: int, limit: int | float
):
    folder, seen, lengths = windows_folder(193), [], set()
    for rank in range(world):
        trainer = StubTrainer(world_size=world, global_rank=rank, limit_val_batches=limit)
        batches = firsts(open_data(folder, trainer).val_dataloader()[0])
        seen += flat(batches)
        lengths.add(len(batches))
    assert len(lengths) == 1
    assert len(seen) == len(set(seen)) == (7 if limit == 1.0 else 6)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8])
def test_any_micro_batch_evaluates_the_same_sequences(windows_folder, micro: int, world: int):
    folder, seen = windows_folder(193), []
    options = {"val_sequences": 5, "micro_batch_size": micro, "eval_train": True}
    for rank in range(world):
        trainer = StubTrainer(world_size=world, global_rank=rank)
        loaders = open_data(folder, trainer, **options).val_dataloader()
        seen += [flat(firsts(loader)) for loader in loaders]
    [one] = open_data(folder, StubTrainer(limit_val_batches=5), micro_batch_size=1).val_dataloader()
    assert sorted(flat(seen[::2])) == sorted(flat(firsts(one)))
    assert len(flat(seen[1::2])) == 5


def test_bound_by_micro_batches_holds_where_it_is_given(windows_folder):
    trainer = StubTrainer(limit_val_batches=2)
    data = open_data(windows_folder(193), trainer, val_sequences=5, micro_batch_size=3)
    assert len(flat(firsts(data.val_dataloader()[0]))) == 6


@pytest.mark.parametrize(
    ("trainer", "options", "sequences"),
    [({}, {}, 7), ({}, {"val_sequences": 5}, 5), ({"limit_val_batches": 0}, {}, 0)],
)
def test_contract_holds_what_is_validated_on(windows_folder, trainer, options, sequences: int):
    contract = open_data(windows_folder(193), StubTrainer(**trainer), **options).contract()
    assert contract["validation sequences"] == sequences
    assert len(contract["validation data"]) == (12 if sequences else 0)


def test_empty_validation_is_refused_at_the_start(windows_folder):
    with pytest.raises(ValueError, match=r"val\.bin holds 12 tokens, which is 0 validation batch"):
        open_data(windows_folder(193, 12), StubTrainer())


def test_validation_turned_off_needs_no_validation_data(windows_folder):
    data = open_data(windows_folder(193, 12), StubTrainer(limit_val_batches=0))
    assert data.val_dataloader() == []


def test_training_batches_are_evaluated_on_request(windows_folder):
    data = open_data(windows_folder(193), StubTrainer(limit_val_batches=2), eval_train=True)
    assert [len(flat(firsts(loader))) for loader in data.val_dataloader()] == [4, 4]


# Files


def test_missing_files_without_a_corpus_name_the_command(tmp_path: Path):
    data = LMDataModule(path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"lacks train\.bin, .* lightning prepare --input"):
        data.prepare_data()


def test_lost_file_of_a_prepared_set_is_not_made_up(corpus: Path, tmp_path: Path):
    folder = tmp_path / "lost"
    shutil.copytree(corpus, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"lacks tokenizer\.json of what its meta\.json describes"):
        LMDataModule(path=str(folder), corpus="stdlib").prepare_data()


def test_complete_files_are_not_prepared_again(corpus: Path):
    before = (corpus / "meta.json").stat().st_mtime_ns
    LMDataModule(path=str(corpus), corpus="python").prepare_data()
    assert (corpus / "meta.json").stat().st_mtime_ns == before


def test_changed_data_is_refused_on_resume_and_can_be_allowed(
    lightning: Lightning, run_yaml: RunYaml, windows_folder
):
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 0, err
    other = run_yaml({"data.path": str(windows_folder(400)), "trainer.max_steps": 8})
    code, _, err = lightning("fit", "--config", other)
    assert code == 2
    assert "the data fingerprint was" in err
    code, _, err = lightning("fit", "--config", other, "--data.allow_data_change", "true")
    assert code == 0, err


def test_spread_of_a_shuffle_is_even(windows_folder):
    # A mean distance of neighbours near n / 3 is that of a random order.
    data = open_data(windows_folder(16 * 300 + 1), StubTrainer(max_steps=150))
    places = data.train_samples.places(np.arange(300)).tolist()
    distances = [abs(a - b) for a, b in pairwise(places)]
    assert 80 < sum(distances) / len(distances) < 120
