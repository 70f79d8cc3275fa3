"""Preemption: signals, and a wall-time limit that is near, become one flag.

::

    a signal, on any rank       rank 0's clock nears the job's end
        │  the handler sets a flag, and nothing else      │
        └───────────────> Preemption.wanted <─────────────┘
                               │  carried by the ranks' agreement, between two batches
                               v
    all ranks at the same step: save, commit │ requeue │ upload while time remains │ raise Preempted

Training code never runs inside a handler.  Handlers of the user's are called after the flag is set; what they raise is
held back until the save is committed.  Children that are forked meanwhile, as the workers of loaders are, inherit the
handler (that is how processes work), but not its meaning: see ``Preemption._in_a_child``.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_resilience.errors import SetupError
from lightning_resilience.numeric import is_whole
from lightning_resilience.ranks import Board, Ranks

log = logging.getLogger("lightning_resilience")

WALL_TIME = 1000
"""Stands in the place of a signal's number where it is the clock that ends the job."""
REQUEUES = 10_000
"""Added to the signal that requeues a job, when ranks agree on one: where several came, that one counts."""
WALL_TIME_STATUS = 124
"""Exit status of a run that stops because its wall time ends, as that of ``timeout``."""

WALL_TIME_MARGIN = 30.0
"""Seconds before the end of the wall time that are left for agreeing and leaving, besides three saves and steps."""
WALL_TIME_SHARE = 0.2
"""No more than this part of the time that the job had when training began is given up for the margin."""

