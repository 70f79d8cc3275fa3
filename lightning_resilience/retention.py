"""What to keep: a rule, a pure judgement over manifests, and the reasons for each.

``judge`` sees the committed checkpoints of one tier and answers for each of them whether it stays and why.  The rules
of a ``Keep`` add up: with one more of them, nothing more is removed; ``max_bytes`` alone takes away, the oldest first.
Whatever a rule says, the newest checkpoint, the newest healthy one, pinned ones and those in use stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_resilience.errors import SetupError
from lightning_resilience.manifest import (
    HEALTHY,
    LAST_GOOD,
    MILESTONE,
    OFF_SINCE,
    PINNED,
    WEIGHTS_ONLY,
    Manifest,
    newest_first,
)
from lightning_resilience.numeric import is_whole


@dataclass(frozen=True)
class Keep:
    """Retention rule of one tier.

    Args:
        last: how many of the newest checkpoints stay; -1 keeps all.  Suspect ones older than the newest healthy one do
            not count, and go.
        top_k: how many of the best by the monitored metric stay besides; -1 keeps all that have the metric.
        milestones: steps of which one checkpoint each stays for good: of every multiple of a number the closest that
            there is, or of each step in a list.
        max_bytes: size of all that stay together; where it is exceeded, the oldest go first, the best last.
        marked: how many of the newest that the schedule labelled ``milestone`` stay besides: a plateau, or the best
            smoothed loss, from before what happened since.
    """

    last: int = 3
    top_k: int | None = None
    milestones: int | Sequence[int] | None = None  # a tuple once it is made
    max_bytes: int | None = None
    marked: int = 1

    def __post_init__(self) -> None:
        if not is_whole(self.last, -1) or self.last == 0:
            raise SetupError(
                f"Keep(last={self.last!r}): at least the newest checkpoint stays.",
                hint="Use a number from 1, or -1 to keep all.",
            )
        if self.top_k is not None and not is_whole(self.top_k, -1):
            raise SetupError(f"Keep(top_k={self.top_k!r}): a number from 0 is wanted, or -1 to keep all.")
        if isinstance(self.milestones, (list, tuple)):
            object.__setattr__(self, "milestones", tuple(self.milestones))
        steps = self.milestones if isinstance(self.milestones, tuple) else (self.milestones,)
        if self.milestones is not None and not all(is_whole(step, 1) for step in steps):
            raise SetupError(
                f"Keep(milestones={self.milestones!r}): a number of steps is wanted, or a list of steps.",
                hint="Use milestones=10_000, or milestones=[1000, 50_000].",
            )
        if self.max_bytes is not None and not is_whole(self.max_bytes, 1):
            raise SetupError(f"Keep(max_bytes={self.max_bytes!r}): a number of bytes is wanted.")
        if not is_whole(self.marked, 0):
            raise SetupError(f"Keep(marked={self.marked!r}): a number of checkpoints is wanted, 0 or more.")


def stated(keep: Keep, remote: Keep | None, ranking: Ranking | None) -> dict[str, Any]:
    """Rules as a manifest states them, for whoever looks at the checkpoints later."""
    rules = {"hot": keep} | ({"cold": remote} if remote is not None else {})
    said: dict[str, Any] = {tier: dataclasses.asdict(rule) for tier, rule in rules.items()}
    return said | ({"monitor": ranking.monitor, "mode": ranking.mode} if ranking is not None else {})


def understood(said: Mapping[str, Any], tier: str) -> tuple[Keep, Ranking | None] | None:
    """The rule of ``hot`` or ``cold`` from what ``stated`` gave; None where there is none, or another version's."""
    try:
        arguments: dict[str, Any] = dict(said[tier])
        keep = Keep(**arguments)
        return keep, Ranking(said["monitor"], said["mode"]) if "monitor" in said else None
    except (KeyError, TypeError, ValueError, SetupError):
        return None


def recorded(manifests: Mapping[str, Manifest], *tiers: str) -> tuple[str, Keep, Ranking | None] | None:
    """The rule that the newest checkpoint with one states, for the first of ``tiers`` that it has one for, and the name
    of that checkpoint; None where there is none, or another version's."""
    name = next((name for name in newest_first(manifests) if "retention" in manifests[name].extra), None)
    if name is None:
        return None
    rules = (understood(manifests[name].extra["retention"], tier) for tier in tiers)
    return next(((name, *rule) for rule in rules if rule is not None), None)


