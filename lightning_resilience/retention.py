"""What to keep: a rule, a pure judgement over manifests, and a reason for each verdict.

``judge`` sees the committed checkpoints of one tier and answers for each of them whether it stays and why.  Adding a
rule never removes more, and whatever a rule says, the newest checkpoint, the newest healthy one, pinned ones and
those in use stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_resilience.errors import SetupError
from lightning_resilience.manifest import HEALTHY, PINNED, WEIGHTS_ONLY, Manifest, newest_first


@dataclass(frozen=True)
class Keep:
    """Retention rule of one tier.

    Args:
        last: how many of the newest checkpoints stay; -1 keeps all.
        top_k: how many of the best by the monitored metric stay besides; -1 keeps all that have the metric.
    """

    last: int = 3
    top_k: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.last, bool) or not isinstance(self.last, int) or (self.last < 1 and self.last != -1):
            raise SetupError(
                f"Keep(last={self.last!r}): at least the newest checkpoint stays.",
                hint="Use a number from 1, or -1 to keep all.",
            )
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < -1
        ):
            raise SetupError(f"Keep(top_k={self.top_k!r}): a number from 0 is wanted, or -1 to keep all.")


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
class Verdict:
    """Whether checkpoint ``name`` stays, and why."""

    name: str
    keep: bool
    reasons: tuple[str, ...]


def judge(
    manifests: Mapping[str, Manifest], keep: Keep, ranking: Ranking | None = None, in_use: Collection[str] = ()
) -> list[Verdict]:
    """Decide over the committed checkpoints of one tier.

    Args:
        manifests: manifest of each, by name.
        keep: the rule.
        ranking: what ``keep.top_k`` ranks by.
        in_use: names that must stay whatever the rule says (resumed from, being uploaded, …).

    Returns:
        One verdict a checkpoint, newest first.
    """
    in_order = newest_first(manifests)
    reasons: dict[str, list[str]] = {name: [] for name in in_order}

    for place, name in enumerate(in_order if keep.last == -1 else in_order[: keep.last], start=1):
        reasons[name].append("newest" if place == 1 else f"{_ordinal(place)} newest")
    resumable = [name for name in in_order if WEIGHTS_ONLY not in manifests[name].labels]
    healthy = [name for name in resumable if manifests[name].health == HEALTHY]
    for guarded, why in ((resumable[:1], "newest to resume from"), (healthy[:1], "newest healthy")):
        for name in guarded:
            if not reasons[name]:
                reasons[name].append(why)
    if ranking is not None and keep.top_k:
        best = ranking.best(manifests)
        for place, name in enumerate(best if keep.top_k == -1 else best[: keep.top_k], start=1):
            reasons[name].append(f"{'' if place == 1 else _ordinal(place) + ' '}best {ranking.monitor}")
    for name in in_order:
        if PINNED in manifests[name].labels:
            reasons[name].append(PINNED)
        if name in in_use:
            reasons[name].append("in use")
    return [Verdict(name, bool(why), tuple(why) or (_surplus(keep),)) for name, why in reasons.items()]


def _surplus(keep: Keep) -> str:
    top = f" nor among the {keep.top_k} best" if keep.top_k else ""
    return f"not among the newest {keep.last}{' and without a score' if keep.top_k == -1 else top}"


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
