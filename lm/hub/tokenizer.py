"""Tokenizer files of an export."""

from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

from lm.hub.files import write_json
from lm.trained import Trained


@runtime_checkable
class Tokens(Protocol):
    """The tokenizer methods that an export uses; lm does not import data."""

    size: int
    """Largest id + 1."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def tokens(self) -> dict[int, str]:
        """Return the token of each id."""
        ...

    def special_id(self, kind: str) -> int | None:
        """Return the id of eos, bos or pad."""
        ...

    @cached_property
    def adds_bos(self) -> bool:
        """Whether the tokenizer's file adds the bos to each text."""
        ...

    def start_ids(self, bos: bool) -> list[int]:
        """Return the ids at the start of a document."""
        ...

    def save_for_others(self, path: Path, bos: bool) -> None:
        """Write a tokenizer.json that adds the bos to each text if `bos`."""
        ...


def special_ids(tokenizer: Tokens | None) -> dict[str, int | None]:
    """Return the ids of bos, eos and pad; without a bos, documents start after an eos."""
    names = ("bos", "eos", "pad")
    ids = {name: None if tokenizer is None else tokenizer.special_id(name) for name in names}
    return ids | {"bos": ids["eos"] if ids["bos"] is None else ids["bos"]}


def begins_with_bos(trained: Trained, tokenizer: Tokens) -> bool:
    """Whether the model was trained with a bos at the start of each document."""
    known = trained.begins_with_bos
    return tokenizer.adds_bos if known is None else known


def write_tokenizer(tokenizer: Tokens, folder: Path, seq_len: int, bos: bool) -> None:
    """Write the files that transformers' AutoTokenizer reads.

    Args:
        bos: Whether texts begin with a bos.
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
