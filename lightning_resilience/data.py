"""Where each rank is in its data, and how to begin there again.

A training loader is *tracked*: its iterators are counted, and how they began (the random generators at that moment)
is remembered.  That is enough to begin one in the middle without loading what was seen: with the generators as they
were, its sampler gives the same order again, and the indices of the batches that were trained on are passed over
before a worker is asked for anything.  Worker processes send their own generators along with each batch, so that
augmentation goes on where it was too.

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

import dataclasses
import itertools
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_resilience import run_state
from lightning_resilience.loops import Loops
from lightning_resilience.order import Dealt, Order, Share, batches, deal, draw, kind_of, order_of, share_of

Position = dict[str, Any]
"""How far one loader is: ``count`` batches of the iterator that began with generators ``start``; see
``Track.position``."""

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


class DataPosition:
    """This rank's place in its training data: tells it for a save, and guides the loaders to it after a resume.

    Args:
        loops: the Trainer's training loop.
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, loops: Loops, rank: int, ranks: int) -> None:
        self._loops = loops
        self.rank = rank
        self.ranks = ranks
        self._saved: dict[str, Any] | None = None
        self._tracked: list[weakref.ref[Any]] = []
        self._begins_an_epoch = False
        self.shared_seed: bytes | None = None

    @property
    def reading(self) -> bool:
        return self._loops.reading

    @property
    def reads_ahead(self) -> bool:
        return self._loops.reads_ahead()

    @property
    def undecided(self) -> bool:
        return self._loops.sets_up and self.exact()

    def track(self, loader: Any) -> Any:
        """Track a training loader."""
        if track_of(track(loader, self)) is not None:
            self._tracked = [other for other in self._tracked if other() is not None]
            self._tracked.append(weakref.ref(loader))
        return loader

    def close(self) -> None:
        """Let all loaders be what they were."""
        for tracked in self._tracked:
            release(tracked())
        self._tracked.clear()

    def state(self) -> dict[str, Any]:
        """For a save, at a step boundary."""
        ahead = self._loops.batches_ahead()
        tracks = [track_of(loader) for loader in self._loops.train_loaders()]
        loaders = [found.position(ahead) if found is not None else None for found in tracks]
        return {
            "loaders": loaders,
            "cycled": self._loops.cycled,
            "reloaded_in": self._loops.reloaded_in,
            "shared_seed": self.shared_seed,
        }

    def go_to(self, saved: dict[str, Any]) -> None:
        """Begin where this rank was; called before the first batch is read."""
        self._saved = saved
        self.shared_seed = saved["shared_seed"]

    def go_to_part(self, first: dict[str, Any], own: dict[str, Any] | None, shared_seed: bytes) -> None:
        """Begin where other ranks, more or fewer, were.

        Args:
            first: what rank 0 saved.
            own: what this rank saved, if it was there.
            shared_seed: for what all ranks have to draw alike from now on.
        """
        self.shared_seed = shared_seed
        loaders = []
        for index, position in enumerate(first["loaders"]):
            mine = own["loaders"][index] if own is not None and index < len(own["loaders"]) else None
            parts = mine["parts"] if mine is not None else {}
            if position is not None:
                position = {**position, "own": None, "workers": {}, "read_with": None, "parts": parts}
            loaders.append(position)
        self._saved = {**first, "loaders": loaders}

    def position_of(self, loader: object) -> Position | None:
        """Where ``loader`` begins: in the middle of the epoch, or at the start of one with what lasts over epochs."""
        loaders = self._loops.train_loaders()
        place = next((index for index, other in enumerate(loaders) if other is loader), None)
        saved = self._saved["loaders"] if self._saved is not None and self.exact() else []
        position = saved[place] if place is not None and place < len(saved) else None
        if position is None or not self._begins_an_epoch:
            return position
        position = {**position, "count": 0, "passes": 0, "offset": 0, "ended_at": position["count"]}
        anew = self._saved is not None and self._loops.made_anew_since(self._saved["reloaded_in"])
        if not anew or self._loops.is_given(loader):
            return position
        fresh: dict[str, Any] = {"own": None, "workers": {}}
        return {**position, **fresh, **({"generators": []} if self._loops.is_from_hook() else {})}

    def epoch_begins(self) -> None:
        """The first epoch of this process is about to begin, with loaders that were made in it."""
        if self._saved is not None and self.exact() and not self._loops.made_anew_since(self._saved["reloaded_in"]):
            self._loops.reloaded_in = self._saved["reloaded_in"]

    def begun(self) -> None:
        """The first batch is about to be read: make the iterators, where they begin."""
        if self._saved is not None:
            self._loops.leave_finished_epoch()
        self._begins_an_epoch = self._loops.at_epoch_start()
        exact = self.exact()
        if self._saved is not None and not self._begins_an_epoch:
            if exact:
                self._deal_anew(self._saved)
            else:
                self._begin_anew("the place in these cannot be followed")
        if exact:
            self._loops.begin_reading()
            if self._saved is not None and not self._begins_an_epoch:
                self._loops.cycled = self._saved["cycled"]
        self._saved = None

    def _deal_anew(self, saved: dict[str, Any]) -> None:
        """Where ranks or batches are others than they were, deal out what is left of the epoch."""
        loaders, positions = self._loops.train_loaders(), saved["loaders"]
        tracks = [track_of(loader) for loader in loaders]
        if len(positions) != len(loaders) or any(position is None for position in positions):
            self._begin_anew("there are others than there were")
            return
        changes = [found.change_of_data(p) for found, p in zip(tracks, positions, strict=True) if found is not None]
        if any(changes):
            self._begin_anew("; ".join(filter(None, changes)))
            return
        shares = [share_of(loader, self.ranks) for loader in loaders]
        same = all(position["share"] == share for position, share in zip(positions, shares, strict=True))
        if same and not any(position["offset"] for position in positions):
            return
        dealt = tracks[0].deal(positions[0], shares[0]) if tracks[0] is not None and len(loaders) == 1 else None
        if dealt is None:
            self._begin_anew("which samples other ranks, or batches of another size, have left is not known for these")
            return
        if not batches(dealt["part"], shares[0]):
            self._begin_anew("what was left is less than a batch, and drop_last would drop it")
            return
        saved["loaders"] = [dealt]
        if not same:
            before, now = (share["ranks"] * share["batch_size"] for share in (positions[0]["share"], shares[0]))
            self._loops.go_to_batch(dealt["offset"] // now, batches(dealt["part"], shares[0]))
            self._tell_of_other_batches(dealt["offset"], before, now)

    @staticmethod
    def _tell_of_other_batches(offset: int, before: int, now: int) -> None:
        rank_zero_warn(
            f"The epoch goes on after {offset} samples, with each of the others once (a few twice where they do not"
            f" come out even). A batch of all ranks together is {now} samples; it was {before}."
            + ("" if now == before else " Change accumulate_grad_batches or the learning rate if that matters.")
        )

    def _begin_anew(self, why: str) -> None:
        """Read the whole epoch again, rather than leave out its end."""
        kinds = ", ".join(type(loader).__name__ for loader in self._loops.train_loaders())
        rank_zero_warn(f"The epoch that was interrupted begins anew, at its first batch, for {kinds}: {why}.")
        self._loops.go_to_batch(0, -1)
        self._begins_an_epoch = True

    def exact(self) -> bool:
        """Whether every training loader continues at the right batch."""
        loaders = self._loops.train_loaders()
        return all(track_of(loader) is not None for loader in loaders) and len({*map(id, loaders)}) == len(loaders)


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


@dataclass
class _Moment:
    """Where a loader is between two batches."""

    passes: int
    count: int
    start: dict[str, Any] | None
    workers: dict[int, bytes]
    own: Any = None
    parts: dict[str, Any] = field(default_factory=dict)
    read_with: run_state.RankState | None = None


class Track:
    """One loader's iterators: how the current one began, and how many batches it gave."""

    def __init__(self, loader: Any, guide: Guide) -> None:
        self._loader = loader
        self.guide = guide
        self.passes = 0
        self.count = 0
        self.start: dict[str, Any] | None = None
        self.workers: dict[int, bytes] = {}
        self.workers_at_start: dict[int, bytes] = {}
        self.origin: tuple[Order | None, int] | None = None
        self._before: deque[_Moment] = deque(maxlen=2)
        self._reads_ahead = False
        self._made_with: dict[str, Any] | None = None

    # -- while training -----------------------------------------------------------------------------------------------

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A new iterator, at the beginning or where the guide says; an empty one as long as that is undecided."""
        if not self.guide.reading:
            return self._for_others(make())
        if self.guide.undecided:
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
        moment = _Moment(self.passes, self.count, self.start, dict(self.workers))
        if self._reads_ahead:
            moment.own, moment.parts = self._own_state(), states_of(self._parts())
            moment.read_with = run_state.capture() if not _workers(self._loader) else None
        self._before.append(moment)

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
        now = _Moment(self.passes, self.count, self.start, dict(self.workers), self._own_state())
        now.parts = states_of(self._parts())
        moment = self._before[-min(ahead, len(self._before))] if ahead and self._before else now
        if not self._reads_ahead:
            moment = dataclasses.replace(moment, own=now.own, parts=now.parts)
        order, offset = self.origin or (self._order(), 0)
        return {
            **vars(moment),
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
        order, was = position["order"], position["share"]
        if (
            order is None
            or None in (share["batch_size"], was["batch_size"])
            or (self.guide.ranks > 1 and not self._is_distributed())
        ):
            return None
        with run_state.kept():
            self._as_at_the_start(position["start"])
            if position["start"]["seeded"] and not position["start"].get("again"):
                torch.empty((), dtype=torch.int64).random_(generator=getattr(self._loader, "generator", None))
            everything = draw(order, self._loader)
        if everything is None:
            return None
        offset, count = position["offset"], position["count"]
        if was != share:
            offset, count = offset + count * was["batch_size"] * was["ranks"], 0
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
        """Samplers with a state of their own."""
        found = {name: getattr(self._loader, name, None) for name in ("sampler", "batch_sampler")}
        return {name: sampler for name, sampler in found.items() if has_state(sampler)}

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
        if position["count"]:
            return self._in_the_middle(make, position)
        if position["workers"] and _persists(self._loader) and position["ended_at"] < (sized_len(self._loader) or 0):
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
        if self.guide.shared_seed is not None and isinstance(
            getattr(loader, "sampler", None), DistributedSamplerWrapper
        ):
            return self._drawn_alike(make)
        self._made_with = None if self._is_stock() else self._generators()
        self.start = self._generators() if _workers(loader) and self._is_stock() else None
        if self.start is not None:
            self.start |= {"seeded": True, "again": begun or bool(states)}
        with self._equipped(states, again=bool(states)), self._hearing_of_leftovers():
            iterator = iter(make())
        self.workers_at_start = dict(self.workers)
        return iterator

    def _drawn_alike(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An epoch whose order every rank draws for itself, where their generators do not agree any more."""
        seed = self.guide.shared_seed
        assert seed is not None
        with run_state.kept():
            run_state.derive(seed, int(self._loader.sampler.epoch), 0)
            start = self._generators()
        position = {
            "start": start,
            "order": self._order(),
            "share": share_of(self._loader, self.guide.ranks),
            "offset": 0,
            "count": 0,
            "workers": self.workers,
            "generators": start["own"],
        }
        dealt = self.deal(position, position["share"])
        assert dealt is not None
        return self._with_a_part(make, dealt)

    def _in_the_middle(self, make: Callable[[], Iterator[Any]], position: Position) -> Iterator[Any]:
        """After ``count`` batches, with the generators that the iterator began with; they are put back afterwards."""
        count, loader, workers = position["count"], self._loader, _workers(self._loader)
        by_index = self._is_stock() and not isinstance(loader.dataset, IterableDataset)
        goes_on = "dataset" in position["parts"] or _first_part(position["workers"], "dataset")
        seeded = position["start"]["seeded"]
        skip = count if by_index and workers else 0
        states = position["workers"] if by_index or goes_on else position["workers_at_start"]
        again = position["start"].get("again", False) or (not seeded and bool(workers))
        with run_state.kept():
            if seeded or (workers and self._is_stock()):
                self._as_at_the_start(position["start"])
            elif position["start"]["made_with"] is not None:
                self._as_at_the_start(position["start"]["made_with"])  # some draw all they need when they are made
            with self._equipped(states, skip, again, first=count if goes_on else 0):
                iterator = iter(make())
            if not seeded and not (workers and self._is_stock()):
                self._as_at_the_start(position["start"])
            if not goes_on and not skip:
                # Without workers only the indices are read; what has none is read itself.
                if isinstance(loader, DataLoader) and not by_index:
                    rank_zero_info(f"Reading and dropping {count} batches of {type(loader.dataset).__name__}.")
                read = getattr(iterator, "_sampler_iter") if by_index else iterator  # noqa: B009  # torch's, private
                for _ in itertools.islice(read, count):
                    pass
                restore_states(self._parts(), position["parts"])  # what is dropped has moved it
        self._set_own_generators(position["generators"])
        self.start, self.count = position["start"], count
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

    def _as_at_the_start(self, start: dict[str, Any]) -> None:
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
        if isinstance(batch, _Stamped):
            self.workers[batch.worker] = batch.generators

    def _unwrapped(self, batch: Any) -> Any:
        self._take_note(batch)
        return batch.batch if isinstance(batch, _Stamped) else batch

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
            attributes["collate_fn"] = _Stamp(loader.collate_fn)
            if states:
                attributes["worker_init_fn"] = _Init(loader.worker_init_fn, attributes["collate_fn"], states)
        if again:
            # Workers that persisted were not seeded anew for this epoch, so that seed is not drawn from the run's.
            attributes["generator"] = torch.Generator()
        if skip:
            attributes[sampler] = _Skip(attributes[sampler], skip)
        try:
            with _first_worker((skip or first) % loader.num_workers if loader.num_workers else 0):
                yield
        finally:
            attributes.update(before)

    # -- generators ---------------------------------------------------------------------------------------------------

    def _generators(self) -> dict[str, Any]:
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


def has_state(thing: object) -> bool:
    """Whether something can be saved and restored by itself."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def parts(dataset: Any, collate: Any) -> dict[str, Any]:
    """What has a state of its own in a loader's data: the dataset, one it is a part of, their transforms, the collate
    function."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left = [("dataset", dataset)]
    while left:
        name, inner = left.pop(0)
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        found[name] = inner
        for attribute in ("transform", "target_transform", "transforms"):
            found[f"{name}.{attribute}"] = getattr(inner, attribute, None)
        left.append((f"{name}.dataset", getattr(inner, "dataset", None)))
        several = getattr(inner, "datasets", None)  # of a ConcatDataset
        left += [(f"{name}.{i}", one) for i, one in enumerate(several if isinstance(several, (list, tuple)) else ())]
    found["collate_fn"] = getattr(collate, "inner", collate)
    return {name: part for name, part in found.items() if has_state(part)}


def _first_part(workers: dict[int, bytes], name: str) -> bool:
    """Whether the workers' copies of a part had a state."""
    return any(name in pickle.loads(state)["parts"] for state in itertools.islice(workers.values(), 1))


def states_of(stateful: dict[str, Any]) -> dict[str, Any]:
    """The state of each part."""
    return {name: part.state_dict() for name, part in stateful.items()}


def restore_states(stateful: dict[str, Any], states: dict[str, Any]) -> None:
    """Give each part its state back; one that has none saved keeps what it has."""
    for name, part in stateful.items():
        if name in states:
            part.load_state_dict(states[name])


def _persists(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _workers(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)


class _Batches:
    """A loader's iterator, counted."""

    def __init__(self, track: Track, iterator: Iterator[Any], position: Position | None) -> None:
        self._track = track
        self._iterator = iterator
        self._read_with = position["read_with"] if position is not None and position["count"] else None

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


# -- in worker processes ----------------------------------------------------------------------------------------------


class _Stamped:
    """A batch, and the generators of the worker that made it as they were then."""

    def __init__(self, batch: Any, worker: int, generators: bytes) -> None:
        self.batch = batch
        self.worker = worker
        self.generators = generators

    def pin_memory(self, device: Any = None) -> _Stamped:
        """Called by the loader's pinning thread."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch, device)  # type: ignore[no-untyped-call]
        return self


class _Stamp:
    """A collate function that adds the worker's generators."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.inner = collate

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        state = {"process": run_state.capture(cuda=False), "parts": states_of(parts(worker.dataset, self.inner))}
        return _Stamped(batch, worker.id, pickle.dumps(state))


class _Init:
    """A worker's initialisation, after which its generators and its copy of the data are as they were."""

    def __init__(self, init: Callable[[int], None] | None, collate: Any, states: dict[int, bytes]) -> None:
        self._init = init
        self._collate = collate
        self._states = states

    def __call__(self, number: int) -> None:
        if self._init is not None:
            self._init(number)
        worker = get_worker_info()
        if worker is not None and number in self._states:
            state = pickle.loads(self._states[number])
            restore_states(parts(worker.dataset, self._collate), state["parts"])
            run_state.restore(state["process"])


@contextmanager
def _first_worker(number: int) -> Iterator[None]:
    """While an iterator is made: let worker ``number`` have its first batch, as it would have had without the
    interruption."""
    if not number:
        yield
        return
    original = _MultiProcessingDataLoaderIter._try_put_index

    def try_put_index(self: Any) -> Any:
        _MultiProcessingDataLoaderIter._try_put_index = original  # type: ignore[method-assign]
        for _ in range(number):
            next(self._worker_queue_idx_cycle)
        return original(self)

    _MultiProcessingDataLoaderIter._try_put_index = try_put_index  # type: ignore[method-assign]
    try:
        yield
    finally:
        _MultiProcessingDataLoaderIter._try_put_index = original  # type: ignore[method-assign]
