"""The doorway into Lightning: where we take the place of its methods.

``FSDPStrategy`` and ``ModelParallelStrategy`` never call a CheckpointIO, and the others call it on rank 0 only, so a
plugin cannot do this work.  What works for all of them is to override a handful of methods on the strategy *instance*
and ``resume_start`` on the Trainer's checkpoint connector (``Doorway``).  Every save then passes here,
``trainer.save_checkpoint`` and a stock ``ModelCheckpoint``'s too, and every load.
"""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

LONGEST_WINDOW = 1000
"""Batches without a step of any optimizer after which a model that optimizes by hand is taken to use none."""


class Doorway:
    """Puts functions in the place of methods of one Trainer's strategy and connector, and takes them out again."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.strategy = trainer.strategy
        self.connector = trainer._checkpoint_connector
        self._accumulates = trainer.accumulate_grad_batches
        self._batches_that_stepped: int | None = None
        self._steps_by_hand = StepsByHand()
        self._before_steps: BeforeSteps | None = None
        self._replaced: list[tuple[object, str]] = []

    def replace(self, owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let ``owner.name`` be ``make(the method as it is now)``."""
        setattr(owner, name, make(getattr(owner, name)))
        self._replaced.append((owner, name))

    def close(self) -> None:
        """Take everything out."""
        self._steps_by_hand.close()
        if self._before_steps is not None:
            self._before_steps.close()
        for owner, name in self._replaced:
            with suppress(AttributeError):
                delattr(owner, name)
        self._replaced.clear()

    # -- private names, each used in one place ------------------------------------------------------------------------

    def dump_checkpoint(self, weights_only: bool) -> dict[str, Any]:
        """The Trainer's checkpoint, with all hooks run; model and optimizers as the doorway gives them."""
        return self.connector.dump_checkpoint(weights_only)

    @property
    def fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    def at_step_boundary(self) -> bool:
        """Whether no gradients of a half-done accumulation window would be lost now.  Asked once a batch."""
        module = self.trainer.lightning_module
        if module.automatic_optimization:
            return not self.trainer.fit_loop.epoch_loop._should_accumulate()
        return self._steps_by_hand.done(module)

    def ends_within_an_epoch(self) -> bool:
        """Whether training stops now, in the middle of an epoch that a longer run would go on with."""
        loop = self.trainer.fit_loop.epoch_loop
        return loop.done and not loop._num_ready_batches_reached()

    def between_batches(self, action: Callable[[int, bool], None]) -> None:
        """Run ``action(epoch, epoch_ended)`` whenever Lightning is done with a batch and with all that follows it: its
        validation, and after the last batch of an epoch the epoch's end.

        The hooks that callbacks have for this come too early: loops, schedulers and loggers still move after them.
        """
        fit_loop, epoch_loop = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop

        def after_batch(original: Callable[..., Any]) -> Callable[..., Any]:
            def on_advance_end(*args: Any, **kwargs: Any) -> None:
                original(*args, **kwargs)
                if not epoch_loop._num_ready_batches_reached():
                    action(self.trainer.current_epoch, False)

            return on_advance_end

        def after_epoch(original: Callable[..., Any]) -> Callable[..., Any]:
            def on_advance_end(*args: Any, **kwargs: Any) -> None:
                epoch = self.trainer.current_epoch
                original(*args, **kwargs)
                action(epoch, True)

            return on_advance_end

        self.replace(epoch_loop, "on_advance_end", after_batch)
        self.replace(fit_loop, "on_advance_end", after_epoch)

    def before_weights_change(self, action: Callable[[], None]) -> None:
        """Run ``action`` whenever training is about to do what may change weights: step an optimizer, the Trainer's or
        any other; validate, where averages take the place of weights; end an epoch."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                action()
                return original(*args, **kwargs)

            return call

        fit_loop = self.trainer.fit_loop
        # Hooks of callbacks before a step are called in there.
        self.replace(self.strategy.precision_plugin, "_after_closure", make)
        self.replace(fit_loop.epoch_loop.val_loop, "run", make)
        self.replace(fit_loop, "on_advance_end", make)
        self._before_steps = BeforeSteps(action, lambda: self.trainer.lightning_module.automatic_optimization)

    def resume_epoch(self, settled: bool) -> None:
        """The first epoch after a resume is about to begin, or to go on.

        Args:
            settled: whether the state was saved by ``between_batches``, so that nothing of the batch or the epoch
                before it is left to do, which Lightning would do again.
        """
        fit_loop = self.trainer.fit_loop
        progress = fit_loop.epoch_progress.current
        self._batches_that_stepped = fit_loop.epoch_loop._batches_that_stepped if settled else None
        if fit_loop.restarted_on_epoch_start:
            progress.ready += 1  # it had been about to begin
        elif fit_loop.restarted_mid_epoch:
            bar = self.trainer.progress_bar_callback
            if bar is not None:  # it learns the length of the epoch
                bar.on_train_epoch_start(self.trainer, self.trainer.lightning_module)
        if fit_loop.restarted_on_epoch_start or (settled and progress.ready == progress.completed):
            self._do_not_restart()

    def resume_batches(self) -> None:
        """The first batch after a resume is about to be read, of a state that was saved by ``between_batches``."""
        if self._batches_that_stepped is not None:
            self.trainer.fit_loop.epoch_loop._batches_that_stepped = self._batches_that_stepped
            self._do_not_restart()

    def _do_not_restart(self) -> None:
        _Loop.restarting.fset(self.trainer.fit_loop, False)  # type: ignore[attr-defined]  # past the loop's own setter

    @property
    def stop_is_wanted(self) -> bool:
        """Whether somebody has set ``trainer.should_stop``, which has to wait for ``min_epochs`` or ``min_steps``."""
        return bool(self.trainer.should_stop) and not self.trainer.fit_loop._can_stop_early

    def stopped_early(self) -> str | None:
        """Why the run that is resumed had been stopped by an ``EarlyStopping``; None where it had not."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning, untyped
            if isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
                return callback.stopping_reason_message or callback.stopping_reason.name
        return None

    def last_of_stock_callbacks(self) -> str | None:
        """What ``ckpt_path="last"`` means to the stock ModelCheckpoints of this Trainer: their newest ``last.ckpt``."""
        found = {
            path
            for callback in self.trainer.checkpoint_callbacks
            if type(callback) is ModelCheckpoint
            for path in callback._find_last_checkpoints(self.trainer)
        }
        return max(found, key=os.path.getmtime, default=None)

    def after_registering_signals(self, action: Callable[[], None]) -> None:
        """Run ``action`` once Lightning has registered its handlers of signals, just before the sanity check."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def register_signal_handlers() -> None:
                original()
                action()

            return register_signal_handlers

        self.replace(self.trainer._signal_connector, "register_signal_handlers", make)

    def take_signals(self, signals: Collection[int]) -> dict[int, Any]:
        """The user's handlers of signals, which Lightning will not put back from now on."""
        originals: dict[Any, Any] = self.trainer._signal_connector._original_handlers
        users = {}
        for signum in signals:
            now, before = signal.getsignal(signum), originals.pop(signum, signal.SIG_DFL)
            users[signum] = before if isinstance(now, _HandlersCompose) else now
        return users

    @property
    def requeue_signal(self) -> int | None:
        """The signal after which SLURM is to start this job again; None where it is not to."""
        environment = self.trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return None
        return environment.requeue_signal

    @property
    def is_lightnings_child(self) -> bool:
        """Whether Lightning started this process beside another one, which it kills when this one's status is not
        0."""
        environment = self.trainer._accelerator_connector.cluster_environment
        return isinstance(environment, LightningEnvironment) and self.trainer.local_rank > 0

    def load_again(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint in the middle of training, as at its start, but for the loops; of those only the counters
        of optimizer and scheduler steps go back."""
        connector, epoch_loop = self.connector, self.trainer.fit_loop.epoch_loop
        type(connector).resume_start(connector, os.fspath(path))  # past the search for a checkpoint
        loops = connector._loaded_checkpoint["loops"]["fit_loop"]
        connector.restore_model()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]  # set by Lightning, untyped
            if isinstance(callback, (Timer, Checkpoint)):  # time goes on, and so do the files that others keep
                connector._loaded_checkpoint.get("callbacks", {}).pop(callback.state_key, None)
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        epoch_loop.automatic_optimization.optim_progress.load_state_dict(
            loops["epoch_loop.automatic_optimization.optim_progress"]
        )
        epoch_loop.manual_optimization.optim_step_progress.load_state_dict(
            loops["epoch_loop.manual_optimization.optim_step_progress"]
        )
        epoch_loop.scheduler_progress.load_state_dict(loops["epoch_loop.scheduler_progress"])
        epoch_loop._batches_that_stepped = loops["epoch_loop.state_dict"]["_batches_that_stepped"]
        connector._loaded_checkpoint = {}
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()

    @contextmanager
    def loaded_kept(self) -> Iterator[None]:
        """While another checkpoint is loaded: what Lightning has yet to take from the one before it."""
        loaded, path = self.connector._loaded_checkpoint, self.connector._ckpt_path
        try:
            yield
        finally:
            self.connector._loaded_checkpoint, self.connector._ckpt_path = loaded, path

    def skip_batches(self, count: int) -> int:
        """Read training batches and leave them out, in whole accumulation windows, the last of an epoch excepted; how
        many of ``count`` are left.

        Where the length of the data is not known, the last could not be told, and none is left out."""
        epoch_loop, fetcher = self.trainer.fit_loop.epoch_loop, self.trainer.fit_loop._data_fetcher
        progress, last = epoch_loop.batch_progress, self.trainer.num_training_batches
        if last == math.inf:
            rank_zero_warn("The length of the training data is not known, so skip_batches= leaves no more batches out.")
            return 0
        window = self.trainer.accumulate_grad_batches
        for _ in range(min(count, max(int(last) - 1 - progress.current.ready, 0)) // window * window):
            if fetcher is None or fetcher.done:
                break
            try:
                next(fetcher)
            except StopIteration:  # there are fewer than their length says
                break
            for increment in ("ready", "started", "processed", "completed"):
                getattr(progress, f"increment_{increment}")()
            progress.is_last_batch = fetcher.done
            count -= 1
        return count

    def before_training(self, action: Callable[[], None]) -> None:
        """Run ``action`` once, after everything at start-up and before the first hook of the first epoch."""
        fit_loop = self.trainer.fit_loop

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def on_advance_start(*args: Any, **kwargs: Any) -> Any:
                del fit_loop.on_advance_start
                action()
                return original(*args, **kwargs)

            return on_advance_start

        self.replace(fit_loop, "on_advance_start", make)

    @property
    def accumulation(self) -> tuple[int, int]:
        """Over how many batches gradients are accumulated: as the Trainer was made, and now, where a callback (such as
        ``GradientAccumulationScheduler``) changes it."""
        return self._accumulates, self.trainer.accumulate_grad_batches

    def resume_accumulation(self, made: int, then: int) -> None:
        """Go on with what a callback made of it, unless the Trainer is made otherwise by now."""
        if made == self._accumulates == self.trainer.accumulate_grad_batches:
            self.trainer.accumulate_grad_batches = then

    @property
    def syncs_buffers(self) -> bool | None:
        """Whether DDP makes all ranks' buffers those of rank 0 in the next forward pass; None without DDP."""
        return getattr(self.strategy.model, "require_forward_param_sync", None)

    @syncs_buffers.setter
    def syncs_buffers(self, syncs: bool) -> None:
        if self.syncs_buffers is not None:
            self.strategy.model.require_forward_param_sync = syncs  # type: ignore[union-attr]  # DDP's

    @property
    def tries_something(self) -> bool:
        """Whether it is a Tuner that trains: no callback of the run is there then, and nothing of it lasts."""
        return not self.trainer.checkpoint_callbacks

    @property
    def training(self) -> bool:
        """Whether the training loop is what runs now."""
        return self.fitting and bool(self.trainer.training)

    def hush_inexact(self, exact: Callable[[], bool]) -> None:
        """Spare users Lightning's warning that their loaders cannot continue inside an epoch, where ours can."""
        epoch_loop = self.trainer.fit_loop.epoch_loop

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def reset(*args: Any, **kwargs: Any) -> Any:
                with warnings.catch_warnings():
                    if exact():
                        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
                    return original(*args, **kwargs)

            return reset

        self.replace(epoch_loop, "reset", make)

    def before_batches(self, action: Callable[[], None]) -> None:
        """Run ``action`` in each epoch, after all hooks of its start and before its first training batch is fetched."""
        epoch_loop = self.trainer.fit_loop.epoch_loop

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def on_run_start(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                action()
                return result

            return on_run_start

        self.replace(epoch_loop, "on_run_start", make)


class StepsByHand:
    """Manual optimization: whether a batch ended an accumulation window, that is whether any optimizer stepped in it,
    the Trainer's or one that the Trainer knows nothing of."""

    def __init__(self) -> None:
        self._stepped = False
        self._since = 0
        self._hook = register_optimizer_step_post_hook(self._note)

    @_disable_dynamo
    def _note(self, *_: Any) -> None:
        self._stepped = True

    def done(self, module: LightningModule) -> bool:
        """Whether the batch that has just ended left no gradients for a later step."""
        stepped, self._stepped = self._stepped, False
        self._since = 0 if stepped or all(p.grad is None for p in module.parameters()) else self._since + 1
        if self._since == LONGEST_WINDOW:
            rank_zero_warn(
                f"No optimizer has stepped for {LONGEST_WINDOW} batches: gradients are taken not to accumulate over"
                " batches, and saves are made after any of them."
            )
        return not 0 < self._since < LONGEST_WINDOW

    def close(self) -> None:
        """Stop listening to optimizers."""
        self._hook.remove()


class BeforeSteps:
    """Runs ``action`` before each step of any optimizer.

    Args:
        action: to run.
        calls_closures: whether a step that is given a closure is sure to call it first, for its forward and backward
            pass, so that ``action`` is in time after that.
    """

    def __init__(self, action: Callable[[], None], calls_closures: Callable[[], bool]) -> None:
        self._action = action
        self._calls_closures = calls_closures
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @_disable_dynamo  # a step may be compiled, and what is done before it is not part of that
    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or not self._calls_closures():
            self._action()
            return None

        def then_act(*closure_args: Any, **closure_kwargs: Any) -> Any:
            result = closure(*closure_args, **closure_kwargs)
            self._action()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_act}
        return (args[0], then_act, *args[2:]), kwargs

    def close(self) -> None:
        """Stop listening to optimizers."""
        self._hook.remove()


ANYWHERE = os.sep
"""What ``_find_last_checkpoints`` answers: a path that exists on every machine.  Which checkpoint it stands for is
decided when the ranks can talk."""


def run_folder(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """The folder that ModelCheckpoint would save to: ``dirpath``, or below the logger's, or below
    ``default_root_dir``."""
    return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
