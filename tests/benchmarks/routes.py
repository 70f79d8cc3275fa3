"""The ways to save and to restore that are compared, each with the same few methods."""

from __future__ import annotations

import io
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.state import TrainingState

PREPARING = 2.0
"""Seconds of training between the first step and the first save: many a step, in which the background gets ready."""


class Route(ABC):
    """One way to save.  All ranks call the same methods in the same order.

    Args:
        folder: empty; on one disk for all ranks.
        state: what is saved and restored in place.
    """

    background = True
    """Whether anything of a save is left to do when ``save`` returns."""
    preparation: float | None = None
    """Seconds that the training thread spends before the first save, where it does."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        self.folder = folder
        self.state = state
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.saves = 0

    @property
    def path(self) -> Path:
        """Where the newest checkpoint is."""
        return self.folder / f"step={self.saves}.ckpt"

    def save(self) -> None:
        """Save; on return the forward and backward pass may go on."""
        self.saves += 1
        self.start()

    def forget(self) -> None:
        """Delete the newest checkpoint, once no rank uses it any more."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink(missing_ok=True)

    @abstractmethod
    def start(self) -> None:
        """``save``, to ``path``."""

    def wait_staged(self) -> None:  # noqa: B027
        """Return when parameters and moments may change."""

    def durable(self) -> bool:
        """Whether this rank's part of the newest save is done."""
        return True

    @abstractmethod
    def wait_durable(self) -> None:
        """Return when this rank's part of the newest save survives power loss."""

    @abstractmethod
    def restore(self) -> Mapping[str, Callable[[], object]]:
        """The steps of restoring the newest save into the state, to be called in order; each is timed."""

    def leave_in_memory(self) -> Callable[[], object] | None:
        """Leave the newest save in memory as a killed process does; what restores it from there, where a route can."""
        return None

    def close(self) -> None:  # noqa: B027
        """Give back what the route holds."""

    def abandon(self) -> None:  # noqa: B027
        """Give back what would outlive the process.  Not collective: this rank has failed."""


class LightningResilience(Route):
    """This package's engine, as the callback uses it: copying overlaps forward and backward."""

    overlaps = True

    def __init__(self, folder: Path, state: TrainingState) -> None:
        from lightning_resilience.engine import Engine
        from lightning_resilience.places import Place
        from lightning_resilience.ranks import Ranks
        from lightning_resilience.tiers import LocalTier

        super().__init__(folder, state)
        self.ranks = Ranks(self.rank, self.world_size)
        self.engine = Engine(self.ranks)
        self.keys = frozenset(key for key, _ in state.flat())
        self.run_folder = self.engine.open_folder(LocalTier(folder))
        self.place = Place.shared(self.ranks, LocalTier(folder))
        self.current: Any = None
        self.source: Any = None
        self.left: Path | None = None
        begin = time.perf_counter()
        self.engine.prepare(self.capture)  # as the callback does after the first step
        self.preparation = time.perf_counter() - begin
        time.sleep(PREPARING)

    def capture(self) -> Any:
        from lightning_resilience import run_state
        from lightning_resilience.saves import Snapshot

        nested = self.state.nested()
        meta = io.BytesIO()
        torch.save({"epoch": 0, "global_step": self.saves}, meta)
        rank_state = run_state.to_bytes(run_state.capture())
        return Snapshot(nested, self.tensors, meta.getvalue(), rank_state, still=self.tensors)

    def tensors(self, _: Any) -> frozenset[str]:
        """All of them are alike on all ranks, and changed by the optimizer's step alone."""
        return self.keys

    def start(self) -> None:
        from lightning_resilience.saves import Facts

        facts = Facts(step=self.saves, epoch=0, reason="benchmark", strategy="SingleDeviceStrategy")
        self.current = self.engine.save(self.run_folder, self.path.name, facts, self.capture, overlap=self.overlaps)
        assert self.current is not None

    def wait_staged(self) -> None:
        self.engine.finish_staging()

    def durable(self) -> bool:
        return bool(self.current.committed.done())

    def wait_durable(self) -> None:
        self.current.wait()

    def restore(self) -> Mapping[str, Callable[[], object]]:
        return {"find": lambda: self._find(self.place), "read": self._read}

    def _find(self, place: Any) -> None:
        from lightning_resilience.resume import find_last

        self.source = find_last(self.ranks, [place], reading_checks=True).source

    def _read(self) -> None:
        from lightning_resilience.reader import CheckpointReader

        source = self.source
        CheckpointReader(source.locate, plain=True, unchecked=source.unchecked).read_into(dict(self.state.flat()))

    def leave_in_memory(self) -> Callable[[], object] | None:
        """In the form that ``memory`` tells of, with a lock that nobody holds."""
        from lightning_resilience import memory
        from lightning_resilience.slots import check_memory

        if (root := check_memory("auto")) is None or available() < 1.5 * self.source.manifest.size:
            return None
        left = Path(f"{root / memory.PREFIX}{os.getuid()}-{memory.token_of(str(self.folder))}{self.rank}")
        slot = left / f"{memory.SLOT}0"
        left.mkdir(0o700)
        slot.mkdir(0o700)
        (left / "lock-0").touch(0o600)
        self.left = left
        mine = [entry for entry in self.source.manifest if entry.rank == self.rank]
        for entry in mine:
            shutil.copyfile(self.source.home(entry.path), slot / entry.path)
            (slot / entry.path).chmod(0o600)
        memory.note(slot, mine, {})

        def recall() -> None:
            tier = memory.MemoryTier(root)
            tier.look_for(str(self.folder))
            self._find(replace(self.place, memory=tier))
            assert self.source.origin.in_memory == (self.world_size, self.world_size)
            self._read()
            tier.release()

        return recall

    def close(self) -> None:
        if self.left is not None:
            shutil.rmtree(self.left)
        self.engine.close()
        dist.barrier()
        self.ranks.close()

    def abandon(self) -> None:
        if self.left is not None:
            shutil.rmtree(self.left, ignore_errors=True)
        self.engine.close(0)


