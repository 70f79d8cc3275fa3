"""What the package costs in a step without a save: following the data, asking the schedule, agreeing.

    python tests/benchmarks/steps.py

Times the calls themselves while a Trainer runs, because a difference between whole runs drowns in noise.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_resilience import AdaptiveSchedule, EverySeconds, ResilientCheckpoint
from lightning_resilience.schedule import Schedule
from lightning_resilience.session import Session
from lightning_resilience.track import Track
from lightning_resilience.watch import Watch

STEPS = 3000


class Numbers(Dataset[Tensor]):
    """The cheapest data there is."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


class Model(L.LightningModule):
    """The cheapest model there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stopwatch:
    """Seconds spent in functions, by their name, one entry a call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: Any, name: str) -> Callable[[], None]:
        """Time ``owner.name`` until the function that is returned is called."""
        original = getattr(owner, name)
        spent = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - begin)

        setattr(owner, name, timed)
        return lambda: setattr(owner, name, original)


def measure(workers: int, schedule: Schedule) -> Iterator[tuple[str, tuple[float, float]]]:
    """Microseconds of each part of a step: the median, and the mean of all but the longest percent."""
    watch = Stopwatch()
    parts = {
        "before_batch": "follow the data: before a batch",
        "after_batch": "follow the data: after a batch",
        "_tell_between_batches": "ask whether to save",
        "on_train_batch_end": "note the loss",
        "wish": "of that: decide",
    }
    owners = (Track, Track, Session, ResilientCheckpoint, Watch)
    undo = [watch.wrap(owner, name) for owner, name in zip(owners, parts, strict=True)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                accelerator="cpu",
                max_epochs=1,
                callbacks=[ResilientCheckpoint(folder, schedule=schedule)],
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Model(), DataLoader(Numbers(), num_workers=workers))
    finally:
        for each in undo:
            each()
    for name, title in parts.items():
        spent = sorted(watch.seconds[name])
        usual = spent[: len(spent) * 99 // 100]
        yield title, (1e6 * median(spent), 1e6 * sum(usual) / len(usual))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # Without a save; and in the time in which the loss picks the moment, which costs most.
    quiet = AdaptiveSchedule()
    choosing = AdaptiveSchedule(max_overhead=2.5e-4, rpo_seconds=3600, prior_mtbf_seconds=1e-6)
    for workers, schedule in ((0, EverySeconds(3600)), (0, quiet), (0, choosing), (2, quiet)):
        print(f"{workers} loader workers, {schedule!r}")
        for title, microseconds in measure(workers, schedule):
            print(f"    {title:34} {microseconds[0]:6.1f} µs, {microseconds[1]:6.1f} on average")
