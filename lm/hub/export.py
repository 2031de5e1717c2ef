"""A trained model as a folder that other libraries load: written whole, compared, or not there."""

import glob
import importlib
import importlib.util
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm.config import ModelConfig
from lm.hub.hf import (
    INDEX,
    WEIGHTS,
    architecture,
    read_folder,
    to_hf_config,
    to_hf_weights,
    write_weights,
)
from lm.plan import WIDEST_HEAD
from lm.trained import Trained, network

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-4  # of logits in fp32, as a share of the largest where that is above 1
# Share of positions at which experts may be others, for their probabilities are as good as equal.
TIES = 0.01
MOST_POSITIONS = 1024  # that logits are compared at
# The line by which an export is known, and the names of its files.
EXPORTED = "Exported by Relight"
SEAL = "\n<!-- CRC32: "
FILES = ("config.json", "generation_config.json", WEIGHTS, INDEX, "README.md")
FILES += ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SHARDS = "model-?????-of-?????.safetensors"
BLOCK_BYTES = 1 << 24  # that are read at once for a checksum
PROBE = "def main(argument):\n    return 'été 漢字 🙂'  # 1 + 1\n"


@runtime_checkable
class Tokens(Protocol):
    """What an export asks of a tokenizer."""

    size: int
    """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ...

    def tokens(self) -> dict[int, str]:
        """What each id is spelled like."""
        ...

    def special_id(self, kind: str) -> int | None:
        """Id of eos, bos or pad."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether its file begins each text with the bos."""
        ...

    def start_ids(self, bos: bool) -> list[int]:
        """What a document begins with."""
        ...

    def save_for_others(self, path: Path, bos: bool) -> None:
        """Write a tokenizer.json that puts the bos before each text where it is asked for."""
        ...


def export(
    trained: Trained,
    output: Path,
    *,
    dtype: str = "fp32",
    tokenizer: Tokens | None = None,
    overwrite: bool = False,
    shard_bytes: float = 5e9,
) -> list[str]:
    """Write the folder and tell what it is; nothing is there before all of it was compared.

    Args:
        tokenizer: what goes along; None leaves the folder without one.
        overwrite: whether an export that is there already is replaced.
        shard_bytes: size that a file of weights may have.

    Raises:
        ValueError: the place is taken, or the model cannot be written so.
        RuntimeError: what was written does not compute what the model does.
        OSError: the disk refuses.
    """
    check_place(output, overwrite)
    config, kind = trained.config, DTYPES[dtype]
    size = config.vocab_size if tokenizer is None else tokenizer.size
    ids = special_ids(tokenizer)
    content = to_hf_config(config, size, str(kind).removeprefix("torch."), ids)
    weights = to_hf_weights({n: t.to(kind) for n, t in trained.weights.items()}, config, size)
    too_large = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if too_large:
        raise ValueError(
            f"{', '.join(too_large)} of {trained.source} do not fit into {dtype}: give --dtype bf16"
        )
    needed = sum(tensor.nbytes for tensor in weights.values())
    with whole_folder(output, needed, overwrite) as folder:
        write_weights(weights, folder, shard_bytes)
        write_json(folder / "config.json", content)
        write_json(folder / "generation_config.json", {f"{n}_token_id": i for n, i in ids.items()})
        if tokenizer is not None:
            write_tokenizer(
                tokenizer, folder, config.max_seq_len, begins_with_bos(trained, tokenizer)
            )
        card = model_card(trained, dtype, needed, size)
        (folder / "README.md").write_text(seal(folder, card), encoding="utf-8", newline="\n")
        lines = [*compared(trained, folder, kind, size, tokenizer)]
    what = f"{output}: {content['architectures'][0]}, {dtype}, {needed / 1e6:.1f} MB"
    if size < config.vocab_size:
        lines.append(f"{config.vocab_size - size} rows of the vocabulary that no token has: cut")
    if config.dropout:
        lines.append(f"dropout {config.dropout} of training: left out, it has no place in use")
    if tokenizer is None:
        lines.append("no tokenizer: the model was trained on token files without one")
    return [what, *lines, *accepted_by(config, size, tokenizer)]


def check_place(output: Path, overwrite: bool) -> None:
    """Find out before any work whether the folder may be written: an empty one always.

    Raises:
        ValueError: something is there that is not to be replaced.
    """
    place = output.resolve()
    # Something else is put under the name, which would leave both of them as they were.
    if place.is_mount() or place == Path.cwd():
        what = "a mount point" if place.is_mount() else "the current folder"
        raise ValueError(f"--output {output} is {what}: give a folder inside it")
    above = next(folder for folder in place.parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"--output {output} would lie in {above}, which is a file: give a folder")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_export(output):
        raise ValueError(
            f"--output {output} exists and is not a folder that lightning export wrote: give "
            "another one"
        )
    if not overwrite:
        raise ValueError(
            f"--output {output} exists; give another one, or --overwrite to replace it"
        )
    if others := sorted(p.name for p in output.iterdir() if not is_own_name(p)):
        raise ValueError(
            f"--output {output} holds {', '.join(others)}, which no export writes and --overwrite "
            "would delete: move it away, or give another folder"
        )
    if others := changed(output):
        raise ValueError(
            f"--output {output} holds {', '.join(others)}, which changed since the export and "
            "--overwrite would delete: give another folder"
        )


