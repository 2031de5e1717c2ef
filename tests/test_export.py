"""`lightning export`, and runs that begin with what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Lightning, RunYaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from data.text.tokenizer import TextTokenizer
from lm.hub import export as exporting
from lm.hub import verify
from lm.hub.folder import FILES
from lm.trained import from_folder

transformers: Any = pytest.importorskip(
    "transformers", reason="what it loads cannot be compared without it"
)
NO_VALIDATION = {"trainer.limit_val_batches": 0}


@pytest.fixture
def run_folder(lightning: Lightning, run_yaml: RunYaml, tmp_path: Path) -> Path:
    """Folder of a run of a few steps."""
    code, _, err = lightning("fit", "--config", run_yaml())
    assert code == 0, err
    return tmp_path / "run"


@pytest.fixture
def exported(lightning: Lightning, run_folder: Path, tmp_path: Path) -> Path:
    code, _, err = lightning("export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert code == 0, err
    return tmp_path / "out"


def refusal(lightning: Lightning, *argv: object) -> str:
    code, _, err = lightning(*argv)
    assert code == 2, err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def trained_weights(root: Path) -> dict[str, torch.Tensor]:
    state = torch.load(root / "checkpoints/step-00000006.ckpt")["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in state.items()}


def test_others_write_text_with_what_is_exported(exported: Path):
    pipeline = transformers.pipeline("text-generation", str(exported))
    [made] = pipeline("def alpha_0(", max_new_tokens=5, do_sample=False)
    assert made["generated_text"].startswith("def alpha_0(")


def test_export_says_what_it_compared(lightning: Lightning, run_folder: Path, tmp_path: Path):
    _, out, _ = lightning("export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert "LlamaForCausalLM, fp32, 0.0 MB" in out
    assert "read again: logits of all 16 positions within" in out
    assert f"by transformers {transformers.__version__}: logits of all 16 positions within" in out
    assert "its tokenizer gives the ids that the model was trained on" in out
    assert "20 rows of the vocabulary that no token has: cut" in out


def test_padded_rows_are_cut_and_ids_of_zero_stay(run_folder: Path, exported: Path):
    content = json.loads((exported / "config.json").read_text())
    assert (content["vocab_size"], content["eos_token_id"], content["bos_token_id"]) == (300, 0, 0)
    stored = load_file(exported / "model.safetensors")
    trained = trained_weights(run_folder)
    assert "lm_head.weight" not in stored
    assert torch.equal(
        stored["model.embed_tokens.weight"], trained["model.embed_tokens.weight"][:300]
    )
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0


def test_tokenizer_gives_the_same_ids_offline(run_folder: Path, exported: Path):
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = TextTokenizer.load(run_folder / "tokenizer.json")
    for text in ("def f(x):\n\treturn x\n", "été 漢字 🙂", ""):
        assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.eos_token_id == 0
    assert TextTokenizer.load(exported).fingerprint == ours.fingerprint


def test_card_names_data_tokens_and_losses(exported: Path):
    text = (exported / "README.md").read_text()
    assert "192 tokens in 6 steps" in text
    assert "validation loss |" in text
    assert "training loss |" in text


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_weights_are_the_rounded_ones(
    lightning: Lightning, run_folder: Path, tmp_path: Path, dtype: str
):
    out = tmp_path / "out"
    code, said, err = lightning(
        "export", "--ckpt_path", run_folder, "--output", out, "--dtype", dtype
    )
    assert code == 0, err
    assert f"LlamaForCausalLM, {dtype}" in said
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    name = "model.layers.0.mlp.up_proj.weight"
    stored = load_file(out / "model.safetensors")[name]
    assert torch.equal(stored, trained_weights(run_folder)[name].to(kind))
    assert json.loads((out / "config.json").read_text())["dtype"] == str(kind).split(".")[1]


def test_shards_are_joined_again(lightning: Lightning, run_folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    code, _, err = lightning(
        "export", "--ckpt_path", run_folder, "--output", out, "--shard_gb", "1e-5"
    )
    assert code == 0, err
    assert len(list(out.glob("model-*.safetensors"))) > 1


def test_sample_reads_an_exported_folder(lightning: Lightning, run_folder: Path, exported: Path):
    texts = [
        lightning("sample", "--ckpt_path", place, "--prompt", "def", "--max_new_tokens", "8")[1]
        for place in (run_folder, exported, run_folder / "weights.safetensors")
    ]
    assert texts[0] == texts[1] == texts[2]


# What must not happen


def test_an_export_is_replaced_only_when_asked(
    lightning: Lightning, run_folder: Path, exported: Path
):
    words = ("export", "--ckpt_path", run_folder, "--output", exported)
    assert refusal(lightning, *words) == (
        f"error: --output {exported} exists; give another one, or --overwrite to replace it"
    )
    (exported / "config.json").write_text("{}")
    assert lightning(*words, "--overwrite")[0] == 0
    assert json.loads((exported / "config.json").read_text())["architectures"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as `export` writes it, each file empty but for the card's line."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (*FILES, "model-00001-of-00002.safetensors"):
        (folder / name).write_text("Exported by Relight 0.1." if name == "README.md" else "")
    return folder


def refused_place(place: Path, overwrite: bool) -> str:
    with pytest.raises(ValueError, match="--output") as caught:
        exporting.check_place(place, overwrite)
    return str(caught.value)


@pytest.mark.parametrize("name", ["notes.txt", ".git", "model.safetensors.bak", "adapter/w"])
def test_what_is_not_its_own_is_never_deleted(place: Path, name: str):
    exporting.check_place(place, True)
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).touch()
    assert refused_place(place, True) == (
        f"--output {place} holds {name.split('/')[0]}, which no export writes and --overwrite "
        "would delete: move it away, or give another folder"
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("card", [None, "A model of others.", b"\xff"])
def test_a_model_of_others_is_left_alone(place: Path, card: str | bytes | None, overwrite: bool):
    (place / "README.md").unlink()
    if card is not None:
        (place / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert refused_place(place, overwrite) == (
        f"--output {place} exists and is not a folder that lightning export wrote: give another one"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_a_file_that_changed_since_the_export_is_never_deleted(exported: Path, name: str):
    exporting.check_place(exported, True)
    content = (exported / name).read_bytes()
    (exported / name).write_bytes(content + b"mine")
    told = refused_place(exported, True)
    (exported / name).write_bytes(content)
    assert told == (
        f"--output {exported} holds {name}, which changed since the export and --overwrite would "
        "delete: give another folder"
    )


def test_the_current_folder_and_a_place_under_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert refused_place(Path(), False) == (
        "--output . is the current folder: give a folder inside it"
    )
    (tmp_path / "file").touch()
    assert refused_place(tmp_path / "file/deep/out", True) == (
        f"--output {tmp_path / 'file/deep/out'} would lie in {tmp_path / 'file'}, which is a file: "
        "give a folder"
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_folder_to_replace(tmp_path: Path, overwrite: bool):
    (tmp_path / "out").touch()
    assert "out exists and is not a folder" in refused_place(tmp_path / "out", overwrite)


def test_an_empty_folder_is_filled_and_a_link_to_it_stays(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    words = ("export", "--ckpt_path", run_folder, "--output", tmp_path / "link")
    code, _, err = lightning(*words)
    assert code == 0, err
    assert (tmp_path / "real/config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_a_mount_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    assert refused_place(tmp_path, False) == (
        f"--output {tmp_path} is a mount point: give a folder inside it"
    )


def test_weights_that_are_not_finite_are_named(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    path = run_folder / "checkpoints/step-00000006.ckpt"
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["net.model.norm.weight"][3] = float("nan")
    torch.save(checkpoint, path)
    told = refusal(lightning, "export", "--ckpt_path", path, "--output", tmp_path / "out")
    sound = path.with_name("step-00000004.ckpt")
    fault = "not finite: state_dict.net.model.norm.weight"
    assert told == f"error: {path} cannot be used: {fault}; the newest intact one is {sound}"
    assert not (tmp_path / "out").exists()


def test_a_difference_is_judged_by_the_size_of_logits_and_ties_by_their_number():
    ours = torch.zeros(1, 200, 5)
    ours[..., 0] = 20.0
    near, far = ours + 1e-3, ours.clone()
    assert verify.differ(ours, near, "x", 0.0) == "logits of all 200 positions within 1e-03"
    far[0, 7] += 0.5
    with pytest.raises(RuntimeError, match=r"logits differ by 0\.5 at position 7; nothing was"):
        verify.differ(ours, far, "x", 0.0)
    told = verify.differ(ours, far, "x", 0.01)
    assert told == "logits of 199 of 200 positions within 2e-03"
    far[0, 8:11] += 0.5
    with pytest.raises(RuntimeError, match="does not compute what the trained one does"):
        verify.differ(ours, far, "x", 0.01)
    with pytest.raises(RuntimeError, match="logits differ by nan"):
        verify.differ(ours, ours * float("nan"), "x", 0.0)


def test_what_a_killed_export_left_is_swept(lightning: Lightning, run_folder: Path, tmp_path: Path):
    # Processes count from 1, and this one has not that number.
    stale = tmp_path / ".out.tmp-999999999"
    stale.mkdir()
    code, _, err = lightning("export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert code == 0, err
    assert not list(tmp_path.glob(".out*"))


def test_an_export_set_aside_by_a_killed_one_comes_back(
    lightning: Lightning, run_folder: Path, exported: Path, tmp_path: Path
):
    stale = tmp_path / ".out.tmp-999999999"
    stale.mkdir()
    exported.rename(stale / "old")
    words = ("export", "--ckpt_path", run_folder, "--output", exported)
    code, _, err = lightning(*words)
    assert (code, (exported / "config.json").is_file()) == (2, True), err
    assert "exists; give another one, or --overwrite" in err
    assert not list(tmp_path.glob(".out*"))


def test_what_does_not_fit_into_fp16_is_named(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    path = run_folder / "checkpoints/step-00000006.ckpt"
    checkpoint = torch.load(path)
    checkpoint["state_dict"]["net.model.norm.weight"][3] = 1e6
    torch.save(checkpoint, path)
    words = ("export", "--ckpt_path", path, "--output", tmp_path / "out", "--dtype", "fp16")
    told = refusal(lightning, *words)
    assert "model.norm.weight" in told
    assert "do not fit into fp16: give --dtype bf16" in told


def test_damaged_checkpoint_and_missing_folder_are_named(
    lightning: Lightning, run_folder: Path, tmp_path: Path
):
    out = tmp_path / "out"
    told = refusal(lightning, "export", "--ckpt_path", tmp_path / "nowhere", "--output", out)
    assert "nowhere does not exist" in told
    path = run_folder / "checkpoints/step-00000006.ckpt"
    path.write_bytes(path.read_bytes()[:500])
    assert "step-00000006.ckpt" in refusal(
        lightning, "export", "--ckpt_path", path, "--output", out
    )


def test_another_tokenizer_is_refused(lightning: Lightning, run_folder: Path, tmp_path: Path):
    content = json.loads((run_folder / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (run_folder / "tokenizer.json").write_text(json.dumps(content))
    told = refusal(lightning, "export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert "has fingerprint" in told


def test_full_disk_leaves_nothing(
    lightning: Lightning, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    code, _, err = lightning("export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert code == 1
    assert "No space left" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.yaml"]


def test_a_model_that_computes_something_else_leaves_nothing(
    lightning: Lightning, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = exporting.to_hf_config

    def wrong(*args: Any) -> dict[str, Any]:
        return right(*args) | {"rms_norm_eps": 0.5}

    monkeypatch.setattr(exporting, "to_hf_config", wrong)
    code, _, err = lightning("export", "--ckpt_path", run_folder, "--output", tmp_path / "out")
    assert code == 1
    assert "does not compute what the trained one does: logits differ by" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.yaml"]


# Runs that begin with weights


@pytest.mark.parametrize("place", ["out", "run", "run/weights.safetensors"])
def test_a_run_begins_with_weights_and_step_zero(
    lightning: Lightning,
    run_yaml: RunYaml,
    run_folder: Path,
    exported: Path,
    tmp_path: Path,
    place: str,
):
    more = {
        "model.from_weights": str(tmp_path / place),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "model.config.vocab_size": 300 if place == "out" else 320,
        "model.optim.lr": 1e-12,
        "trainer.max_steps": 1,
        **NO_VALIDATION,
    }
    code, _, err = lightning("fit", "--config", run_yaml(more))
    assert code == 0, err
    found = torch.load(tmp_path / "more/checkpoints/step-00000001.ckpt")
    before = trained_weights(run_folder)
    for name, tensor in found["state_dict"].items():
        old = before[name.removeprefix("net.")][: len(tensor)]
        torch.testing.assert_close(tensor, old, rtol=1e-6, atol=1e-9)
    # It has learned already, which is no fault.
    assert "warning" not in err.replace("warning: " + str(tmp_path), "")


def test_a_resumed_run_does_not_read_them_again(
    lightning: Lightning, run_yaml: RunYaml, exported: Path, tmp_path: Path
):
    more = {
        "model.from_weights": str(exported),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "model.config.vocab_size": 300,
        "trainer.max_steps": 2,
    }
    assert lightning("fit", "--config", run_yaml(more))[0] == 0
    exported.rename(tmp_path / "gone")
    code, _, err = lightning("fit", "--config", run_yaml(more | {"trainer.max_steps": 4}))
    assert code == 0, err
    assert "resuming from" in err


def test_a_larger_vocabulary_needs_the_flag_and_keeps_the_old_rows(
    lightning: Lightning, run_yaml: RunYaml, exported: Path, tmp_path: Path
):
    more = {
        "model.from_weights": str(exported),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "model.config.vocab_size": 364,
        "model.optim.lr": 1e-12,
        "trainer.max_steps": 1,
        **NO_VALIDATION,
    }
    told = refusal(lightning, "fit", "--config", run_yaml(more))
    assert "model.config.vocab_size is 364 and of the weights 300" in told
    assert "model.grow_vocab true adds new rows" in told
    code, _, err = lightning("fit", "--config", run_yaml(more | {"model.grow_vocab": True}))
    assert code == 0, err
    grown = torch.load(tmp_path / "more/checkpoints/step-00000001.ckpt")["state_dict"]
    rows = grown["net.model.embed_tokens.weight"]
    stored = load_file(exported / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(rows[:300], stored, rtol=1e-6, atol=1e-9)
    assert rows[300:].std() > 0


def test_another_model_is_refused_with_every_difference(
    lightning: Lightning, run_yaml: RunYaml, exported: Path, tmp_path: Path
):
    more = {
        "model.from_weights": str(exported),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "model.config.vocab_size": 300,
        "model.config.ffn_dim": 32,
        "model.config.rope_theta": 5000.0,
    }
    told = refusal(lightning, "fit", "--config", run_yaml(more))
    assert "model.config.ffn_dim is 32 and of the weights 24" in told
    assert "model.config.rope_theta is 5000.0 and of the weights 10000.0" in told
    assert "model.layers.0.mlp.up_proj.weight is (24, 16) and should be (32, 16)" in told
    assert told.endswith(" and 1 more")
    assert not (tmp_path / "more/checkpoints").exists()


def test_other_tokens_are_refused(
    lightning: Lightning, run_yaml: RunYaml, exported: Path, tmp_path: Path
):
    path = exported / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[10:12]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    more = {
        "model.from_weights": str(exported),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "model.config.vocab_size": 300,
    }
    told = refusal(lightning, "fit", "--config", run_yaml(more))
    assert "the data's tokenizer" in told
    assert f"prepare the data with lightning prepare --tokenizer {exported}" in told


def test_weights_whose_tokenizer_is_not_beside_are_compared_by_fingerprint(
    lightning: Lightning, run_yaml: RunYaml, run_folder: Path, tmp_path: Path
):
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((run_folder / "weights.safetensors").read_bytes())
    more = {
        "model.from_weights": str(moved),
        "trainer.default_root_dir": str(tmp_path / "more"),
        "trainer.max_steps": 1,
        **NO_VALIDATION,
    }
    assert lightning("fit", "--config", run_yaml(more))[0] == 0
    trained = load_file(moved)
    with safe_open(moved, "pt") as file:
        facts = json.loads(file.metadata()["relight"])
    facts["contract"]["tokenizer fingerprint"] = "0" * 64
    save_file(trained, moved, metadata={"relight": json.dumps(facts)})
    more["trainer.default_root_dir"] = str(tmp_path / "other")
    told = refusal(lightning, "fit", "--config", run_yaml(more))
    assert "is not that of model.from_weights" in told
    assert "put that one's tokenizer.json beside it" in told


def test_a_dry_run_reads_them_too(lightning: Lightning, run_yaml: RunYaml):
    told = refusal(
        lightning,
        *("fit", "--config", run_yaml({"model.from_weights": "nowhere"})),
        *("--trainer.fast_dev_run", "1"),
    )
    assert "model.from_weights nowhere does not exist" in told


def test_weights_that_are_not_there_are_named(
    lightning: Lightning, run_yaml: RunYaml, tmp_path: Path
):
    told = refusal(lightning, "fit", "--config", run_yaml({"model.from_weights": "nowhere"}))
    assert "model.from_weights nowhere does not exist" in told


# Written as the run goes on


def test_weights_alone_are_left_at_the_end(run_folder: Path):
    stored = load_file(run_folder / "weights.safetensors")
    trained = trained_weights(run_folder)
    assert stored.keys() == trained.keys()
    assert all(torch.equal(stored[name], trained[name]) for name in stored)
    assert not list(run_folder.glob("*.tmp-*"))


def test_files_have_the_mode_that_new_files_have(run_folder: Path, exported: Path):
    (new := run_folder / "new").touch()
    files = [path for folder in (run_folder, exported) for path in folder.rglob("*")]
    assert {path.stat().st_mode for path in files if path.is_file()} == {new.stat().st_mode}


def test_a_run_killed_after_its_last_checkpoint_leaves_them_at_its_next_start(
    lightning: Lightning, run_yaml: RunYaml, run_folder: Path
):
    (run_folder / "weights.safetensors").unlink()
    (run_folder / "weights.tmp-7.safetensors").touch()
    assert lightning("fit", "--config", run_yaml())[0] == 0
    assert (run_folder / "weights.safetensors").exists()
    assert not list(run_folder.glob("*.tmp-*"))


def test_a_disk_that_refuses_them_costs_a_line(
    lightning: Lightning, run_yaml: RunYaml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("No space left")

    monkeypatch.setattr("lm.module.write_weights_file", refuse)
    code, _, err = lightning("fit", "--config", run_yaml({"weights.export_every_n_steps": 3}))
    assert code == 0, err
    assert err.count("not written: No space left") == 3
    assert (tmp_path / "run/checkpoints/step-00000006.ckpt").exists()


def test_a_folder_is_exported_every_so_many_steps_and_training_does_not_notice(
    lightning: Lightning, run_yaml: RunYaml, run_folder: Path, tmp_path: Path
):
    more = {
        "weights.export_every_n_steps": 3,
        "weights.save_at_end": False,
        "trainer.default_root_dir": str(tmp_path / "more"),
    }
    code, _, err = lightning("fit", "--config", run_yaml(more))
    assert code == 0, err
    folders = sorted(path.name for path in (tmp_path / "more/exports").iterdir())
    assert folders == ["step-00000003", "step-00000006"]
    assert err.count("exported ") == 2
    last = from_folder(tmp_path / "more/exports/step-00000006")
    trained = trained_weights(run_folder)
    assert torch.equal(last.weights["model.norm.weight"], trained["model.norm.weight"])
    again = trained_weights(tmp_path / "more")
    assert all(torch.equal(trained[name], again[name]) for name in trained)


def test_interval_of_exports_below_one_is_refused(lightning: Lightning, run_yaml: RunYaml):
    told = refusal(lightning, "fit", "--config", run_yaml({"weights.export_every_n_steps": 0}))
    assert "weights.export_every_n_steps is 0: must be at least 1, or null" in told