def available() -> int:
    """Bytes of memory that may be taken."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class LightningResilienceAtOnce(LightningResilience):
    """The same, copying everything before training goes on."""

    overlaps = False


class TorchSave(Route):
    """Lightning's ``TorchCheckpointIO``, on rank 0 while the others wait, as its strategies do.

    It does not fsync; making the file durable is counted as part of ``durable`` and not of the stall.
    """

    background = False

    def __init__(self, folder: Path, state: TrainingState) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO

        super().__init__(folder, state)
        self.io: Any = TorchCheckpointIO()

    def start(self) -> None:
        if self.rank == 0:
            self.io.save_checkpoint(self._checkpoint(), self.path)
        dist.barrier()

    def _checkpoint(self) -> dict[str, Any]:
        nested = self.state.nested()
        return {"epoch": 0, "state_dict": nested["model"], "optimizer_states": [nested["optimizer_0"]]}

    def wait_durable(self) -> None:
        if self.rank == 0:
            _sync(self.path)
            _sync(self.folder)

    def restore(self) -> Mapping[str, Callable[[], object]]:
        return {"read": self._read}

    @torch.no_grad()
    def _read(self) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO

        loaded = TorchCheckpointIO().load_checkpoint(self.path)
        moments = loaded["optimizer_states"][0]["state"]
        for name, parameter in self.state.parameters.items():
            parameter.copy_(loaded["state_dict"][name])
            for key, value in self.state.optimizer.state[parameter].items():
                value.copy_(moments[name][key])


class AsyncIO(TorchSave):
    """Lightning's ``AsyncCheckpointIO`` around it."""

    background = True

    def __init__(self, folder: Path, state: TrainingState) -> None:
        from lightning.fabric.plugins import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        super().__init__(folder, state)
        self.io = AsyncCheckpointIO(TorchCheckpointIO())
        self.synced: Future[None] | None = None

    def start(self) -> None:
        super().start()
        # Its executor has one thread, which takes this up when the save is written.
        self.synced = self.io._executor.submit(super().wait_durable) if self.rank == 0 else None

    def durable(self) -> bool:
        return self.synced is None or self.synced.done()

    def wait_durable(self) -> None:
        if self.synced is not None:
            self.synced.result()

    def close(self) -> None:
        self.io.teardown()


class DcpSave(Route):
    """``torch.distributed.checkpoint.save`` with one writer thread."""

    background = False
    threads = 1

    def writer(self) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.path, thread_count=self.threads)

    def start(self) -> None:
        dcp.save(self.state.nested(), storage_writer=self.writer())

    def wait_durable(self) -> None:
        if self.rank == 0:
            _sync(self.path)
            _sync(self.folder)

    def restore(self) -> Mapping[str, Callable[[], object]]:
        return {"read": lambda: dcp.load(self.state.nested(), storage_reader=dcp.FileSystemReader(self.path))}


class DcpSave2(DcpSave):
    """The same with two writer threads."""

    threads = 2


class DcpAsyncThread(DcpSave):
    """``dcp.async_save`` in a thread, with the stager that it takes by default."""

    background = True
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self.group = dist.new_group(backend="gloo")  # one shared with training deadlocks
        self.stager: DefaultStager | None = None
        self.response: Any = None

    @property
    def upload(self) -> Future[Any]:
        return getattr(self.response, "upload_completion", self.response)  # type: ignore[no-any-return]

    def start(self) -> None:
        self.response = dcp.async_save(
            self.state.nested(),
            storage_writer=self.writer(),
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )

    def wait_staged(self) -> None:
        staging = getattr(self.response, "staging_completion", None)
        if staging is not None:
            staging.result()

    def durable(self) -> bool:
        return self.upload.done()

    def wait_durable(self) -> None:
        self.upload.result()
        super().wait_durable()

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        dist.destroy_process_group(self.group)


class DcpAsyncStaged(DcpAsyncThread):
    """``dcp.async_save`` in a thread, with a stager that copies in a thread too, into memory that it keeps."""

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
            )
        )


class DcpAsyncProcess(DcpAsyncThread):
    """``dcp.async_save`` in a process, which is started by the first save."""

    kind = AsyncCheckpointerType.PROCESS

    def close(self) -> None:
        from torch.distributed.checkpoint import _async_process_executor as executor

        executor._CHECKPOINT_PROCESS = None  # its finalizer ends the process
        super().close()


ROUTES: dict[str, type[Route]] = {
    "lightning_resilience": LightningResilience,
    "at-once": LightningResilienceAtOnce,
    "torch.save": TorchSave,
    "AsyncCheckpointIO": AsyncIO,
    "dcp.save-1": DcpSave,
    "dcp.save-2": DcpSave2,
    "dcp.async-thread": DcpAsyncThread,
    "dcp.async-staged": DcpAsyncStaged,
    "dcp.async-process": DcpAsyncProcess,
}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
