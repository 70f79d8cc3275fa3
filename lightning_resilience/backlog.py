"""What the cold tier lacks, and which of that goes next.

A ``Backlog`` is told what is where and how each copy ended, and answers from that alone: it has no thread and no lock,
and looks into no tier.  What is on its way is nowhere written down: it is what the cold tier's rule would keep, over
what is there and what could be, and is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from lightning_resilience import store
from lightning_resilience.manifest import HEALTHY, Manifest
from lightning_resilience.retention import Keep, Ranking, judge


@dataclass(frozen=True)
class Task:
    """A checkpoint to copy: its ``name`` here and there (``target``), and whether each file is sent by the rank that
    saved it (``owners_only``); or one that is there already and of which its manifest has to say something else
    (``restates``)."""

    name: str
    target: str
    manifest: Manifest
    owners_only: bool
    restates: bool = False


class Backlog:
    """The checkpoints of one run between its hot and its cold tier, as far as one rank has heard.

    Args:
        keep: what the cold tier retains.
        ranking: what ``keep.top_k`` ranks by.
        run: gives the id of the run, to whose checkpoints the rule is applied.
    """

    def __init__(self, keep: Keep, ranking: Ranking | None, run: Callable[[], str]) -> None:
        self.keep = keep
        self.ranking = ranking
        self._run = run
        self._hot: dict[str, Manifest] = {}
        self._cold: dict[str, Manifest] = {}
        self._since: dict[str, float] = {}
        """Second at which each hot one was offered first, by ``save_id``."""
        self._in_use: frozenset[str] = frozenset()
        self._left: dict[str, Manifest] = {}
        """What the run went back from, by ``save_id``."""
        self._taken: frozenset[str] = frozenset()
        self._failures: dict[str, int] = {}
        """How often the copy of each save has failed, by ``save_id``."""
        self._spoiled: set[str] = set()
        """The saves that are of no use as they are here, by ``save_id``."""

    # -- what it is told ----------------------------------------------------------------------------------------------

    def offer(self, hot: Mapping[str, Manifest], in_use: Collection[str], now: float) -> None:
        """The hot tier has these, of which those in use stay in the cold tier too."""
        self._hot = dict(hot)
        self._since = {one.save_id: self._since.get(one.save_id, now) for one in hot.values()}
        self._in_use = frozenset(in_use)

    def leave_behind(self, left: Iterable[Manifest]) -> None:
        """The run went back from these, which are called suspect by now."""
        self._left |= {manifest.save_id: manifest for manifest in left}

    def learn(self, cold: Mapping[str, Manifest]) -> None:
        """The cold tier has these."""
        self._cold |= cold

    def reserve(self, names: Iterable[str]) -> None:
        """Under these names the cold tier has a manifest that cannot be used: not ours to write over."""
        self._taken = frozenset(names)

    def arrive(self, task: Task, manifest: Manifest) -> None:
        """One is there now."""
        self._cold[task.target] = manifest
        self._failures.pop(task.manifest.save_id, None)

    def fail(self, task: Task, *, for_good: bool) -> None:
        """One did not get there; ``for_good`` where no time and no other rank mends that."""
        save = task.manifest.save_id
        self._failures[save] = self._failures.get(save, 0) + 1
        if for_good:
            self._spoiled.add(save)

    def remove(self, names: Iterable[str]) -> None:
        """These are in the cold tier no more."""
        for name in names:
            self._cold.pop(name, None)

    # -- what follows -------------------------------------------------------------------------------------------------

    def next(self) -> Task | None:
        """The oldest that is on its way, of those that failed least often."""
        copies = [
            Task(name, target, self._hot[name], owners_only=self._hot[name].save_id not in self._failures)
            for target, name in self._to_copy().items()
        ]
        restatements = [
            Task(target, target, manifest, owners_only=False, restates=True)
            for target, manifest in self._outdated().items()
        ]
        useful = [task for task in copies + restatements if task.manifest.save_id not in self._spoiled]
        return min(useful, key=self._turn, default=None)

    def _turn(self, task: Task) -> tuple[int, tuple[int, int]]:
        return self._failures.get(task.manifest.save_id, 0), task.manifest.order

    def pending(self) -> set[str]:
        """Names of the checkpoints that the cold tier should have and does not: their hot copy must stay."""
        restated = {manifest.save_id for manifest in self._outdated().values()}
        return {*self._to_copy().values()} | {name for name, one in self._hot.items() if one.save_id in restated}

    def waiting(self) -> set[str]:
        """Names of those of them that can get there as they are here."""
        return {name for name in self.pending() if self._hot[name].save_id not in self._spoiled}

    def targets(self) -> set[str]:
        """Names that what is on its way gets in the cold tier."""
        return {*self._to_copy()}

    def size(self) -> int:
        """Bytes of those that are waiting."""
        return sum(self._hot[name].size for name in self.waiting())

    def lag(self, now: float) -> float:
        """Seconds for which this process has known of the oldest that is waiting; 0 where none is."""
        return max((now - self._since[self._hot[name].save_id] for name in self.waiting()), default=0.0)

    def retries(self) -> set[str]:
        """Saves that failed and are tried again, by ``save_id``."""
        return self._failures.keys() - self._spoiled

    def is_done_with(self, manifest: Manifest) -> bool:
        """Whether a save is in the cold tier already, or is of no use."""
        return manifest.save_id in self._spoiled or any(one.is_same_save(manifest) for one in self._cold.values())

    def known_since(self, manifest: Manifest, otherwise: float) -> float:
        """Second at which this process came to know of a save that the hot tier has."""
        return self._since.get(manifest.save_id, otherwise)

    def name_of(self, manifest: Manifest) -> str | None:
        """What a save is called in the hot tier now."""
        return next((name for name, one in self._hot.items() if one.is_same_save(manifest)), None)

    def there(self) -> dict[str, Manifest]:
        """What the cold tier has, of whatever run."""
        return dict(self._cold)

    def own(self) -> dict[str, Manifest]:
        """What the cold tier has of this run."""
        run = self._run()
        return {name: manifest for name, manifest in self._cold.items() if manifest.run == run}

    def in_use(self) -> set[str]:
        """Names in the cold tier that stay whatever its rule says: another save's name here may be another there."""
        used = {self._hot[name].save_id for name in self._in_use if name in self._hot}
        return {*self._in_use, *(name for name, manifest in self.own().items() if manifest.save_id in used)}

    def _to_copy(self) -> dict[str, str]:
        """What the cold tier lacks and its rule would keep: the hot name by the one that it gets there."""
        lacking = self._lacking()
        judgements = judge(
            {**self.own(), **{target: self._hot[name] for target, name in lacking.items()}}, self.keep, self.ranking
        )
        kept = {judgement.name for judgement in judgements if judgement.keep}
        return {target: name for target, name in lacking.items() if target in kept}

    def _lacking(self) -> dict[str, str]:
        """What the cold tier lacks: the hot name by the one that it gets there.

        They differ where another save has that name there: nothing gives way in one step behind a URL, so the older
        one stays until the rule gives it up.
        """
        there = {manifest.save_id for manifest in self._cold.values()}
        targets: dict[str, str] = {}
        for name, manifest in self._hot.items():
            if manifest.save_id not in there:
                targets[store.free_name(name, {*self._cold, *self._taken, *targets}.__contains__)] = name
                there.add(manifest.save_id)
        return targets

    def _outdated(self) -> dict[str, Manifest]:
        """What the cold tier still calls healthy and is not: what to say of it, by its name there."""
        suspect = self._left | {one.save_id: one for one in self._hot.values() if one.health != HEALTHY}
        return {
            target: suspect[one.save_id]
            for target, one in self._cold.items()
            if one.health == HEALTHY and one.save_id in suspect
        }