LEAVE = 2.0
"""Seconds of the grace that are left for loggers and the interpreter's end; a quarter of a shorter grace."""
SCONTROL = 30.0
"""Seconds that ``scontrol`` gets to answer."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Preempted(SIGTERMException):
    """Ends ``trainer.fit`` on every rank after the save: training is not finished, and goes on with
    ``ckpt_path="last"``.

    A ``SystemExit``, as what Lightning raises at a SIGTERM: callbacks hear of it in ``on_exception``, the Trainer tears
    down, and a script that does not catch it ends with a status that tells a scheduler that the run is not finished.

    Args:
        signum: the signal, or ``WALL_TIME``.
        step: the global step that training has stopped at.
        status: exit status, where it is not the usual one for the signal: 128 + its number.
    """

    def __init__(self, signum: int, step: int, status: int | None = None) -> None:
        super().__init__(status_of(signum) if status is None else status)
        self.signum = signum
        self.step = step

    def __reduce__(self) -> tuple[type[Preempted], tuple[Any, ...]]:
        return Preempted, (self.signum, self.step, self.code)

    def __str__(self) -> str:
        return f"preempted at step {self.step}: {name_of(self.signum)}"


def status_of(signum: int) -> int:
    """Exit status that tells that a run was stopped and is not finished: 143 for SIGTERM."""
    return WALL_TIME_STATUS if signum == WALL_TIME else 128 + signum


def name_of(signum: int) -> str:
    """``SIGTERM`` and the like."""
    if signum == WALL_TIME:
        return "wall time ends"
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals have no name
        return f"signal {signum}"


def check_signals(signals: object) -> tuple[int, ...]:
    """The numbers of signals that were given by name or by number.

    Raises:
        SetupError: one is unknown, or cannot be handled.
    """
    if isinstance(signals, (str, int)) or not isinstance(signals, Iterable):
        raise SetupError(f"signals={signals!r}: a list of signals is wanted.", hint="Try signals=('SIGTERM',).")
    return tuple(dict.fromkeys(_number(one) for one in signals))


def _number(one: object) -> int:
    names = {signum.name: int(signum) for signum in signal.Signals}
    number = names.get(one if one.startswith("SIG") else f"SIG{one}") if isinstance(one, str) else one
    if not is_whole(number) or number not in signal.valid_signals():
        raise SetupError(f"signals: {one!r} is not a signal of this system.", hint="Try 'SIGTERM' or 'SIGUSR1'.")
    if number in _UNFIT:
        why = "can be handled by no process" if number in _UNCATCHABLE else "tells of a crash, or of a child's end"
        raise SetupError(f"signals: {name_of(number)} {why}.", hint="Try 'SIGTERM' or 'SIGUSR1'.")
    return int(number)


_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_UNFIT = _UNCATCHABLE | {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGCHLD,
}


class Preemption:
    """Whether this process has been told to stop, and how long it has from then on.

    Handlers are installed by ``install`` and taken out by ``close``; in between, ``signum`` is the first signal that
    came, and 0 before.

    Args:
        ranks: who stops together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.signals: set[int] = set()
        self.grace = math.inf
        """Seconds from the signal to the kill."""
        self.requeue_signal: int | None = None
        """The signal after which a scheduler is to start this job again; None where it is not asked to."""
        self.signum = 0
        self.agreed = 0
        """What all ranks have agreed to stop for; 0 before."""
        self._held: BaseException | None = None
        self._all_know = False
        self._notices: Board | None = None
        self._since = math.inf
        self._ends = math.inf
        self._share = math.inf
        self._asked = (-math.inf, -math.inf)
        self._pid = os.getpid()
        self._earlier: dict[int, Handler] = {}

    # -- signals ------------------------------------------------------------------------------------------------------

    def install(self, earlier: Mapping[int, Handler]) -> None:
        """Handle signals from now on, in the main thread; Python has handlers nowhere else.

        Args:
            earlier: the user's handler of each signal, which is called too, and put back by ``close``.
        """
        if threading.current_thread() is not threading.main_thread():
            if earlier:
                log.warning("event=signals reason='fit does not run in the main thread: no signal is handled'")
            return
        self._pid = os.getpid()
        for signum, handler in earlier.items():
            self._earlier[signum] = handler
            signal.signal(signum, self._handle)

    def close(self) -> None:
        """Put the user's handlers back where ours are still in place."""
        earlier, self._earlier = self._earlier, {}
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in earlier.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(signum)
        if os.getpid() != self._pid:
            self._in_a_child(signum, frame, earlier)
            return
        is_first = not self.signum
        if is_first:
            self._since = time.monotonic()
        if is_first or signum == self.requeue_signal:
            self.signum = signum
        if callable(earlier) and (earlier is not signal.default_int_handler or not is_first):
            try:
                earlier(signum, frame)
            except BaseException as error:
                if earlier is signal.default_int_handler:
                    raise  # the second Ctrl-C means it
                self._held = error

    @staticmethod
    def _in_a_child(signum: int, frame: FrameType | None, earlier: Handler) -> None:
        """A forked child does what it would without us: the user's handler, or its end.

        But the signals that schedulers and terminals send to all processes of a job, and mean for the one that trains,
        end no loader worker, without which the step under way could not be finished.
        """
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(signum, frame)
        elif signum not in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2) and earlier != signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    # -- wall time ----------------------------------------------------------------------------------------------------

    def ends_at(self, when: float) -> None:
        """Stop in time for the wall time's end, which rank 0 watches.

        Args:
            when: seconds of the UNIX clock.  What is over already is another job's, whose environment this one has.
        """
        left = when - time.time()
        if left > 0 and self._ranks.rank == 0:
            self._ends, self._share = when, WALL_TIME_SHARE * left

    def wanted(self, save_seconds: float = 0.0) -> int:
        """As ``call``, or ``WALL_TIME`` where a save has to begin now to be in time; 0 where neither.  Asked
        once a batch.

        Args:
            save_seconds: how long a save takes until it is committed.
        """
        if self.signum or self._ends == math.inf:
            return self.call
        now = time.time()
        before, last = self._asked
        self._asked = (last, now)
        step = min(now - last, last - before) if before > -math.inf else 0.0  # one of the two may be a validation
        margin = min(WALL_TIME_MARGIN + 3 * (save_seconds + step), self._share)
        return WALL_TIME if now >= self._ends - margin else 0

    # -- from then on -------------------------------------------------------------------------------------------------

    @property
    def call(self) -> int:
        """The signal that came here, or 0, so that the largest of all ranks is the one that counts."""
        return self.signum + REQUEUES * (self.signum == self.requeue_signal)

    def agree(self, call: int) -> None:
        """All ranks have agreed to stop for what ``wanted`` or ``call`` said, or not to where it is 0."""
        if call:
            self.agreed = call % REQUEUES
            self.hurry()

    def hurry(self) -> None:
        """Some rank was signalled: the grace counts from now where no signal came here."""
        self._since = min(self._since, time.monotonic())

    def deadline(self) -> float:
        """Second of the monotonic clock at which this process should be leaving; infinity where nothing says so."""
        return self._since + self.grace - min(LEAVE, self.grace / 4) if self.grace < math.inf else math.inf

    def leave_by(self) -> float:
        """``deadline`` where any rank was told.  Asked again and again while there is something to wait for, by ranks
        that may be anywhere."""
        if self.grace < math.inf and not self._all_know and self._ranks.world_size > 1:
            try:
                self._all_know = self._tell_or_hear()
            except RuntimeError:  # rank 0 is gone
                self.hurry()
                self._all_know = True
        return self.deadline()

    def _tell_or_hear(self) -> bool:
        """Through the board, because others wait elsewhere: whether all ranks know now that one was signalled."""
        key = f"{self._ranks.session}/leaving"
        if self._notices is None:
            self._notices = self._ranks.board()
        is_told = self.deadline() < math.inf  # asked once: a signal may come at any moment of this
        if is_told:
            self._notices.put_once(key, True)
        elif is_told := self._notices.has(key):
            self.hurry()
        return is_told

    @property
    def period(self) -> float:
        """Seconds between two questions to all ranks, so that asking takes no more than a fifth of the grace."""
        return min(1.0, self.grace / 10)

    @property
    def wants_requeue(self) -> bool:
        """Whether the scheduler is to start this job again."""
        return self.requeue_signal is not None and self.agreed in (self.requeue_signal, WALL_TIME)

    def requeue(self) -> None:
        """Have rank 0 see to it that the scheduler starts this job again, where it is to."""
        job = slurm_job() if self.wants_requeue and self._ranks.rank == 0 else None
        if job is not None:
            requeue(job)

    def stop(self, step: int, quietly: bool = False) -> Preempted:
        """What ends training.

        Args:
            step: that it ends at.
            quietly: with status 0.
        """
        stop = Preempted(self.agreed, step, status=0 if quietly else None)
        stop.__cause__ = self._held
        if self._ranks.rank == 0:
            log.warning("event=preempted step=%d reason=%r exit=%d", step, name_of(self.agreed), stop.code)
        return stop


# -- SLURM ------------------------------------------------------------------------------------------------------------


def slurm_job() -> str | None:
    """What ``scontrol`` calls this job, or this task of an array; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def slurm_end() -> float | None:
    """When the wall time of this job ends, in seconds of the UNIX clock; None where SLURM does not say."""
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    try:
        return float(text) if text and slurm_job() else None
    except ValueError:
        return None


def requeue(job: str, command: Collection[str] = ("scontrol", "requeue")) -> bool:
    """Ask SLURM to put this job into the queue again; whether it will.  What goes wrong is logged, and no error: the
    checkpoint is there."""
    try:
        done = subprocess.run([*command, job], capture_output=True, text=True, timeout=SCONTROL, check=False)
        problem = "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    if problem:
        log.warning("event=requeue job=%s outcome=failed reason=%r note='submit it again yourself'", job, problem)
    else:
        log.info("event=requeue job=%s", job)
    return not problem
