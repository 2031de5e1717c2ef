"""`lightning plan`: a run's numbers, known without training."""

from callbacks.config.options import OTHERS, LineParser, finite


def plan(argv: list[str]) -> None:
    """Show everything that can be known of a run without training."""
    parser = LineParser(plan, epilog=OTHERS)
    add = parser.add_argument
    add("--json", action="store_true", help="print all numbers as JSON, for scripts")
    add("--hours", type=finite, nargs="+", help="durations to look at; unset: 8 to 67 hours")
    options, run = parser.parse_known_args(argv)
    for hours in options.hours or ():
        if not 0 < hours < float("inf"):
            raise ValueError(f"--hours is {hours:g}: must be a number above 0")

    import json
    from dataclasses import asdict

    from callbacks.run.lightning_cli import parse_run
    from callbacks.run.plan import run_plan
    from callbacks.run.trainer_arguments import check_arguments
    from lm.plan import HOURS, ledger
    from lm.plan_table import table

    cli = parse_run(run)
    check_arguments(vars(cli.config.trainer))
    found = ledger(run_plan(cli, tuple(options.hours or HOURS)))
    print(json.dumps(asdict(found), indent=1) if options.json else table(found))
