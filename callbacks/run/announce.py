"""Messages to the user, printed once per run."""

import sys
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only

# Called before a message: they end a console line that is still being updated in place.
line_enders: list[Callable[[], None]] = []


@rank_zero_only
def announce(line: str) -> None:
    """Print a message on stderr, on rank 0 only."""
    for end_line in line_enders:
        end_line()
    print(line, file=sys.stderr, flush=True)
