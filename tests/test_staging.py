"""Copies behind the training thread: pieces, help, what is noticed, and the order on a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_resilience import points, staging
from lightning_resilience.errors import SaveFailed
from lightning_resilience.staging import MANY, PIECE, SMALL, THREAD, Copies, Staging, copy_at_once


def copies_of(*sources: Tensor) -> Copies:
    """Each over memory of nobody's, in its own dtype."""
    names = [f"model.{number}" for number in range(len(sources))]
    return Copies(names, [torch.full(source.shape, 77).to(source.dtype) for source in sources], sources)


def sources() -> list[Tensor]:
    """Small ones and large ones, contiguous or not, mixed."""
    large = torch.arange(PIECE // 4 * 2 + 1000, dtype=torch.float32)
    return [
        *(torch.full((3,), float(number)) for number in range(MANY + 10)),
        large,
        torch.tensor(5.0),
        large[: SMALL * 2].view(-1, 2).t(),
        large[7:-9],
        torch.arange(SMALL + 1, dtype=torch.int8),
        torch.ones(4, dtype=torch.bfloat16),
        torch.empty(0),
    ]


def ended(copy: Staging) -> BaseException | None:
    copy.start()
    return copy.wait(30)


def test_everything_is_copied_at_once_or_behind() -> None:
    for behind in (False, True):
        copies = copies_of(*sources())
        targets, wanted = list(copies.targets), list(copies.sources)
        if behind:
            now = copies_of(torch.ones(2))
            [early] = now.targets
            copy = Staging(now, copies)
            assert torch.equal(early, torch.ones(2))
            assert ended(copy) is None
            assert copy.is_done
            assert copy.seconds > 0
        else:
            copy_at_once(copies)
        assert all(map(torch.equal, targets, wanted))


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """The thread of the copy is held at its first piece until the function is called."""
    go = threading.Event()

    def wait(name: str) -> None:
        if name == "stage.piece" and threading.current_thread().name == THREAD:
            assert go.wait(30)

    stop = points.listen(wait)
    try:
        yield go.set
    finally:
        go.set()
        stop()


def test_the_training_thread_does_all_that_the_other_has_not_begun() -> None:
    done_here = []
    copies = copies_of(*sources())
    targets, wanted = list(copies.targets), list(copies.sources)
    with held() as go:
        copy = Staging(Copies(), copies)
        copy.start()
        note = points.listen(lambda _: done_here.append(threading.current_thread().name))
        threading.Timer(0.1, go).start()
        copy.let_go_on()
        note()
    assert all(map(torch.equal, targets, wanted))
    assert threading.current_thread().name in done_here
    assert copy.wait(30) is None


def change_in_place(source: Tensor) -> None:
    source.mul_(2)


def change_memory(source: Tensor) -> None:
    source.data = source.data * 2


@pytest.mark.parametrize("change", [change_in_place, change_memory])
def test_what_is_changed_before_it_is_copied_is_named(change: Callable[[Tensor], None]) -> None:
    with held() as go:
        copies = copies_of(torch.ones(3), torch.ones(4), torch.ones(5))
        second = copies.sources[1]
        copy = Staging(Copies(), copies)
        copy.start()
        change(second)
        go()
        copy.let_go_on()
        error = copy.wait(30)
    assert copy.changed == "model.1"
    assert isinstance(error, SaveFailed)
    assert "model.1" in str(error)
    assert "overlap_staging=False" in error.hint


def test_what_is_changed_after_the_barrier_is_right() -> None:
    copies = copies_of(torch.ones(3))
    [target], [source] = copies.targets, copies.sources
    copy = Staging(Copies(), copies)
    copy.start()
    copy.let_go_on()
    source.zero_()
    copy.let_go_on()
    assert copy.wait(30) is None
    assert torch.equal(target, torch.ones(3))


@pytest.mark.parametrize("thread", [THREAD, threading.main_thread().name])
def test_a_copy_that_fails_on_either_thread_is_said_and_does_not_stop_training(thread: str) -> None:
    def fail(name: str) -> None:
        if threading.current_thread().name == thread:
            raise OSError("no more")

    with held() as go:
        copy = Staging(Copies(), copies_of(*sources()))
        copy.start()
        stop = points.listen(fail)
        threading.Timer(0.05, go).start()
        copy.let_go_on()
        error = copy.wait(30)
        stop()
    assert isinstance(error, OSError)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_training_thread_in_a_copy_is_its_own_and_ends_the_copy(interrupt: type) -> None:
    def fail(name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            raise interrupt

    with held() as go:
        copy = Staging(Copies(), copies_of(*sources()))
        copy.start()
        stop = points.listen(fail)
        with pytest.raises(interrupt):
            copy.let_go_on()
        stop()
        go()
        error = copy.wait(30)
    assert error is not None


@pytest.mark.parametrize("thread", [THREAD, threading.main_thread().name])
def test_what_goes_wrong_while_a_piece_is_taken_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    original, failed = staging.HostLane._take, threading.Event()

    def fail(lane: staging.HostLane) -> Any:
        if threading.current_thread().name == thread:
            failed.set()
            raise MemoryError("no more")
        assert failed.wait(30)
        return original(lane)

    monkeypatch.setattr(staging.HostLane, "_take", fail)
    copy = Staging(Copies(), copies_of(*sources()))
    copy.start()
    copy.let_go_on()
    assert isinstance(copy.wait(30), MemoryError)
    with pytest.raises(SaveFailed):
        copy.await_below(2**62)


def test_a_copy_that_is_given_up_or_takes_too_long_is_void() -> None:
    with held() as go:
        copy = Staging(Copies(), copies_of(*sources()))
        copy.start()
        assert isinstance(copy.wait(0.01), SaveFailed)
        go()
        assert isinstance(copy.wait(30), SaveFailed)


# -- the order on a device --------------------------------------------------------------------------------------------


class Device:
    """A device that does what is put on its streams as late as it may, and of several streams' work first that of the
    one it is asked for; what a stream waits for comes before, and nothing else is certain."""

    def __init__(self) -> None:
        self.training = Stream(self)
        self.current = self.training
        self.clock = 0.0

    def pass_time(self, milliseconds: float) -> None:
        self.clock += milliseconds

    def run(self, *order: Stream) -> None:
        """All work of the streams, in that order as far as they need not wait for each other."""
        for stream in order:
            stream.catch_up(len(stream.work))


class Stream:
    def __init__(self, device: Device, *_: Any) -> None:
        self.device = device
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def catch_up(self, to: int) -> None:
        while self.done < to:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        stream, place = event.recorded
        self.work.append(lambda: stream.catch_up(place))

    def wait_stream(self, other: Stream) -> None:
        place = len(other.work)
        self.work.append(lambda: other.catch_up(place))


class Event:
    def __init__(self, **_: bool) -> None:
        self.at: float | None = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream, len(stream.work)
        stream.work.append(lambda: setattr(self, "at", stream.device.clock))

    def synchronize(self) -> None:
        """The host waits."""
        self.recorded[0].catch_up(self.recorded[1])

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None
        assert later.at is not None
        return later.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Tensors lie in host memory, and copies of them are put on streams."""
    device = Device()
    copier = Stream(device)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        yield
        device.current = before

    def copy(targets: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        assert non_blocking
        pairs = list(zip(targets, sources, strict=True))
        device.current.work.append(lambda: [_memory_of(target).copy_(_memory_of(source)) for target, source in pairs])
        for target, source in pairs:  # torch does the rest at once, on the host
            if source.is_conj():
                target.conj_physical_()
            if source.is_neg():
                target.neg_()

    cuda = SimpleNamespace(current_stream=lambda _: device.current, stream=on, Event=Event, device=nullcontext)
    monkeypatch.setattr(
        staging, "torch", SimpleNamespace(cuda=cuda, no_grad=torch.no_grad, _foreach_copy_=copy, device=torch.device)
    )
    monkeypatch.setattr(staging, "copy_stream", lambda _: copier)
    monkeypatch.setattr(staging, "_lane", lambda device, now, later: staging.CudaLane(device, now, later))
    monkeypatch.setattr(staging.CudaLane, "settle", lambda lane: synchronized.wait(30))
    synchronized = threading.Event()
    device.copier, device.synchronized = copier, synchronized  # type: ignore[attr-defined]
    return device


def test_what_a_device_waits_for_a_copy_is_known_although_this_process_does_not_wait(device: Any) -> None:
    now, later = copies_of(torch.zeros(3)), copies_of(torch.zeros(3))
    kernel = device.training.work.append
    copy = Staging(now, later)
    device.training.work.insert(1, lambda: device.pass_time(30))  # copying what the forward changes
    copy.start()
    kernel(lambda: device.pass_time(500))  # the forward
    copy._on_its_way.wait(30)
    device.copier.work.insert(1, lambda: device.pass_time(700))  # copying the rest, once the step before is done
    copy.let_go_on()
    copy.let_go_on()  # the next optimizer
    assert copy.held() == 0  # the device has not come so far
    device.run(device.training)
    device.synchronized.set()
    assert copy.wait(30) is None
    assert copy.held() == pytest.approx(0.73)


@pytest.mark.parametrize("first", ["training", "copier"])
def test_a_device_copies_after_the_last_step_and_before_the_next(device: Any, first: str) -> None:
    weight, buffer = torch.zeros(3), torch.zeros(3)
    now, later = copies_of(buffer), copies_of(weight)
    [saved_buffer], [saved_weight] = now.targets, later.targets
    kernel = device.training.work.append
    kernel(lambda: (weight.fill_(1), buffer.fill_(1)))  # the step before
    copy = Staging(now, later)
    copy.start()
    kernel(lambda: buffer.fill_(2))  # the forward
    copy.let_go_on()
    kernel(lambda: weight.fill_(2))  # the step
    device.run(*((device.training, device.copier) if first == "training" else (device.copier, device.training)))
    device.synchronized.set()
    copy.wait(30)
    assert torch.equal(saved_weight, torch.ones(3))
    assert torch.equal(saved_buffer, torch.ones(3))
    assert torch.equal(weight, torch.full((3,), 2.0))
    assert torch.equal(buffer, torch.full((3,), 2.0))


def _memory_of(tensor: Tensor) -> Tensor:
    """What lies there, without how it is seen."""
    tensor = torch._conj(tensor) if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


@pytest.mark.parametrize("behind", [True, False])
@pytest.mark.parametrize("view", [torch.conj, lambda value: value.conj().imag])
def test_a_device_copies_what_is_seen(device: Any, view: Callable[[Tensor], Tensor], behind: bool) -> None:
    source = view(torch.randn(5, dtype=torch.complex64))
    copies = Copies(["w"], [torch.empty(source.shape, dtype=source.dtype)], [source])
    [target] = copies.targets
    copy = Staging(*((Copies(), copies) if behind else (copies, Copies())))
    copy.start()
    copy.let_go_on()
    device.run(device.copier, device.training)
    device.synchronized.set()
    assert copy.wait(30) is None
    assert torch.equal(target, source.resolve_conj().resolve_neg())


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Calls of CUDA's runtime, and the device that was the calling thread's: ``"first"`` where it has named none."""
    calls: list[tuple[str, Any]] = []
    here = threading.local()

    def note(what: str) -> None:
        calls.append((what, getattr(here, "device", "first")))

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before, here.device = getattr(here, "device", "first"), device
        try:
            yield
        finally:
            here.device = before

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        note("stream")
        try:
            yield
        finally:
            note("stream")

    class Event:
        def __init__(self, **_: bool) -> None:
            pass

        def record(self, _: Any) -> None:
            note("record")

        def synchronize(self) -> None:
            note("synchronize")

    def copy(*_: Any, **__: Any) -> None:
        note("copy")
        raise MemoryError("no more")

    cuda = SimpleNamespace(current_stream=lambda _: None, stream=stream, Event=Event, device=on)
    monkeypatch.setattr(
        staging, "torch", SimpleNamespace(cuda=cuda, no_grad=torch.no_grad, _foreach_copy_=copy, device=torch.device)
    )
    copier = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(staging, "copy_stream", lambda _: copier)
    monkeypatch.setattr(staging, "_lane", lambda _, now, later: staging.CudaLane(torch.device("cuda:3"), now, later))
    return calls


def test_threads_name_the_device_and_a_copy_that_fails_is_over_when_it_is_told_of(
    used: list[tuple[str, Any]],
) -> None:
    """Else each rank would have a context on the first device; and memory would be given back that is written to."""
    copy = Staging(Copies(), copies_of(torch.ones(3)))
    lanes = list(copy._lanes)
    copy.start()
    assert isinstance(copy.wait(30), MemoryError)
    assert [what for what, _ in used] == ["stream", "copy", "record", "stream", "synchronize"]
    for lane in lanes:
        lane.await_below(0)
    assert {device for _, device in used} == {torch.device("cuda:3")}


@pytest.mark.parametrize("view", [torch.conj, lambda value: value.conj().imag])
def test_a_tensor_that_is_another_seen_differently_is_saved_as_it_is_seen(view: Callable[[Tensor], Tensor]) -> None:
    """Conjugated or negated without that being done to its memory."""
    source = view(torch.randn(2**17, dtype=torch.complex64))
    assert source.is_conj() or source.is_neg()
    target = torch.empty(source.shape, dtype=source.dtype)
    nothing = Copies([], [], [])
    copy = Staging(nothing, Copies(["w"], [target], [source]))
    copy.start()
    copy.let_go_on()
    assert copy.wait(30) is None
    assert torch.equal(target, source.resolve_conj().resolve_neg())


# -- with a device ----------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@gpu
@pytest.mark.gpu
def test_a_copy_from_a_device_is_what_there_was_before_the_step() -> None:
    weights = [torch.randn(2**20, device="cuda") for _ in range(32)]
    buffers = [torch.randn(2**16, device="cuda") for _ in range(8)]
    wanted = [tensor.cpu() for tensor in (*buffers, *weights)]
    now, later = (
        Copies(list(map(str, range(len(some)))), [torch.empty(one.shape, pin_memory=True) for one in some], some)
        for some in (buffers, weights)
    )
    targets = [*now.targets, *later.targets]
    copy = Staging(now, later)
    copy.start()
    for buffer in buffers:
        buffer.zero_()
    copy.let_go_on()
    for weight in weights:
        weight.zero_()
    assert copy.wait(30) is None
    assert all(map(torch.equal, targets, wanted))


@gpu
@pytest.mark.gpu
def test_a_change_before_the_barrier_is_noticed_on_a_device() -> None:
    copies = Copies(["model.0"], [torch.empty(2**26, pin_memory=True)], [torch.randn(2**26, device="cuda")])
    [source] = copies.sources
    copy = Staging(Copies(), copies)
    source.zero_()
    copy.start()
    copy.let_go_on()
    assert isinstance(copy.wait(30), SaveFailed)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "view", [torch.conj, lambda value: value.conj().imag, lambda value: value.real.view(-1, 2).t()]
)
def test_a_copy_from_a_device_is_what_is_seen_there(view: Callable[[Tensor], Tensor]) -> None:
    source = view(torch.randn(2**24, dtype=torch.complex64, device="cuda"))
    wanted = source.cpu()
    for behind in (True, False):
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        copies = Copies(["w"], [target], [source])
        if behind:
            copy = Staging(Copies(), copies)
            assert ended(copy) is None
        else:
            copy_at_once(copies)
        assert torch.equal(target, wanted)
