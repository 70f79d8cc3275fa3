"""``ResilientCheckpoint``: the callback that people add to their Trainer.

It decides when, and leaves how to the engine::

    setup                 open the folder, join the ranks, take the strategy's place for saves and loads
    between two batches   hear of commits and signals; ask the schedule; save at a step boundary
    on_train_end          save the last step, wait for it
    teardown              end the background work
    on_exception          the same without the other ranks, within seconds

All ranks run the same lines with the same answers, because whatever they could see differently was decided by one of
them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_resilience import slots
from lightning_resilience.agreement import Agreement
from lightning_resilience.arguments import (
    check_apart,
    check_choice,
    check_dirpath,
    check_filename,
    check_name,
    check_number,
    check_ranking,
    check_remote,
    check_rollback,
    doubt_mode,
    identity,
    the_schedule,
)
from lightning_resilience.divergence import Rollback
from lightning_resilience.doorway import ANYWHERE, run_folder
from lightning_resilience.engine import OVERDUE, Committed, Folder, Save
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    CheckpointUncommitted,
    Diverged,
    SaveFailed,
    SetupError,
    TierUnavailable,
)
from lightning_resilience.ledger import EXCEPTION, INTERRUPTED, PREEMPTED
from lightning_resilience.manifest import HEALTHY, LAST_GOOD, Manifest
from lightning_resilience.objects import shown
from lightning_resilience.peers import Peers
from lightning_resilience.places import Source
from lightning_resilience.preemption import Preempted, check_signals, name_of
from lightning_resilience.ranks import raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.replication import Replicated, Replicator
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.schedule import Progress, Schedule
from lightning_resilience.session import Session, log_save, manifests_in
from lightning_resilience.standings import Standings, best_first
from lightning_resilience.store import list_checkpoints
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.trainer_state import step_of
from lightning_resilience.watch import END_OF_TRAINING, Watch

log = logging.getLogger("lightning_resilience")

DRAIN_AFTER_EXCEPTION = 10.0
"""Seconds that a save under way and the copies on their way get, together, when training ends with an exception."""

BLIND = 100
"""Batches in a row without a loss after which it is said that there is none."""

_LOOK = "Look at the data and the learning rate; checkpoints are kept."

WATCHED = "lightning_resilience"
"""Key of what was watched, in a Trainer's checkpoint."""


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
        SetupError: arguments that are unknown, out of range or contradict each other.
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
        loss_key: str = "loss",
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
        self._given_dirpath = check_dirpath(dirpath)
        check_remote(remote, storage_options, remote_keep, self._given_dirpath)
        check_choice("mode", mode, ("min", "max"))
        check_choice("overlap_staging", overlap_staging, ("auto", False))
        check_choice("on_save_error", on_save_error, ("warn", "raise"))
        check_choice("on_unrestorable", on_unrestorable, ("raise", "fresh"))
        check_choice("save_last", save_last, (None, True, False, "link"))
        check_number("peers", peers, least=0, whole=True)
        check_number("max_failures", max_failures, least=1, whole=True)
        check_number("save_timeout", save_timeout, least=0.001)
        self._signals = check_signals(signals)
        if grace_seconds is not None:
            check_number("grace_seconds", grace_seconds, least=0.001)
        if max_attempts is not None:
            check_number("max_attempts", max_attempts, least=1, whole=True)
        for name, flag in (
            ("exact_data", exact_data),
            ("log_metrics", log_metrics),
            ("restore_optimizers", restore_optimizers),
            ("save_weights_only", save_weights_only),
            ("save_on_exception", save_on_exception),
        ):
            check_choice(name, flag, (True, False))
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
        self._by_step = self.schedule.by_step_alone()
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
        self.keep = self._the_keep(keep)
        self.remote = remote
        self.peers = peers
        self._storage_options = storage_options
        self.remote_keep = self._the_keep(remote_keep) if remote_keep is not None else self.keep
        self.ranking = Ranking(monitor, mode) if monitor is not None else None
        doubt_mode(monitor, mode)
        self._last_is_wanted = False
        self._reset()

    def _reset(self) -> None:
        """What belongs to one fit."""
        self._session: Session | None = None
        self._folder: Folder | None = None
        self._replicator: Replicator | None = None
        self._peers: Peers | None = None
        self._last_save: Save | None = None
        self._agreement: Agreement | None = None
        self._is_prepared = False
        self._watch: Watch | None = None
        self._to_skip = 0
        self._watched_before: Mapping[str, Any] | None = None
        self._started = Progress(0, 0.0)
        self._reasons: list[str] = []
        self._epoch = 0
        self._saved_at: tuple[int, int] | None = None
        self._standings = Standings(self.keep, self.ranking, self.save_top_k)
        self._validation_metrics: set[str] = set()
        self._validated = False
        self._metrics_are_of: tuple[int, int] | None = None
        self._overdue: Save | None = None
        self._last_error = "see the log of the rank that failed"
        self._metrics_before_validation: set[str] = set()

    def _the_keep(self, keep: Keep | None) -> Keep:
        if keep is None:
            keep = Keep(last=-1 if self.save_top_k == -1 and self.monitor is None else 3)
        if self.monitor is not None and keep.top_k is None:
            keep = replace(keep, top_k=self.save_top_k)
        return keep

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

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint (the newest, without ``monitor``); ``""`` where there is none.  A process that
        has not trained yet finds it in ``dirpath``."""
        if not self._best_model_path and self._folder is None and self._given_dirpath is not None:
            tier = self._tier(self._expanded_dirpath() or "")
            best = best_first(list_checkpoints(tier).committed, self.ranking)
            return tier.where(best[0]) if best else ""
        return self._best_model_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_model_path = path

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
        self._reset()
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
        self.dirpath = self._agree_on_folder(trainer, session)
        if self._storage_options is not None:
            session.lookup.storage_options.append(self._storage_options)
        tier = self._tier(self.dirpath)
        session.lookup.remember(tier)
        cold = RemoteTier(self.remote, self._storage_options) if self.remote is not None else None
        if stage == "fit":
            self._open(session, tier, cold)
        place = session.lookup.place(tier, cold, find_out=True)
        if last_is_wanted:
            siblings = self._sibling_folders(tier.root) if isinstance(tier, LocalTier) else []
            session.lookup.resume_last.append((place, siblings))

    def _tier(self, dirpath: str) -> LocalTier | RemoteTier:
        """Where saves go to."""
        return RemoteTier(dirpath, self._storage_options) if "://" in dirpath else LocalTier(dirpath)

    def _open(self, session: Session, tier: LocalTier | RemoteTier, cold: RemoteTier | None) -> None:
        """Get ready to save there."""
        self._check_places(session, tier, cold)
        self._folder = session.folder(
            tier,
            keep=self.keep,
            ranking=self.ranking,
            link=f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}" if self.save_last else None,
            remote_keep=self.remote_keep if cold is not None else None,
        )
        self._standings.committed = manifests_in(self._folder, session.ranks)
        session.engine.count_from(self._standings.committed.values())
        if cold is not None:
            self._begin_replicating(session, self._folder, cold)
        session.engine.protect(self._folder, partial(_must_stay, self._standings, self._replicator))
        if self.peers and isinstance(tier, LocalTier):
            if len(self._folder.leaders) > 1:
                self._peers = Peers(session.ranks, tier, self._folder.sharing, self.peers)
            else:
                rank_zero_warn(f"peers={self.peers} copies nothing: all ranks share {tier.where()!r}.")

    @staticmethod
    def _check_places(session: Session, tier: LocalTier | RemoteTier, cold: RemoteTier | None) -> None:
        """Raise SetupError, on all ranks, where the places are not apart from each other and from other callbacks'."""
        others = [other for place in session.lookup.places.values() for other in (place.tier, place.cold)]
        taken = {identity(other) for other in others if other is not None}
        for argument, one in (("dirpath", tier), ("remote", cold)):
            if one is not None and identity(one) in taken:
                raise SetupError(
                    f"Two checkpoint callbacks save to {one.where()!r}, where each would remove what the other keeps.",
                    hint=f"Give them different {argument}=.",
                )
        if cold is not None and isinstance(tier, LocalTier):
            raise_first(session.ranks.gathered(lambda: check_apart(tier.root, cold.objects)))

    def _in_use(self) -> set[str]:
        """Names that stay in the cold tier, whatever its rule says."""
        resumed = self._session.engine.in_use if self._session is not None else set()
        return {*resumed, *filter(None, [self._standings.last_good])}

    def _begin_replicating(self, session: Session, folder: Folder, cold: RemoteTier) -> None:
        """Go on with what a killed run left on its way, and make sure now that the cold tier can be written."""
        self._replicator = replicator = Replicator(
            session.ranks,
            folder,
            cold,
            self.remote_keep,
            self.ranking,
            run=lambda: session.engine.run,
            tolerant=bool(self._standings.committed),
            last_good=self._standings.last_good_of,
        )
        session.engine.count_from(replicator.known_cold().values())

    def _agree_on_folder(self, trainer: Trainer, session: Session) -> str:
        """The folder: rank 0's, so that loggers that number their runs do not split it; or each rank's own if that
        was asked for."""
        if self._given_dirpath is not None and "://" in self._given_dirpath:
            return self._given_dirpath
        if self._given_dirpath is not None and "$" in self._given_dirpath:
            expanded = self._expanded_dirpath()
            assert expanded is not None
            return os.path.abspath(expanded)
        return session.ranks.broadcast(os.path.abspath(local_path(run_folder(self, trainer))))

    def _sibling_folders(self, root: Path) -> list[str]:
        """Folders of earlier runs where the logger numbers them (``…/version_3/checkpoints``): "last" is in one of
        those."""
        if self._given_dirpath is not None or not root.parent.name.startswith("version_"):
            return []
        return sorted(str(path) for path in root.parent.parent.glob(f"version_*/{root.name}") if path != root)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is None:
            return
        self._session.stop_before_training()
        self._agreement = Agreement(self._session.ranks, self._session.preemption.period)
        self._session.between_batches.append(self._between_batches)
        self._session.before_leaving.append(self._replicate_in_time)
        self._session.went_back.append(self._go_on_from)
        self._started = self._now(trainer)
        self._begin_watch(self._session)
        begun, engine = self._session.resumption.resumed, self._session.engine
        self._standings.begin(engine.run, begun.manifest if begun is not None else None, engine.sequence)
        if self._replicator is not None:
            self._replicator.offer(self._standings.committed, self._in_use())
        if self._session.resumption.resumed is not None:
            self._saved_at = self._position(trainer)
        self._update_best()

    def _begin_watch(self, session: Session) -> None:
        tier = self._folder.tier if self._folder is not None else None
        manifest = session.resumption.resumed.manifest if session.resumption.resumed is not None else None
        self._watch = Watch(self.schedule.by_agreement(), session.ranks.rank, self.loss_key)
        self._to_skip = self._watched_before.get("to_skip", 0) if self._watched_before is not None else 0
        self._watch.begin(
            self._started,
            tier.root if isinstance(tier, LocalTier) else None,
            self._watched_before,
            ended=manifest is not None and END_OF_TRAINING in manifest.reason,
            run=session.engine.run,
        )

    # -- when to save -------------------------------------------------------------------------------------------------

    def _between_batches(self, epoch: int, epoch_ended: bool, at_boundary: bool) -> None:
        """Lightning is done with a batch, its validation and, where it was the last, its epoch: save if it is time."""
        session = self._session
        if session is None or self._agreement is None or self._watch is None:
            return
        trainer, self._epoch = session.trainer, epoch
        self._hear(trainer)
        now = self._now(trainer)
        self._watch.look(now)
        wish = self._wanted_by_time(now) if session.ranks.rank == 0 else None
        answer = self._agreement.ask(wish, session.signal_to_ask(self._between_batches), self._has_diverged())
        session.preemption.agree(self._agreement.signal)
        self._reasons += [answer] if answer else []
        if self._validated:
            self._metrics_are_of = self._position(trainer)
        if (epoch_ended or self._validated) and (
            epoch_ended if self._should_save_on_train_epoch_end(trainer) else self._validated
        ):
            self._reasons += self._reasons_of_an_evaluation(trainer, epoch)
        if not at_boundary:
            return  # what is wanted stays wanted until the accumulation window ends
        due = self._by_step.due(now, self._started) if self._by_step else None
        ends = not epoch_ended and session.ends_within_an_epoch()
        reasons = [reason for reason in (due, *self._reasons, END_OF_TRAINING if ends else None) if reason]
        self._validated, self._reasons = False, []
        if self._agreement.diverged:
            self._roll_back(trainer, self._agreement)
            return
        if session.preempted:
            self._save_in_time(trainer, "; ".join(dict.fromkeys([*reasons, name_of(session.preemption.agreed)])))
            return
        if ends:
            self._wait(trainer)
        if reasons:
            overlap = self.overlap_staging == "auto" and not (epoch_ended or ends)
            self._save(trainer, "; ".join(dict.fromkeys(reasons)), epoch, overlap=overlap)
        elif not self._is_prepared and self._folder is not None:
            session.prepare(self.save_weights_only)  # the optimizers have their state now
        self._is_prepared = True
        if self._to_skip:
            self._to_skip = session.skip_batches(self._to_skip)

    def _wanted_by_time(self, now: Progress) -> str | None:
        session, watch, agreement = self._session, self._watch, self._agreement
        assert session is not None
        assert watch is not None
        assert agreement is not None
        wish = watch.wish(now, self._started, agreement.lag + session.trainer.accumulate_grad_batches - 1)
        return None if session.engine.busy else wish

    def _reasons_of_an_evaluation(self, trainer: Trainer, epoch: int) -> list[str]:
        """Why to save when an epoch, or a validation, has ended."""
        reasons = []
        if self._every_epochs and (epoch + 1) % self._every_epochs == 0:
            reasons.append("end of epoch")
        assert self._session is not None
        if self._session.ranks.broadcast(self._standings.gets_in(self._score(trainer))):
            reasons.append(
                f"among the {self.save_top_k} best {self.monitor}" if self.save_top_k > 1 else f"best {self.monitor}"
            )
        return reasons

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None and not trainer.sanity_checking:
            self._metrics_before_validation = set(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreement is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        self._validation_metrics |= set(trainer.callback_metrics) - self._metrics_before_validation
        self._validated = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.batch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Too early to save: see ``_between_batches``."""
        if self._watch is not None and self._session is not None:
            self._watch.see_outputs(outputs, self._session.engine.busy)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Too early to save: see ``_between_batches``."""

    # -- going back ---------------------------------------------------------------------------------------------------

    def _has_diverged(self) -> bool:
        """Whether rank 0 wants the run to go back."""
        assert self._watch is not None
        if self.rollback is None:
            return False
        if self._watch.unseen == BLIND:
            rank_zero_warn(
                f"rollback= has nothing to go by: no loss was seen in the last {BLIND} batches. Return it from"
                f" training_step, as a tensor or in a dict under {self.loss_key!r} (loss_key=)."
            )
        return self._watch.course.off_for >= self.rollback.patience

    def _roll_back(self, trainer: Trainer, agreement: Agreement) -> None:
        """Take the run back to before the loss left its course, leave batches out, and save that.  Collective.

        Raises:
            Diverged: it was taken back as often as it may be, or there is nothing to go back to; on all ranks.
        """
        session, folder, watch, rule = self._session, self._folder, self._watch, self.rollback
        assert session is not None
        assert folder is not None
        assert watch is not None
        assert rule is not None
        agreement.close()
        self._wait(trainer)
        self._standings.off_since, times = session.ranks.broadcast((watch.course.off_since, watch.rollbacks))
        where = f"The loss has been off its course since step {self._standings.off_since}"
        if times >= rule.most:
            good = session.ranks.broadcast(self._standings.last_good)
            which = f" The last good checkpoint is {folder.tier.where(good)!r}." if good is not None else ""
            raise Diverged(f"{where}, and the run was taken back {times} times.", hint=f"{_LOOK}{which}")
        source = self._load_last_good(session, folder, where)
        assert source.manifest is not None
        watch.rollbacks = times + 1
        if trainer.is_global_zero:
            log.warning(
                "event=rollback step=%d from=%s times=%d skip=%d reason=%r",
                trainer.global_step, source.name, times + 1, rule.skip_batches, where,
            )  # fmt: skip
        for forget in session.went_back:
            forget(source.manifest)
        window = trainer.accumulate_grad_batches  # gradients of half a window would be a smaller step
        self._to_skip = session.skip_batches(math.ceil(rule.skip_batches / window) * window)
        # Before training goes on: a crash must lead to what comes after it, with the count of times.
        self._save_and_wait(trainer, f"rolled back to {source.name}", of=source.manifest)

    def _load_last_good(self, session: Session, folder: Folder, where: str) -> Source:
        """Load the last good checkpoint, or where that is damaged the one before it.  Collective.

        Raises:
            Diverged: there is none, or it does not fit what is trained now; on all ranks.
        """
        useless: set[str] = set()
        while True:
            found: tuple[str, Manifest, dict[str, Manifest] | None] | None
            found = session.ranks.broadcast(self._find_last_good(useless))
            if found is None:
                whole = " that is whole" if useless else ""
                raise Diverged(f"{where}, and there is no checkpoint from before that{whole}.", hint=_LOOK)
            name, manifest, copies = found
            begun = session.resumption.resumed
            tier = begun.tier if begun is not None and copies is None else folder.tier
            try:
                source = session.roll_back(tier, name, copies or {})
            except CheckpointIncompatible as error:
                raise Diverged(
                    f"{where}, and the last good checkpoint, {name}, does not fit what is trained now: {error.message}",
                    hint=f"{_LOOK} Start again from {name}, with what was trained then.",
                ) from error
            except (CheckpointCorrupt, CheckpointNotFound, CheckpointUncommitted, TierUnavailable) as error:
                rank_zero_warn(f"The run cannot go back to {name}: {error}")
                useless.add(manifest.save_id)
                continue
            if tier is folder.tier:
                self._standings.add(source.name, manifest)
            return source

    def _find_last_good(self, useless: Collection[str]) -> tuple[str, Manifest, dict[str, Manifest] | None] | None:
        """Name and manifest of the last good checkpoint, and its copies where only the cold tier has it; None for those
        where it is what the run was resumed from, in another folder."""
        assert self._folder is not None
        assert self._session is not None
        here = {name: one for name, one in self._standings.committed.items() if one.save_id not in useless}
        known = {*useless} | {one.save_id for one in here.values()}
        cold = self._replicator.known_cold() if self._replicator is not None else {}
        there = {name: one for name, one in cold.items() if one.save_id not in known}
        found = [(some, name) for some in (here, there) if (name := self._standings.last_good_of(some)) is not None]
        if not found:
            begun = self._session.resumption.resumed
            if begun is None or begun.manifest is None or begun.manifest.save_id in known:
                return None
            # Loggers give each start a folder of its own, so what this one was resumed from may be in another.
            is_good = self._standings.last_good_of({begun.name: begun.manifest}) is not None
            return (begun.name, begun.manifest, None) if is_good and begun.tier.exists(begun.name) else None
        some, name = max(found, key=lambda one: one[0][one[1]].order)
        is_far = some is there or isinstance(self._folder.tier, RemoteTier)
        return name, some[name], {name: some[name]} if is_far else {}

    def _go_on_from(self, good: Manifest) -> None:
        """The run was taken back, by whichever callback: what this one knows of a later step is of no use."""
        session, folder = self._session, self._folder
        assert session is not None
        assert folder is not None
        trainer = session.trainer
        self._hear(trainer)  # what was under way has ended, and is left behind too
        self._saved_at = None
        self._started = self._now(trainer)
        if self._watch is not None:
            self._watch.went_back(self._started, good)
        if self._agreement is not None:
            self._agreement.close()  # what is being asked is of before
            self._agreement.diverged = False
        session.leave_behind(folder, self._standings.go_back(good), self._standings.newest)
        if self._replicator is not None:
            self._replicator.leave_behind(self._standings.left_behind(self._replicator.known_cold(), good).values())
            self._replicator.offer(self._standings.committed, self._in_use())
        self._update_best()

    # -- save ---------------------------------------------------------------------------------------------------------

    def _save(
        self,
        trainer: Trainer,
        reason: str,
        epoch: int,
        *,
        settled: bool = True,
        of: Manifest | None = None,
        overlap: bool = False,
    ) -> Save | None:
        """Start a save of this step, unless it is saved already or one is under way.  Collective.

        Args:
            trainer: the Trainer.
            reason: why.
            epoch: the epoch that the last batch belonged to.
            settled: whether Lightning is between two batches, rather than anywhere.
            of: the checkpoint that the run was just taken back to, if it was.
            overlap: whether a forward and a backward pass follow, and copying may go on meanwhile.
        """
        session, folder, watch = self._session, self._folder, self._watch
        assert session is not None
        assert folder is not None
        assert watch is not None
        watch.look_at_all()
        suspicion, off_since = watch.suspicion, watch.course.doubtful_since
        # Ranks hear of failures at different moments, so they may differ in what they take for saved.
        unsaved, suspect, off_since = session.ranks.any_max(
            self._saved_at != self._position(trainer), bool(suspicion), -1 if off_since is None else off_since
        )
        if not unsaved:
            return None
        self._stop_after_failures()
        self._standings.off_since = off_since if off_since >= 0 else None
        marks = watch.marks() if not suspect else {}
        save = session.save(
            folder,
            self._name(trainer, epoch),
            epoch=epoch,
            reason="; ".join([reason, *(f"{mark}: {why}" for mark, why in marks.items())]),
            metrics=self._metrics(trainer) if of is None else of.metrics,
            settled=settled,
            weights_only=self.save_weights_only,
            replace=not self._enable_version_counter,
            labels=(*([LAST_GOOD] if of is not None else []), *marks),
            suspicion=(suspicion or "the loss of another rank is not finite") if suspect else "",
            off_since=self._standings.off_since,
            overlap=overlap,
        )
        if save is None:
            watch.telemetry.skipped += 1
        else:
            watch.started()
            self._saved_at = self._position(trainer)
            self._started = self._now(trainer)
        return save

    def _name(self, trainer: Trainer, epoch: int) -> str:
        """The checkpoint's name from the template; slashes in metrics' names do not make folders."""
        path = self.format_checkpoint_name({**self._monitor_candidates(trainer), "epoch": torch.tensor(epoch)})
        return os.path.relpath(path, self.dirpath).replace(os.sep, "_")

    def _score(self, trainer: Trainer) -> float | None:
        return self._metrics(trainer).get(self.ranking.monitor) if self.ranking is not None else None

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """The numbers logged at this step; those of an earlier validation belong to an earlier step and are left
        out."""
        fresh = self._metrics_are_of == self._position(trainer)
        return {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if value.numel() == 1 and (fresh or name not in self._validation_metrics)
        }

    def _stop_after_failures(self) -> None:
        """Raise on all ranks alike once too many saves in a row have failed."""
        assert self._session is not None
        assert self._folder is not None
        failures = self._session.ranks.any_max(self._session.engine.failures(self._folder))[0]
        most = 1 if self.on_save_error == "raise" else self.max_failures
        if failures >= most:
            raise SaveFailed(
                f"{failures} saves in a row have failed; the last cause: {self._last_error}",
                hint="Earlier checkpoints are untouched: mend the storage, then start again with ckpt_path='last'.",
            )

    def _hear(self, trainer: Trainer) -> None:
        """Take note of the saves that ended since the last batch."""
        assert self._session is not None
        late = self._session.engine.overdue
        if late is not None and late is not self._overdue:
            self._overdue = late
            log.warning("event=hang step=%d reason='the storage does not answer; no save is possible'", late.step)
        for save in self._session.finished(self._folder):
            error = save.committed.exception()
            if error is not None:
                self._saved_at = None
                self._last_error = str(error)
                if self._watch is not None:
                    self._watch.telemetry.failures += 1
                rank_zero_warn(f"{error} Earlier checkpoints are untouched.")
                continue
            if trainer.is_global_zero:
                log_save(save)
            if self._watch is not None:
                self._tell_loggers(trainer, self._watch.committed(save, self._now(trainer)))
            self._note(trainer, save.committed.result())
            self._session.engine.tidy(save)
            self._last_save = save
        if self._replicator is not None:
            self._hear_of_copies(trainer, self._replicator)

    def _hear_of_copies(self, trainer: Trainer, replicator: Replicator) -> None:
        """Take note of the checkpoints that the cold tier has got since the last batch."""
        copies = replicator.poll()
        for copy in copies:
            if self._watch is not None:
                backlog = len(replicator.pending())
                self._tell_loggers(trainer, self._watch.replicated(copy.seconds, copy.bytes, copy.lag, backlog))
            self.on_checkpoint_replicated(trainer, trainer.lightning_module, copy)
        if copies and self._last_save is not None and self._session is not None:
            self._session.engine.tidy(self._last_save)  # what was kept only because it was on its way may go

    def _tell_loggers(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """What checkpoints cost, in the Trainer's loggers."""
        if self.log_metrics and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(dict(metrics), step=trainer.global_step)

    def _note(self, trainer: Trainer, checkpoint: Committed) -> None:
        """Now that it exists: tell loggers and subclasses."""
        self._standings.add(checkpoint.name, checkpoint.manifest)
        if trainer.is_global_zero and checkpoint.manifest.health != HEALTHY:
            log.warning(
                "event=health step=%d name=%s health=%s reason=%r note='it is kept, and not resumed from'",
                checkpoint.manifest.step,
                checkpoint.name,
                checkpoint.manifest.health,
                checkpoint.manifest.extra.get("suspicion", ""),
            )
        assert self._session is not None
        if self._replicator is not None:
            self._replicator.offer(self._standings.committed, self._in_use())
        assert self._folder is not None
        self._standings.give_up(self._session.engine.must_stay(self._folder))
        if self._peers is not None:
            self._peers.offer(checkpoint.name, checkpoint.manifest)
        self._update_best()
        if self.verbose and trainer.is_global_zero:
            print(f"saved {checkpoint.path} ({checkpoint.manifest.reason})")
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))
        self.on_checkpoint_committed(trainer, trainer.lightning_module, checkpoint)

    def _update_best(self) -> None:
        """Set ModelCheckpoint's public fields from what is committed."""
        folder = self._folder
        assert folder is not None
        standings, where = self._standings, folder.tier.where
        best = standings.best_first
        self.last_model_path = where(standings.newest) if standings.newest else ""
        self.best_model_path = where(best[0]) if best else ""
        if self.ranking is not None:
            self.best_k_models = {where(name): torch.tensor(standings.score(name)) for name in standings.top}
            self.best_model_score = torch.tensor(standings.score(best[0])) if best else None
            self.kth_best_model_path = where(standings.top[-1]) if standings.top else ""

    @staticmethod
    def _position(trainer: Trainer) -> tuple[int, int]:
        """The step boundary training is at; batches count where manual optimization leaves the step alone."""
        return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready

    @staticmethod
    def _now(trainer: Trainer) -> Progress:
        return Progress(step_of(trainer), time.monotonic())

    # -- end ----------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self._session
        if session is None or self._agreement is None or self._folder is None:
            return
        self._agreement.close()
        self._save_and_wait(trainer, END_OF_TRAINING)
        if self._watch is not None:
            self._watch.end()
            if trainer.is_global_zero:
                log.info("event=summary step=%d %s", trainer.global_step, self._watch.summary())

    def _save_and_wait(
        self, trainer: Trainer, reason: str, deadline: float = math.inf, *, of: Manifest | None = None
    ) -> None:
        """Save the step that training is at, unless it is, and wait until it is committed."""
        self._wait(trainer, deadline)
        while self._saved_at != self._position(trainer) and self._now(trainer).step > 0:
            self._save(trainer, reason, self._epoch, of=of)
            self._wait(trainer, deadline)

    def _save_in_time(self, trainer: Trainer, reason: str) -> None:
        """Save before all ranks stop.  A save that fails does not make a run finished, nor keeps it from stopping."""
        session, agreement = self._session, self._agreement
        assert session is not None
        assert agreement is not None
        agreement.close()
        try:
            self._save_and_wait(trainer, reason, session.preemption.deadline())
        except SaveFailed as error:
            if self.on_save_error == "raise":
                raise
            rank_zero_warn(f"The step that training stops at is not saved: {error}")

    def _replicate_in_time(self) -> None:
        """Let other nodes and the cold tier have what is on its way, as long as there is time."""
        if self._peers is not None and self._session is not None:
            left = self._session.preemption.leave_by() - time.monotonic()
            self._peers.drain(max(min(self.save_timeout, left), 0.0))
        if self._replicator is not None and self._session is not None:
            self._replicator.close(self.save_timeout, self._session.preemption.leave_by)
            self._hear_of_copies(self._session.trainer, self._replicator)

    def _wait(self, trainer: Trainer, deadline: float = math.inf) -> None:
        """Until the save under way has ended on all ranks, but not beyond ``deadline``."""
        session = self._session
        assert session is not None
        begin = time.monotonic()
        done = session.engine.drain(max(min(self.save_timeout + OVERDUE, deadline - begin), 0.0))
        self._hear(trainer)
        hangs, failed = session.ranks.any_max(not done, self._saved_at is None)
        if hangs:
            raise SaveFailed(
                f"The storage behind {shown(str(self.dirpath))!r} does not answer in time: a save is still under way"
                f" after {time.monotonic() - begin:.0f} s.",
                hint="Earlier checkpoints are untouched: start again with ckpt_path='last' once it does.",
            )
        if failed:
            self._saved_at = None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._session is not None:
            if self._replicator is not None:
                self._replicator.offer(self._standings.committed, self._in_use())
            self._replicate_in_time()
            session, peers = self._session, self._peers
            self._session = self._agreement = self._replicator = self._peers = self._watch = None
            try:
                session.leave()
            finally:
                if peers is not None:
                    peers.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the save under way finish and what is on its way arrive, within seconds and without a word to the other
        ranks, which may be anywhere."""
        session = self._session
        if session is None:
            return
        try:
            is_alone = session.ranks.world_size == 1 and self._agreement is not None
            if self.save_on_exception and is_alone and not isinstance(exception, (Preempted, Diverged)):
                session.engine.drain(DRAIN_AFTER_EXCEPTION)
                reason = f"{type(exception).__name__}: {exception}"[:200]
                self._save(trainer, reason, trainer.current_epoch, settled=False)
        except Exception as error:  # the exception that ends training is the one to be seen
            log.warning("event=save step=%d outcome=failed error=%r", trainer.global_step, error)
        finally:
            if self._watch is not None:
                self._watch.end(_how_it_ended(exception))
            deadline = min(time.monotonic() + DRAIN_AFTER_EXCEPTION, session.preemption.deadline())
            try:
                if self._peers is not None:
                    self._peers.drain(max(deadline - time.monotonic(), 0.0) / 2)
                    self._peers.close()
                self._replicate_until(deadline, session)
            finally:
                session.abandon(max(deadline - time.monotonic(), 0.0), exception)
                self._session = self._agreement = self._replicator = self._peers = self._watch = None

    def _replicate_until(self, deadline: float, session: Session) -> None:
        """Let the cold tier have what is on its way, the save under way included; no exception comes from here."""
        replicator, folder = self._replicator, self._folder
        if replicator is None or folder is None:
            return
        try:
            if self._agreement is not None:
                session.engine.drain(max(deadline - time.monotonic(), 0.0))
                for save in session.finished(folder):
                    if save.committed.exception() is None:
                        self._standings.committed[save.committed.result().name] = save.committed.result().manifest
                replicator.offer(self._standings.committed, self._in_use())
                replicator.drain(max(deadline - time.monotonic(), 0.0))
        except Exception as error:
            log.warning("event=drain tier=cold outcome=failed error=%r", error)
        finally:
            replicator.abandon()

    # -- state --------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep what was watched, of each of our callbacks.  Beside Lightning's state of callbacks, which asks for
        callbacks by the very arguments they had."""
        if self._watch is not None and (state := self._watch.state()):
            state["to_skip"] = self._to_skip
            checkpoint.setdefault(WATCHED, {})[self._watched_key] = state

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        watched: dict[str, Any] = checkpoint.get(WATCHED, {})
        only = next(iter(watched.values())) if len(watched) == 1 else None  # the folder may have moved
        self._watched_before = watched.get(self._watched_key, only)

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
        """Picklable at any time (``ddp_spawn``, ``copy``): what belongs to a running fit stays behind."""
        return {**self.__dict__, **dict.fromkeys(_OF_A_FIT)}


_OF_A_FIT = (
    "_session",
    "_agreement",
    "_folder",
    "_overdue",
    "_replicator",
    "_peers",
    "_last_save",
    "_watch",
    "_watched_before",
)


def _must_stay(standings: Standings, replicator: Replicator | None) -> set[str]:
    """Names that stay in a folder, whatever its rule says; asked for until the last background work has ended."""
    on_their_way = replicator.protected() if replicator is not None else set()
    return {*on_their_way, *filter(None, [standings.last_good])}


def _how_it_ended(exception: BaseException) -> str:
    """In the ledger's words: only what nobody meant is a failure."""
    if isinstance(exception, KeyboardInterrupt):
        return INTERRUPTED
    return PREEMPTED if isinstance(exception, SystemExit) else EXCEPTION


def _make_visible() -> None:
    """Show the package's log lines as Lightning shows its own, unless the user has set up logging."""
    if log.level == logging.NOTSET and not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
