"""``ResilientCheckpoint``: the callback that people add to their Trainer.

It has the arguments, Lightning's hooks and ModelCheckpoint's public fields; each fit is a ``Fit`` of its own::

    setup                 open the folder, join the ranks, take the strategy's place for saves and loads: a Fit
    on_train_start        it begins: from now on it decides between two batches, as the session calls it
    on_train_end          save the last step, wait for it
    teardown              end the background work, and drop the Fit
    on_exception          the same without the other ranks, within seconds
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from weakref import proxy

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_resilience import slots
from lightning_resilience.arguments import (
    check_dirpath,
    check_filename,
    check_name,
    check_ranking,
    check_remote,
    check_rollback,
    check_values,
    doubt_mode,
    the_keep,
    the_schedule,
)
from lightning_resilience.destination import Destination, agreed_folder, sibling_folders, tier_at
from lightning_resilience.divergence import Rollback
from lightning_resilience.doorway import ANYWHERE
from lightning_resilience.errors import SetupError
from lightning_resilience.fit import Fit, abandon
from lightning_resilience.news import Audience
from lightning_resilience.orders import Orders
from lightning_resilience.preemption import check_signals, name_of
from lightning_resilience.remote import RemoteTier
from lightning_resilience.replication import Replicated
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.saves import Committed
from lightning_resilience.schedule import Schedule
from lightning_resilience.session import Session
from lightning_resilience.standings import best_first
from lightning_resilience.store import list_checkpoints
from lightning_resilience.tiers import LocalTier
from lightning_resilience.urls import shown
from lightning_resilience.watch import LOSS_KEY, WATCHED

log = logging.getLogger("lightning_resilience")


class ResilientCheckpoint(ModelCheckpoint):
    """Saves the run asynchronously and sharded, and lets ``trainer.fit(ckpt_path="last")`` go on with it.

    A drop-in for ``ModelCheckpoint``, whose arguments keep their meaning.  Differences: several triggers may be given
    together; besides what they ask for there is a checkpoint at the end of training, and with ``monitor`` one
    whenever a validation gets into the top k; the newest checkpoint is always found by ``ckpt_path="last"``, with or
    without ``save_last`` (which adds a link ``last.ckpt`` for other tools); each checkpoint is a folder.

    Args:
        dirpath: folder of the checkpoints, node-local or shared; as in ModelCheckpoint if not given.  Environment
            variables are expanded on each rank.  A URL saves straight to an object store, without a local folder.
        filename: template for names, as in ModelCheckpoint.
        monitor: metric that ranks checkpoints.
        verbose: print each checkpoint's path and reason.
        save_last: keep a symbolic link ``last.ckpt`` to the newest checkpoint.
        save_top_k: with ``monitor``, how many of the best stay besides the newest; -1 keeps all.
        save_on_exception: also save when training ends with an exception; on a single process only, because with
            several the others cannot be asked then.
        save_weights_only: leave out optimizers and the rest of the run; training cannot go on from such a checkpoint.
        mode: ``"min"`` or ``"max"``: which scores are best.
        auto_insert_metric_name: as in ModelCheckpoint.
        every_n_train_steps: save at every multiple of this step.
        train_time_interval: save when this time has passed.
        every_n_epochs: save at the end of every n-th epoch (after its validation, if it has one).
        save_on_train_epoch_end: as in ModelCheckpoint.
        enable_version_counter: give a name that is taken a version; otherwise the older checkpoint gives way, unless it
            is pinned.
        schedule: when to save: ``AdaptiveSchedule``, ``LossVariance``, ``EverySteps``, ``EverySeconds``, ``FirstOf``;
            ``AdaptiveSchedule()`` if neither this nor one of the three triggers above is given.
        loss_key: name of the loss that the schedule goes by in what ``training_step`` returns.
        keep: what is retained; the newest 3 by default.
        memory: where state is staged: ``"auto"`` (tmpfs if it has room), ``False`` (anonymous memory) or a folder on
            tmpfs.  On tmpfs a killed process leaves it to the next start of its run on that node, which reads its
            shards there.
        overlap_staging: ``"auto"`` copies what only an optimizer's step changes while the next forward and backward
            pass run, and has the step wait for it; ``False`` copies everything before training goes on.  Right for
            training code that changes weights at other times, and by ways that torch does not count (``.data``).
        on_save_error: ``"warn"`` goes on training and tries again at the next save, ``"raise"`` stops at the first
            failure.
        max_failures: failed saves in a row after which training stops whatever ``on_save_error`` says.
        rollback: take the run back by itself when the loss has left its course, see ``Rollback``; None goes on.
        log_metrics: tell the Trainer's loggers what checkpoints cost, under ``resilience/``.
        on_unrestorable: when checkpoints exist and none can be resumed from: ``"raise"``, or ``"fresh"`` to start over
            with a warning.
        save_timeout: seconds after which a save that some rank has not finished is dropped.
        signals: names or numbers of signals after which all ranks save the next step boundary once and stop, whichever
            rank was sent one; ``fit`` ends with ``Preempted``, a ``SystemExit`` with status 143 for SIGTERM.  On SLURM
            with auto-requeue the job is requeued after the commit where its requeue signal came.
        grace_seconds: time from a signal to the kill, if it is known: what is left of it after the save is used for the
            cold tier.
        max_attempts: starts from one checkpoint that crash before there is a newer one, after which
            ``ckpt_path="last"`` passes it over for the one before it, and stops with ``CrashLoop`` once that has been
            tried as often; None tries for ever.
        exact_data: continue an interrupted epoch at the exact sample; otherwise Lightning does what it does: it goes on
            counting batches, and reads from the first one.  Right for data that is gone once read, as from a queue.
        remote: cold tier: an ``s3://bucket/folder`` or any other fsspec URL, to which every checkpoint is copied in the
            background, and from which a run goes on where the folder was lost.
        storage_options: credentials and the like for ``remote``, by the names that fsspec's implementation has.
        remote_keep: what the cold tier retains of this run; as ``keep`` if not given.
        peers: on how many other nodes each node's files get a second copy, in the background, where folders are
            node-local: with 1 the loss of a node costs no trip to the cold tier.
        restore_optimizers: ``False`` resumes all but the optimizers and their schedulers, to go on with others.

    Raises:
        SetupError: arguments that are out of range or contradict each other.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        schedule: Schedule | None = None,
        loss_key: str = LOSS_KEY,
        keep: Keep | None = None,
        memory: str | bool = "auto",
        overlap_staging: Literal["auto", False] = "auto",
        on_save_error: Literal["warn", "raise"] = "warn",
        max_failures: int = 3,
        rollback: Rollback | None = None,
        log_metrics: bool = True,
        on_unrestorable: Literal["raise", "fresh"] = "raise",
        save_timeout: float = 1800.0,
        signals: Sequence[str | int] = ("SIGTERM", "SIGUSR1"),
        grace_seconds: float | None = None,
        max_attempts: int | None = 3,
        exact_data: bool = True,
        restore_optimizers: bool = True,
        remote: str | None = None,
        storage_options: dict[str, Any] | None = None,
        remote_keep: Keep | None = None,
        peers: int = 0,
    ) -> None:
        given = dict(locals())
        self._given_dirpath = check_dirpath(dirpath)
        check_remote(remote, storage_options, remote_keep, self._given_dirpath)
        check_values(given)
        self._signals = check_signals(signals)
        check_rollback(rollback, save_weights_only, enable_version_counter)
        check_name("loss_key", loss_key, "a name in what training_step returns")
        check_filename(filename, ModelCheckpoint)
        slots.check_memory(memory)
        check_ranking(monitor, save_top_k, {"keep": keep, "remote_keep": remote_keep})
        self.schedule = the_schedule(schedule, every_n_train_steps, train_time_interval, every_n_epochs)
        super().__init__(
            dirpath=self._expanded_dirpath(),
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
        )
        self._every_epochs = every_n_epochs or 0
        self.loss_key = loss_key
        self.rollback = rollback
        self.log_metrics = log_metrics
        self.memory = memory
        self.overlap_staging = overlap_staging
        self.on_save_error = on_save_error
        self.max_failures = max_failures
        self.on_unrestorable = on_unrestorable
        self.save_timeout = save_timeout
        self.signals = tuple(name_of(signum) for signum in self._signals)
        self.grace_seconds = grace_seconds
        self.max_attempts = max_attempts
        self.exact_data = exact_data
        self.restore_optimizers = restore_optimizers
        self.keep = the_keep(keep, monitor, save_top_k)
        self.remote = remote
        self.peers = peers
        self._storage_options = storage_options
        self.remote_keep = the_keep(remote_keep, monitor, save_top_k) if remote_keep is not None else self.keep
        self.ranking = Ranking(monitor, mode) if monitor is not None else None
        doubt_mode(monitor, mode)
        self._last_is_wanted = False
        self._session: Session | None = None
        self._fit: Fit | None = None
        self._has_opened = False  # its folder, in this process

    def _expanded_dirpath(self) -> str | None:
        return os.path.expandvars(self._given_dirpath) if self._given_dirpath is not None else None

    @property
    @override
    def state_key(self) -> str:
        """Two callbacks with different folders or names keep their state apart."""
        return self._generate_state_key(
            dirpath=shown(self._given_dirpath) if self._given_dirpath is not None else None,
            filename=self.filename,
            monitor=self.monitor,
            mode=self.mode,
            schedule=repr(self.schedule),
        )

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def on_checkpoint_committed(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Committed) -> None:
        """Called on every rank, from the training thread, once ``checkpoint`` exists.  Override it in a subclass.

        Ranks may hear of it at different batches, so it is no place for a collective.
        """

    def on_checkpoint_replicated(self, trainer: Trainer, pl_module: LightningModule, checkpoint: Replicated) -> None:
        """Called on every rank, from the training thread, once ``checkpoint`` is in the cold tier; see
        ``on_checkpoint_committed``."""

    # -- public fields ------------------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint (the newest, without ``monitor``); ``""`` where there is none.  A process that
        has not trained yet finds it in ``dirpath``."""
        if not self._best_model_path and not self._has_opened and self._given_dirpath is not None:
            tier = tier_at(self._expanded_dirpath() or "", self._storage_options)
            best = best_first(list_checkpoints(tier).committed, self.ranking)
            return tier.where(best[0]) if best else ""
        return self._best_model_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_model_path = path

    def _show(self, destination: Destination) -> None:
        """Set the public fields from what is committed."""
        standings, where = destination.standings, destination.folder.tier.where
        best = standings.best_first
        self.last_model_path = where(standings.newest) if standings.newest else ""
        self.best_model_path = where(best[0]) if best else ""
        if self.ranking is not None:
            self.best_k_models = {where(name): torch.tensor(standings.score(name)) for name in standings.top}
            self.best_model_score = torch.tensor(standings.score(best[0])) if best else None
            self.kth_best_model_path = where(standings.top[-1]) if standings.top else ""

    def _tell_costs(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """What checkpoints cost, in the Trainer's loggers."""
        if self.log_metrics and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(metrics), step=trainer.global_step)

    def _tell_committed(self, trainer: Trainer, checkpoint: Committed) -> None:
        """Now that it exists: to people, loggers and subclasses."""
        if self.verbose and trainer.is_global_zero:
            print(f"saved {checkpoint.path} ({checkpoint.manifest.reason})")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))
        self.on_checkpoint_committed(trainer, trainer.lightning_module, checkpoint)

    def _tell_replicated(self, trainer: Trainer, checkpoint: Replicated) -> None:
        self.on_checkpoint_replicated(trainer, trainer.lightning_module, checkpoint)

    # -- start --------------------------------------------------------------------------------------------------------

    @override
    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        self._last_is_wanted = not trainer.fast_dev_run  # type: ignore[attr-defined]  # set by Lightning, untyped
        return {ANYWHERE} if self._last_is_wanted else set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer, Trainer):
            raise SetupError(
                f"ResilientCheckpoint was given to a {type(trainer).__module__}.{type(trainer).__qualname__}.",
                hint="Use lightning.pytorch.Trainer: `import lightning as L; L.Trainer(…)`.",
            )
        _make_visible()
        last_is_wanted, self._last_is_wanted = self._last_is_wanted, False
        self._session = self._fit = None
        self._has_opened = False
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning, untyped
            return
        self._session = session = Session.join(
            trainer,
            exact_data=self.exact_data,
            on_unrestorable=self.on_unrestorable,
            restore_optimizers=self.restore_optimizers,
            signals=self._signals,
            grace=math.inf if self.grace_seconds is None else self.grace_seconds,
            max_attempts=math.inf if self.max_attempts is None else self.max_attempts,
            memory=self.memory,
            timeout=self.save_timeout,
        )
        self.dirpath = agreed_folder(self._given_dirpath, self, trainer, session.ranks)
        if self._storage_options is not None:
            session.lookup.storage_options.append(self._storage_options)
        tier = tier_at(self.dirpath, self._storage_options)
        session.lookup.remember(tier)
        cold = RemoteTier(self.remote, self._storage_options) if self.remote is not None else None
        if stage == "fit":
            self._fit = self._open(session, tier, cold)
        place = session.lookup.place(tier, cold, find_out=True)
        if last_is_wanted:
            siblings = sibling_folders(tier) if self._given_dirpath is None else []
            session.lookup.resume_last.append((place, siblings))

    def _open(self, session: Session, tier: LocalTier | RemoteTier, cold: RemoteTier | None) -> Fit:
        """Get ready to save there: what the arguments mean for one fit."""
        trainer = session.trainer
        destination = Destination(
            session,
            tier,
            cold,
            keep=self.keep,
            remote_keep=self.remote_keep,
            ranking=self.ranking,
            top_k=self.save_top_k,
            link=f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}" if self.save_last else None,
            copies=self.peers,
        )
        self._has_opened = True
        audience = Audience(
            standings=partial(self._show, destination),
            costs=partial(self._tell_costs, trainer),
            committed=partial(self._tell_committed, trainer),
            replicated=partial(self._tell_replicated, trainer),
        )
        orders = Orders(
            schedule=self.schedule,
            loss_key=self.loss_key,
            rollback=self.rollback,
            ranking=self.ranking,
            top_k=self.save_top_k,
            every_epochs=self._every_epochs,
            at_epoch_end=partial(self._should_save_on_train_epoch_end, trainer),
            name=partial(self._name, trainer),
            weights_only=self.save_weights_only,
            replace=not self._enable_version_counter,
            overlap=self.overlap_staging == "auto",
            most_failures=1 if self.on_save_error == "raise" else self.max_failures,
            fails_loudly=self.on_save_error == "raise",
            timeout=self.save_timeout,
        )
        return Fit(session, destination, orders, audience)

    def _name(self, trainer: Trainer, epoch: int) -> str:
        """The checkpoint's name from the template; slashes in metrics' names do not make folders."""
        path = self.format_checkpoint_name({**self._monitor_candidates(trainer), "epoch": torch.tensor(epoch)})
        return os.path.relpath(path, self.dirpath).replace(os.sep, "_")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.begin()

    # -- training -----------------------------------------------------------------------------------------------------

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.evaluations.validation_begins()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.evaluations.validation_ended()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._fit is not None:
            self._fit.watch.batch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Too early to save: see ``Decisions.between_batches``."""
        if self._fit is not None:
            self._fit.see_outputs(outputs)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Too early to save: see ``Decisions.between_batches``."""

    # -- end ----------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.end()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.tell_if_nothing_was_left()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        session, fit = self._session, self._fit
        if session is None:
            return
        if fit is not None:
            fit.leave()
        self._session = self._fit = None
        try:
            session.leave()
        finally:
            if fit is not None:
                fit.destination.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        session, fit = self._session, self._fit
        if session is None:
            return
        try:
            if fit is not None:
                fit.abandon(exception, save=self.save_on_exception)
            else:
                abandon(session, exception)
        finally:
            self._session = self._fit = None

    # -- state --------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what was watched, of each of our callbacks.  Beside Lightning's state of callbacks, which asks for
        callbacks by the very arguments they had."""
        if self._fit is not None and (state := self._fit.state()):
            checkpoint.setdefault(WATCHED, {})[self._watched_key] = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        watched: dict[str, Any] = checkpoint.get(WATCHED, {})
        only = next(iter(watched.values())) if len(watched) == 1 else None  # the folder may have moved
        if self._fit is not None:
            self._fit.watched_before = watched.get(self._watched_key, only)

    @property
    def _watched_key(self) -> str:
        return shown(self._given_dirpath) if self._given_dirpath is not None else ""

    @override
    def state_dict(self) -> dict[str, Any]:
        """Nothing that the manifests do not say better."""
        return {}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        """Picklable at any time (``ddp_spawn``, ``copy``): a running fit stays behind."""
        return {**self.__dict__, "_session": None, "_fit": None, "_has_opened": False}


def _make_visible() -> None:
    """Show the package's log lines as Lightning shows its own, unless the user has set up logging."""
    if log.level == logging.NOTSET and not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
