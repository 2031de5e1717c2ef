"""Raw text in, a folder of token files out: train.bin, val.bin, tokenizer.json, meta.json."""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers

from data.prepare.corpus import SourceFile, describe, python_files
from data.prepare.encode import Sources, encode, training_texts
from data.prepare.ownership import WORK, finished, refuse_others
from data.prepare.readers import Input, find_inputs, real_identity, refuse_twins
from data.prepare.summary import refuse_empty, repeated
from data.prepare.texts import ReadOptions
from data.prepare.vocabulary import find_tokenizer, train_bpe
from data.prepare.work import LISTS, Work
from data.system.atomic import replace_text, sync
from data.system.lock import Owner, held
from data.text.specials import END_OF_TEXT
from data.text.text_loss import TextLoss
from data.text.tokenizer import TextTokenizer
from data.tokens.folder import (
    FILES,
    FORMAT,
    TOKEN_FILE,
    load_meta,
    missing_files,
    split_fingerprint,
)

VAL_SHARE = 0.02
"""Share of a corpus's documents, chosen by name, that is kept for validation."""

BOS = "<|bos|>"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How files become a prepared folder."""

    tokenizer: str | None = None
    """File, folder, byte or tiktoken:NAME; None trains one."""
    vocab_size: int | None = None
    """Ids of the tokenizer to train."""
    read: ReadOptions = field(default_factory=ReadOptions)
    val_fraction: float = 0.01
    """Share of the documents that validates, chosen by their text; with val_input none."""
    val_input: Sequence[str] = ()
    """Files that validate."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    dtype: str = "auto"
    """Of the token files: auto, uint16 or uint32."""
    bos: bool = False
    """Store a bos before each document."""
    eos: str | None = None
    """Name of the token that ends a document."""
    pad: str | None = None
    """Name of the token that pads rows."""
    shard_tokens: int | None = None
    """Tokens of a token file; None puts all into one."""

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise ValueError(
                f"--val_fraction is {self.val_fraction}: must be above 0 and below 1; validation "
                "files of their own are given by --val_input"
            )
        if (self.tokenizer is None) == (self.vocab_size is None):
            given = "neither is" if self.tokenizer is None else "both are"
            raise ValueError(
                f"--tokenizer takes a tokenizer, --vocab_size trains one, and {given} given: give "
                "one of them"
            )
        if self.shard_tokens is not None and self.shard_tokens < 1:
            raise ValueError(f"--shard_tokens is {self.shard_tokens}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to prepare: the same job goes on where it was killed."""

    name: str
    """For errors."""
    sources: Sources
    settings: Settings
    corpus: dict[str, Any]
    """What `meta.json` tells of the sources."""
    more_text: str | None
    """How a split gets text; None where documents are divided by their text."""
    tokenizer: TextTokenizer | None
    """None trains one."""
    workers: int | None = None

    def identity(self) -> dict[str, Any]:
        """All that the result depends on, as JSON holds it."""
        known = {
            "format": FORMAT,
            "tokenizers": tokenizers.__version__,
            "corpus": self.corpus,
            "inputs": [[given, *each.identity] for given, each in self.sources.inputs],
            # A path has many spellings: relative, absolute or through a link.
            "real_inputs": [[given, *real_identity(each)] for given, each in self.sources.inputs],
            "tokenizer": self.tokenizer and self.tokenizer.fingerprint,
            "settings": asdict(self.settings),
        }
        return json.loads(json.dumps(known))

    def softer(self) -> dict[str, Any]:
        """The identity under settings that give the same result where nothing was left out."""
        identity = self.identity()
        settings = identity["settings"] | {"on_bad_row": "stop"}
        settings["read"] = settings["read"] | {"encoding_errors": "strict"}
        return identity | {"settings": settings}


def prepare_files(
    inputs: Sequence[str],
    output: Path,
    settings: Settings,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the documents of files, folders, globs or hub data sets as token files.

    A document ends with exactly one eos. A kill at any time leaves a whole set, or a folder
    without `meta.json` in which the same call goes on. Memory does not grow with the input.

    Args:
        overwrite: replace files in the folder that are not of the same inputs and settings.
        workers: threads that encode, all cores if None; the result does not depend on it. Heeded
            in full by a process that has not encoded yet.
        progress: a bar on a terminal, lines elsewhere, on stderr.

    Returns:
        What `meta.json` holds. `bytes` are UTF-8 bytes of text, separators not counted.

    Raises:
        ValueError: for inputs or settings that cannot be, a bad row, a split without text, or a
            folder that holds other files.
    """
    if workers is not None:
        if workers < 1:
            raise ValueError(f"--workers is {workers}: must be at least 1")
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # of the tokenizers library
    tokenizer = settings.tokenizer and find_tokenizer(settings.tokenizer)
    tokenizer = tokenizer.named(eos=settings.eos, pad=settings.pad) if tokenizer else None
    if os.path.lexists(output) and not output.is_dir():
        raise ValueError(f"--output {output} is there and is no folder: name a folder")
    if output.is_dir() and not overwrite:
        refuse_others(output, tokenizer)  # before a pipe is read, which may take hours
    words = {None: inputs, "val": settings.val_input}
    found: list[tuple[str | None, Input]] = []
    for given, names in words.items():
        split = "train" if settings.val_input and given is None else given
        found += [(split, each) for each in find_inputs(names, settings.read, output)]
    refuse_twins([each for _, each in found])
    named = [*inputs, *settings.val_input]
    job = Job(
        name=", ".join(named[:3]) + (f" and {len(named) - 3} more" if named[3:] else ""),
        sources=Sources(
            inputs=found,
            val_fraction=settings.val_fraction,
            skip_faults=settings.on_bad_row == "skip",
        ),
        settings=settings,
        corpus={"name": "files"},
        more_text="name inputs that hold text for it" if settings.val_input else None,
        tokenizer=tokenizer,
        workers=workers,
    )
    return _locked(job, output, progress, overwrite=overwrite)


def prepare_corpus(
    corpus: str,
    output: Path,
    vocab_size: int,
    *,
    overwrite: bool = False,
    progress: bool = True,
    made_already: bool = False,
) -> dict[str, Any]:
    """Train a tokenizer on a corpus and write it as token files, as `prepare_files` does.

    A document is one file of the corpus.

    Args:
        vocab_size: ids at most; a small corpus gives fewer.
        overwrite: replace files in the folder that are not of the same inputs and settings.
        made_already: take any whole corpus, such as one that another process made meanwhile.

    Raises:
        ValueError: for an unknown corpus, a vocabulary below the 256 bytes and the separator,
            a split without text, or a folder that holds other files.
    """
    found: list[tuple[str | None, Input]] = []
    for name, path in python_files(corpus):
        found.append(("val" if is_validation(name) else "train", SourceFile(name, path)))
    job = Job(
        name=f"corpus {corpus!r}",
        sources=Sources(inputs=found),
        settings=Settings(vocab_size=vocab_size),
        corpus=describe(corpus),
        more_text="use a larger corpus",
        tokenizer=None,
    )
    return _locked(job, output, progress, overwrite=overwrite, made_already=made_already)


def _locked(
    job: Job, output: Path, progress: bool, *, overwrite: bool, made_already: bool = False
) -> dict[str, Any]:
    if job.tokenizer is not None:
        _check_tokenizer(job.tokenizer, job.settings)
    made_from, softer = _made_from(job.identity()), _made_from(job.softer())

    def already() -> dict[str, Any] | None:
        if made_already and not missing_files(output):
            return load_meta(output)
        meta = None if overwrite else finished(output, made_from, softer, job.tokenizer)
        if meta is not None and progress:
            print(f"nothing to do: {output} is prepared from the same inputs", file=sys.stderr)
        return meta

    # Before the lock too, which a folder that can only be read has no place for.
    if output.is_dir() and (meta := already()) is not None:
        return meta
    # Runs that start together on a missing corpus prepare it once.
    with held(output, Waiting(output)):
        if (meta := already()) is not None:
            return meta
        work = Work(output / WORK, job.identity(), job.softer())
        try:
            meta = work.meta or _prepare(job, work, progress)
        except ValueError:
            if not work.kept:
                work.remove()
            raise
        except OSError as error:
            free = shutil.disk_usage(output).free / 1e6
            error.add_note(
                f"{work.folder} keeps {work.kept:,} documents, {free:,.0f} MB are free there; mend "
                "that, and the same call goes on"
            )
            raise
        finally:
            work.close()
        _publish(work, output, meta)
        return meta


class Waiting:
    """Says once who is waited for."""

    def __init__(self, output: Path) -> None:
        self.output, self.told = output, False

    def __call__(self, owner: Owner) -> None:
        if not self.told:
            print(f"waiting for {owner}, which prepares {self.output}", file=sys.stderr)
        self.told = True


def _made_from(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity as `meta.json` keeps it: lists of inputs, which may be long, as digests."""
    inputs = {key: json.dumps(identity[key]).encode("utf-8") for key in LISTS}
    return identity | {key: hashlib.sha256(text).hexdigest() for key, text in inputs.items()}


def _prepare(job: Job, work: Work, progress: bool) -> dict[str, Any]:
    settings, path = job.settings, work.folder / "tokenizer.json"
    tokenizer = job.tokenizer
    if work.state is None:
        tokenizer = tokenizer or _train(job, progress)
        tokenizer.save(path)
    tokenizer = tokenizer or TextTokenizer.load(path)
    dtype = token_dtype(tokenizer.size) if settings.dtype == "auto" else settings.dtype
    state = work.open(dtype, settings.shard_tokens, len(job.sources.inputs))
    sources = job.sources.with_validation() if settings.val_input else job.sources
    encode(sources, tokenizer, work, bos=settings.bos, workers=job.workers, show=progress)
    refuse_empty(job.name, state, job.more_text)
    ids = {kind: tokenizer.special_id(kind) for kind in ("eos", "bos", "pad")}
    meta: dict[str, Any] = {
        "format": FORMAT,
        "dtype": dtype,
        "byte_order": "little",
        "vocab_size": tokenizer.size,
        "special_ids": {kind: number for kind, number in ids.items() if number is not None},
        "bos_stored": settings.bos,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "corpus": job.corpus,
        "made_from": _made_from(job.identity()),
        "left_out": dict(state["left_out"]),
        "sources": {},
    }
    names = [each.name for _, each in job.sources.inputs]
    for split, writer in work.writers.items():
        writer.finish()
        counts = {key: value for key, value in state[split].items() if key != "sources"}
        fingerprint = split_fingerprint([work.folder / name for name in writer.files])
        meta[split] = {"files": writer.files, **counts, "fingerprint": fingerprint}
        meta["sources"][split] = [
            {"name": name, "documents": count}
            for name, count in zip(names, state[split]["sources"], strict=True)
            if count
        ]
    if job.corpus["name"] == "files" and (twins := repeated(names, state)):
        meta["repeated"] = twins
    if (loss := TextLoss.read(state["text_loss"])).warnings:
        meta["text_loss"] = loss.content
    if tokenizer.ignored:
        meta["ignored_settings"] = tokenizer.ignored
    meta["token_bytes"] = tokenizer.token_bytes().tolist()
    replace_text(work.folder / "meta.json", json.dumps(meta))
    return meta


def _train(job: Job, progress: bool) -> TextTokenizer:
    settings = job.settings
    assert settings.vocab_size is not None
    specials = [settings.eos or END_OF_TEXT, *([BOS] if settings.bos else []), settings.pad]
    names = list(dict.fromkeys(name for name in specials if name is not None))
    tokenizer = train_bpe(training_texts(job.sources, progress), settings.vocab_size, names)
    tokenizer = tokenizer.named(eos=names[0], pad=settings.pad)
    _check_tokenizer(tokenizer, settings)
    return tokenizer


def _check_tokenizer(tokenizer: TextTokenizer, settings: Settings) -> None:
    tokenizer.eos_id  # noqa: B018  # raises where there is none
    if settings.bos and tokenizer.special_id("bos") is None:
        raise ValueError(
            f"--bos is given, but {tokenizer.source} has no bos token: leave it out, or take a "
            "tokenizer that has one"
        )
    if settings.dtype == "uint16" and token_dtype(tokenizer.size) != "uint16":
        raise ValueError(
            f"--dtype is uint16, whose ids are below 65536, but {tokenizer.source} has vocab size "
            f"{tokenizer.size}: leave --dtype out or give uint32"
        )


def _publish(work: Work, output: Path, meta: dict[str, Any]) -> None:
    files = [*meta["train"]["files"], *meta["val"]["files"]]
    # An older set must not look whole while its files are being replaced.
    (output / "meta.json").unlink(missing_ok=True)
    for path in output.iterdir():
        if TOKEN_FILE.fullmatch(path.name) and path.name.removesuffix(".max_id.json") not in files:
            path.unlink()
    sync(output)
    work.publish(output, [*FILES[1:4:2], *files, *FILES[4:]])


def is_validation(name: str) -> bool:
    """Whether the document of that name is kept for validation, on every machine alike."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < VAL_SHARE * 2**64


def token_dtype(n_ids: int) -> str:
    """The narrowest type that holds the ids 0 … n_ids - 1."""
    return "uint16" if n_ids <= 1 << 16 else "uint32"
