"""Where this rank is in its training data, over all its loaders, and how to begin there again.

What one loader does is its ``Track``'s.  Here is what concerns all of them: which was which, and whether the epoch goes
on where it was, goes on with what is left of it dealt out to other ranks or in other batches, or begins anew.
"""

from __future__ import annotations

import weakref
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.loops import Loops
from lightning_resilience.order import batches, of_all_ranks, share_of
from lightning_resilience.position import DataState, Position
from lightning_resilience.track import release, track, track_of


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
        self._saved: DataState | None = None
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

    def state(self) -> DataState:
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

    def go_to(self, saved: DataState) -> None:
        """Begin where this rank was; called before the first batch is read."""
        self._saved = saved
        self.shared_seed = saved["shared_seed"]

    def go_to_part(self, first: DataState, own: DataState | None, shared_seed: bytes) -> None:
        """Begin where other ranks, more or fewer, were.

        Args:
            first: what rank 0 saved.
            own: what this rank saved, if it was there.
            shared_seed: for what all ranks have to draw alike from now on.
        """
        self.shared_seed = shared_seed
        loaders: list[Position | None] = []
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
        fresh: Position = {**position, "own": None, "workers": {}}
        if self._loops.is_from_hook():
            fresh["generators"] = []
        return fresh

    def epoch_begins(self) -> None:
        """The first epoch of this process is about to begin, with loaders that were made in it."""
        if self._saved is not None and self.exact() and not self._loops.made_anew_since(self._saved["reloaded_in"]):
            self._loops.reloaded_in = self._saved["reloaded_in"]

    @property
    def is_left_empty(self) -> bool:
        """Whether loaders were made without their iterators: at start-up, and by a Tuner's callback as an epoch begins,
        after which Lightning makes none."""
        tracks = [track_of(loader) for loader in self._loops.train_loaders()]
        return any(found is not None and found.is_left_empty for found in tracks)

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

    def _deal_anew(self, saved: DataState) -> None:
        """Where ranks or batches are others than they were, deal out what is left of the epoch."""
        loaders, positions = self._loops.train_loaders(), [one for one in saved["loaders"] if one is not None]
        tracks = [track_of(loader) for loader in loaders]
        if not len(positions) == len(saved["loaders"]) == len(loaders):
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
            before, now = (of_all_ranks(share) for share in (positions[0]["share"], shares[0]))
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
