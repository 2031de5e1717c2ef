"""Models in Hugging Face's form, ours to theirs and theirs to ours."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.config import ModelConfig
from lm.generate import generate
from lm.hub.config import from_hf_config, to_hf_config
from lm.hub.files import read_folder, write_weights
from lm.hub.weights import to_hf_weights
from lm.model import LM
from lm.trained import from_folder

transformers: Any = pytest.importorskip(
    "transformers", reason="what it loads cannot be compared without it"
)
transformers.utils.logging.set_verbosity_error()

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 48,
    "n_layers": 2,
    "n_heads": 6,
    "ffn_dim": 64,
    "max_seq_len": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-gqa-4-2": {"n_heads": 4, "n_kv_heads": 2},
    "llama-gqa-6-2": {"n_kv_heads": 2},
    "llama-untied": {"tie_embeddings": False},
    "llama-head-dim": {"head_dim": 16, "rope_theta": 500000.0, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "n_kv_heads": 2},
    "qwen3-untied": {"qk_norm": True, "tie_embeddings": False, "head_dim": 16},
    "qwen3-odd-width": {"qk_norm": True, "d_model": 40, "head_dim": 8},
    "mixtral": {"n_experts": 4, "n_kv_heads": 2, "rope_theta": 20000.0},
    "mixtral-untied": {"n_experts": 3, "n_experts_per_token": 1, "tie_embeddings": False},
    "qwen3-moe": {"n_experts": 4, "n_experts_per_token": 3, "qk_norm": True, "n_kv_heads": 2},
    "qwen3-moe-untied": {"n_experts": 4, "qk_norm": True, "tie_embeddings": False},
}
IDS: dict[str, int | None] = {"bos": 0, "eos": 0, "pad": None}


def network(kind: str) -> LM:
    """A network whose weights are far from those of a new one: every norm counts."""
    torch.manual_seed(1)
    model = LM(ModelConfig(**(SIZES | KINDS[kind]))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(model: LM, folder: Path, most_bytes: float = 5e9) -> None:
    config = model.config
    content = to_hf_config(config, config.vocab_size, "float32", IDS)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    write_weights(to_hf_weights(model.state_dict(), config, config.vocab_size), folder, most_bytes)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.inference_mode()
def test_transformers_computes_our_logits_at_every_position(kind: str, tmp_path: Path):
    model = network(kind)
    write(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(96, (2, 32), generator=torch.Generator().manual_seed(0))
    assert (theirs(ids).logits - model(ids)).abs().max() < 1e-4
    assert (
        type(theirs).__name__
        == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    )
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == model.config.tie_embeddings


def test_round_trip_is_bit_equal(kind: str, tmp_path: Path):
    model = network(kind)
    write(model, tmp_path)
    config, weights = read_folder(tmp_path)
    before = model.state_dict()
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[name], before[name]) for name in before)
    # What training alone needs is not in the folder.
    assert config == dataclasses.replace(
        model.config,
        aux_loss_coef=config.aux_loss_coef,
        head_dim=config.head_dim,
        n_kv_heads=config.n_kv_heads,
    )
    assert config.head_size == model.config.head_size


@torch.inference_mode()
def test_their_own_model_is_ours_too(kind: str, tmp_path: Path):
    content = to_hf_config(ModelConfig(**(SIZES | KINDS[kind])), 96, "float32", IDS)
    torch.manual_seed(2)
    model_class = getattr(transformers, content["architectures"][0])
    their_config = model_class.config_class(**content)
    theirs = model_class(their_config).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    model = from_folder(tmp_path).model().eval()
    ids = torch.randint(96, (1, 32), generator=torch.Generator().manual_seed(0))
    assert (theirs(ids).logits - model(ids)).abs().max() < 1e-4
    prompt = [5, 17, 3]
    new = generate(
        model, prompt, max_new_tokens=50, temperature=0.0, top_k=None, top_p=None, seed=0,
        eos_id=None, n_tokens=96,
    )  # fmt: skip
    wanted = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=50, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert prompt + list(new) == wanted[0].tolist()


@torch.inference_mode()
def test_fifty_greedy_tokens_are_those_of_transformers(tmp_path: Path):
    torch.manual_seed(1)
    config = dataclasses.replace(ModelConfig(**SIZES), n_kv_heads=2)
    model = LM(config).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    write(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    new = generate(
        model, [7], max_new_tokens=50, temperature=0.0, top_k=None, top_p=None, seed=0,
        eos_id=None, n_tokens=96,
    )  # fmt: skip
    wanted = theirs.generate(
        torch.tensor([[7]]), max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert [7, *new] == wanted[0].tolist()


def test_experts_are_stored_one_by_one(tmp_path: Path):
    model = network("mixtral")
    write(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stacked = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    layer = "model.layers.1.block_sparse_moe"
    assert torch.equal(stored[f"{layer}.experts.2.w1.weight"], stacked[2, :64])
    assert torch.equal(stored[f"{layer}.experts.2.w3.weight"], stacked[2, 64:])
    assert stored[f"{layer}.experts.2.w2.weight"].shape == (48, 64)
    assert not [name for name in stored if "gate_up" in name]


def test_large_models_are_cut_into_files_that_transformers_joins(tmp_path: Path):
    model = network("llama-untied")
    write(model, tmp_path, most_bytes=40_000.0)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert not (tmp_path / "model.safetensors").exists()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(index["weight_map"].values())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(32).unsqueeze(0)
    with torch.inference_mode():
        assert (theirs(ids).logits - model(ids)).abs().max() < 1e-4
        assert torch.equal(from_folder(tmp_path).model()(ids), model(ids))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is of GPT2LMHeadModel, which is not supported: "
         "LlamaForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM are"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "not supported: rope_type is llama3"),
        ({"attention_bias": True}, "not supported: attention_bias is True"),
        ({"hidden_act": "gelu", "mlp_bias": True}, "hidden_act is gelu, mlp_bias is True"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "is damaged (hidden_size is '64'): fetch it again"),
        ({"hidden_size": 64.0}, "is damaged (hidden_size is 64.0): fetch it again"),
        ({"rope_parameters": "x"}, "is damaged (rope_parameters is 'x'): fetch it again"),
        ({"rope_parameters": {"rope_theta": "1"}}, "(rope_theta is '1'): fetch it again"),
        ({"max_position_embeddings": 0}, "is of a model that cannot be: data.seq_len is 0"),
        ({"rope_scaling": {"type": "linear"}}, "not supported: rope_type is linear"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"model_type": "mistral"}, "not supported: model_type is mistral"),
        ({"architectures": ["LlamaForTokenClassification"]}, "which is not supported: Llama"),
    ],
)  # fmt: skip
def test_what_our_model_cannot_be_is_named(change: dict[str, Any], told: str):
    content = to_hf_config(ModelConfig(**SIZES), 96, "float32", IDS) | change
    content = {name: value for name, value in content.items() if value is not None}
    with pytest.raises(ValueError, match=r"config\.json") as error:
        from_hf_config(content, Path("somewhere/config.json"))
    assert told in str(error.value)


def test_older_files_give_rope_flat_and_no_head_dim():
    content = to_hf_config(ModelConfig(**SIZES, rope_theta=5e5), 96, "float32", IDS)
    assert (content["rope_theta"], content["rope_parameters"]["rope_theta"]) == (5e5, 5e5)
    del content["rope_parameters"], content["head_dim"]
    assert from_hf_config(content, Path("config.json")).rope_theta == 5e5
    del content["rope_theta"]
    assert from_hf_config(content, Path("config.json")).rope_theta == 10000.0


def test_ids_of_zero_stay():
    content = to_hf_config(ModelConfig(**SIZES), 96, "float32", IDS)
    assert (content["bos_token_id"], content["eos_token_id"], content["pad_token_id"]) == (
        0,
        0,
        None,
    )


def test_weights_that_do_not_fit_their_config_are_all_named(tmp_path: Path):
    write(network("llama-untied"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = torch.zeros(95, 48)
    del stored["model.norm.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not hold what its config\.json says") as error:
        from_folder(tmp_path)
    assert "lm_head.weight is (95, 48) and should be (96, 48)" in str(error.value)
    assert "model.norm.weight is missing and should be (48,)" in str(error.value)


def test_damaged_and_missing_files_are_named(tmp_path: Path):
    write(network("llama"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        from_folder(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no model.safetensors and no .*index.json"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        from_folder(tmp_path)


def test_a_tied_matrix_may_be_there_as_the_head_alone(tmp_path: Path):
    write(network("llama"), tmp_path)
    expected, weights = read_folder(tmp_path)[1], load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = from_folder(tmp_path).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("differ", [False, True])
def test_a_head_beside_a_tied_matrix_counts_where_it_differs(tmp_path: Path, differ: bool):
    write(network("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + float(differ)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(20)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = from_folder(tmp_path)
    assert found.config.tie_embeddings is not differ
    with torch.no_grad():
        torch.testing.assert_close(found.model().eval()(ids), theirs(ids).logits)


@pytest.mark.parametrize("newer", ["file", "index"])
def test_one_whole_file_counts_before_an_index_of_shards(tmp_path: Path, newer: str):
    first, second = network("llama"), network("llama")
    with torch.no_grad():
        second.model.norm.weight.add_(1)
    for model, most_bytes in ((first, 5e4), (second, 5e9))[:: 1 if newer == "file" else -1]:
        write(model, tmp_path, most_bytes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = from_folder(tmp_path).weights["model.norm.weight"]
    assert torch.equal(ours, theirs.model.norm.weight)
    assert torch.equal(ours, second.model.norm.weight)


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", ["LlamaModel"]])
def test_a_trunk_that_was_saved_alone_is_read_by_its_type(tmp_path: Path, named: Any):
    model = network("llama")
    write(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"architectures": named}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours = from_folder(tmp_path).model().eval()(ids)
        torch.testing.assert_close(ours, theirs(ids).logits)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git "
         "LFS and not the file: get it by git lfs pull"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git "
         "LFS and not the file: get it by git lfs pull"),
        ("adapter_config.json", "{}", "holds an adapter (adapter_config.json), which is only a "
         "part of a model: merge it by peft's merge_and_unload and save the whole with "
         "save_pretrained"),
    ],
)  # fmt: skip
def test_files_that_are_not_the_model_are_named(tmp_path: Path, name: str, content: str, told: str):
    write(network("llama"), tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    place = tmp_path if name == "adapter_config.json" else tmp_path / name
    with pytest.raises(ValueError, match=f"^{re.escape(f'{place} {told}')}$"):
        from_folder(tmp_path)


@pytest.mark.parametrize("where", ["null", '{"model.norm.weight": 1}', "[]"])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, where: str):
    write(network("llama-untied"), tmp_path, most_bytes=40_000.0)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {where}}}', encoding="utf-8")
    with pytest.raises(ValueError, match=f"^{index} names no files: fetch it again$"):
        from_folder(tmp_path)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path: Path, kind: torch.dtype):
    write(network("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(kind)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"holds model\.norm\.weight as {kind}: weights must be"):
        from_folder(tmp_path)
