"""Copying live tensors into a slot: at once, or behind the training thread while it goes on.

::

    training thread         copy what the forward changes │ forward, backward │ ── barrier ── │ optimizer step
    thread of the copy                                    │ copy the rest ────┼──> checked    │

Behind the training thread only what nothing but an optimizer's step changes may be copied.  Before that step, and
before anything else that may change weights, the training thread passes the *barrier* (``let_go_on``): on a host it
stands still until everything is copied, and helps; on a CUDA device only the device waits, and the host goes on.

What was changed before the barrier all the same is noticed by the version that torch counts for each tensor, and makes
the copy void.  Changes that torch does not count (through ``.data``, by foreign kernels) cannot be seen.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import compress, takewhile
from operator import attrgetter, not_
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_resilience import points
from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import addresses_of

OVERLAPPING = frozenset({"cpu", "cuda"})
"""Devices from which can be copied behind the training thread; from others it is done at once."""

THREAD = "resilience-stage"
"""Name of the thread that copies."""

PIECE = 16 * 2**20
"""Bytes after which another thread may go on with a copy; few enough for the training thread to help."""
SMALL = 128 * 2**10
"""Bytes up to which tensors are copied many at a time; torch copies them with one thread."""
MANY = 512
"""How many of them at a time."""


class Copies:
    """Tensors to copy: ``sources``, each over the one of ``targets`` (in host memory) at its place, by ``names``; and
    the ``addresses`` of the sources."""

    def __init__(
        self,
        names: Sequence[str] = (),
        targets: Sequence[Tensor] = (),
        sources: Sequence[Tensor] = (),
        addresses: Sequence[int] | None = None,
    ) -> None:
        self.names = list(names)
        self.targets = list(targets)
        self.sources = list(sources)
        self.addresses = addresses_of(sources) if addresses is None else list(addresses)

    def split(self, chosen: Sequence[bool]) -> tuple[Copies, Copies]:
        """Those that are not chosen, and those that are."""
        return self._where(list(map(not_, chosen))), self._where(chosen)

    def on(self, device: torch.device) -> Copies:
        """Those from one device."""
        if self.devices == [device]:
            return self
        return self._where([source.device == device for source in self.sources])

    def _where(self, wanted: Sequence[bool]) -> Copies:
        if all(wanted):
            return self
        if not any(wanted):
            return Copies()
        return Copies(*(list(compress(part, wanted)) for part in self._parts))

    @property
    def _parts(self) -> tuple[list[Any], ...]:
        return self.names, self.targets, self.sources, self.addresses

    @cached_property
    def devices(self) -> list[torch.device]:
        """Where they are copied from."""
        if all(map(attrgetter("is_cpu"), self.sources)):
            return [torch.device("cpu")] if self.sources else []
        return list({source.device: None for source in self.sources})

    def clear(self) -> None:
        """Refer to none any more."""
        for part in self._parts:
            part.clear()


@torch.no_grad()
def copy_at_once(copies: Copies) -> None:
    """Copy; on return it is done."""
    if not copies.sources:
        return
    devices = copies.devices
    # Of other devices nothing is known that could be waited for.
    at_once = not all(device.type in OVERLAPPING for device in devices)
    if not at_once and any(device.type == "cuda" for device in devices):
        _put_on_stream(copies.targets, copies.sources)
    else:
        torch._foreach_copy_(copies.targets, copies.sources, non_blocking=not at_once)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _put_on_stream(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Have a device copy, without waiting for it.

    What is another tensor seen differently (conjugated, negated) is made what it is seen as before: torch would do that
    to the target, on the host, when the copy has not landed yet.
    """
    seen = [one.resolve_conj().resolve_neg() if one.is_conj() or one.is_neg() else one for one in sources]
    torch._foreach_copy_(list(targets), seen, non_blocking=True)


class Lane(Protocol):
    """How tensors of one kind of device are copied."""

    @property
    def time(self) -> StreamTime | None:
        """What it costs the device's training; None where only this process waits."""

    def run(self) -> None:
        """On the thread of the copy: copy, or tell the device to."""

    def help(self) -> None:
        """On the training thread: take part in what is left.  What goes wrong is raised by ``run``, and here only what
        is no ``Exception``, such as an interrupt."""

    def hold_back(self) -> None:
        """On the training thread, after ``run``: let nothing that follows change a source that is not copied."""

    def settle(self) -> None:
        """On the thread of the copy: return when the targets hold everything."""

    def await_below(self, address: int) -> None:
        """On a thread that reads targets: return when those below an address hold everything, or never will."""

    def cancel(self) -> None:
        """Do not go on."""


