"""Slots: the staging area is the shard file.

A slot is this rank's shard file in memory, kept from save to save.  Laying it out writes the constant bytes once;
staging then is one copy of each tensor over its payload, into memory that is already there.  Two slots take turns, so
that one can be written out while the other is filled.  They are files on tmpfs where that has room, one for each file
of the checkpoint, so that a killed process leaves them for the next one (the RAM tier, see ``memory``); otherwise
anonymous shared memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import shutil
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_resilience import memory, scratch
from lightning_resilience.errors import SetupError
from lightning_resilience.flat import PLAIN, FlatState
from lightning_resilience.manifest import FileEntry
from lightning_resilience.memo import Memo
from lightning_resilience.scratch import Scratch
from lightning_resilience.shards import Layout, dump_object
from lightning_resilience.staging import OVERLAPPING, Copies, Staging, copy_at_once

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger("lightning_resilience")

TMPFS = Path("/dev/shm")
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_MAP_AT_ONCE = 4 * 2**20  # bytes; the call holds the interpreter's lock
_MAP_FIXED = 0x10
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)


class Slot:
    """One rank's shard files in memory, in a row.

    Args:
        layout: where everything lies.
        memory: writable map of ``layout.size`` bytes or more.
        path: the folder of the files behind the map, or None.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap, path: Path | None = None) -> None:
        self.layout = layout
        self.path = path
        self._own_files = frozenset(os.listdir(path)) if path is not None else frozenset()
        self._memory = memory
        self._pinned: list[int] = []  # addresses of what is locked
        self._payloads: list[torch.Tensor] = []
        self._keys = [spot.piece.key for spot in layout.tensors]
        self._places: list[int] = []  # of the payloads' values in the state
        self._addressed: list[int] = []  # of their addresses in the state's; the last where there is none
        self._cut: list[int] | None = None  # which payloads are not a whole plain tensor of the state
        self._behind: Memo[list[bool]] = Memo()  # which payloads are copied behind the training thread
        self._chosen: Memo[list[int]] = Memo()  # which payloads ``tensors`` gives
        self._laying_out = threading.Lock()
        self._state: Literal["new", "laid out", "closed"] = "new"

    def lay_out(self) -> None:
        """Write what is the same in every save, unless that is done; any thread may."""
        with self._laying_out:
            if self._state != "new":
                return
            for offset, constant in self.layout.constant:
                self._memory[offset : offset + len(constant)] = constant
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            self._payloads = [
                whole[spot.offset : spot.offset + spot.nbytes].view(spot.dtype).view(spot.shape)
                for spot in self.layout.tensors
            ]
            self._state = "laid out"

    def fill(self, flat: FlatState, objects: Mapping[str, bytes], later: Collection[str] = ()) -> Staging | None:
        """Copy the state in.  On return nothing of it is referred to any more, but by what is left to copy.

        Args:
            flat: this rank's state, of the fingerprint that the layout was made for.
            objects: the pickled values that are not tensors, by key; see ``dump_objects``.
            later: keys of tensors that may be copied behind the training thread.

        Returns:
            The copies that are left, to be started; None where there are none.
        """
        self.lay_out()
        for spot in self.layout.objects:
            pickled = objects[spot.piece.key]
            self._memory[spot.offset : spot.offset + spot.capacity] = pickled.ljust(spot.capacity, b"\0")
        copies = Copies(self._keys, self._payloads, *self._sources(flat))
        if later:
            at_once, behind = copies.split(self._behind.get((later,), lambda: _overlapping(copies, later)))
            if behind.sources:
                return Staging(at_once, behind)
        copy_at_once(copies)
        return None

    def _sources(self, flat: FlatState) -> tuple[list[torch.Tensor], list[int]]:
        """What each payload is copied from, and where that begins."""
        if self._cut is None:  # keys, kinds and shapes are part of the fingerprint
            addressed = {key: place for place, key in enumerate(flat.outline.tensor_keys)}
            self._places = [flat.outline.places[key] for key in self._keys]
            self._addressed = [addressed.get(key, -1) for key in self._keys]
            values = zip(map(flat.__getitem__, self._keys), self.layout.tensors, strict=True)
            self._cut = [
                i for i, (value, spot) in enumerate(values) if type(value) not in PLAIN or value.shape != spot.shape
            ]
        sources = list(map(flat.values.__getitem__, self._places))
        addresses = list(map([*flat.addresses, 0].__getitem__, self._addressed))
        with torch.no_grad():
            for i in self._cut:
                sources[i] = self.layout.tensors[i].piece.cut(flat)
                addresses[i] = sources[i].data_ptr()
        return sources, addresses

    def pin(self) -> None:
        """Have the driver of CUDA lock the memory, so that devices copy to it by themselves and at full speed; where it
        refuses, copies are slower."""
        if self._pinned:
            return
        for begin, end in ((0, self.layout.common), (self.layout.common, self.layout.size)):  # a file each
            if begin == end:
                continue
            address = self.address + begin
            if error := int(cuda_runtime().cudaHostRegister(address, end - begin, _PORTABLE)):
                forget_cuda_error()
                log.warning(
                    "event=memory reason='the slot cannot be locked for CUDA (error %d): copies are slower'", error
                )
                return
            self._pinned.append(address)

    def _unpin(self) -> None:
        while self._pinned:
            cuda_runtime().cudaHostUnregister(self._pinned.pop())

    def tensors(self, keys: Collection[str]) -> list[tuple[str, torch.Tensor]]:
        """The tensors of those keys, as they were copied."""
        chosen = self._chosen.get((keys,), lambda: [i for i, key in enumerate(self._keys) if key in keys])
        return [(self._keys[i], self._payloads[i]) for i in chosen]

    def populate(self) -> None:
        """Have the kernel map the memory now, and not at the first copy, and lay it out; where it cannot, nothing is
        lost."""
        with suppress(OSError, ValueError):  # an older kernel; a slot that was closed meanwhile
            for start in range(0, len(self._memory), _MAP_AT_ONCE):
                count = min(_MAP_AT_ONCE, len(self._memory) - start)
                self._memory.madvise(_MADV_POPULATE_WRITE, start, count)
        self.lay_out()

    @property
    def address(self) -> int:
        """Where it begins."""
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def view(self) -> memoryview:
        """The whole file."""
        return memoryview(self._memory)[: self.layout.size]

    def note(self, entries: Iterable[FileEntry], files: Mapping[str, Buffer]) -> None:
        """Let the process after this one know what is here.

        Args:
            entries: the files of this rank as they were written.
            files: their content.
        """
        if self.path is not None:
            others = {file: data for file, data in files.items() if file not in self._own_files}
            memory.note(self.path, entries, others)

    def close(self, *, keep: bool = False) -> None:
        """Give the memory back; or ``keep`` its files for the process after this one."""
        self._unpin()
        with self._laying_out:
            self._state = "closed"
            self._payloads.clear()
        with suppress(BufferError):  # a writer that is still at it keeps the map until it ends
            self._memory.close()
        if self.path is not None and not keep:
            shutil.rmtree(self.path, ignore_errors=True)


