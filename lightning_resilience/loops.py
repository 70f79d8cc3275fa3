"""The Trainer's training loop, as its data see it: what it reads, how far it is, whether it is what reads now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils._pytree import tree_flatten


class Loops:
    """The training loop of one Trainer and what it reads from.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.sets_up = False
        """Whether the training loaders are being made, and not read yet."""
        self._reading = False
        self._watched: Any = None

    # -- what it reads -------------------------------------------------------------------------------------------------

    def train_loaders(self) -> list[Any]:
        """The training loaders, in their order."""
        combined = self._trainer.fit_loop._combined_loader
        return list(combined.flattened) if combined is not None else []

    def batches_ahead(self) -> int:
        """How many batches the fit loop has read and not trained on."""
        fit_loop = self._trainer.fit_loop
        fetched = fit_loop._data_fetcher.fetched if fit_loop._data_fetcher is not None else 0
        progress: Any = fit_loop.epoch_loop.batch_progress.current
        return max(fetched - int(progress.processed), 0)

    def reads_ahead(self) -> bool:
        """Whether one more batch is read than is trained on, to know which is the last."""
        fetcher = self._trainer.fit_loop._data_fetcher
        return fetcher is not None and fetcher.length is None

    @property
    def cycled(self) -> list[bool]:
        """Which loaders have been through at least once in this epoch, where shorter ones are cycled."""
        combined = self._trainer.fit_loop._combined_loader
        return list(getattr(getattr(combined, "_iterator", None), "_consumed", ()))

    @cycled.setter
    def cycled(self, cycled: list[bool]) -> None:
        combined = self._trainer.fit_loop._combined_loader
        iterator: Any = getattr(combined, "_iterator", None)
        if cycled and hasattr(iterator, "_consumed"):
            iterator._consumed = list(cycled)

    @property
    def reloaded_in(self) -> float:
        """The epoch in which the training loaders were made."""
        return self._trainer.fit_loop._last_train_dl_reload_epoch

    @reloaded_in.setter
    def reloaded_in(self, epoch: float) -> None:
        self._trainer.fit_loop._last_train_dl_reload_epoch = epoch

    def made_anew_since(self, epoch: float) -> bool:
        """Whether loaders that were made in ``epoch`` would have been made anew by now."""
        every: int = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set by Lightning
        return bool(every) and self._trainer.current_epoch - epoch >= every

    def is_from_hook(self) -> bool:
        """Whether the training loaders come from a hook of the model or DataModule, rather than from ``fit``."""
        return bool(self._trainer.fit_loop._data_source.is_module())

    def is_given(self, loader: object) -> bool:
        """Whether a loader is the very object that was given to ``fit``, not one that Lightning made from it."""
        given = self._trainer.fit_loop._data_source.instance
        return any(loader is leaf for leaf in tree_flatten(getattr(given, "iterables", given))[0])

    @property
    def processes_training_data(self) -> bool:
        """Whether the loader that the strategy is handed now is for training."""
        state = self._trainer.state
        return state.fn == TrainerFn.FITTING and state.stage == RunningStage.TRAINING

    # -- where it is --------------------------------------------------------------------------------------------------

    def at_epoch_start(self) -> bool:
        """Whether the next training batch is the first of an epoch."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return bool(progress.current.ready == 0)

    def go_to_batch(self, done: int, left: int) -> None:
        """Count as if ``done`` batches of this epoch had been trained on, or ``left`` were left, where all are read."""
        fit_loop = self._trainer.fit_loop
        total, everything = self._trainer.num_training_batches, [sized_len(one) for one in self.train_loaders()]
        if left >= 0 and total != math.inf:
            is_all = len(everything) == 1 and everything[0] == total
            done = max(int(total) - left, 0) if is_all else min(done, int(total))
        current: Any = fit_loop.epoch_loop.batch_progress.current
        if fit_loop._data_fetcher is not None:
            fit_loop._data_fetcher.fetched += done - current.ready
        current.ready = current.started = current.processed = current.completed = done
        fit_loop.epoch_loop.batch_progress.is_last_batch = False

    def leave_finished_epoch(self) -> None:
        """Count from the start where the state was saved after the last batch of an epoch whose length nobody knew:
        Lightning would look for more of it."""
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        if loop.batch_progress.is_last_batch and loop.batch_progress.current.ready and fit_loop.max_batches == math.inf:
            loop.batch_progress.reset_on_run()
            loop.scheduler_progress.reset_on_run()
            loop.automatic_optimization.optim_progress.reset_on_run()
            loop.val_loop.batch_progress.total.reset()

    def begin_reading(self) -> None:
        """Make the iterators of the training loaders, which at start-up were left empty."""
        fit_loop, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        assert fit_loop._data_fetcher is not None
        iter(fit_loop._data_fetcher)
        fit_loop._data_fetcher.fetched += loop.batch_progress.current.ready

    # -- who reads -----------------------------------------------------------------------------------------------------

    def make_setup_data(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of the loop's ``setup_data``: lets ``sets_up`` and ``reading`` tell what goes on."""

        def setup_data(*args: Any, **kwargs: Any) -> Any:
            self.sets_up = True
            try:
                return original(*args, **kwargs)
            finally:
                self.sets_up = False
                self._watch_reading()

        return setup_data

    def _watch_reading(self) -> None:
        """Let ``reading`` tell whether it is the training loop that reads from its loaders."""
        combined: Any = self._trainer.fit_loop._combined_loader
        if combined is None or combined is self._watched:
            return
        cls, loops = type(combined), self

        def begin(loader: Any) -> Any:
            with loops._reads():
                return cls.__iter__(loader)

        def advance(loader: Any) -> Any:
            with loops._reads():
                return cls.__next__(loader)

        self._unwatch()
        self._watched = combined
        combined.__class__ = type(cls.__name__, (cls,), {"__iter__": begin, "__next__": advance})

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.__class__ = type(self._watched).__mro__[1]
            self._watched = None

    @contextmanager
    def _reads(self) -> Iterator[None]:
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    @property
    def reading(self) -> bool:
        """Whether the training loop reads from its loaders now, or makes them."""
        return self.sets_up or (self._reading and self.processes_training_data)

    def close(self) -> None:
        """Let the loop's loader be what it was."""
        self._unwatch()