class HostLane:
    """Sources in host memory: two threads copy piece by piece, without holding the interpreter's lock."""

    time: StreamTime | None = None

    def __init__(self, now: Copies, later: Copies) -> None:
        copy_at_once(now)
        self._targets, self._sources = later.targets, later.sources  # from low addresses to high
        self._next = self._offset = self._taken = 0
        self._under_way: dict[int, int] = {}  # where pieces begin, by number
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self) -> None:
        self.help()
        self.hold_back()
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def help(self) -> None:
        try:
            while (taken := self._take()) is not None:
                number, copy = taken
                points.reach("stage.piece")
                copy()
                with self._changed:
                    self._under_way.pop(number, None)  # gone where the other thread gave up
                    self._changed.notify_all()
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise  # what a handler of a signal raises, say, is not the copy's to keep

    def _give_up(self, error: BaseException) -> None:
        """Let nobody wait for what is not copied any more: the save has failed."""
        self._error = self._error or error
        with self._changed:
            self._next = len(self._sources)
            self._under_way.clear()
            self._changed.notify_all()

    def _take(self) -> tuple[int, Callable[[], object]] | None:
        with self._changed:
            if self._next >= len(self._sources):
                return None
            self._taken += 1
            self._under_way[self._taken] = self._front
            source, target = self._sources[self._next], self._targets[self._next]
            return self._taken, self._part_of(source, target) if _is_large(source) else self._several()

    @property
    def _front(self) -> int:
        """Where the next piece begins."""
        return self._targets[self._next].data_ptr() + self._offset

    def _part_of(self, source: Tensor, target: Tensor) -> Callable[[], object]:
        if not (source.is_contiguous() and source.dtype == target.dtype) or source.is_conj() or source.is_neg():
            self._next += 1
            return partial(target.copy_, source)
        begin, size = self._offset, source.nbytes
        count = min(PIECE, size - begin)
        self._offset = begin + count if begin + count < size else 0
        self._next += not self._offset
        return partial(ctypes.memmove, target.data_ptr() + begin, source.data_ptr() + begin, count)

    def _several(self) -> Callable[[], object]:
        sizes = map(attrgetter("nbytes"), self._sources[self._next : self._next + MANY])
        several = slice(self._next, self._next + len(list(takewhile(SMALL.__ge__, sizes))))
        self._next = several.stop
        return partial(torch._foreach_copy_, self._targets[several], self._sources[several])

    def hold_back(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)

    def settle(self) -> None:
        pass

    def await_below(self, address: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._reaches(address))

    def _reaches(self, address: int) -> bool:
        all_taken = self._next >= len(self._sources)
        return all(begin >= address for begin in self._under_way.values()) and (all_taken or self._front >= address)

    def cancel(self) -> None:
        with self._changed:
            self._next = len(self._sources)
            self._changed.notify_all()


def _is_large(tensor: Tensor) -> bool:
    return tensor.nbytes > SMALL


