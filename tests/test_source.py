"""What a run trains on: prepared folders, token files of others, rows and mixtures."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Lightning, RunYaml
from test_datamodule import StubTrainer, firsts, flat, open_data

from callbacks.drill.drill import compare
from data.datamodule import LMDataModule
from data.text.tokenizer import TextTokenizer
from data.tokens.foreign import is_foreign


def counting(folder: Path, n: int = 193, val: int = 113, vocab: int = 64) -> Path:
    """A folder as nanoGPT leaves it: ids that count round and round, without meta.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", n), ("val", val)):
        (np.arange(count) % vocab).astype("<u2").tofile(folder / f"{split}.bin")
    return folder


def other_tokenizer(path: Path, to: Path) -> str:
    """Write a tokenizer of the same size in which two ids are exchanged; returns its print."""
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    to.write_text(json.dumps(content), encoding="utf-8")
    return TextTokenizer.load(to).fingerprint


def refused(text: str):
    return pytest.raises(ValueError, match=re.escape(text))


def rows(root: Path) -> list[dict[str, str]]:
    with (root / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def second(corpus: Path, tmp_path: Path) -> Path:
    """Another prepared folder of the same tokenizer, whose splits are exchanged."""
    folder = tmp_path / "second"
    shutil.copytree(corpus, folder)
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["train"], meta["val"] = meta["val"], meta["train"]
    for split, other in (("train", "val"), ("val", "train")):
        meta[split]["files"] = [f"{split}.bin"]
        for ending in (".bin", ".docs.npy"):
            shutil.copy(corpus / f"{other}{ending}", folder / f"{split}{ending}")
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def mixed(corpus: Path, second: Path, **weights: float) -> dict[str, Any]:
    return {
        "data.path": ...,
        "data.mixture": {str(corpus): weights.get("a", 3), str(second): weights.get("b", 1)},
    }


# Token files of others


def test_run_on_files_of_nanogpt_needs_nothing_else(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    config = run_yaml({"data.path": str(counting(tmp_path / "gpt"))})
    code, _, err = lightning("fit", "--config", config)
    assert code == 0, err
    assert f"data: {tmp_path}/gpt/train.bin (uint16): 193 tokens in 12 windows of 16\n" in err
    assert "val/bits_per_byte" not in rows(tmp_path / "run")[-1]
    assert not (tmp_path / "run" / "tokenizer.json").exists()


def test_sample_of_a_run_without_a_tokenizer_says_so(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, corpus: Path
):
    lightning("fit", "--config", run_yaml({"data.path": str(counting(tmp_path / "gpt"))}))
    argv = ["sample", "--ckpt_path", tmp_path / "run", "--prompt", "x", "--max_new_tokens", "3"]
    code, _, err = lightning(*argv)
    assert code == 2
    assert "was trained on token files without a tokenizer; name theirs by --tokenizer" in err
    code, _, err = lightning(*argv, "--tokenizer", corpus / "tokenizer.json")
    assert code == 0, err


def test_named_tokenizer_counts_bytes_and_comes_along(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, corpus: Path
):
    for split in ("train", "val"):
        (tmp_path / "gpt").mkdir(exist_ok=True)
        shutil.copy(corpus / f"{split}.bin", tmp_path / "gpt")
    named = {"data.path": f"{tmp_path}/gpt", "data.tokenizer": str(corpus / "tokenizer.json")}
    code, _, err = lightning("fit", "--config", run_yaml(named))
    assert code == 0, err
    assert float(rows(tmp_path / "run")[-1]["val/bits_per_byte"]) > 0
    code, _, err = lightning("sample", "--ckpt_path", tmp_path / "run", "--prompt", "def")
    assert code == 0, err


def test_text_of_files_without_a_tokenizer_is_refused(tmp_path):
    data = open_data(counting(tmp_path), StubTrainer())
    with refused(
        f"{tmp_path} holds token files without a tokenizer, so there is no text to read or write; "
        "name their tokenizer.json by data.tokenizer"
    ):
        _ = data.tokenizer


def test_changed_token_files_of_others_are_another_run(tmp_path):
    prints = []
    for n in (193, 194):
        data = open_data(counting(tmp_path, n), StubTrainer())
        prints.append(data.contract()["data fingerprint"])
    assert prints[0] != prints[1]


def test_resume_with_a_tokenizer_where_none_was_is_refused(tmp_path, corpus):
    old = open_data(counting(tmp_path), StubTrainer()).contract()
    named = {"tokenizer": str(corpus / "tokenizer.json")}
    data = open_data(tmp_path, StubTrainer(), **named)
    [fault] = data.refused_changes(old)
    assert fault.startswith("the tokenizer fingerprint was none and is ")


def test_id_without_an_embedding_is_refused_with_its_file_and_offset(tmp_path):
    ids = np.arange(200) % 64
    ids[150] = 64
    counting(tmp_path)
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    with refused(f"{tmp_path}/train.bin holds id 64 at offset 150, the largest is 64"):
        open_data(tmp_path, StubTrainer(), vocab_size=64)


def test_missing_validation_files_are_refused_unless_validation_is_off(tmp_path):
    path = counting(tmp_path) / "val.bin"
    path.unlink()
    with refused(
        f"{tmp_path} has no validation tokens: bring a file with val for train in its name, or "
        "turn validation off by trainer.limit_val_batches 0"
    ):
        open_data(tmp_path, StubTrainer())
    assert open_data(tmp_path, StubTrainer(limit_val_batches=0)).val_dataloader() == []


def test_file_of_a_prepared_folder_is_not_taken_out_of_it(corpus):
    with refused(
        f"data.path {corpus}/train.bin is a file of a prepared folder, whose meta.json tells its "
        f"type and tokenizer: give data.path {corpus}"
    ):
        open_data(corpus / "train.bin", StubTrainer())


def test_type_of_a_prepared_folder_is_not_another_one(corpus):
    with refused(
        f"{corpus / 'meta.json'} says uint16, but data.dtype is uint32: leave data.dtype out"
    ):
        open_data(corpus, StubTrainer(), dtype="uint32")


def test_tokenizer_of_a_prepared_folder_is_not_another_one(corpus, tmp_path):
    other = tmp_path / "other.json"
    other_tokenizer(corpus / "tokenizer.json", other)
    with pytest.raises(
        ValueError,
        match=rf"data\.tokenizer {other} has fingerprint \w{{12}}, but {corpus} was prepared with "
        r"\w{12}: leave data\.tokenizer out",
    ):
        open_data(corpus, StubTrainer(), tokenizer=str(other))
    open_data(corpus, StubTrainer(), tokenizer=str(corpus / "tokenizer.json"))


@pytest.mark.parametrize(
    ("files", "foreign"),
    [
        (["train.bin", "val.bin"], True),
        (["train.bin", "tokenizer.json"], True),
        (["train.bin", "meta.json"], False),
        (["train.bin", "train.docs.npy"], False),
        (["train.bin", ".work"], False),
        (["notes.txt"], False),
    ],
)
def test_folder_where_prepare_was_interrupted_is_not_trained_on(tmp_path, files, foreign):
    for name in files:
        (tmp_path / name).touch()
    assert is_foreign(str(tmp_path)) == foreign


def test_token_files_of_others_are_never_overwritten_by_a_corpus(tmp_path):
    folder = counting(tmp_path)
    before = (folder / "train.bin").read_bytes()
    LMDataModule(path=str(folder), corpus="stdlib").prepare_data()
    assert (folder / "train.bin").read_bytes() == before
    assert not (folder / "meta.json").exists()


# Rows


def test_rows_of_an_epoch_end_with_a_step_over_what_is_left(corpus):
    trainer = StubTrainer(max_steps=-1, accumulate_grad_batches=4)
    data = open_data(corpus, trainer, rows="split", epochs=2.0)
    n_rows = data.train_samples.epoch_size
    seen = flat(firsts(data.train_dataloader()))
    assert len(seen) == 2 * n_rows
    assert trainer.max_steps == -(-2 * n_rows // 8)


def test_rows_of_a_folder_that_tells_no_documents_are_refused(tmp_path):
    with refused(
        f"data.rows is set, but {tmp_path} does not tell where its documents begin: rows need a "
        "folder made by lightning prepare; leave data.rows out to train on windows"
    ):
        open_data(counting(tmp_path), StubTrainer(), rows="split")


def test_rows_at_random_places_are_refused():
    with refused(
        "data.rows is split and data.windows is random: rows are whole documents, each once an "
        "epoch; leave data.windows out"
    ):
        LMDataModule(path="anywhere", rows="split", windows="random")


def test_change_from_windows_to_rows_is_another_run(corpus):
    old = open_data(corpus, StubTrainer()).contract()
    data = open_data(corpus, StubTrainer(), rows="split")
    assert data.refused_changes(old) == ["data.rows was None and is split now"]


def test_checkpoint_from_before_there_were_rows_goes_on(corpus):
    data = open_data(corpus, StubTrainer())
    old = data.contract()
    del old["data.rows"], old["data.mixture"]
    assert data.refused_changes(old) == []


def test_truncation_is_warned_of_once_at_the_start(lightning: Lightning, run_yaml: RunYaml):
    code, _, err = lightning("fit", "--config", run_yaml({"data.rows": "truncate"}))
    assert code == 0, err
    assert err.count("warning: data.rows truncate cuts 54 of 54 documents at data.seq_len 16") == 1


def test_any_split_of_a_global_batch_sees_the_same_rows_in_a_step(corpus):
    seen = []
    for rank in (0, 1):
        trainer = StubTrainer(accumulate_grad_batches=3, world_size=2, global_rank=rank)
        seen += flat(firsts(open_data(corpus, trainer, rows="split").train_dataloader()))
    whole = open_data(corpus, StubTrainer(), micro_batch_size=12, rows="split")
    assert sorted(seen) == sorted(flat(firsts(whole.train_dataloader())))


# Mixtures


def test_samples_of_a_mixture_keep_its_proportions(corpus, second):
    data = open_data(None, StubTrainer(max_steps=40), mixture={str(corpus): 3.0, str(second): 1.0})
    assert data.source_names == ["prepared", "second"]
    chosen, _ = data.train_samples._slots(np.arange(80))  # pyright: ignore[reportAttributeAccessIssue]
    assert np.bincount(chosen).tolist() == [60, 20]


def test_order_of_sources_in_a_file_decides_nothing(corpus, second):
    weights = {str(corpus): 3.0, str(second): 1.0}
    batches = []
    for mixture in (weights, dict(reversed(weights.items()))):
        data = open_data(None, StubTrainer(), mixture=mixture)
        batches.append([batch["input_ids"].tolist() for batch in data.train_dataloader()])
    assert batches[0] == batches[1]


def test_mixture_validates_each_source_and_all_of_them(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path, corpus: Path, second: Path
):
    overrides = mixed(corpus, second) | {"data.eval_train": True, "trainer.limit_val_batches": 3}
    code, _, err = lightning("fit", "--config", run_yaml(overrides))
    assert code == 0, err
    last = rows(tmp_path / "run")[-1]
    each = [float(last[f"val/loss/{name}"]) for name in ("prepared", "second")]
    # Three micro-batches of two windows of each.
    assert float(last["val/loss"]) == pytest.approx(sum(each) / 2, rel=1e-6)
    assert float(last["train/eval_loss"]) > 0
    assert re.search(r"tokens in \d+ windows of 16.*; 3 of 4 samples\n", err)
    assert re.search(r"step 6 · val loss .* · prepared \d\.\d{4} · second \d\.\d{4}\n", err)


@pytest.mark.slow
@pytest.mark.parametrize("rows_too", [{}, {"data.rows": "split"}], ids=["windows", "rows"])
@pytest.mark.parametrize("mixture", [True, False], ids=["mixture", "one source"])
def test_resume_ends_with_the_same_bits(
    lightning: Lightning,
    run_yaml: RunYaml,
    tmp_path: Path,
    corpus: Path,
    second: Path,
    rows_too: dict,
    mixture: bool,
):
    kept = (mixed(corpus, second) if mixture else {}) | {"checkpoint.keep_last": 9} | rows_too
    for name, lost in (("whole", ()), ("killed", ()), ("killed", (6, 4))):
        root = tmp_path / name
        for step in lost:
            (root / "checkpoints" / f"step-{step:08d}.ckpt").unlink()
        config = run_yaml(kept | {"trainer.default_root_dir": str(root)})
        assert lightning("fit", "--config", config)[0] == 0
    assert compare(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.slow
def test_two_ranks_see_the_rows_of_one_and_validate_alike(
    run_yaml: RunYaml, tmp_path: Path, corpus: Path, second: Path
):
    for world, accumulate in ((1, 4), (2, 2)):
        split = {
            "data.rows": "split",
            "data.micro_batch_size": 3,
            "trainer.devices": world,
            "trainer.strategy": "ddp" if world > 1 else "auto",
            "trainer.accumulate_grad_batches": accumulate,
            "trainer.default_root_dir": str(tmp_path / f"world-{world}"),
        }
        program = Path(sys.executable).with_name("lightning")
        command = [program, "fit", "--config", run_yaml(mixed(corpus, second) | split)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=120)
    for one, two in zip(rows(tmp_path / "world-1"), rows(tmp_path / "world-2"), strict=True):
        assert one["data/rows_crc32"] == two["data/rows_crc32"]
        for name in ("train/loss", "val/loss", "val/loss/prepared", "val/loss/second"):
            assert float(one[name] or 0) == pytest.approx(float(two[name] or 0), rel=1e-4)


@pytest.mark.parametrize("allowed", [False, True])
def test_changed_mixture_is_refused_and_can_be_allowed(corpus, second, allowed):
    old = open_data(None, StubTrainer(), mixture={str(corpus): 3.0, str(second): 1.0}).contract()
    new = {str(corpus): 1.0, str(second): 1.0}
    data = open_data(None, StubTrainer(), mixture=new, allow_data_change=allowed)
    fault = (
        "data.mixture was {'prepared': 3, 'second': 1} and is {'prepared': 1, 'second': 1} now "
        "(data.allow_data_change true goes on with it)"
    )
    assert data.refused_changes(old) == ([] if allowed else [fault])


def test_changed_source_of_a_mixture_is_named(corpus, second):
    data = open_data(None, StubTrainer(), mixture={str(corpus): 3.0, str(second): 1.0})
    old = data.contract() | {"data fingerprint of second": "0123456789abcdef"}
    [fault] = data.refused_changes(old)
    assert fault.startswith("the data fingerprint of second was 0123456789ab and is ")


def test_moved_sources_of_a_mixture_are_the_same_run(corpus, second, tmp_path):
    old = open_data(None, StubTrainer(), mixture={str(corpus): 3.0, str(second): 1.0}).contract()
    (tmp_path / "elsewhere").mkdir()
    moved = second.rename(tmp_path / "elsewhere" / "second")
    data = open_data(None, StubTrainer(), mixture={str(corpus): 3.0, str(moved): 1.0})
    assert data.refused_changes(old) == []


def test_sources_of_different_tokenizers_are_refused(corpus, second):
    path = second / "tokenizer.json"
    other = other_tokenizer(path, path)
    meta = json.loads((second / "meta.json").read_text(encoding="utf-8"))
    known, meta["tokenizer_fingerprint"] = meta["tokenizer_fingerprint"], other
    (second / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with refused(
        f"the sources of data.mixture have different tokenizers: {corpus} has {known[:12]}, "
        f"{second} has {other[:12]}; prepare them with one tokenizer"
    ):
        open_data(None, StubTrainer(), mixture={str(corpus): 1.0, str(second): 1.0})


def test_source_without_a_tokenizer_beside_one_that_has_one_is_refused(corpus, tmp_path):
    other = counting(tmp_path / "x")
    with pytest.raises(ValueError, match=rf"different tokenizers: .*{other} has none; prepare"):
        open_data(None, StubTrainer(), mixture={str(corpus): 1.0, str(other): 1.0})


def test_unknown_folder_of_a_mixture_is_named(corpus, tmp_path):
    data = LMDataModule(mixture={str(corpus): 1.0, f"{tmp_path}/gone": 2.0})
    with refused(f"data.mixture names {tmp_path}/gone, which lacks train.bin, "):
        data.prepare_data()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            "data.path or data.mixture names the data, and neither is given: give one, or "
            "a file that does, by --config",
        ),
        (
            {"path": "x", "mixture": {"a": 1.0}},
            "data.path or data.mixture names the data, and both are given (data.path x): give one",
        ),
        (
            {"mixture": {"a": 1.0}, "corpus": "stdlib"},
            "data.corpus is stdlib and data.mixture is given: the folders of a mixture are not "
            "made up; prepare them one by one",
        ),
        (
            {"mixture": {"a": 1.0}, "epochs": 2.0},
            "data.epochs is 2.0 and data.mixture is given: each source goes through epochs of its "
            "own; give trainer.max_steps or data.total_tokens",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, text):
    with refused(text):
        LMDataModule(**options)


# What a plan rests on


def test_plan_knows_the_sizes_of_a_prepared_folder(corpus):
    meta = json.loads((corpus / "meta.json").read_text(encoding="utf-8"))
    data = LMDataModule(path=str(corpus), rows="split", seq_len=16)
    assert data.known_sizes() == {
        "data_tokens": meta["train"]["tokens"],
        "val_tokens": meta["val"]["tokens"],
        "tokenizer_size": 300,
        "epoch_samples": open_data(corpus, StubTrainer(), rows="split").train_samples.epoch_size,
    }


def test_plan_knows_the_sizes_of_a_mixture_and_of_files_of_others(corpus, second, tmp_path):
    mixture = {str(corpus): 1.0, str(second): 1.0}
    sizes, parts = (
        LMDataModule(mixture=mixture).known_sizes(),
        [LMDataModule(path=path).known_sizes() for path in mixture],
    )
    for key in ("data_tokens", "val_tokens"):
        assert sizes[key] == sum(part[key] or 0 for part in parts)
    foreign = LMDataModule(path=str(counting(tmp_path / "x"))).known_sizes()
    assert (foreign["data_tokens"], foreign["val_tokens"]) == (193, 113)


def test_plan_leaves_open_what_the_data_does_not_tell(tmp_path):
    for path in (f"{tmp_path}/gone", f"{tmp_path}/*.bin"):
        assert set(LMDataModule(path=path, rows="split").known_sizes().values()) == {None}


@pytest.mark.parametrize("data", [{"data.rows": "split"}, {"mixed": True}], ids=str)
def test_plan_of_rows_and_of_a_mixture_is_drawn(
    lightning: Lightning, run_yaml: RunYaml, corpus: Path, second: Path, data: dict
):
    epochs = {"data.rows": "split", "data.epochs": 2.0, "trainer.max_steps": ...}
    config = run_yaml(mixed(corpus, second) if "mixed" in data else epochs)
    code, out, err = lightning("plan", "--config", config)
    assert code == 0, err
    assert "mixed" in data or "2.00 passes over the data" in out


def test_prompts_of_a_run_without_a_tokenizer_are_refused_at_its_start(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    prompts = {"data.path": str(counting(tmp_path / "gpt")), "samples.prompts": ["def"]}
    code, _, err = lightning("fit", "--config", run_yaml(prompts))
    assert code == 2
    assert "name their tokenizer.json by data.tokenizer" in err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_sources_of_a_mixture_are_prepared_one_by_one(lightning, run_yaml, corpus):
    mixed = run_yaml({"data.path": ..., "data.mixture": {str(corpus): 1}})
    code, _, err = lightning("prepare", "--config", mixed)
    assert code == 2
    assert err == (
        "error: data.mixture is given: its folders are prepared one by one, by lightning prepare "
        "--input FILES --output DIR\n"
    )
