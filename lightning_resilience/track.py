"""One training loader, tracked: how its iterators began, how many batches they gave, and how to begin in the middle.

A loader's iterators are counted, and how they began (the random generators at that moment) is remembered.  That is
enough to begin one in the middle without loading what was seen: with the generators as they were, its sampler gives
the same order again, and the indices of the batches that were trained on are passed over before a worker is asked for
anything.  Worker processes send their own generators along with each batch, so that augmentation goes on where it was
too.

Nothing is wrapped: a tracked loader is the user's object, of a class that derives from the user's.  Its first
iterator is made when its first batch is wanted, because until then a resume may still decide where it begins.

==========================================  ==========================================================================
loader                                      continues
==========================================  ==========================================================================
with ``state_dict`` and ``load_state_dict``  where its own state says
``DataLoader``, data with a length           at the next batch; nothing is loaded twice or in vain
iterable data with its own state             where its state says (the data's ``state_dict``)
other iterable data                          by reading and dropping what was trained on
what is none of these (a generator)          not at all: the epoch begins anew, and a warning says so
==========================================  ==========================================================================
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_resilience import run_state
from lightning_resilience.held_generators import HeldGenerator, has_state
from lightning_resilience.order import (
    Dealt,
    Order,
    Share,
    deal,
    draw,
    kind_of,
    of_all_ranks,
    order_of,
    share_of,
    user_sampler,
)
from lightning_resilience.position import Moment, Position, Start
from lightning_resilience.worker_state import (
    Init,
    Stamp,
    Stamped,
    first_part,
    first_worker,
    parts,
    restore_states,
    states_of,
    with_generators,
)

_ATTRIBUTE = "_lightning_resilience_track"


class Guide(Protocol):
    """Tells a loader what its next iterator is for, and where it goes on."""

    rank: int
    ranks: int

    shared_seed: bytes | None
    """Source of randomness that all ranks have alike, where their generators do not agree any more."""

    @property
    def reading(self) -> bool:
        """Whether it is the training loop that reads now; anybody may iterate a loader."""

    @property
    def reads_ahead(self) -> bool:
        """Whether the training loop reads one more batch than it trains on, to know which is the last."""

    @property
    def undecided(self) -> bool:
        """Whether iterators made now should be empty, because others are made before they are read."""

    def position_of(self, loader: object) -> Position | None:
        """Where ``loader`` begins; None for its beginning."""


def track(loader: Any, guide: Guide) -> Any:
    """Track a training loader, in place.  What cannot be tracked (a list, a generator) is returned as it is."""
    found = track_of(loader)
    if found is not None:
        found.guide = guide
        return loader
    cls = type(loader)
    if not hasattr(cls, "__iter__") or not hasattr(loader, "__dict__"):
        return loader

    def begin(self: Any) -> Iterator[Any]:
        own: Track = getattr(self, _ATTRIBUTE)
        return own.begin(lambda: cls.__iter__(self))

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the user's class, and are not tracked."""
        twin: Any = cls.__new__(cls)  # type: ignore[call-overload]
        vars(twin).update({name: value for name, value in vars(self).items() if name != _ATTRIBUTE})
        how, *rest = twin.__reduce_ex__(protocol)
        return (_new if how.__name__ == "__newobj__" else how, *rest)

    members = {"__iter__": begin, "__reduce_ex__": reduce, "__module__": cls.__module__}
    try:
        loader.__class__ = type(cls.__name__, (cls,), members)
    except TypeError:
        return loader
    vars(loader)[_ATTRIBUTE] = Track(loader, guide)
    return loader


