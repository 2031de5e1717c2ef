"""Which samples a rank's batches hold, and the loader that hands them out."""

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from data.order import step_samples
from data.system.processes import signals_held, start_worker


class StepBatches:
    """Batch sampler of one rank: the sample numbers of each micro-batch, starting at a step.

    Its length is always that of the whole run, as Lightning counts batches from step 0; only
    the iteration starts later. A length of what remains would make it train data twice.
    """

    def __init__(
        self,
        *,
        start: int,
        max_steps: int,
        accumulate: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        first_sample: int,
    ) -> None:
        self.start, self.max_steps, self.accumulate = start, max_steps, accumulate
        self.rank, self.world_size = rank, world_size
        self.micro_batch_size, self.first_sample = micro_batch_size, first_sample

    def __len__(self) -> int:
        return self.max_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.max_steps):
            for micro_step in range(self.accumulate):
                yield step_samples(
                    step,
                    micro_step,
                    self.rank,
                    first_sample=self.first_sample,
                    micro_batch_size=self.micro_batch_size,
                    accumulate=self.accumulate,
                    world_size=self.world_size,
                ).tolist()


class TimedLoader(DataLoader):
    """A DataLoader that adds up how long its batches were waited for.

    Its workers do not receive stop signals: the process that trains finishes the step and saves,
    for which it needs their batches.
    """

    seconds_waited = 0.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        init = functools.partial(start_worker, os.getpid())
        super().__init__(*args, worker_init_fn=init, **settings)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # At once, and not with the first batch: it draws from torch's generator, and starts the
        # workers.
        with signals_held():
            batches = super().__iter__()
        return self._timed(batches)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds_waited += time.perf_counter() - began
            if batch is None:
                return
            yield batch
