"""Trained models by path: model, tokenizer, device."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.text.tokenizer import TextTokenizer
    from lm.model import LM
    from lm.trained import Trained

TRAINED = "run folder (its newest checkpoint), checkpoint, weights file or export"
"""Paths that hold weights, as help and errors name them."""


def load_trained(
    ckpt_path: str, device: str, tokenizer_path: str | None
) -> "tuple[LM, TextTokenizer, list[int]]":
    """Return a trained model, its tokenizer, and the ids that documents begin with."""
    device = usable_device(device)
    trained = read_trained(Path(ckpt_path))
    tokenizer = tokenizer_of(trained, tokenizer_path)
    bos = trained.begins_with_bos
    start = tokenizer.start_ids(tokenizer.adds_bos if bos is None else bos)
    return trained.model().to(device), tokenizer, start


def usable_device(asked: str) -> str:
    """Return the device type for the value of --device."""
    import torch

    from callbacks.run.devices import device_type

    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but this machine has none; leave it out or give cpu")
    torch.set_float32_matmul_precision("highest")  # as in training
    return device_type(asked)


def read_trained(place: Path, key: str = "--ckpt_path") -> "Trained":
    """Read a run folder's newest intact checkpoint, a checkpoint, a weights file or an export.

    Raises:
        ValueError: the path leads to none of them.
    """
    import zipfile

    from callbacks.checkpoint.files import WEIGHTS, checkpoints, read_checkpoint, read_newest
    from callbacks.run.announce import announce
    from lm.hub.files import names_model
    from lm.trained import from_checkpoint, from_folder, from_weights_file

    if not place.exists():
        raise ValueError(
            f"{key} {place} does not exist; give a {TRAINED}, each as a path on this machine"
        )
    if names_model(place) and not checkpoints(place):
        return from_folder(place)
    if (place / WEIGHTS).is_file() and not checkpoints(place):
        return from_weights_file(place / WEIGHTS)
    known = place.suffix in (".ckpt", ".safetensors") or not place.is_file()
    if not known and not zipfile.is_zipfile(place):
        raise ValueError(
            f"{key} {place} is no checkpoint and no weights file by its content: give one, or of a "
            "model in Hugging Face's form the folder"
        )
    if place.is_dir():
        path, content = read_newest(place, announce)
        return from_checkpoint(content, path)
    if place.suffix == ".safetensors":
        return from_weights_file(place)
    return from_checkpoint(read_checkpoint(place), place)


def tokenizer_of(trained: "Trained", path: str | None = None) -> "TextTokenizer":
    """Return the tokenizer of a trained model: the one beside it, or a given one if it is the same.

    Raises:
        ValueError: the tokenizer is missing or that of another model.
    """
    from data.text.tokenizer import TextTokenizer

    source, fingerprint = trained.source, trained.tokenizer_fingerprint
    if path is None and not trained.has_tokenizer:
        raise ValueError(
            f"{source} was trained on token files without a tokenizer; name theirs by --tokenizer"
        )
    found = trained.tokenizer_path if path is None else Path(path)
    if not found.is_file():
        raise ValueError(f"{found} does not exist; name the tokenizer.json by --tokenizer")
    # Hugging Face's folders name special tokens in a file beside.
    beside = found.name == "tokenizer.json" and (found.parent / "tokenizer_config.json").is_file()
    tokenizer = TextTokenizer.load(found.parent if beside else found)
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        raise ValueError(
            f"{found} has fingerprint {tokenizer.fingerprint[:12]}, but {source} was trained with "
            f"{fingerprint[:12]}; give that one by --tokenizer"
        )
    if tokenizer.size > trained.config.vocab_size:
        raise ValueError(
            f"{found} has {tokenizer.size} ids, more than the {trained.config.vocab_size} of "
            f"{source}: it is another model's; name the right one by --tokenizer"
        )
    return tokenizer


def export_weights(file: Path, folder: Path) -> list[str]:
    """Export a weights file to a folder, and return the lines to print."""
    from lm.hub.export import export

    trained = read_trained(file)
    tokenizer = tokenizer_of(trained) if trained.has_tokenizer else None
    return export(trained, folder, tokenizer=tokenizer, overwrite=folder.exists())
