"""Weights that a run starts from (model.from_weights), and their tokenizer's check."""

from functools import partial
from pathlib import Path

from torch import Tensor

from callbacks.run.announce import announce
from callbacks.run.trained import read_trained
from data.datamodule import LMDataModule
from data.text.tokenizer import TextTokenizer, check_same_ids
from lm.module import LMModule
from lm.trained import Trained, starting_weights


def read_start(model: LMModule, data: LMDataModule) -> None:
    """Read the weights that a run starts from; they are compared when its data is known."""
    if model.from_weights is not None:
        trained = read_trained(Path(model.from_weights), "model.from_weights")
        model.starting_weights = partial(checked_weights, trained, model, data)


def checked_weights(trained: Trained, model: LMModule, data: LMDataModule) -> dict[str, Tensor]:
    """Return the weights to start from, after a check that ids mean the same to them."""
    check_tokenizer(trained, data, model.grow_vocab)
    return starting_weights(trained, model.config, model.grow_vocab)


def check_tokenizer(trained: Trained, data: LMDataModule, grow: bool) -> None:
    """Check that the data's token ids mean the same to the weights; warn if that is unknown.

    Raises:
        ValueError: the tokenizers differ.
    """
    known = trained.tokenizer_fingerprint
    new = data.tokenizer if data.tokenizer_path is not None else None
    if new is not None and known == new.fingerprint:
        return
    place = trained.tokenizer_path
    old = TextTokenizer.load(place.parent) if place.is_file() else None
    if new is not None and old is not None and known in (None, old.fingerprint):
        return check_same_ids(new, old, trained.source, grow)
    if new is not None and known is not None:
        raise ValueError(
            f"the data's tokenizer ({new.fingerprint[:12]}) is not that of "
            f"model.from_weights {trained.source} ({known[:12]}); put that one's "
            f"tokenizer.json beside it, and prepare the data with it"
        )
    announce(
        f"warning: whether the ids of the data mean the same to {trained.source} is "
        "not known: one of them has no tokenizer"
    )