def described(keep: Keep, ranking: Ranking | None) -> str:
    """What a rule keeps, in words."""
    parts = ["all" if keep.last == -1 else _the_newest(keep.last)]
    if ranking is not None and keep.top_k:
        best = "all" if keep.top_k == -1 else "the best" if keep.top_k == 1 else f"the {keep.top_k} best"
        parts.append(f"{best} by {ranking.monitor} ({ranking.mode})")
    if isinstance(keep.milestones, int):
        parts.append(f"one for each multiple of {keep.milestones:,} steps")
    elif keep.milestones:
        parts.append(f"one for each of the steps {', '.join(map(str, keep.milestones))}")
    if keep.marked:
        parts.append(f"{_the_newest(keep.marked)} labelled {MILESTONE}")
    if keep.max_bytes is not None:
        parts.append(f"{keep.max_bytes:,} bytes at most")
    return ", ".join(parts)


def _the_newest(count: int) -> str:
    return "the newest" if count == 1 else f"the newest {count}"


@dataclass(frozen=True)
class Ranking:
    """The metric that orders checkpoints: its name, and ``min`` or ``max``."""

    monitor: str
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise SetupError(f"mode={self.mode!r}: 'min' or 'max' is wanted.")

    def best(self, manifests: Mapping[str, Manifest]) -> list[str]:
        """Names with a finite score, best first; of equals the older one.  Suspect ones are never best."""
        scored = [
            (score if self.mode == "min" else -score, manifest.order, name)
            for name, manifest in manifests.items()
            if (score := manifest.metrics.get(self.monitor)) is not None
            and math.isfinite(score)
            and manifest.health == HEALTHY
        ]
        return [name for _, _, name in sorted(scored)]


@dataclass(frozen=True)
class Judgement:
    """Whether checkpoint ``name`` stays, and why."""

    name: str
    keep: bool
    reasons: tuple[str, ...]


def judge(
    manifests: Mapping[str, Manifest], keep: Keep, ranking: Ranking | None = None, in_use: Collection[str] = ()
) -> list[Judgement]:
    """Decide over the committed checkpoints of one tier.

    Args:
        manifests: manifest of each, by name.
        keep: the rule.
        ranking: what ``keep.top_k`` ranks by.
        in_use: names that must stay whatever the rule says (resumed from, being uploaded, …).

    Returns:
        One judgement a checkpoint, newest first.
    """
    in_order = newest_first(manifests)
    reasons: dict[str, list[str]] = {name: [] for name in in_order}

    newest = in_order if keep.last == -1 else _that_count(in_order, manifests)[: keep.last]
    for place, name in enumerate(newest, start=1):
        reasons[name].append("newest" if place == 1 else f"{_ordinal(place)} newest")
    resumable = [name for name in in_order if WEIGHTS_ONLY not in manifests[name].labels]
    healthy = [name for name in in_order if manifests[name].unresumable is None]
    for guarded, why in ((resumable[:1], "newest to resume from"), (healthy[:1], "newest healthy")):
        for name in guarded:
            if not reasons[name]:
                reasons[name].append(why)
    good: list[str] = []
    if ranking is not None and keep.top_k:
        best = ranking.best(manifests)
        for place, name in enumerate(best if keep.top_k == -1 else best[: keep.top_k], start=1):
            reasons[name].append(f"{'' if place == 1 else _ordinal(place) + ' '}best {ranking.monitor}")
            good.append(name)
    for step, name in _milestones(keep.milestones, {name: manifests[name] for name in healthy}).items():
        reasons[name].append(f"milestone {step}")
    marked = [name for name in healthy if MILESTONE in manifests[name].labels]
    for place, name in enumerate(marked[: keep.marked], start=1):
        reasons[name].append(f"{'newest' if place == 1 else _ordinal(place) + ' newest'} {MILESTONE}")
    guards = {name for some in (in_order, resumable, healthy) for name in some[:1]}
    if in_order and (before := _of_a_spike(manifests[in_order[0]], manifests)) is not None:
        reasons[before].append("from before the loss left its course")
        guards.add(before)
    for name in in_order:
        if PINNED in manifests[name].labels:
            reasons[name].append(PINNED)
        if name in in_use:
            reasons[name].append("in use")
        if PINNED in manifests[name].labels or name in in_use:
            guards.add(name)
    plain = [name for name in reversed(in_order) if name not in good]
    may_go = [name for name in (*plain, *reversed(good)) if name not in guards]
    surplus = _over_the_limit(keep.max_bytes, {name: manifests[name] for name in in_order if reasons[name]}, may_go)
    return [
        Judgement(name, False, (f"over max_bytes={keep.max_bytes:,}",))
        if name in surplus
        else Judgement(name, bool(why), tuple(why) or (_surplus(keep),))
        for name, why in reasons.items()
    ]


