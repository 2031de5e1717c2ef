"""`lightning peek`: training samples as the model gets them."""

from callbacks.config.options import OTHERS, LineParser, integer


def peek(argv: list[str]) -> None:
    """Show samples as the model gets them: text, targets and padding."""
    parser = LineParser(peek, epilog=OTHERS)
    add = parser.add_argument
    add("--count", type=integer, default=3, help="how many samples (3)")
    add("--step", type=integer, default=1, help="optimizer step whose first samples are shown (1)")
    options, run = parser.parse_known_args(argv)
    if options.count < 1:
        raise ValueError(f"--count is {options.count}: must be at least 1")
    if options.step < 1:
        raise ValueError(f"--step is {options.step}: steps are counted from 1")

    from callbacks.run.devices import count_devices
    from callbacks.run.lightning_cli import parse_run
    from data.peek import MARKS
    from data.peek import peek as look

    cli = parse_run(run)
    trainer, data = cli.config.trainer, cli.datamodule
    data.prepare_data()
    world_size = count_devices(trainer) * trainer.num_nodes
    a_step = data.micro_batch_size * trainer.accumulate_grad_batches * world_size
    samples = data.training_samples()
    print(
        "\n".join(
            [*samples.start_lines, f"nothing is learned from what stands in {'…'.join(MARKS)}"]
        )
    )
    for head, text in look(samples, data.tokenizer, (options.step - 1) * a_step, options.count):
        print(f"\n{head}\n{text}")
