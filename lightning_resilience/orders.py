"""When and how the checkpoints of one callback are saved, as its arguments say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_resilience.divergence import Rollback
from lightning_resilience.retention import Ranking
from lightning_resilience.schedule import Schedule


@dataclass(frozen=True)
class Orders:
    """What one fit goes by.

    Args:
        schedule: when to save.
        loss_key: name of the loss that it goes by.
        rollback: when to take the run back.
        ranking: what checkpoints are ranked by.
        top_k: how many of the best are wanted.
        every_epochs: after how many epochs there is a save; 0 for none.
        at_epoch_end: whether evaluations are reasons at the end of the epoch, rather than after a validation.
        name: gives a checkpoint's name, for the epoch that it belongs to.
        weights_only: leave out all but the weights.
        replace: whether a checkpoint of the same name gives way.
        overlap: whether copying may go on during the next forward and backward pass.
        most_failures: failed saves in a row after which training stops.
        fails_loudly: whether a save that fails ends training also where it ends anyway.
        timeout: seconds that a save gets, and the last copies.
    """

    schedule: Schedule
    loss_key: str
    rollback: Rollback | None
    ranking: Ranking | None
    top_k: int
    every_epochs: int
    at_epoch_end: Callable[[], bool]
    name: Callable[[int], str]
    weights_only: bool
    replace: bool
    overlap: bool
    most_failures: int
    fails_loudly: bool
    timeout: float
