"""Which tokens of a vocabulary end, begin and pad: found by usual names, or told."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
"""The document separator of the tokenizers we train; always id 0."""

EOS_NAMES = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "[EOS]")
"""Names of the end of a document; the first that a vocabulary has is taken."""

BOS_NAMES = ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]")
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
SPECIAL_NAMES = {"eos": EOS_NAMES, "bos": BOS_NAMES, "pad": PAD_NAMES}
"""The first that a vocabulary has is taken."""

UNUSED = "<|unused{}|>"
"""Name of a token that fills a gap between the ids of a tiktoken vocabulary."""

NAMED = "relight:"


def declared_names(folder: Path) -> dict[str, str]:
    """Names by kind that the files of a Hugging Face folder give.

    Raises:
        ValueError: for a file that is damaged.
    """
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_object(folder / file)
        for kind in SPECIAL_NAMES:
            token = content.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[kind] = token
    return names


def declared_bos(folder: Path) -> bool | None:
    """Whether a Hugging Face folder says that texts begin with the bos; None if it does not say."""
    found = _read_object(folder / "tokenizer_config.json").get("add_bos_token")
    return found if isinstance(found, bool) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): fetch it again") from error
    return content if isinstance(content, dict) else {}


def _processors(content: dict[str, Any]) -> list[dict[str, Any]]:
    found = content.get("post_processor") or {"type": "Sequence", "processors": []}
    return found["processors"] if found["type"] == "Sequence" else [found]


def told_names(content: dict[str, Any]) -> dict[str, str]:
    """Names by kind that a tokenizer.json was given by `with_told_names`."""
    return {
        name.removeprefix(NAMED): token["tokens"][0]
        for processor in _processors(content)
        for name, token in processor.get("special_tokens", {}).items()
        if name.startswith(NAMED) and isinstance(token, dict)
    }


def with_told_names(content: dict[str, Any], told: dict[str, str], ids: dict[str, Any]) -> str:
    """A tokenizer.json with names by kind: as tokens of a template that adds nothing."""
    text, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    tokens = {
        NAMED + kind: {"id": NAMED + kind, "ids": [ids[name]], "tokens": [name]}
        for kind, name in told.items()
    }
    template = {"type": "TemplateProcessing", "single": [text], "pair": [text, second]}
    kept = [one for one in _processors(content) if not told_names({"post_processor": one})]
    processors = [*kept, template | {"special_tokens": tokens}]
    content["post_processor"] = {"type": "Sequence", "processors": processors}
    return json.dumps(content, indent=2, ensure_ascii=False)


def with_bos(content: dict[str, Any], bos: str, bos_id: int) -> None:
    """Make a tokenizer.json begin each text with a bos, as other libraries read it."""
    text, second = ({"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB"))
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [first, text]}
    template |= {"pair": [first, text, second]}
    template |= {"special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}}
    told = [one for one in _processors(content) if told_names({"post_processor": one})]
    content["post_processor"] = {"type": "Sequence", "processors": [*told, template]}


def ignored_settings(content: dict[str, Any]) -> list[str]:
    """Settings of a tokenizer.json that `neutralize` and its reader turn off, for people."""
    found = {
        "dropout": content["model"].get("dropout"),
        "truncation": (content.get("truncation") or {}).get("max_length"),
        "padding": content.get("padding") and "on",
    }
    return [f"{name} {value}" for name, value in found.items() if value]


def neutralize(content: dict[str, Any], special_ids: Collection[int | None]) -> bool:
    """Make a text have the same ids each time, and none of `special_ids` for what it spells.

    Returns:
        Whether the content was changed.
    """
    changed = bool(content["model"].get("dropout"))
    if changed:
        content["model"]["dropout"] = None
    for token in content.get("added_tokens", []):
        if token["id"] in special_ids and not token["special"]:
            token["special"] = changed = True
    return changed


def read_text(path: Path) -> str:
    """The text of a tokenizer's file.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a tokenizer.json ({error}): name another file") from error