def is_export(folder: Path) -> bool:
    """Whether a folder is one that `export` wrote, by the line in its card."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.startswith(EXPORTED) for line in lines)


def seal(folder: Path, card: str) -> str:
    """A card with the checksums of itself and of the weights in a folder."""
    sums = {path.name: file_checksum(path) for path in folder.glob("*.safetensors")}
    return f"{card}{SEAL}{json.dumps(sums | {'README.md': checksum([card.encode()])})} -->\n"


def changed(folder: Path) -> list[str]:
    """The card and files of weights that are not as `export` wrote them.

    None of a folder without checksums. Other files cost nobody more than a moment.
    """
    card, seal, text = (folder / "README.md").read_text(encoding="utf-8").partition(SEAL)
    if not seal:
        return []
    try:
        sums = json.loads(text.removesuffix(" -->\n"))
    except ValueError:
        return ["README.md"]
    found = {path.name: file_checksum(path) for path in sorted(folder.glob("*.safetensors"))}
    found["README.md"] = checksum([card.encode()])
    return [name for name, digits in found.items() if sums.get(name) != digits]


def file_checksum(path: Path) -> str:
    """Checksum of a file, read block by block: weights may be larger than the memory."""
    with path.open("rb") as file:
        return checksum(iter(lambda: file.read(BLOCK_BYTES), b""))


def checksum(parts: Iterable[bytes]) -> str:
    """CRC32 of bytes in parts, as hexadecimal digits."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def is_own_name(path: Path) -> bool:
    """Whether `export` writes files of this name."""
    return path.is_file() and (path.name in FILES or fnmatch(path.name, SHARDS))


@contextmanager
def whole_folder(output: Path, needed: int, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which appears under its name when the block ends well and else is gone."""
    output = output.resolve()
    missing = [folder for folder in output.parents if not folder.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise OSError(
            f"No space left for {output}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
        )
    for stale in output.parent.glob(f".{glob.escape(output.name)}.tmp-*"):
        number = stale.name.rpartition("-")[2]
        if number.isdecimal() and not runs(int(number)):
            if not output.exists() and (stale / "old").exists():
                (stale / "old").rename(output)  # a kill came between the two renames
            shutil.rmtree(stale, ignore_errors=True)
    check_place(output, overwrite)
    place = output.with_name(f".{output.name}.tmp-{os.getpid()}")
    folder, old = place / "new", place / "old"
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*folder.iterdir(), folder):
            sync(path)
        check_place(output, overwrite)
        if output.exists():
            output.rename(old)
        try:
            folder.rename(output)
        except OSError:
            if old.exists():
                old.rename(output)
            raise
        sync(output.parent)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def runs(process: int) -> bool:
    """Whether a process other than this one is there."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Have a file or the names in a folder on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A readable JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def special_ids(tokenizer: Tokens | None) -> dict[str, int | None]:
    """Ids of bos, eos and pad; a document without a bos begins as after the end of another."""
    names = ("bos", "eos", "pad")
    ids = {name: None if tokenizer is None else tokenizer.special_id(name) for name in names}
    return ids | {"bos": ids["eos"] if ids["bos"] is None else ids["bos"]}


def begins_with_bos(trained: Trained, tokenizer: Tokens) -> bool:
    """Whether the model expects a bos at the beginning of a text."""
    known = trained.begins_with_bos
    return tokenizer.adds_bos if known is None else known


def write_tokenizer(tokenizer: Tokens, folder: Path, seq_len: int, bos: bool) -> None:
    """The files that transformers' AutoTokenizer reads.

    Args:
        bos: whether texts begin with a bos.
    """
    tokenizer.save_for_others(folder / "tokenizer.json", bos)
    tokens = tokenizer.tokens()
    ids = {name: tokenizer.special_id(name) for name in ("bos", "eos", "pad")}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    write_json(folder / "special_tokens_map.json", named)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if bos:
        settings["add_bos_token"] = True
    write_json(folder / "tokenizer_config.json", settings | named)


def model_card(trained: Trained, dtype: str, n_bytes: int, vocab_size: int) -> str:
    """README.md of the folder."""
    config, facts = trained.config, trained.facts
    contract = facts.get("contract", {})
    rows = {
        "architecture": f"{architecture(config)}, {config.n_layers} layers of {config.d_model}, "
        f"{config.n_heads} heads, context {config.max_seq_len}, vocabulary {vocab_size}",
        "weights": f"{sum(t.numel() for t in trained.weights.values()):,} in training; "
        f"{n_bytes / 1e6:.1f} MB of {dtype} here",
    }
    if contract:
        step = facts["global_step"]
        tokens = step * contract["global batch size"] * contract["data.seq_len"]
        data = contract["data.path"] or contract["data.mixture"]
        rows["trained on"] = f"{data}, {tokens:,} tokens in {step:,} steps"
        rows["precision"] = contract["trainer.precision"]
    for name, key in (("training loss", "train_loss"), ("validation loss", "val_loss")):
        if facts.get(key) is not None:
            rows[name] = f"{facts[key]:.4f} nats a token"
    if config.dropout:
        rows["dropout"] = f"{config.dropout} in training, none here"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"{EXPORTED} {version('relight')}.\n\n| | |\n|---|---|\n{table}\n\n"
        "```python\nfrom transformers import pipeline\n\n"
        'print(pipeline("text-generation", ".")("def main("))\n```\n'
    )


