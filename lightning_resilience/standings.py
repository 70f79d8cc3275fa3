"""The checkpoints of a folder as training knows of them: which is the newest, the best, the last good one.

It is what has been committed and told of, not what is on disk at this moment, so it is the same on all ranks once they
have heard of the same saves.  What the folder's rule gives up leaves it when it is judged, like the files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from lightning_resilience.manifest import HEALTHY, Manifest, newest_first
from lightning_resilience.retention import Keep, Ranking, judge, last_good


class Standings:
    """What is committed in one folder.

    Args:
        keep: the folder's rule.
        ranking: what the best are ranked by; the newest is the best without it.
        top_k: how many of the best are wanted; -1 for all.
    """

    def __init__(self, keep: Keep, ranking: Ranking | None, top_k: int) -> None:
        self._keep = keep
        self._ranking = ranking
        self._top_k = top_k
        self.committed: dict[str, Manifest] = {}
        """Manifests by name."""
        self.off_since: int | None = None
        """The step since which the loss is off its course; None where all is well."""
        self._run: str | None = None
        self._left = range(0)

    def add(self, name: str, manifest: Manifest) -> None:
        """A checkpoint was committed."""
        self.committed[name] = manifest

    def give_up(self, must_stay: Collection[str]) -> None:
        """Leave out what the rule gives up, as the folder does."""
        for judgement in judge(self.own, self._keep, self._ranking, must_stay):
            if not judgement.keep:
                del self.committed[judgement.name]

    @property
    def own(self) -> dict[str, Manifest]:
        """Those of the run that trains, which alone its rule and its ranking are for; all until training begins."""
        return {name: one for name, one in self.committed.items() if self._run in (None, one.run)}

    @property
    def newest(self) -> str | None:
        """Name of the newest healthy one."""
        own = self.own
        return next((name for name in newest_first(own) if own[name].health == HEALTHY), None)

    @property
    def best_first(self) -> list[str]:
        """Names from best to worst; from new to old where there is no ranking."""
        return best_first(self.own, self._ranking)

    @property
    def top(self) -> list[str]:
        """Names of the best that are wanted, the best first."""
        return self.best_first if self._top_k == -1 else self.best_first[: self._top_k]

    def score(self, name: str) -> float:
        """What a checkpoint is ranked by."""
        assert self._ranking is not None
        return self.committed[name].metrics[self._ranking.monitor]

    def gets_in(self, score: float | None) -> bool:
        """Whether a checkpoint with that score would be among the wanted best."""
        if self._ranking is None or self._top_k == 0 or score is None or not math.isfinite(score):
            return False
        top = self.top
        if self._top_k == -1 or len(top) < self._top_k:
            return True
        worst = self.score(top[-1])
        return score < worst if self._ranking.mode == "min" else score > worst

    @property
    def last_good(self) -> str | None:
        """While the loss is off its course, the newest from before that: it stays whatever a rule says."""
        return self.last_good_of(dict(self.committed))  # a copy: it is asked for by other threads too

    def last_good_of(self, manifests: Mapping[str, Manifest]) -> str | None:
        """The same of other checkpoints of the run."""
        if self.off_since is None:
            return None
        return last_good({name: one for name, one in manifests.items() if self._is_past(one)}, self.off_since)

    def begin(self, run: str, resumed: Manifest | None, sequence: int) -> None:
        """Training begins.

        Args:
            run: id of the run.
            resumed: what it goes on from.
            sequence: number of the newest save there is; what was saved after ``resumed`` up to that one is another
                course of the run, which its user has left.
        """
        self._run = run
        self._left = range(resumed.sequence + 1 if resumed is not None else 0, sequence + 1)

    def _is_past(self, manifest: Manifest) -> bool:
        """Whether a checkpoint is of what this training has been through."""
        return self._run is None or (manifest.run == self._run and manifest.sequence not in self._left)

    def go_back(self, good: Manifest) -> dict[str, Manifest]:
        """The run goes on from ``good``: what was committed since is suspect from now on; those, by name."""
        self.off_since = None
        left = self.left_behind(self.committed, good)
        self.committed |= left
        return left

    def left_behind(self, manifests: Mapping[str, Manifest], good: Manifest) -> dict[str, Manifest]:
        """What of some checkpoints a run leaves behind that goes back to ``good``, called suspect."""
        why = f"the run went back from it to step {good.step}"
        return {
            name: manifest.suspected(why)
            for name, manifest in manifests.items()
            if self._is_past(manifest)
            and manifest.order > good.order
            and manifest.step > good.step  # not what another callback saved of the same step
            and manifest.health == HEALTHY
        }


def best_first(committed: dict[str, Manifest], ranking: Ranking | None) -> list[str]:
    """Names from best to worst; of healthy ones from new to old where there is no ranking."""
    if ranking is not None:
        return ranking.best(committed)
    return [name for name in newest_first(committed) if committed[name].health == HEALTHY]