class StreamTime:
    """How long a device's training stream copied, or stood still for copies, as the device measures it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[torch.cuda.Stream]:
        """What is put on the training stream meanwhile counts."""
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(stream)
        yield stream
        after.record(stream)
        self._marks.append((before, after))

    def seconds(self) -> float:
        """How long so far."""
        with torch.cuda.device(self._device):
            milliseconds = [before.elapsed_time(after) for before, after in self._marks if after.query()]  # type: ignore[no-untyped-call]
        return float(sum(milliseconds)) / 1e3


class CudaLane:
    """Sources on a CUDA device: copies are put on a stream of their own, after what the training stream has to do for
    this step, and the training stream waits for them before the next.

    A thread begins with the first device as its own, and a call of the runtime puts a context there, which takes
    hundreds of MiB of another rank's memory.  So threads other than the training's name the device before any call.
    """

    def __init__(self, device: torch.device, now: Copies, later: Copies) -> None:
        self._device, self._later = device, later
        self._cancelled = self._holds_back = False
        self.time: StreamTime = StreamTime(device)
        if now.sources:
            with torch.no_grad(), self.time.measured():
                _put_on_stream(now.targets, now.sources)
        self._stream = copy_stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Threads that wait for it sleep: by default they would each keep a core busy.
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._on_its_way = threading.Event()

    @torch.no_grad()
    def run(self) -> None:
        targets, sources = self._later.targets, self._later.sources
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                try:
                    for begin in range(0, len(sources), MANY):
                        if self._cancelled:
                            break
                        points.reach("stage.piece")
                        several = slice(begin, begin + MANY)
                        _put_on_stream(targets[several], sources[several])
                finally:
                    self._copied.record(self._stream)
        finally:
            self._on_its_way.set()

    def help(self) -> None:
        pass

    def hold_back(self) -> None:
        if self._holds_back:
            torch.cuda.current_stream(self._device).wait_event(self._copied)  # it may be another one
            return
        self._holds_back = True
        with self.time.measured() as stream:
            stream.wait_event(self._copied)

    def settle(self) -> None:
        with torch.cuda.device(self._device):
            self._copied.synchronize()

    def await_below(self, address: int) -> None:
        self._on_its_way.wait()
        self.settle()

    def cancel(self) -> None:
        self._cancelled = True
        self._on_its_way.set()


@lru_cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies from a device, one for the process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _lane(device: torch.device, now: Copies, later: Copies) -> Lane:
    return CudaLane(device, now, later) if device.type == "cuda" else HostLane(now, later)


class Staging:
    """One copy behind the training thread.  Made on the training thread, which goes on after ``start``.

    Args:
        now: what is copied before anything else happens to it.
        later: what only an optimizer's step changes.
    """

    def __init__(self, now: Copies, later: Copies) -> None:
        self._lanes = [_lane(device, now.on(device), later.on(device)) for device in _devices(now, later)]
        # Without the lanes, which refer to what they copy.
        self._times = [lane.time for lane in self._lanes if lane.time is not None]
        self._later = later
        self._versions = _versions(later.sources)
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled = False
        self._began = time.perf_counter()
        self._on_its_way = threading.Event()
        self._done = threading.Event()
        self.error: BaseException | None = None
        """Why the targets do not hold what they should, once it is known."""
        self.changed: str | None = None
        """The tensor that was changed too early, if that is why."""
        self.seconds = 0.0
        """How long it took."""

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def _run(self) -> None:
        try:
            try:
                for lane in self._lanes:
                    lane.run()
            except BaseException:
                for lane in self._lanes:
                    lane.cancel()  # nobody waits for those whose turn does not come
                raise
            finally:
                self._on_its_way.set()
                for lane in self._lanes:
                    lane.settle()  # where one has failed, too: a device still writes what it was told to
            if self._cancelled:
                raise SaveFailed("The copy of the state was given up.", stage="stage")
            self._close()
        except BaseException as error:
            self.error = error
        finally:
            with self._lock:
                self._closed = True
                self._later.clear()
                self._versions = []
                self._lanes.clear()
            self.seconds = time.perf_counter() - self._began
            self._done.set()

    def let_go_on(self) -> None:
        """The barrier: on return of it weights may be changed on this thread.  May be passed more than once."""
        lanes = list(self._lanes)  # they are dropped once all is copied
        for lane in lanes:
            lane.help()
        self._on_its_way.wait()
        self._close()
        for lane in lanes:
            lane.hold_back()

    def _close(self) -> None:
        """Whatever changes a source from now on does it after it was copied; has anything before?"""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.changed = next(self._changed(), None)
                if self.changed is not None:
                    self.error = SaveFailed(
                        f"{self.changed} was changed outside of an optimizer's step, while it was copied.",
                        stage="stage",
                        hint="Change weights after the step (on_train_batch_end), or set overlap_staging=False.",
                    )

    def _changed(self) -> Iterator[str]:
        """What was changed in place, or was given other memory."""
        later = self._later
        before, now = (self._versions, later.addresses), (_versions(later.sources), addresses_of(later.sources))
        if before != now:
            marks = zip(later.names, zip(*before, strict=True), zip(*now, strict=True), strict=True)
            yield from (name for name, early, late in marks if early != late)

    @property
    def is_done(self) -> bool:
        """Whether the targets hold everything, or never will."""
        return self._done.is_set()

    def wait(self, seconds: float) -> BaseException | None:
        """Block until the targets hold everything; why they do not, if they do not."""
        if not self._done.wait(seconds):
            self.cancel()
            return SaveFailed(f"The state was not copied within {seconds:.0f} s.", stage="stage")
        return self.error

    def held(self) -> float:
        """Seconds for which devices, and not this process, have let training wait; not to be asked before it is done.
        A device that comes to the barrier later does not wait there."""
        return sum(time.seconds() for time in self._times)

    def await_below(self, offset: int, base: int = 0) -> None:
        """Block until the targets below an address hold everything.

        Args:
            offset: bytes from ``base`` to that address.
            base: an address.

        Raises:
            SaveFailed: they never will.
        """
        for lane in list(self._lanes):  # they are dropped once all is copied
            lane.await_below(base + offset)
        if self._cancelled or self.error is not None:
            raise SaveFailed("The copy of the state was given up.", stage="stage") from self.error

    def cancel(self) -> None:
        """Do not go on with it."""
        self._cancelled = True
        for lane in list(self._lanes):
            lane.cancel()


def _devices(*copies: Copies) -> Sequence[torch.device]:
    """Those of the copies; a host last, whose copies take this thread's time."""
    found = {device: None for some in copies for device in some.devices}
    return sorted(found, key=lambda device: device.type != "cuda")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(attrgetter("_version"), tensors))