def judge_runs(
    manifests: Mapping[str, Manifest], keep: Keep, ranking: Ranking | None = None, in_use: Collection[str] = ()
) -> list[Judgement]:
    """As ``judge``, each run for itself: what one run saves makes nothing of another's redundant."""
    runs: dict[str, dict[str, Manifest]] = {}
    for name, manifest in manifests.items():
        runs.setdefault(manifest.run, {})[name] = manifest
    judgements = {one.name: one for run in runs.values() for one in judge(run, keep, ranking, in_use)}
    return [judgements[name] for name in newest_first(manifests)]


def last_good(manifests: Mapping[str, Manifest], off_since: int) -> str | None:
    """The newest checkpoint of a run from before its loss left its course.

    Args:
        manifests: those of the run, by name.
        off_since: the step with whose weights the loss was off first.  A checkpoint of that very step is the last
            resort: its weights may be what is wrong.
    """
    resumable = [name for name in newest_first(manifests) if manifests[name].unresumable is None]
    # What the run was taken back to is good, also where the very next batch is off again.
    before = (one for one in resumable if manifests[one].step < off_since + (LAST_GOOD in manifests[one].labels))
    return next(before, None) or next((one for one in resumable if manifests[one].step == off_since), None)


def _of_a_spike(newest: Manifest, manifests: Mapping[str, Manifest]) -> str | None:
    """The last good checkpoint, where the newest one says that it was saved while the loss was off its course."""
    off_since = newest.extra.get(OFF_SINCE)
    if not is_whole(off_since):
        return None
    return last_good({name: one for name, one in manifests.items() if one.run == newest.run}, off_since)


def _that_count(in_order: Sequence[str], manifests: Mapping[str, Manifest]) -> list[str]:
    """Names that count among the newest: a suspect one of an earlier time than a healthy one is of use to nobody, and
    those that are pinned stay besides."""
    healthy = [name for name in in_order if manifests[name].health == HEALTHY]
    older = set(in_order[in_order.index(healthy[0]) :]) if healthy else set()
    useful = [name for name in in_order if name in healthy or name not in older]
    return [name for name in useful if PINNED not in manifests[name].labels]


def _milestones(steps: int | Sequence[int] | None, manifests: Mapping[str, Manifest]) -> dict[int, str]:
    """The checkpoint that stands for each milestone: the closest; of equals the older."""
    closest: dict[int, tuple[int, tuple[int, int], str]] = {}
    for name, manifest in manifests.items():
        if steps is None:
            wanted: Sequence[int] = ()
        elif isinstance(steps, int):
            wanted = [(manifest.step + steps // 2) // steps * steps]  # the multiple that it is closest to
        else:
            wanted = steps
        for step in wanted:
            place = (abs(manifest.step - step), manifest.order, name)
            if step and (step not in closest or place < closest[step]):
                closest[step] = place
    return {step: name for step, (_, _, name) in sorted(closest.items())}


def _over_the_limit(limit: int | None, staying: Mapping[str, Manifest], may_go: Sequence[str]) -> set[str]:
    """What has to go so that the others fit."""
    surplus: set[str] = set()
    size = sum(manifest.own_size for manifest in staying.values())
    for name in may_go:
        if limit is None or size <= limit:
            break
        if name in staying:
            surplus.add(name)
            size -= staying[name].own_size
    return surplus


def _surplus(keep: Keep) -> str:
    top = f" nor among the {keep.top_k} best" if keep.top_k else ""
    return f"not among the newest {keep.last}{' and without a score' if keep.top_k == -1 else top}" + (
        " nor a milestone" if keep.milestones else ""
    )


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
