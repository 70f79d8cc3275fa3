"""A Trainer's state as a ``Snapshot``: what of it is tensors, what is serialised at once, and what each rank has for
itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_resilience import logged, run_state, trainer_state
from lightning_resilience.data import DataPosition
from lightning_resilience.doorway import Doorway
from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import FlatState
from lightning_resilience.manifest import WEIGHTS_ONLY
from lightning_resilience.named_optimizers import raw_optimizer
from lightning_resilience.names import canonical
from lightning_resilience.ranks import Ranks
from lightning_resilience.saveable import check_saveable
from lightning_resilience.saves import Facts, Snapshot
from lightning_resilience.strategies import Family


class Capture:
    """Takes the state of one Trainer on this rank, for saves.

    Args:
        trainer: the Trainer.
        family: how its strategy's state is had.
        ranks: the ranks that save together.
        doorway: the way into Lightning.
        data: where this rank is in its data.
        exact_data: whether that is saved, as all callbacks of the Trainer have agreed by then.
    """

    def __init__(
        self,
        trainer: Trainer,
        family: Family,
        ranks: Ranks,
        doorway: Doorway,
        data: DataPosition,
        exact_data: Callable[[], bool],
    ) -> None:
        self._trainer = trainer
        self._family = family
        self._ranks = ranks
        self._doorway = doorway
        self._data = data
        self._exact_data = exact_data
        self._has_saved = False

    def now(self, weights_only: bool, settled: bool) -> Snapshot:
        """The Trainer's state as it is now; see ``snapshot``."""
        return self.snapshot(self._doorway.dump_checkpoint(weights_only), settled)

    def snapshot(self, checkpoint: dict[str, Any], settled: bool) -> Snapshot:
        """Split a Trainer's checkpoint into tensors for DCP and the rest, which is serialised here and now.

        Args:
            checkpoint: as ``Trainer.save_checkpoint`` makes it.
            settled: whether Lightning is between two batches, with nothing of the last one left to do.
        """
        state, rest = trainer_state.split(checkpoint, self._family.prefix)
        meta: bytes | Exception = b""
        if self._ranks.rank == 0:
            meta = self._serialised(lambda: self._dump(rest))
        if not self._has_saved:
            check_saveable(FlatState.of(state))  # later on it costs that save; see ``planning``
        family = self._family
        own = self._serialised(lambda: run_state.to_bytes(self._of_this_rank(state, settled)))
        self._has_saved = True
        return Snapshot(state, family.identical, meta, own, family.trained, family.still)

    def tensors(self, weights_only: bool) -> Snapshot:
        """What a plan is made from, and no more: the model, and the optimizers as they are once they have stepped."""
        state: dict[str, Any] = {self._family.prefix: self._family.model_state()}
        if not weights_only:
            for index, optimizer in enumerate(self._trainer.optimizers):
                state[f"optimizer_{index}"] = self.optimizer_state(optimizer)
        return Snapshot(state, self._family.identical, b"", b"", self._family.trained)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """In the place of ``Strategy.optimizer_state``."""
        return self._family.optimizer_state(raw_optimizer(optimizer))

    def facts(
        self,
        reason: str,
        epoch: int,
        metrics: Mapping[str, float],
        weights_only: bool,
        labels: tuple[str, ...] = (),
        suspicion: str = "",
        off_since: int | None = None,
    ) -> Facts:
        """What the manifest says of a save of the state as it is now.

        Args:
            reason: why it is saved.
            epoch: that the last batch belonged to.
            metrics: by name.
            weights_only: whether all but the weights is left out.
            labels: what it is marked as; rank 0's count.
            suspicion: why it is not to be resumed from, if it is not; rank 0's counts.
            off_since: the step since which the loss is off its course, if it is; rank 0's counts.
        """
        return Facts(
            step=trainer_state.step_of(self._trainer),
            epoch=epoch,
            reason=reason,
            strategy=type(self._trainer.strategy).__name__,
            suspicion=suspicion,
            labels=(*((WEIGHTS_ONLY,) if weights_only else ()), *labels),
            metrics=metrics,
            versions=trainer_state.VERSIONS,
            off_since=off_since,
        )

    def _of_this_rank(self, state: Mapping[str, Any], settled: bool) -> dict[str, Any]:
        """What this rank has for itself."""
        own: dict[str, Any] = {**run_state.capture(), "settled": settled}
        own["stop_is_wanted"] = self._doorway.stop_is_wanted
        if self._doorway.training:
            own["logged"] = logged.capture(self._trainer)
        if self._ranks.rank:
            names = {canonical(name) for name in state[self._family.prefix]}
            own["buffers"] = run_state.own_buffers(self._trainer.lightning_module, names)
        else:
            own["thawed"] = self._family.thawed()
        own["accumulation"] = self._doorway.accumulation
        own["syncs_buffers"] = self._doorway.syncs_buffers
        if self._exact_data():
            own["data"] = self._data.state()
        return own

    def _dump(self, rest: Mapping[str, Any]) -> bytes:
        meta = trainer_state.dump(rest)
        if not self._has_saved:
            trainer_state.check_loads(meta)
        return meta

    def _serialised(self, make: Callable[[], bytes]) -> bytes | Exception:
        """What cannot be saved at all stops the run at its first save, before hours are at stake; later on it costs
        that save."""
        try:
            return make()
        except SaveFailed as error:
            failure = error
        except Exception as error:
            failure = SaveFailed(
                f"What rank {self._ranks.rank} has for itself cannot be saved: {type(error).__name__}: {error}.",
                stage="plan",
                hint="Look at state_dict() of datasets, samplers and loaders; or set exact_data=False.",
            )
            failure.__cause__ = error
        if not self._has_saved:
            raise failure
        return failure
