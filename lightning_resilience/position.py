"""What a save says of a rank's place in its data: ``data`` in each rank's own file.

These are plain dicts, and part of the on-disk format: a key keeps its name and its meaning.  A saved position has all
of them but ``part`` and ``ended_at``, which a resume adds and which are never saved.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from lightning_resilience.order import Order, Share
from lightning_resilience.run_state import RankState


class _Generators(TypedDict):
    process: RankState
    """Generators of the process."""
    own: list[Tensor]
    """States of the ``torch.Generator`` objects of the loader and its samplers."""
    samplers: dict[str, Any]
    """States of the samplers that have one, by attribute of the loader, and of generators that they hold."""
    seeded: bool
    """Whether the workers' seed was drawn after this, before the epoch's order was."""
    made_with: Start | None
    """The same as the iterator was made, where code that is not torch's made it, and may have drawn all it needs
    then."""


class Start(_Generators, total=False):
    """The random generators when an iterator began: as it was made, or, without workers, at its first batch."""

    again: bool
    """Whether workers went on from an epoch before, so that no seed was drawn."""


class Moment(TypedDict):
    """Where a loader is between two batches."""

    passes: int
    """How many iterators had begun, this one included."""
    count: int
    """How many batches this one had given."""
    start: Start | None
    """How it began; None where its first batch is yet to be read, and nothing was drawn from the generators."""
    workers: dict[int, bytes]
    """By worker: its generators and the state of its copy of the data, pickled, as they came with its last batch."""
    own: Any
    """The state of a loader that has one of its own; None for others."""
    parts: dict[str, Any]
    """The states of what has one in the loader's data, in this process; see ``worker_state.parts``."""
    read_with: RankState | None
    """Generators of the process before the batch was read, where it was read ahead and by this process."""


class _Saved(Moment):
    order: Order | None
    """How the epoch's order is drawn again; None where that is not known."""
    share: Share
    """How that is dealt to the ranks."""
    offset: int
    """Samples of that order, over all ranks, that were used up before ``count`` began, by other ranks or in other
    batches."""
    workers_at_start: dict[int, bytes]
    """``workers`` as the iterator was made."""
    generators: list[Tensor]
    """States of the ``torch.Generator`` objects of the loader and its samplers, as they are now."""
    samplers: dict[str, Any]
    """States of the samplers that have one, as they are now."""


class Position(_Saved, total=False):
    """How far one loader is."""

    part: Tensor
    """This rank's part of what is left after ``offset``: indices, in their order."""
    ended_at: int
    """Batches that the epoch before had given when it ended, where ``count`` is 0 because one begins."""


class DataState(TypedDict):
    """How far a rank is in all its training loaders."""

    loaders: list[Position | None]
    """In their order; None for one that cannot be followed."""
    cycled: list[bool]
    """Which have been through at least once in this epoch, where shorter ones are cycled."""
    reloaded_in: float
    """Epoch in which the loaders were made; -inf before there are any."""
    shared_seed: bytes | None
    """Source of randomness that all ranks have alike, where their generators do not agree any more."""
