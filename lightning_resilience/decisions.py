"""What is decided between two batches, by one callback on all ranks alike.

::

    hear of saves  ->  ask: is it time? was anyone signalled? has the loss left its course?  ->  at a step boundary:
    go back  |  save and stop  |  save, if it is this callback's turn

All ranks run the same lines with the same answers, because whatever they could see differently was decided by one of
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.agreement import Agreement
from lightning_resilience.errors import SaveFailed
from lightning_resilience.evaluations import Evaluations
from lightning_resilience.orders import Orders
from lightning_resilience.preemption import name_of
from lightning_resilience.rollback import SpikeRecovery
from lightning_resilience.saves import Folder
from lightning_resilience.saving import Saving
from lightning_resilience.schedule import Progress
from lightning_resilience.session import Session
from lightning_resilience.watch import END_OF_TRAINING, Watch


class Decisions:
    """Decides for one fit of one callback.

    Args:
        session: of the Trainer.
        folder: where saves go.
        agreement: how ranks decide together.
        watch: gives rank 0's wish.
        evaluations: what validations have to say.
        saving: makes the saves.
        recovery: takes the run back.
        orders: when to save.
    """

    def __init__(
        self,
        session: Session,
        folder: Folder,
        agreement: Agreement,
        watch: Watch,
        evaluations: Evaluations,
        saving: Saving,
        recovery: SpikeRecovery,
        orders: Orders,
    ) -> None:
        self._session = session
        self._folder = folder
        self._agreement = agreement
        self._watch = watch
        self._evaluations = evaluations
        self._saving = saving
        self._recovery = recovery
        self._orders = orders
        self._by_step = orders.schedule.by_step_alone()  # what each rank decides alone
        self._is_prepared = False
        self._asks_for_signals = False
        """Whether this callback is the one that asks for all of the Trainer's."""
        self._epoch = 0
        self._asked_for: list[str] = []
        """Why to save, as ranks have agreed since the last step boundary."""
        self._evaluated: list[str] = []
        """Why to save, as evaluations have it since the last step boundary."""
        self._put_off: list[str] = []
        """Why to save as soon as it is this callback's turn; empty where it does not stand in line."""

    def begin(self) -> None:
        """Training begins: from now on the session asks after each batch."""
        self._agreement.seconds = self._session.preemption.period
        self._asks_for_signals = self._session.ask_between_batches(self.between_batches)

    def forget(self) -> None:
        """The run was taken back: what was asked is of before."""
        self._agreement.forget()
        self._session.turns.leave(self._folder)
        self._asked_for, self._evaluated, self._put_off = [], [], []

    def end(self) -> None:
        """Training is over: save the step that it ends at.  Collective.

        Raises:
            SaveFailed: it cannot be saved; on all ranks.
        """
        self._agreement.close()
        self._saving.save_and_wait(END_OF_TRAINING, self._epoch)

    def between_batches(self, epoch: int, epoch_ended: bool, at_boundary: bool) -> None:
        """Lightning is done with a batch, its validation and, where it was the last, its epoch: save if it is time."""
        self._epoch = epoch
        self._saving.hear()
        now = self._saving.now
        self._watch.look(now)
        self._ask(now)
        self._evaluated += self._evaluations.reasons(epoch, epoch_ended)
        if at_boundary:  # what is wanted stays wanted until the accumulation window ends
            self._act(now, epoch_ended)

    def _ask(self, now: Progress) -> None:
        """Agree with the other ranks on what they may see differently."""
        session = self._session
        wish = self._wish(now) if session.ranks.rank == 0 else None
        call = session.signal_to_ask() if self._asks_for_signals else 0
        answer = self._agreement.ask(wish, call, self._recovery.is_wanted())
        session.preemption.agree(self._agreement.signal)
        if answer:
            self._asked_for += self._put_off or [answer]

    def _wish(self, now: Progress) -> str | None:
        """As rank 0: why to save, if the engine can, or another callback's save keeps it from doing so."""
        engine, turns, folder = self._session.engine, self._session.turns, self._folder
        if self._put_off:
            return "; ".join(self._put_off) if turns.is_next(folder) and not engine.busy else None
        lag = self._agreement.lag + self._session.trainer.accumulate_grad_batches - 1
        wish = self._watch.wish(now, self._saving.last, lag)
        return None if engine.busy and turns.was_mine(folder) else wish

    def _act(self, now: Progress, epoch_ended: bool) -> None:
        """At a step boundary: do what is wanted by now."""
        session = self._session
        due = self._by_step.due(now, self._saving.last) if self._by_step is not None else None
        ends = not epoch_ended and session.ends_within_an_epoch()
        rare = [*self._evaluated, *([END_OF_TRAINING] if ends else [])]
        reasons = list(dict.fromkeys([*filter(None, [due]), *self._asked_for, *rare]))
        self._asked_for, self._evaluated = [], []
        self._evaluations.at_boundary()
        if self._agreement.diverged:
            self._recovery.take_back(self._epoch)
            return
        if session.preempted:
            self._save_and_stop("; ".join([*reasons, name_of(session.preemption.agreed)]))
            return
        if ends:
            self._saving.wait()
        if reasons:
            overlap = self._orders.overlap and not (epoch_ended or ends)
            goes = bool(rare) or self._is_next(now.step, can_wait=due is None)
            self._save_or_put_off(reasons, now.step, goes, overlap)
        elif not self._is_prepared:
            self._saving.prepare()  # the optimizers have their state now
        self._is_prepared = True
        self._recovery.skip()

    def _is_next(self, step: int, *, can_wait: bool) -> bool:
        """Whether no other callback's save comes first.

        Args:
            step: that training is at.
            can_wait: whether a later step does as well, so that it is not waited for another's save of this one.
        """
        turns = self._session.turns
        return turns.is_next(self._folder) and not (can_wait and turns.was_anothers(self._folder, step))

    def _save_or_put_off(self, reasons: Sequence[str], step: int, goes: bool, overlap: bool) -> None:
        """Save, if it ``goes``; where another callback's save is in the way, as soon as that is over."""
        if goes and self._saving.save("; ".join(reasons), self._epoch, overlap=overlap):
            self._put_off = []
            return
        turns = self._session.turns
        if not goes:
            turns.wait(self._folder)
            self._watch.skipped()
        if not turns.waits(self._folder):
            self._put_off = []
        elif not self._put_off:
            self._put_off = [f"{reason}, wanted at step {step}" for reason in reasons]

    def _save_and_stop(self, reason: str) -> None:
        """Save before all ranks stop.  A save that fails does not make a run finished, nor keeps it from stopping."""
        self._agreement.close()
        try:
            self._saving.save_and_wait(reason, self._epoch, self._session.preemption.deadline())
        except SaveFailed as error:
            if self._orders.fails_loudly:
                raise
            rank_zero_warn(f"The step that training stops at is not saved: {error}")
