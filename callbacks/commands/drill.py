"""`lightning drill`: kills, resumes and the comparison, as a report."""

import random
import sys
from pathlib import Path

from callbacks.config.options import OTHERS, LineParser, integer


def drill(argv: list[str]) -> None:
    """Kill and resume a run, and check that its result is bit-identical."""
    parser = LineParser(drill, epilog=OTHERS)
    add = parser.add_argument
    add("--kills", type=integer, default=5, help="how often the run is killed")
    add("--steps", type=integer, help="shorten the run to so many optimizer steps")
    add("--seed", type=integer, default=0, help="of the moments and times")
    add("--elastic", action="store_true", help="also go on under another split of the batch")
    options, run = parser.parse_known_args(argv)
    if options.kills < 1:
        raise ValueError(f"--kills is {options.kills}: must be at least 1")
    if options.steps is not None and options.steps < 6:
        raise ValueError(f"--steps is {options.steps}: must be at least 6, to save and validate")

    from callbacks.config.files import read_pipes
    from callbacks.drill import drill as fire_drill
    from callbacks.run.devices import count_devices, device_type
    from callbacks.run.lightning_cli import parse_run
    from callbacks.run.plan import run_plan
    from lm.compile import why_not_compiled
    from lm.flops import flops_per_token

    run = read_pipes(run)
    config = parse_run([*run, *shortened(options.steps)]).config
    trainer, micro_batch_size = config.trainer, config.data.micro_batch_size
    split = (micro_batch_size, trainer.accumulate_grad_batches, count_devices(trainer))
    other = fire_drill.other_split(*split) if options.elastic else ()
    root = Path(trainer.default_root_dir + "-drill")
    draw = random.Random(options.seed)
    plan = fire_drill.plan_kills(
        options.kills,
        draw,
        accumulates=trainer.accumulate_grad_batches > 1,
        validates=trainer.limit_val_batches != 0,
    )
    say = print_in_place if sys.stderr.isatty() else lambda line: None
    arguments = [*run, *shortened(options.steps), "--trainer.log_every_n_steps=1"]
    arguments += ["--tracker.name=null", "--ckpt_path=last"]
    if options.steps and config.model.compile == "auto":
        # As the whole run decides, where a short one would not be compiled.
        whole = run_plan(parse_run(run), ())
        per_token = flops_per_token(whole.config, whole.config.max_seq_len)
        run_flops = per_token * whole.tokens_per_step * (whole.steps or 0)
        compiled = why_not_compiled("auto", device_type(trainer.accelerator), run_flops) is None
        arguments.append(f"--model.compile={str(compiled).lower()}")
    changed, loss, elastic = 0, 0.0, None
    with fire_drill.claim(root):
        print(f"drill: {options.kills} kills, seed {options.seed}, in {root}", flush=True)
        outcome = fire_drill.drill(arguments, root, plan, draw, say)
        if other and not outcome.found:
            elastic = fire_drill.elastic(arguments, root, other, say)
    print(f"\n{'start':>5}  {'resumed from':<14}{'killed':<36}{'last step seen':>14}")
    for number, start in enumerate(outcome.starts, 1):
        moment, *when = start.moment.split(":")
        killed = " ".join([moment, *(f"#{word}" for word in when[:1]), *when[1:]])
        killed = killed if start.code else "ran to its end"
        print(f"{number:>5}  {start.resumed_from:<14}{killed:<36}{start.last_step:>14}")
    for where, bits in outcome.found[:5]:
        print(f"differs: {where}: {bits} bits")
    if elastic is not None:
        step, steps, changed, loss = elastic
        print(
            f"elastic: {' × '.join(map(str, split))} until step {step}, then "
            f"{' × '.join(map(str, other))} (micro-batch × accumulate × devices): the same samples "
            f"in {steps - changed} of {steps} steps, losses within {loss:.0e} of each other"
        )
    print(f"drill: {outcome.kills} kills, {outcome.bits} differing bits")
    if outcome.found or changed:
        places = len(outcome.found) + changed
        on_gpu = device_type(trainer.accelerator) == "cuda" and not trainer.deterministic
        hint = "; on a GPU only --trainer.deterministic true repeats all bits" if on_gpu else ""
        raise RuntimeError(f"the runs differ in {places} places; they are in {root}{hint}")
    if outcome.kills < options.kills:
        raise RuntimeError(
            f"the run never came to {options.kills - outcome.kills} of {options.kills} kills: "
            "lengthen it, or save and validate more often"
        )
    if not loss <= fire_drill.SPLIT_LOSS:  # nan too
        raise RuntimeError(f"losses under the other split differ by {loss:.0e}; see {root}")


def shortened(steps: int | None) -> list[str]:
    """Options of a run cut down to so many steps, in which it still saves and validates."""
    if steps is None:
        return []
    length = [f"--trainer.max_steps={steps}", "--data.total_tokens=null", "--data.epochs=null"]
    every = [
        f"--checkpoint.every_n_steps={steps // 6}",
        f"--trainer.val_check_interval={steps // 3}",
    ]
    return [*length, *every]


def print_in_place(line: str) -> None:
    """Show a passing line on a terminal."""
    print(f"\r{line:<78}", end="", file=sys.stderr, flush=True)
