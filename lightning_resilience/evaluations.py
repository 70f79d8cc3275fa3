"""Validations and ends of epochs: which numbers belong to a step, and whether they are a reason to save it."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.errors import SetupError
from lightning_resilience.orders import Orders
from lightning_resilience.ranks import Ranks
from lightning_resilience.standings import Standings
from lightning_resilience.trainer_state import position_of


class Evaluations:
    """What is logged during one fit, as saves go by it.

    Args:
        trainer: the Trainer, whose metrics these are.
        ranks: who decides together; rank 0's score counts.
        standings: what a score has to compare with.
        orders: when to save.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, standings: Standings, orders: Orders) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._standings = standings
        self._orders = orders
        self._before: set[str] = set()
        """Names of metrics that were there before the last validation began."""
        self._of_validations: set[str] = set()
        """Names of metrics that validations give."""
        self._has_validated = self._has_ever_validated = self._has_warned = False
        self._fresh_at: tuple[int, int] | None = None
        """The step boundary that the last validation's metrics belong to."""

    def validation_begins(self) -> None:
        self._before = set(self._trainer.callback_metrics)

    def validation_ended(self) -> None:
        self._of_validations |= set(self._trainer.callback_metrics) - self._before
        self._has_validated = self._has_ever_validated = True

    def reasons(self, epoch: int, epoch_ended: bool) -> list[str]:
        """Why to save now that a batch is done, with its validation and its epoch where it ended them.  Collective
        where it did; see ``_gets_in`` for what it raises."""
        if self._has_validated:
            self._fresh_at = position_of(self._trainer)
        if not (epoch_ended or self._has_validated):
            return []
        if not (epoch_ended if self._orders.at_epoch_end() else self._has_validated):
            return []
        reasons = []
        if self._orders.every_epochs and (epoch + 1) % self._orders.every_epochs == 0:
            reasons.append("end of epoch")
        if self._orders.ranking is not None and self._gets_in(self._orders.ranking.monitor):
            among = f"among the {self._orders.top_k} best" if self._orders.top_k > 1 else "best"
            reasons.append(f"{among} {self._orders.ranking.monitor}")
        return reasons

    def at_boundary(self) -> None:
        """Training is at a step boundary, where all reasons so far are heeded."""
        self._has_validated = False

    def _gets_in(self, monitor: str) -> bool:
        """Whether rank 0's score is among the wanted best.  Collective.

        Raises:
            SetupError: there is no such metric although there was a validation, where ``ModelCheckpoint`` raises too;
                on all ranks.
        """
        answer = self._ranks.broadcast(self._has_top_score(monitor) if self._ranks.rank == 0 else False)
        if isinstance(answer, SetupError):
            raise answer
        return bool(answer)

    def _has_top_score(self, monitor: str) -> bool | SetupError:
        logged = self._trainer.callback_metrics
        if monitor not in logged and self._orders.top_k:
            error = SetupError(
                f"monitor={monitor!r}: no such metric is logged; there are {sorted(logged)}.",
                hint=f"Call self.log({monitor!r}, value) in the LightningModule, or give another monitor=.",
            )
            if self._has_ever_validated:
                return error
            if not self._has_warned:
                self._has_warned = True
                rank_zero_warn(f"ResilientCheckpoint: {error}")
        return self._standings.gets_in(self.metrics().get(monitor))

    def metrics(self) -> dict[str, float]:
        """The numbers logged at this step; those of an earlier validation belong to an earlier step and are left
        out."""
        is_fresh = self._fresh_at == position_of(self._trainer)
        return {
            name: float(value)
            for name, value in self._trainer.callback_metrics.items()
            if value.numel() == 1 and (is_fresh or name not in self._of_validations)
        }