def compared(
    trained: Trained, folder: Path, kind: torch.dtype, size: int, tokenizer: Tokens | None
) -> Iterator[str]:
    """Load the folder again, by our reader and by transformers, and compare logits and tokens.

    Raises:
        RuntimeError: they differ.
    """
    rounded = {name: tensor.to(kind).float() for name, tensor in trained.weights.items()}
    length = min(trained.config.max_seq_len, MOST_POSITIONS)
    ids = torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = network(trained.config, rounded).eval()(ids)[..., :size]
        config, weights = read_folder(folder)
        again = network(config, weights).eval()(ids)
    ties = 0.0 if config.n_experts is None else TIES
    yield f"read again: {differ(ours, again, 'our reader', ties)}"
    if importlib.util.find_spec("transformers") is None or older(version("transformers")):
        yield "transformers, from release 5 on, is not installed: it did not read it"
        return
    theirs, tokens = by_transformers(folder, ids)
    yield f"by transformers {version('transformers')}: {differ(ours, theirs, 'transformers', ties)}"
    if tokenizer is None:
        return
    bos = begins_with_bos(trained, tokenizer)
    expected = tokenizer.start_ids(bos) + tokenizer.encode(PROBE)
    if tokens == expected:
        begin = ", with the bos before each text" if bos else ""
        yield f"its tokenizer gives the ids that the model was trained on{begin}"
    elif tokens and [i for i in tokens if i in expected] == expected:
        yield (
            "its tokenizer adds special tokens to a text, which training did not: pass "
            "add_special_tokens=False"
        )
    else:
        raise RuntimeError(f"transformers reads {PROBE!r} as {tokens}, training as {expected}")


def older(release: str) -> bool:
    """Whether a release of transformers is one that names the type of weights otherwise."""
    return int(release.partition(".")[0]) < 5


def differ(
    ours: Float[Tensor, "B T V"], theirs: Float[Tensor, "B T V"], who: str, ties: float
) -> str:
    """How far logits are apart, for people.

    Args:
        ties: share of positions at which they may be.

    Raises:
        RuntimeError: too far.
    """
    if ours.shape != theirs.shape:
        raise RuntimeError(f"{who} gives logits of {theirs.shape}, the model of {ours.shape}")
    apart = (ours - theirs).abs().amax(-1)[0]
    limit = TOLERANCE * max(1.0, float(ours.abs().max()))
    far = int((~(apart < limit)).sum())
    most = float(apart.max())
    if far > ties * len(apart):
        raise RuntimeError(
            f"the exported model, read by {who}, does not compute what the trained one does: "
            f"logits differ by {most:.2g} at position {int(apart.argmax())}; nothing was written"
        )
    if far:
        return f"logits of {len(apart) - far} of {len(apart)} positions within {limit:.0e}"
    return f"logits of all {len(apart)} positions within {most:.0e}"


def by_transformers(
    folder: Path, ids: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T V"], list[int] | None]:
    """Logits, and the ids of `PROBE`, by the classes that transformers chooses itself."""
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    with torch.inference_mode():
        found = model.eval()(ids).logits
    if not (folder / "tokenizer.json").is_file():
        return found, None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return found, tokenizer(PROBE)["input_ids"]


def accepted_by(config: ModelConfig, size: int, tokenizer: Tokens | None) -> list[str]:
    """What inference servers will take, and why not where not."""
    kind, head = architecture(config), config.head_size
    vllm = f"vLLM: takes {kind}"
    if head % 8 or head > WIDEST_HEAD:
        vllm += f", but its flash attention no heads of {head} (multiples of 8 up to {WIDEST_HEAD})"
    llama = f"llama.cpp: its converter takes {kind}"
    if tokenizer is None:
        llama += ", but needs a tokenizer"
    else:
        llama += (
            "; it knows tokenizers by a checksum of their ids and stops at one that it has not "
            "seen: add it to get_vocab_base_pre() with the pre-tokenizer that fits (gpt-2 for one "
            "trained by lightning prepare)"
        )
    narrow = [n for n in (config.d_model, config.ffn_dim) if n % 32]
    if narrow:
        llama += f"; rows of {narrow[0]} are no multiple of 32, so most quantised types are out"
    elif config.d_model % 256 or config.ffn_dim % 256:
        llama += "; K-quants need rows of multiples of 256 and will fall back to other types"
    return [vllm, llama]
