"""Measures limits and routes on one rank, interleaved; what runs in each process that ``run`` starts.

One round measures every route from its opening to its closing, in an order that changes from round to round, and the
limits before each of them.  Ranks start each measurement together, and the slowest counts.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.limits import Limits
from benchmarks.routes import ROUTES, Route
from benchmarks.state import TrainingState
from processes import free_port

Samples = dict[str, dict[str, list[float]]]
"""Seconds (bytes for ``memory``) by route or ``limits``, then by quantity: one entry for each time it was measured."""


@dataclass(frozen=True)
class Config:
    """What one group of processes measures.

    Args:
        folder: an empty folder on the disk to measure.
        size: bytes of the state.
        tensors: number of tensors in it.
        routes: names of routes.
        rounds: how often everything is measured.
        steady: saves after the first and the second, in each round; what a route sets up once, such as the second of
            two buffers, is there by then.
        steps: training steps before, and at least as many after, a save during training; 0 for no training.
        passes: forward and backward passes in such a step.
    """

    folder: Path
    size: int
    tensors: int
    routes: tuple[str, ...]
    rounds: int = 3
    steady: int = 1
    steps: int = 4
    passes: int = 1


def measure(config: Config) -> Samples:
    """Measure everything, on this rank."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_resilience").setLevel(logging.ERROR)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("gloo")
    samples = _Measurement(config).run()
    dist.destroy_process_group()
    return samples


class _Measurement:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.state = TrainingState(config.size, config.tensors)
        self.limits = Limits(config.folder, self.state.large(), self.rank, self.world_size, torch.get_num_threads())
        for operation in self.limits.operations().values():
            operation()  # whatever the first one does more
        self.samples: Samples = defaultdict(lambda: defaultdict(list))

    def run(self) -> Samples:
        for round_ in range(self.config.rounds):
            first = round_ % len(self.config.routes)
            for name in self.config.routes[first:] + self.config.routes[:first]:
                self._measure_limits()
                self._measure_route(name, check=round_ == 0)
        self.samples["limits"]["share"] = [self.limits.share]
        self.samples["limits"]["state"] = [self.state.size]
        return {name: dict(quantities) for name, quantities in self.samples.items()}

    def _measure_limits(self) -> None:
        for name, operation in self.limits.operations().items():
            self.samples["limits"][name].append(timed(operation))
            self.limits.tidy()

    def _measure_route(self, name: str, check: bool) -> None:
        folder = self.config.folder / name
        samples = self.samples[name]
        memory = PeakMemory()
        if self.rank == 0:
            folder.mkdir()
        dist.barrier()
        route = ROUTES[name](folder, self.state)
        if route.preparation is not None:
            samples["preparation"].append(route.preparation)
        try:
            self._measure_open_route(route, samples, memory, check)
        except BaseException:
            route.abandon()  # without the other ranks, which may be anywhere
            raise
        route.close()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)
        del route
        give_memory_back()

    def _measure_open_route(
        self, route: Route, samples: dict[str, list[float]], memory: PeakMemory, check: bool
    ) -> None:
        for which in ("first", "second", *["steady"] * self.config.steady):
            if route.saves:
                route.forget()
            stall, durable = self._save(route)
            samples[f"{which} stall"].append(stall)
            samples["first durable" if which == "first" else "durable"].append(durable)
        samples["memory"].append(memory.peak())
        self._restore(route, samples, check)
        route.forget()
        if self.config.steps:
            self._train(route, samples)
            route.forget()

    def _save(self, route: Route) -> tuple[float, float]:
        dist.barrier()
        begin = time.perf_counter()
        route.save()
        route.wait_staged()
        stall = time.perf_counter() - begin
        route.wait_durable()
        durable = time.perf_counter() - begin
        dist.barrier()
        return stall, durable

    def _restore(self, route: Route, samples: dict[str, list[float]], check: bool) -> None:
        saved = self.state.digest() if check else None
        files = [route.path] if route.path.is_file() else sorted(route.path.iterdir())
        for file in files:
            file.read_bytes()  # whoever wrote it, it is in the page cache now
        for name, read in self.limits.reads(files).items():
            samples[name].append(timed(read))
        self.state.wipe()
        total = 0.0
        for name, step in route.restore().items():
            seconds = timed(step)
            samples[f"restore/{name}"].append(seconds)
            total += seconds
        samples["restore"].append(total)
        self._compare(route, saved)
        if (recall := route.leave_in_memory()) is not None:
            self.state.wipe()
            samples["recall"].append(timed(recall))
            self._compare(route, saved)

    def _compare(self, route: Route, saved: torch.Tensor | None) -> None:
        if saved is not None and not torch.equal(saved, self.state.digest()):
            raise AssertionError(f"{type(route).__name__} did not restore what it saved")

    def _train(self, route: Route, samples: dict[str, list[float]]) -> None:
        """Train, save, and train on until the save is durable; what that took more than the same steps alone."""
        steps = self.config.steps
        self._step(lambda: None, done=True)
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(lambda: None, done=True)
        alone = (time.perf_counter() - begin) / steps

        begin = time.perf_counter()
        route.save()
        blocked = time.perf_counter() - begin
        taken, disturbed, all_durable = 0, [], False
        while taken < steps or not all_durable:
            step_begin = time.perf_counter()
            waited, now_durable = self._step(route.wait_staged, done=route.durable())
            if not all_durable:
                disturbed.append(time.perf_counter() - step_begin - waited)
            all_durable = all_durable or now_durable
            blocked += waited
            taken += 1
        with_save = time.perf_counter() - begin
        route.wait_durable()
        samples["step"].append(alone)
        samples["blocked"].append(blocked)
        samples["lost"].append(with_save - taken * alone)
        if route.background:
            samples["inflation"].append(sum(disturbed) / len(disturbed) / alone - 1)

    def _step(self, before_update: Callable[[], None], done: bool) -> tuple[float, bool]:
        """One training step in which the ranks wait for each other, as with DDP: seconds waited, and are all done?"""
        for _ in range(self.config.passes):
            self.state.forward_backward()
        flag = torch.tensor([0 if done else 1])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        begin = time.perf_counter()
        before_update()
        waited = time.perf_counter() - begin
        self.state.update()
        return waited, not flag.item()


class PeakMemory:
    """Bytes that this process and its children come to hold more than now.  NaN where the kernel does not say."""

    def __init__(self) -> None:
        give_memory_back()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._before = _status(os.getpid()).get("VmRSS", float("nan"))

    def peak(self) -> float:
        peak = _status(os.getpid()).get("VmHWM", float("nan")) - self._before
        for child in _children():
            status = _status(child)
            # What it shares with this process is counted there.
            peak += status.get("VmHWM", 0) - status.get("RssShmem", 0)
        return peak


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end meanwhile
            yield from map(int, (task / "children").read_text().split())


def _status(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: float(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def give_memory_back() -> None:
    """Free what is not used, so that the next route finds the process as the one before it did."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def timed(operation: Callable[[], object]) -> float:
    """Seconds that ``operation`` takes when all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    operation()
    return time.perf_counter() - begin
