"""`lightning prepare`: raw text to token files."""

import argparse
import sys
from pathlib import Path

from callbacks.config.options import LineParser, finite, integer, local_path, nonempty

OVERWRITE = "--overwrite"
"""The option that both forms of the command share."""


def prepare(argv: list[str]) -> None:
    """Turn raw text, or the corpus of a configuration, into token files."""
    if any(word.partition("=")[0] == "--input" for word in argv):
        return prepare_input(argv)
    if {"-h", "--help"} & {*argv}:
        print(input_parser().format_help(), "", sep="\n")
    overwrite, argv = OVERWRITE in argv, [word for word in argv if word != OVERWRITE]

    from callbacks.run.lightning_cli import parse_run
    from data.prepare.prepare import prepare_corpus
    from data.prepare.summary import summary

    data = parse_run(argv).datamodule
    if data.path is None:
        raise ValueError(
            "data.mixture is given: its folders are prepared one by one, by lightning prepare "
            "--input FILES --output DIR"
        )
    if data.corpus is None:
        raise ValueError(
            f"data.corpus is not set, so there is nothing to make data.path {data.path} of; bring "
            "a folder with its files, set data.corpus to python or stdlib, or name your text by "
            "lightning prepare --input FILES --output DIR"
        )
    meta = prepare_corpus(data.corpus, data.path, data.vocab_size, overwrite=overwrite)
    print_summary(summary(meta, data.path))


def input_parser() -> argparse.ArgumentParser:
    """Options of `prepare --input`."""
    parser = LineParser(
        prepare,
        usage="lightning prepare --input FILE ... --output DIR [--OPTION VALUE ...]"
        "\n       lightning prepare --config FILE [--KEY VALUE ...]",
        description="Turn text into token files. A killed call goes on when it is given again.",
        epilog="With --config, the corpus named by data.corpus is prepared at data.path; "
        f"{OVERWRITE} works there too.",
    )
    add = parser.add_argument
    kinds = ".jsonl, .json (an object a line), .txt, also .gz, .zst, .bz2 or .xz; .parquet"
    words = f"files, folders, globs, pipes or - ({kinds}), hf:NAME[:SPLIT]"
    add("--input", required=True, nargs="+", type=local_path, metavar="FILE", help=words)
    words = "folder to make, for data.path"
    add("--output", required=True, type=local_path, metavar="DIR", help=words)
    words = "tokenizer.json, its folder, byte, or tiktoken:NAME; unset: one is trained"
    add("--tokenizer", type=local_path, metavar="NAME", help=words)
    add("--vocab_size", type=integer, metavar="N", help="ids of the BPE to train, on up to 512 MB")
    words = "key of the text in a row, dots lead into objects (text)"
    add("--field", default="text", type=nonempty, help=words)
    words = "documents of .txt: file (default), blank_line, or what stands between two of them"
    add("--split_documents", default="file", metavar="RULE", help=words)
    words = "share of documents to validate on, chosen by their text (0.01)"
    add("--val_fraction", type=finite, default=0.01, metavar="X", help=words)
    words = "files to validate on instead"
    add("--val_input", default=[], nargs="+", type=local_path, metavar="FILE", help=words)
    words = "at a row that is no text: stop (default), or skip and count"
    add("--on_bad_row", default="stop", choices=("stop", "skip"), help=words)
    words = "what is not UTF-8: strict, a bad row (default), or replace by U+FFFD"
    add("--encoding_errors", default="strict", choices=("strict", "replace"), help=words)
    words = "of the token files (auto: the narrowest that fits)"
    add("--dtype", default="auto", choices=("auto", "uint16", "uint32"), help=words)
    add("--bos", action="store_true", help="store a bos before each document, not only its eos")
    add("--eos", type=nonempty, metavar="TOKEN", help="name of the token that ends a document")
    add("--pad", type=nonempty, metavar="TOKEN", help="name of the token that pads rows")
    words = "tokens of a file; unset: one file a split"
    add("--shard_tokens", type=integer, metavar="N", help=words)
    words = "replace files in the output folder that were not made from the same inputs"
    add(OVERWRITE, action="store_true", help=words)
    add("--workers", type=integer, metavar="N", help="threads that encode (all cores)")
    return parser


def prepare_input(argv: list[str]) -> None:
    """Turn the files that a command line names into token files."""
    options = vars(input_parser().parse_args(argv))
    inputs, output = options.pop("input"), Path(options.pop("output"))
    how = {name: options.pop(name) for name in ("overwrite", "workers")}

    from data.prepare.prepare import Settings, prepare_files
    from data.prepare.summary import summary
    from data.prepare.texts import ReadOptions

    read = {name: options.pop(name) for name in ("field", "split_documents", "encoding_errors")}
    settings = Settings(read=ReadOptions(**read), **options)
    print_summary(summary(prepare_files(inputs, output, settings, **how), output))


def print_summary(lines: list[str]) -> None:
    """Print lines, warnings among them to stderr."""
    for line in lines:
        print(line, file=sys.stderr if line.startswith("warning") else sys.stdout)
