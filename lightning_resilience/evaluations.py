"""Validations and ends of epochs: which numbers belong to a step, and whether they are a reason to save it."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_resilience.ranks import Ranks
from lightning_resilience.retention import Ranking
from lightning_resilience.standings import Standings
from lightning_resilience.trainer_state import position_of


class Evaluations:
    """What is logged during one fit, as saves go by it.

    Args:
        trainer: the Trainer, whose metrics these are.
        ranks: who decides together; rank 0's score counts.
        standings: what a score has to compare with.
        ranking: what checkpoints are ranked by.
        top_k: how many of the best are wanted.
        every_epochs: after how many epochs there is a save; 0 for none.
        at_epoch_end: whether saves wait for the end of the epoch, rather than for a validation.
    """

    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        standings: Standings,
        *,
        ranking: Ranking | None,
        top_k: int,
        every_epochs: int,
        at_epoch_end: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._standings = standings
        self._ranking = ranking
        self._top_k = top_k
        self._every_epochs = every_epochs
        self._at_epoch_end = at_epoch_end
        self._before: set[str] = set()
        """Names of metrics that were there before the last validation began."""
        self._of_validations: set[str] = set()
        """Names of metrics that validations give."""
        self._has_validated = False
        self._fresh_at: tuple[int, int] | None = None
        """The step boundary that the last validation's metrics belong to."""

    def validation_begins(self) -> None:
        self._before = set(self._trainer.callback_metrics)

    def validation_ended(self) -> None:
        self._of_validations |= set(self._trainer.callback_metrics) - self._before
        self._has_validated = True

    def reasons(self, epoch: int, epoch_ended: bool) -> list[str]:
        """Why to save now that a batch is done, with its validation and its epoch where it ended them.  Collective
        where it did."""
        if self._has_validated:
            self._fresh_at = position_of(self._trainer)
        if not (epoch_ended or self._has_validated):
            return []
        if not (epoch_ended if self._at_epoch_end() else self._has_validated):
            return []
        reasons = []
        if self._every_epochs and (epoch + 1) % self._every_epochs == 0:
            reasons.append("end of epoch")
        if self._ranking is not None and self._ranks.broadcast(self._standings.gets_in(self._score())):
            among = f"among the {self._top_k} best" if self._top_k > 1 else "best"
            reasons.append(f"{among} {self._ranking.monitor}")
        return reasons

    def at_boundary(self) -> None:
        """Training is at a step boundary, where all reasons so far are heeded."""
        self._has_validated = False

    def _score(self) -> float | None:
        return self.metrics().get(self._ranking.monitor) if self._ranking is not None else None

    def metrics(self) -> dict[str, float]:
        """The numbers logged at this step; those of an earlier validation belong to an earlier step and are left
        out."""
        is_fresh = self._fresh_at == position_of(self._trainer)
        return {
            name: float(value)
            for name, value in self._trainer.callback_metrics.items()
            if value.numel() == 1 and (is_fresh or name not in self._of_validations)
        }
