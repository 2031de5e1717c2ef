"""Output folders: prepare replaces the files that it made itself, and others only when told to."""

from pathlib import Path
from typing import Any

from data.prepare.work import LISTS, same_job
from data.text.tokenizer import TextTokenizer
from data.tokens.folder import (
    FILES,
    check_files,
    is_output,
    load_meta,
    lost_meta,
    missing_files,
)
from data.tokens.foreign import SUFFIXES, is_foreign

WORK = ".work"
REPLACE = "name another folder, or replace them by lightning prepare --overwrite"


def refuse_others(output: Path, tokenizer: TextTokenizer | None) -> dict[str, Any] | None:
    """Return the meta of a corpus in a folder, None where there is none.

    Args:
        tokenizer: of the job; its own file may lie in the folder already.

    Raises:
        ValueError: prepare would replace files there that another program made.
    """
    held = sorted(name for name in _names(output) if is_output(name))
    if (output / WORK / "meta.json").is_file():
        return None  # a kill interrupted the renaming, which replaces these files
    meta = _own_meta(output)
    ours = set() if meta is None else _own_names(meta)
    others = [name for name in held if name not in ours]
    if is_foreign(str(output)):
        others = sorted(name for name in _names(output) if name.endswith(SUFFIXES))
    elif others == ["tokenizer.json"] and _is(output / "tokenizer.json", tokenizer):
        others = []
    if others and (lost := lost_meta(output)):
        raise ValueError(f"{lost}, so the inputs of the files beside it are unknown: {REPLACE}")
    if others:
        raise ValueError(f"{output} holds {_listed(others)} that prepare did not make: {REPLACE}")
    return meta


def finished(
    output: Path, made_from: dict[str, Any], softer: dict[str, Any], tokenizer: TextTokenizer | None
) -> dict[str, Any] | None:
    """Return the meta of a whole corpus made from the same, None where there is none yet.

    Args:
        made_from: inputs and settings, as `meta.json` keeps them.
        softer: the same with the settings that change nothing where nothing was left out.
        tokenizer: of the job; its own file may lie in the folder already.

    Raises:
        ValueError: the folder holds files that would be replaced: another program's, files
            that changed since, or a corpus made from something else.
    """
    meta = refuse_others(output, tokenizer)
    if meta is None:
        return None
    known = meta.get("made_from")
    if known is None or not any(same_job(known, each) for each in (made_from, softer)):
        changes = "an older version made it" if known is None else _changes(known, made_from)
        raise ValueError(f"{output} holds another prepared corpus ({changes}): {REPLACE}")
    if missing_files(output):
        return None  # made again, which brings them back
    check_files(output, meta)
    return meta


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _own_meta(output: Path) -> dict[str, Any] | None:
    try:
        return load_meta(output)
    except ValueError:
        return None


def _own_names(meta: dict[str, Any]) -> set[str]:
    files = [*meta["train"]["files"], *meta["val"]["files"]]
    beside = [name for name in FILES if not name.endswith(".bin")]
    return {*files, *beside, *(f"{file}.max_id.json" for file in files)}


def _is(path: Path, tokenizer: TextTokenizer | None) -> bool:
    try:
        return tokenizer is not None and (
            TextTokenizer.load(path).fingerprint == tokenizer.fingerprint
        )
    except ValueError:
        return False


def _listed(names: list[str]) -> str:
    *most, last = names[:4] if len(names) < 5 else [*names[:3], f"{len(names) - 3} more files"]
    return f"{', '.join(most)} and {last}" if most else last


def _changes(known: dict[str, Any], made_from: dict[str, Any]) -> str:
    """The settings that differ, with both values; else which other part of the job does."""
    old, new = (_flat(each["settings"]) for each in (known, made_from))
    same_inputs = any(known.get(key) == made_from[key] for key in LISTS)
    spelled = {"val_input": same_inputs, "tokenizer": known["tokenizer"] == made_from["tokenizer"]}
    changed = [key for key in new if old.get(key) != new[key] and not spelled.get(key)]
    if changed:
        return ", ".join(f"--{key} was {old.get(key)}, is {new[key]}" for key in changed)
    if not same_inputs:
        return "its inputs are others, or changed since"
    parts = {
        "corpus": "its source files are of other versions",
        "tokenizer": "its tokenizer is another one",
    }
    changed = [said for key, said in parts.items() if known.get(key) != made_from[key]]
    return changed[0] if changed else "another version of the tokenizers library made it"


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | settings["read"] | {"read": None}
