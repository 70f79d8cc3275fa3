"""The ledger of a run folder: when training began and ended, and how; a small file that survives restarts.

``.ledger.jsonl`` beside the checkpoints has one JSON object a line, each with ``life`` (an id of the process), ``time``
(seconds since 1970) and ``step``:

=========  ===========================================================================================================
``start``  training begins.  ``run`` as in the manifests, ``world_size``; ``carried``: ``failures`` and ``seconds`` of
           lives that this file does not know, from the checkpoint that is resumed.
``beat``   training goes on: ``seconds`` of this life so far and ``stalled``, those of them in which saves kept it
           still, or that came to nothing because the run was taken back.  After a commit also ``stall`` and
           ``commit``, the seconds it cost and took.
``end``    how it ended: ``clean``, ``interrupted`` (by the user), ``preempted`` or ``exception``; ``seconds`` and
           ``stalled`` as above.  A life without an end was killed.
``past``   lives that were folded into one line: their number, when the first ``began``, ``failures``, ``seconds``,
           ``stalled``.
=========  ===========================================================================================================

Rank 0 alone writes it, in a thread of its own: no step waits for it, and a ledger that cannot be written is mentioned
once and given up, because training does not depend on it.  Lines are only ever added, each by one write, so a reader
sees whole lines and at most one that is torn, which it passes over.  Where the file has grown beyond ``LARGEST`` at a
start it is put in order: one file takes the place of the other in one step.  Keys and events that this version does
not know are kept as long as their line is.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience.numeric import is_number
from lightning_resilience.useful import Useful

log = logging.getLogger("lightning_resilience")

LEDGER = ".ledger.jsonl"
LARGEST = 256 * 1024
"""Bytes beyond which a ledger is put in order at the next start."""
LIVES_KEPT = 200
"""Lives that keep lines of their own when a ledger is put in order."""
BEAT_SECONDS = 60.0
"""Seconds between two beats where there is no commit."""
CLOSING_SECONDS = 5.0
"""Seconds that the last lines get to be written."""

Line = dict[str, Any]

START, BEAT, END, PAST = "start", "beat", "end", "past"
CLEAN, INTERRUPTED, PREEMPTED, EXCEPTION, KILLED = "clean", "interrupted", "preempted", "exception", "killed"
FAILURES = (EXCEPTION, KILLED)


@dataclass
class Life:
    """One process, from the start of training to its end."""

    id: str
    lines: list[Line] = field(default_factory=list)

    def last(self, event: str) -> Line:
        """The last line of a kind; an empty one where there is none."""
        return next((line for line in reversed(self.lines) if line.get("event") == event), {})

    @property
    def how(self) -> str:
        """How it ended: one of the words above, or ``killed``."""
        return str(self.last(END).get("how", KILLED))

    @property
    def run(self) -> str:
        """Id of its run; empty where it does not say."""
        return str(self.last(START).get("run", ""))

    @property
    def seconds(self) -> float:
        """Seconds of training that are known of."""
        return max((_number(line.get("seconds")) for line in self.lines), default=0.0)

    @property
    def steps(self) -> int:
        """Steps that are known of."""
        steps = [_number(line.get("step")) for line in self.lines]
        return int(max(steps) - steps[0]) if steps else 0

    @property
    def stalled(self) -> float:
        """Seconds of them that came to nothing: saves kept training still, or it was taken back."""
        return max((_number(line.get("stalled")) for line in self.lines), default=0.0)

    @property
    def began(self) -> float:
        """When it began, in seconds since 1970."""
        return min((_number(line.get("time")) for line in self.lines), default=0.0)

    @property
    def reached(self) -> tuple[int, int]:
        """The step it began with, and the last that is known of."""
        steps = [int(_number(line.get("step"))) for line in self.lines]
        return (steps[0], max(steps)) if steps else (0, 0)


@dataclass(frozen=True)
class History:
    """What lives so far say of the failure rate: ``failures`` in ``seconds`` of training."""

    failures: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Folded:
    """Lives that were folded into one line: how many ``lives``, when the first ``began``, and seconds that were
    ``useful``, as far as is known."""

    lives: int = 0
    began: float = 0.0
    useful: float = 0.0


@dataclass(frozen=True)
class Record:
    """A ledger as it was read: its lives from old to new, and the lines that belong to none."""

    lives: Sequence[Life] = ()
    others: Sequence[Line] = ()

    @property
    def empty(self) -> bool:
        return not self.lives and not self.others

    @property
    def folded(self) -> Folded:
        """The lives that have no lines of their own any more."""
        line = next((line for line in self.others if line.get("event") == PAST), {})
        useful = _number(line.get("seconds")) - _number(line.get("stalled"))
        return Folded(int(_number(line.get("lives"))), _number(line.get("began")), max(useful, 0.0))

    def history(self, without: str = "") -> History:
        """Failures and training seconds of all lives but the one that still goes on."""
        failures, seconds = 0, 0.0
        for line in (*self.others, *(_carried(life) for life in self.lives)):
            failures, seconds = failures + int(_number(line.get("failures"))), seconds + _number(line.get("seconds"))
        for life in self.lives:
            if life.id != without:
                failures, seconds = failures + (life.how in FAILURES), seconds + life.seconds
        return History(failures, seconds)


def _carried(life: Life) -> Line:
    carried = life.last(START).get("carried")
    return carried if isinstance(carried, dict) else {}


def _number(value: object) -> float:
    """A number from a file that anybody may have written to; 0 for anything else."""
    return float(value) if is_number(value, 0) and value <= sys.float_info.max else 0.0


def read(folder: str | os.PathLike[str]) -> Record:
    """The ledger of a run folder; an empty one where there is none.  Safe while somebody writes it.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        content = (Path(folder) / LEDGER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Record()
    return understood(content)


def understood(content: bytes) -> Record:
    """The lines of a ledger; torn ones are passed over."""
    lives: dict[str, Life] = {}
    others: list[Line] = []
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(line, dict):
            continue
        life = line.get("life")
        if isinstance(life, str):
            lives.setdefault(life, Life(life)).lines.append(line)
        else:
            others.append(line)
    return Record(tuple(lives.values()), tuple(others))


def in_order(record: Record) -> bytes:
    """A ledger that says the same in fewer lines: of each life what it said last, the oldest lives in one sum."""
    old, young = record.lives[:-LIVES_KEPT], record.lives[-LIVES_KEPT:]
    folded = [line for line in record.others if line.get("event") == PAST]
    history = Record(old, folded).history()
    past = {
        "event": PAST,
        "began": min(
            [life.began for life in old] + [_number(line["began"]) for line in folded if "began" in line], default=0.0
        ),
        "lives": len(old) + sum(int(_number(line.get("lives"))) for line in record.others),
        "failures": history.failures,
        "seconds": history.seconds,
        "stalled": sum(life.stalled for life in old) + sum(_number(line.get("stalled")) for line in record.others),
    }
    unknown = [line for line in record.others if line.get("event") != PAST][-LIVES_KEPT:]
    lines = [*([past] if past["lives"] else []), *unknown]
    for life in young:
        last_commit = next((line for line in reversed(life.lines) if "commit" in line), None)
        last = {id(line) for event in (START, BEAT, END) if (line := life.last(event))} | {id(last_commit)}
        strange = [line for line in life.lines if line.get("event") not in (START, BEAT, END)][-10:]
        last |= {id(line) for line in strange}
        lines += [line for line in life.lines if id(line) in last]
    return _written(lines)


def _written(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


class Ledger:
    """Writes the life of this process into the ledger of a run folder.

    Args:
        folder: the run folder; None writes nothing.
        history: what the checkpoint that is resumed says of lives before, for a folder without a ledger.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, history: History | None = None) -> None:
        self.life = uuid.uuid4().hex[:12]
        self._path = Path(folder) / LEDGER if folder is not None else None
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._useful = Useful()
        self._beaten = 0.0
        carried = history or History()
        found = self._read()
        self.carried = carried if found.empty else History()
        self.history = self.carried if found.empty else found.history()
        """What the lives before this one say of the failure rate."""
        self.before = found
        """The lives before this one."""

    def _read(self) -> Record:
        try:
            return read(self._path.parent) if self._path is not None else Record()
        except OSError as error:
            self._give_up(error)
            return Record()

    # -- what happens -------------------------------------------------------------------------------------------------

    def start(self, useful: Useful, step: int, **facts: Any) -> None:
        """Training begins.

        Args:
            useful: counts its seconds, of the clock that the calls that follow go by.
            step: where.
            **facts: what else to write down.
        """
        self._useful, self._beaten = useful, useful.began
        if self.carried != History():
            facts["carried"] = {"failures": self.carried.failures, "seconds": self.carried.seconds}
        if self._path is not None:
            self._thread = threading.Thread(target=self._work, name="resilience-ledger", daemon=True)
            self._thread.start()
        self._put(START, step, **facts)

    def beat(self, now: float, step: int) -> None:
        """Training goes on.  Call it as often as you like: it is written down once a minute."""
        if now - self._beaten >= BEAT_SECONDS:
            self._beat(now, step)

    def commit(self, now: float, step: int, stall: float, seconds: float) -> None:
        """A save was committed: what it cost training, and how long it took."""
        self._beat(now, step, stall=round(stall, 6), commit=round(seconds, 6))

    def _beat(self, now: float, step: int, **facts: Any) -> None:
        self._beaten = now
        self._put(BEAT, step, **self._spent(now), **facts)

    def end(self, now: float, step: int, how: str) -> None:
        """Training ended; what is said afterwards is not written."""
        if self._closed:
            return
        self._put(END, step, how=how, **self._spent(now))
        self._closed = True
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)

    def known(self, now: float) -> History:
        """Lives so far, this one included, for the checkpoint."""
        return History(self.history.failures, self.history.seconds + max(now - self._useful.began, 0.0))

    def _spent(self, now: float) -> dict[str, float]:
        return {"seconds": round(now - self._useful.began, 3), "stalled": round(self._useful.wasted, 3)}

    def _put(self, event: str, step: int, **facts: Any) -> None:
        if self._thread is not None and self._path is not None and not self._closed:
            self._lines.put({"event": event, "life": self.life, "time": round(time.time(), 3), "step": step, **facts})

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        path, ahead = self._path, b"\n"  # of a line that a kill tore
        assert path is not None
        try:
            if path.exists() and path.stat().st_size > LARGEST:
                self._put_in_order(path)
            while (line := self._lines.get()) is not None:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    torn = ahead if os.fstat(fd).st_size else b""
                    os.write(fd, torn + _written([line]))
                    os.fsync(fd)
                finally:
                    os.close(fd)
                ahead = b""
        except Exception as error:
            self._give_up(error)

    def _put_in_order(self, path: Path) -> None:
        fresh = path.with_name(f"{LEDGER}-{self.life}")
        try:
            fresh.write_bytes(in_order(understood(path.read_bytes())))
            os.replace(fresh, path)
        finally:
            with suppress(OSError):
                fresh.unlink()

    def _give_up(self, error: Exception) -> None:
        log.warning("event=ledger path=%s error=%r reason='failures are not written down'", self._path, error)
        self._path = None