def _new(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def release(loader: Any) -> None:
    """Undo ``track``."""
    if track_of(loader) is not None:
        del vars(loader)[_ATTRIBUTE]
        loader.__class__ = type(loader).__mro__[1]


def track_of(loader: object) -> Track | None:
    """The track of a loader, if it is tracked."""
    return vars(loader).get(_ATTRIBUTE) if hasattr(loader, "__dict__") else None


class Track:
    """One loader's iterators: how the current one began, and how many batches it gave."""

    def __init__(self, loader: Any, guide: Guide) -> None:
        self._loader = loader
        self.guide = guide
        self.passes = 0
        self.count = 0
        self.is_left_empty = False
        """Whether the iterator is an empty one, that another is to follow."""
        self.start: Start | None = None
        self.workers: dict[int, bytes] = {}
        self.workers_at_start: dict[int, bytes] = {}
        self.origin: tuple[Order | None, int] | None = None
        self._before: deque[Moment] = deque(maxlen=2)
        self._reads_ahead = False
        self._made_with: Start | None = None

    # -- while training -----------------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A new iterator, at the beginning or where the guide says; an empty one as long as that is undecided."""
        if not self.guide.reading:
            return self._for_others(make())
        self.is_left_empty = self.guide.undecided
        if self.is_left_empty:
            return iter(())
        self._reads_ahead = self.guide.reads_ahead
        self._before.clear()
        position = self.guide.position_of(self._loader)
        return _Batches(self, self._make(make, position), position)

    def _for_others(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """An iterator that is not for training.  Workers that persist go on adding their generators."""
        return map(self._unwrapped, iterator) if _persists(self._loader) else iterator

    def before_batch(self) -> None:
        """A batch is about to be read."""
        if self.start is None:
            self.start = {**self._generators(), "made_with": self._made_with}
        moment = self._moment()
        if self._reads_ahead:
            moment["own"], moment["parts"] = self._own_state(), states_of(self._parts())
            moment["read_with"] = run_state.capture() if not _workers(self._loader) else None
        self._before.append(moment)

    def _moment(self) -> Moment:
        """Now, without what takes longer to ask for."""
        return {
            "passes": self.passes,
            "count": self.count,
            "start": self.start,
            "workers": dict(self.workers),
            "own": None,
            "parts": {},
            "read_with": None,
        }

    def after_batch(self, batch: Any) -> Any:
        """A batch has been read; returns it without what a worker added."""
        self.count += 1
        return self._unwrapped(batch)

    def position(self, ahead: int) -> Position:
        """How far training is.

        Args:
            ahead: how many batches have been read and not trained on: one that tells whether the last is near, and one
                that an exception keeps from being trained on.
        """
        now: Moment = {**self._moment(), "own": self._own_state(), "parts": states_of(self._parts())}
        moment = self._before[-min(ahead, len(self._before))] if ahead and self._before else now
        if not self._reads_ahead:
            moment = {**moment, "own": now["own"], "parts": now["parts"]}
        order, offset = self.origin or (self._order(), 0)
        return {
            "passes": moment["passes"],
            "count": moment["count"],
            "start": moment["start"],
            "workers": moment["workers"],
            "own": moment["own"],
            "parts": moment["parts"],
            "read_with": moment["read_with"],
            "order": order,
            "share": share_of(self._loader, self.guide.ranks),
            "offset": offset,
            "workers_at_start": dict(self.workers_at_start),
            "generators": [generator.get_state() for generator in self._own_generators()],
            "samplers": states_of(self._samplers()),
        }

    def _order(self) -> Order | None:
        return None if has_state(self._loader) else order_of(self._loader, self.guide.ranks)

    def change_of_data(self, position: Position) -> str | None:
        """What is different in the data from when ``position`` was saved, so that its order means nothing any more."""
        order = position["order"]
        if order is None or not isinstance(self._loader, DataLoader):
            return None
        if order["samples"] != sized_len(self._loader.dataset):
            return f"there are {sized_len(self._loader.dataset)} samples, and were {order['samples']}"
        live = self._order()
        goes_on_as_it_was = position["share"] == share_of(self._loader, self.guide.ranks) and not position["offset"]
        if goes_on_as_it_was and (live is None or kind_of(live) != kind_of(order)):
            return "their sampler is another one"
        return None

    def deal(self, position: Position, share: Share) -> Position | None:
        """A position with this rank's part of what is left of the epoch, for a way of dealing that may be another.

        Returns:
            The position, with ``part``; None where the order cannot be drawn again or another sampler is in use.
        """
        order, was, start = position["order"], position["share"], position["start"]
        if (
            order is None
            or start is None
            or None in (share["batch_size"], was["batch_size"])
            or (self.guide.ranks > 1 and not self._is_distributed())
        ):
            return None
        with run_state.kept():
            self._as_at_the_start(start)
            if start["seeded"] and not start.get("again"):
                torch.empty((), dtype=torch.int64).random_(generator=getattr(self._loader, "generator", None))
            everything = draw(order, self._loader)
        if everything is None:
            return None
        offset, count = position["offset"], position["count"]
        if was != share:
            offset, count = offset + count * of_all_ranks(was), 0
        part = deal(everything[offset:], self.guide.rank, share, drop_uneven=self._drops_uneven())
        return {**position, "offset": offset, "count": count, "share": share, "part": part}

    def _drops_uneven(self) -> bool:
        return bool(getattr(self._loader.sampler, "drop_last", False))

    def _is_distributed(self) -> bool:
        return isinstance(getattr(self._loader, "sampler", None), DistributedSampler)

    def _parts(self) -> dict[str, Any]:
        """What has a state in this process; with workers, it is their copies that count."""
        if _workers(self._loader) or has_state(self._loader):
            return {}
        return parts(getattr(self._loader, "dataset", None), getattr(self._loader, "collate_fn", None))

    def _samplers(self) -> dict[str, Any]:
        """What draws an epoch's order and has a state: samplers, and generators that they hold; those of a stream that
        this process reads, too, which may draw its order itself."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        found = {
            "sampler": user_sampler(getattr(self._loader, "sampler", None)),
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": user_sampler(getattr(batch_sampler, "sampler", None)),
        }
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            found |= {name: part for name, part in self._parts().items() if isinstance(part, HeldGenerator)}
        known = {id(generator) for generator in self._own_generators()}
        return {
            name: one
            for name, one in with_generators(found).items()
            if not isinstance(one, HeldGenerator) or id(one.generator) not in known
        }

    def _own_state(self) -> Any:
        return self._loader.state_dict() if has_state(self._loader) else None

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _make(self, make: Callable[[], Iterator[Any]], position: Position | None) -> Iterator[Any]:
        self.count, self.passes, self.origin = 0, self.passes + 1, None
        if position is None:
            return self._plainly(make, None)
        self.passes = position["passes"]
        restore_states(self._parts(), position["parts"])
        if position["own"] is not None and has_state(self._loader):
            self._loader.load_state_dict(position["own"])
            self.count = position["count"]
            return iter(make())
        if "part" in position:
            self.origin = position["order"], position["offset"]
            return self._with_a_part(make, position)
        begins = "ended_at" in position
        if position["count"] or (not begins and position["start"] is not None):  # its first batch was read ahead
            return self._in_the_middle(make, position)
        if (
            begins
            and position["workers"]
            and _persists(self._loader)
            and position["ended_at"] < (sized_len(self._loader) or 0)
        ):
            # The last epoch was cut short, with batches in its workers' hands that they still made.
            self._in_the_middle(make, {**position, "count": position["ended_at"]})
            self.count = 0
        self._set_own_generators(position["generators"])
        restore_states(self._samplers(), position["samplers"])
        return self._plainly(make, position)

    def _plainly(self, make: Callable[[], Iterator[Any]], position: Position | None) -> Iterator[Any]:
        """From the beginning; workers that persist go on with their generators."""
        loader = self._loader
        persist = _persists(loader)
        begun = persist and loader._iterator is not None
        states = position["workers"] if position is not None and persist and not begun else {}
        if not begun:
            self.workers = dict(states)
        is_drawn_by_each = isinstance(getattr(loader, "sampler", None), DistributedSamplerWrapper)
        if self.guide.shared_seed is not None and is_drawn_by_each:
            if (dealt := self._dealt_alike(self.guide.shared_seed)) is not None:
                return self._with_a_part(make, dealt)
            rank_zero_warn(
                "After the change of the number of ranks each of them draws an order of its own: the loader's is not"
                " known to this package, so some samples come twice in an epoch and others not at all. Give the sampler"
                " a seed of its own that all ranks share."
            )
        draws_as_it_is_made = not self._is_stock() or isinstance(loader.dataset, IterableDataset)
        self._made_with = self._generators() if draws_as_it_is_made else None
        self.start = self._generators() if _workers(loader) and self._is_stock() else None
        if self.start is not None:
            self.start |= {"seeded": True, "again": begun or bool(states)}
        with self._equipped(states, again=bool(states)), self._hearing_of_leftovers():
            iterator = iter(make())
        self.workers_at_start = dict(self.workers)
        return iterator

    def _dealt_alike(self, seed: bytes) -> Position | None:
        """This rank's part of an epoch whose order every rank draws for itself, where their generators do not agree any
        more; None where that order cannot be drawn from here."""
        with run_state.kept():
            run_state.derive(seed, int(self._loader.sampler.epoch), 0)
            start = self._generators()
        position: Position = {
            "passes": self.passes,
            "count": 0,
            "start": start,
            "workers": self.workers,
            "own": None,
            "parts": {},
            "read_with": None,
            "order": self._order(),
            "share": share_of(self._loader, self.guide.ranks),
            "offset": 0,
            "workers_at_start": {},
            "generators": start["own"],
            "samplers": {},
        }
        return self.deal(position, position["share"])

    def _in_the_middle(self, make: Callable[[], Iterator[Any]], position: Position) -> Iterator[Any]:
        """After ``count`` batches, with the generators that the iterator began with; they are put back afterwards."""
        count, loader, workers, start = position["count"], self._loader, _workers(self._loader), position["start"]
        assert start is not None  # there are batches, so the iterator had begun
        by_index = self._is_stock() and not isinstance(loader.dataset, IterableDataset)
        # By index a place is the sampler's, whatever else the data have a state of.
        goes_on = not by_index and ("dataset" in position["parts"] or first_part(position["workers"], "dataset"))
        seeded = start["seeded"]
        skip = count if by_index and workers else 0
        states = position["workers"] if by_index or goes_on else position["workers_at_start"]
        again = start.get("again", False) or (not seeded and bool(workers))
        with run_state.kept():
            if seeded or (workers and self._is_stock()):
                self._as_at_the_start(start)
            elif start["made_with"] is not None:
                self._as_at_the_start(start["made_with"])  # some draw all they need when they are made
            with self._equipped(states, skip, again, first=count if goes_on else 0):
                iterator = iter(make())
            if not seeded and not (workers and self._is_stock()):
                self._as_at_the_start(start)
            if not goes_on and not skip:
                # Without workers only the indices are read; what has none is read itself.
                if count and isinstance(loader, DataLoader) and not by_index:
                    rank_zero_info(f"Reading and dropping {count} batches of {type(loader.dataset).__name__}.")
                read = getattr(iterator, "_sampler_iter") if by_index else iterator  # noqa: B009  # torch's, private
                for _ in itertools.islice(read, count):
                    pass
                restore_states(self._parts(), position["parts"])  # what is dropped has moved it
        self._set_own_generators(position["generators"])
        self.start, self.count = start, count
        self.workers, self.workers_at_start = dict(position["workers"]), dict(position["workers_at_start"])
        return iterator

    def _with_a_part(self, make: Callable[[], Iterator[Any]], position: Position) -> Iterator[Any]:
        """The part that this rank was dealt, after ``count`` batches of it."""
        loader, count = self._loader, position["count"]
        sampler = vars(loader)["batch_sampler"]
        vars(loader)["batch_sampler"] = Dealt(position["part"], position["share"], count, then=sampler)
        begun = _persists(loader) and loader._iterator is not None
        try:
            if begun:  # workers that persist have kept the sampler that they began with
                loader._iterator._index_sampler = vars(loader)["batch_sampler"]
            with run_state.kept(), self._equipped({} if begun else position["workers"], first=count):
                iterator = iter(make())
        finally:
            vars(loader)["batch_sampler"] = sampler
        self._set_own_generators(position["generators"])
        self.start, self.count = position["start"], count
        self.workers = dict(position["workers"])
        return iterator

    def _is_stock(self) -> bool:
        """Whether the loader is iterated by torch's own code, which can be told where to begin."""
        cls: Any = type(self._loader).__mro__[1]
        return isinstance(self._loader, DataLoader) and cls.__iter__ is DataLoader.__iter__

    def _as_at_the_start(self, start: Start) -> None:
        """The generators as they were when the order was drawn: as the iterator was made; without workers, at its first
        batch."""
        run_state.restore(start["process"])
        self._set_own_generators(start["own"])
        restore_states(self._samplers(), start["samplers"])

    @contextmanager
    def _hearing_of_leftovers(self) -> Iterator[None]:
        """While workers that persist begin an epoch: take note of what they did for the last one in vain."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is None or not _persists(self._loader):
            yield
            return
        get = iterator._get_data

        def get_data() -> Any:
            number, batch = get()
            self._take_note(batch)
            return number, batch

        for task in iterator._task_info.values():
            self._take_note(*task[1:])
        iterator._get_data = get_data
        try:
            yield
        finally:
            del iterator._get_data

    def _take_note(self, batch: Any = None) -> None:
        if isinstance(batch, Stamped):
            self.workers[batch.worker] = batch.generators

    def _unwrapped(self, batch: Any) -> Any:
        self._take_note(batch)
        return batch.batch if isinstance(batch, Stamped) else batch

    @contextmanager
    def _equipped(self, states: dict[int, bytes], skip: int = 0, again: bool = False, first: int = 0) -> Iterator[None]:
        """While an iterator is made: its workers send their generators along, begin with ``states``, its sampler
        passes over ``skip`` batches, and its first batch counts as number ``first`` when workers take turns."""
        loader = self._loader
        if not self._is_stock() or has_state(loader):
            yield
            return
        attributes = vars(loader)
        sampler = "batch_sampler" if attributes.get("batch_sampler") is not None else "sampler"
        before = {name: attributes[name] for name in ("collate_fn", "worker_init_fn", "generator", sampler)}
        if loader.num_workers:
            attributes["collate_fn"] = Stamp(loader.collate_fn)
            if states:
                attributes["worker_init_fn"] = Init(loader.worker_init_fn, attributes["collate_fn"], states)
        if again:
            # Workers that persisted were not seeded anew for this epoch, so that seed is not drawn from the run's.
            attributes["generator"] = torch.Generator()
        if skip:
            attributes[sampler] = _Skip(attributes[sampler], skip)
        try:
            with first_worker((skip or first) % loader.num_workers if loader.num_workers else 0):
                yield
        finally:
            attributes.update(before)

    # -- generators ---------------------------------------------------------------------------------------------------

    def _generators(self) -> Start:
        own = [generator.get_state() for generator in self._own_generators()]
        samplers = states_of(self._samplers())
        return {"process": run_state.capture(), "own": own, "samplers": samplers, "seeded": False, "made_with": None}

    def _own_generators(self) -> list[torch.Generator]:
        """``torch.Generator`` objects of the loader and its samplers, each once."""
        loader = self._loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        found = (getattr(holder, "generator", None) for holder in holders)
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _set_own_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._own_generators(), states, strict=False):
            generator.set_state(state)


def _persists(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _workers(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)


class _Batches:
    """A loader's iterator, counted."""

    def __init__(self, track: Track, iterator: Iterator[Any], position: Position | None) -> None:
        self._track = track
        self._iterator = iterator
        self._read_with = position["read_with"] if position is not None and "ended_at" not in position else None

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        self._track.before_batch()
        if self._read_with is None:
            return self._track.after_batch(next(self._iterator))
        # The first batch was read ahead of the step that was saved, with the generators of that time.
        now = run_state.capture()
        run_state.restore(self._read_with)
        self._read_with = None
        try:
            return self._track.after_batch(next(self._iterator))
        finally:
            run_state.restore(now)

    def __len__(self) -> int:
        return len(self._track._loader)


class _Skip:
    """A sampler that passes over its first so many batches, once."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing happens before the first batch is asked for: iterators are made and thrown away,
        # and the sampler draws its order after the workers' seed was drawn.
        count, self._count = self._count, 0
        yield from itertools.islice(self._sampler, count, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)
