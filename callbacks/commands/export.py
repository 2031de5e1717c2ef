"""`lightning export`: a trained model as a Hugging Face folder."""

from pathlib import Path

from callbacks.config.options import LineParser, finite, local_path
from callbacks.run.trained import TRAINED, read_trained, tokenizer_of


def export(argv: list[str]) -> None:
    """Write a trained model as a verified Hugging Face folder."""
    parser = LineParser(export)
    add = parser.add_argument
    add("--ckpt_path", required=True, type=local_path, help=TRAINED)
    add("--output", required=True, type=local_path, metavar="DIR", help="folder to make")
    add("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="of the weights (fp32)")
    add("--tokenizer", type=local_path, help="tokenizer.json; unset: the one in the run folder")
    add("--overwrite", action="store_true", help="replace an export that is there")
    add("--shard_gb", type=finite, default=5.0, metavar="X", help="largest file of weights (5)")
    options = parser.parse_args(argv)
    if not options.shard_gb > 0:
        raise ValueError(f"--shard_gb is {options.shard_gb}: must be above 0")

    from lm.hub.export import export as write
    from lm.hub.folder import check_place

    output = Path(options.output)
    check_place(output, options.overwrite)
    trained = read_trained(Path(options.ckpt_path))
    with_tokenizer = trained.has_tokenizer or options.tokenizer
    lines = write(
        trained,
        output,
        dtype=options.dtype,
        tokenizer=tokenizer_of(trained, options.tokenizer) if with_tokenizer else None,
        overwrite=options.overwrite,
        shard_bytes=options.shard_gb * 1e9,
    )
    print("\n".join(lines))