def _overlapping(copies: Copies, later: Collection[str]) -> list[bool]:
    """Which may be copied behind the training thread."""
    return [
        name in later and source.device.type in OVERLAPPING
        for name, source in zip(copies.names, copies.sources, strict=True)
    ]


def dump_objects(layout: Layout, flat: FlatState) -> dict[str, bytes] | None:
    """Pickle what is not a tensor; None where something outgrew its spot, so that a new layout is needed."""
    objects = {spot.piece.key: dump_object(flat[spot.piece.key]) for spot in layout.objects}
    fits = all(len(objects[spot.piece.key]) <= spot.capacity for spot in layout.objects)
    return objects if fits else None


class SlotMemory:
    """Where slots are allocated.

    Args:
        where: ``"auto"`` (tmpfs if it has room), ``False`` (anonymous shared memory) or a folder on tmpfs.
        rank: this process's rank, for names.

    Raises:
        SetupError: ``where`` is something else, or a folder that cannot be used.
    """

    def __init__(self, where: str | os.PathLike[str] | bool = "auto", rank: int = 0) -> None:
        self._rank = rank
        self._root = check_memory(where)
        self._folder: Scratch | None = None
        self._run: str | None = None
        if self._root is not None:
            scratch.sweep(self._root)
            memory.sweep(self._root)

    def belong_to(self, run: str) -> None:
        """Let slots be found by the next start of a run: by the path or URL of its folder.  The first one counts;
        without one nobody is to find them."""
        self._run = self._run or run

    def allocate(self, layout: Layout, copies: int = 2) -> list[Slot]:
        """``copies`` slots for ``layout``; the caller closes them.

        Raises:
            OSError: there is not enough memory.
        """
        size = max(layout.size, 1)
        if self._root is not None:
            free = _free_bytes(self._root)
            if copies * size > 0.9 * free:
                memory.sweep(self._root, 0.0)  # the living come before what the dead left
                free = _free_bytes(self._root)
            # Leave a tenth of what is free: tmpfs is shared with loader workers, which die without it.
            if copies * size <= 0.9 * free and (slots := self._on_tmpfs(layout, size, copies)):
                slots[-1].populate()
                return slots
            log.warning(
                "event=memory rank=%d reason=%r",
                self._rank,
                f"{self._root} has {free / 2**20:.0f} MiB free, {copies} slots need {copies * size / 2**20:.0f} MiB: "
                "staging in anonymous memory",
            )
        return [Slot(layout, mmap.mmap(-1, size)) for _ in range(copies)]

    def _on_tmpfs(self, layout: Layout, size: int, copies: int) -> list[Slot]:
        """Slots on tmpfs, or none: other ranks of this node allocate at the same time, and one may come too late."""
        slots: list[Slot] = []
        try:
            for _ in range(copies):
                slots.append(self._one_on_tmpfs(layout, size))
        except OSError:
            for slot in slots:
                slot.close()
            return []
        return slots

    def _one_on_tmpfs(self, layout: Layout, size: int) -> Slot:
        path = self._make_folder() / f"{memory.SLOT}{uuid.uuid4().hex[:8]}"
        path.mkdir(0o700)
        try:
            with ExitStack() as files:
                parts = []
                for file, where in layout.files(self._rank).items():
                    fd = os.open(path / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    files.callback(os.close, fd)
                    if where.stop > where.start:
                        # Reserving now turns a full tmpfs into an error here, where it would be a SIGBUS at a copy.
                        os.posix_fallocate(fd, 0, where.stop - where.start)
                        parts.append((fd, where))
                return Slot(layout, _map_in_a_row(parts, size), path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def _make_folder(self) -> Path:
        if self._folder is None:
            assert self._root is not None
            token = f"{uuid.uuid4().hex[:12]}-rank{self._rank}"
            if self._run is None:
                self._folder = Scratch(self._root, token)
            else:
                self._folder = Scratch(self._root, memory.token_of(self._run) + token, memory.PREFIX)
        return self._folder.path

    def close(self, *, keep: bool = False) -> None:
        """Remove everything, or ``keep`` it for the process after this one; the slots must be closed."""
        if self._folder is not None:
            self._folder.close(remove=not keep)
            self._folder = None


def _map_in_a_row(files: Iterable[tuple[int, slice]], size: int) -> mmap.mmap:
    """One map of several open files, each of which begins at a page of it.

    Raises:
        OSError: one cannot be mapped.
    """
    whole = mmap.mmap(-1, size)
    begin = torch.frombuffer(whole, dtype=torch.uint8).data_ptr()
    for fd, where in files:
        flags = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED)
        found = _libc.mmap(begin + where.start, where.stop - where.start, *flags, fd, 0)
        if found != begin + where.start:
            raise OSError(ctypes.get_errno(), "mmap")
    return whole


def check_memory(where: str | os.PathLike[str] | bool) -> Path | None:
    """The folder that ``memory=where`` means, or None for anonymous memory; SetupError where it means nothing."""
    if where is False:
        return None
    if where is True or not isinstance(where, (str, os.PathLike)):
        raise SetupError(f"memory={where!r} is not understood.", hint='Use "auto", False or a folder on tmpfs.')
    if where == "auto":
        return TMPFS if TMPFS.is_dir() and os.access(TMPFS, os.W_OK) else None
    folder = Path(where)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SetupError(f"memory={str(where)!r} is not a folder that can be written.", hint='Use memory="auto".')
    return folder


def is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system that is memory; True where that cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return True
    here = [(point, kind) for _, point, kind, *_ in mounts if folder.resolve().is_relative_to(point)]
    _, kind = max(here, key=lambda mount: len(mount[0]), default=("", "tmpfs"))
    return kind in ("tmpfs", "ramfs", "hugetlbfs")


def cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def forget_cuda_error() -> None:
    """What a call of the runtime met is kept until a launch on this thread is checked, which would raise it as its
    own."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize
