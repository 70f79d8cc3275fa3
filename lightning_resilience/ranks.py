"""How ranks talk to each other: three channels, none of which is the Trainer's.

* **the group**: gloo, with a timeout of its own, used from the training thread only.  All ranks call the same method at
  the same step, so these are collectives: a few integers a save, whole plans when the shape of the state changed, and
  lists of checkpoints at a resume.
* **the board**: a key-value store with deadlines, used from the background.  Nobody waits for anybody who has not
  promised to write: a save ends on every rank with the verdict of the board, or with its deadline.
* **connections between nodes**, over which ``peers`` sends whole files in the background, and which it opens itself.
  What it needs to know for that is told here: at which address others reach a node, and by which token they know each
  other (``session``).

Nothing else talks between ranks.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_resilience.errors import CheckpointCorrupt, ResilienceError, TierUnavailable
from lightning_resilience.tiers import BLOCK, LocalTier

log = logging.getLogger("lightning_resilience")

T = TypeVar("T")

CONNECTIONS = 3
"""Of each rank to the board: for saves, for copies, and one to spare."""
OTHER_FILES = 1024
"""That rank 0 has open beside them."""

ABANDON = 2.0
"""Seconds that leaving a group may take where the other ranks do not leave it too."""

TOGETHER = 256
"""Keys that are read from the board with one request."""

FOREVER = 20 * 86400.0
"""Seconds; a store counts milliseconds in 32 bits."""


class Ranks:
    """The ranks of one training run, as seen from one of them.

    Creating it is collective.

    Args:
        rank: global rank of this process.
        world_size: number of processes.
        timeout: seconds after which a collective of the group gives up.
        address: host name under which rank 0 is reached, where the launcher says so.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, timeout: float = 1800.0, address: str | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = None
        self._server: Any = None
        if world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self.session: str = self.broadcast(uuid.uuid4().hex[:12])
        self._where = self._open_board(address)

    # -- the group ----------------------------------------------------------------------------------------------------

    def any_max(self, *values: int) -> list[int]:
        """The largest of each value over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def start_max(self, *values: int) -> PendingMax:
        """``any_max`` that does not wait; ask the returned handle for the answer some steps later."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        work = None
        if self.world_size > 1:
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return PendingMax(tensor, work)

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank, on all ranks."""
        if self.world_size == 1:
            return value
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]  # type: ignore[return-value]

    def told(self, compute: Callable[[], T]) -> T | BaseException:
        """What rank 0 computes, or its exception, on all ranks."""
        return self.broadcast(attempt(compute) if self.rank == 0 else None)  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [value]
        box: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, box, dst=0, group=self._group)
        return box

    def scatter(self, values: Sequence[T] | None) -> T:
        """This rank's one of rank 0's values."""
        if self.world_size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, list(values) if values is not None else None, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on all ranks."""
        if self.world_size == 1:
            return [value]
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value, group=self._group)
        return box

    def gathered(self, compute: Callable[[], T]) -> list[T | BaseException]:
        """``all_gather(compute())``, where a rank that fails hands in its exception, so that none is left waiting."""
        return self.all_gather(attempt(compute))

    def copy_file(self, source: int, path: Path, sink: Path | None) -> None:
        """Send a file from rank ``source``, where it is at ``path``, to the ranks that give a ``sink`` to write it
        to.  Collective.

        Raises:
            CheckpointCorrupt: it cannot be read; on all ranks.
            TierUnavailable: a rank cannot write it; on all ranks.
        """
        end = _End(path if self.rank == source else None, sink)
        with ExitStack() as files:
            sizes = self.gathered(partial(end.open, files))
            raise_first(sizes)
            size, failed = sizes[source], None
            assert isinstance(size, int)
            for start in range(0, size, BLOCK):
                block = torch.empty(min(BLOCK, size - start), dtype=torch.uint8, device="cpu")
                # The others go on whatever fails here, so this rank takes part to the end.
                failed = failed or _error_of(partial(end.read, block.numpy().data))
                if self._group is not None:
                    dist.broadcast(block, src=source, group=self._group)
                failed = failed or _error_of(partial(end.write, block.numpy().data))
            raise_first(self.all_gather(failed or _error_of(end.finish)))

    # -- the board ----------------------------------------------------------------------------------------------------

    def _open_board(self, address: str | None) -> tuple[str, int] | None:
        if self.world_size == 1:
            self._server = HashStore()
            return None
        where = None
        if self.rank == 0:
            _allow_connections(CONNECTIONS * self.world_size)
            self._server = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            where = (address or os.environ.get("MASTER_ADDR") or socket.gethostname(), self._server.port)
        return self.broadcast(where)

    def board(self) -> Board:
        """A connection of the calling thread's own: a wait on it holds up nobody else."""
        if self._where is None:
            return Board(self._server)
        host, port = self._where
        if self.rank == 0:
            host = "localhost"
        return Board(TCPStore(host, port, is_master=False, timeout=self._timeout))

    @property
    def address(self) -> str:
        """Where other nodes reach this one: at the address from which it reaches rank 0."""
        if self._where is None:
            return "localhost"
        host, port = self._where
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])

    # -- folders ------------------------------------------------------------------------------------------------------

    def sharing(self, tier: LocalTier) -> tuple[int, ...]:
        """Which ranks see the same folder as this one; found out by writing a file each.  Collective.

        Raises:
            TierUnavailable, TierDenied: a rank cannot write its folder; on all ranks.
        """
        probes = tier.root / self.broadcast(f".ranks-{uuid.uuid4().hex[:12]}")
        mine = probes / str(self.rank)

        def write() -> None:
            tier.check_writable()
            probes.mkdir(exist_ok=True)
            mine.touch()

        raise_first(self.gathered(write))
        seen: list[int] = []
        # Who sees what stays where it was found: all of it together grows with the square of the ranks.
        raise_first(self.gathered(lambda: seen.extend(sorted(int(name) for name in os.listdir(probes)))))
        mine.unlink(missing_ok=True)
        with suppress(OSError):  # another rank's file is still in it; the last one out removes it
            probes.rmdir()
        return tuple(seen)

    def close(self, abandoned: bool = False) -> None:
        """Leave the group; rank 0 takes the board down.

        Args:
            abandoned: the other ranks do not leave now, and may never answer what they were asked; the group is left to
                a thread then, because it waits for them.
        """
        if self._group is not None and dist.is_initialized():
            leaving = threading.Thread(target=dist.destroy_process_group, args=(self._group,), daemon=True)
            leaving.start()
            leaving.join(ABANDON if abandoned else None)
        self._group = None
        self._server = None


class _End:
    """A rank's end of the way of a file from one rank to others.

    Args:
        path: where it is read; None on ranks that do not send it.
        sink: where it is written; None on ranks that do not want it.
    """

    def __init__(self, path: Path | None, sink: Path | None) -> None:
        self._path, self._sink = path, sink
        self._reader: BinaryIO | None = None
        self._writer: BinaryIO | None = None

    def open(self, files: ExitStack) -> int:
        """Get ready, until ``files`` are closed; the number of bytes to send."""
        with self._writing():
            if self._sink is not None:
                self._writer = files.enter_context(open(self._sink, "xb"))  # noqa: SIM115
        with self._reading():
            if self._path is not None:
                self._reader = files.enter_context(open(self._path, "rb"))  # noqa: SIM115
                return os.fstat(self._reader.fileno()).st_size
        return 0

    def read(self, block: memoryview) -> None:
        """Fill a block."""
        with self._reading():
            if self._reader is not None and self._reader.readinto(block) != len(block):  # type: ignore[attr-defined]
                raise OSError(errno.EIO, "it is shorter than it was")

    def write(self, block: memoryview) -> None:
        """Take a block in."""
        with self._writing():
            if self._writer is not None:
                self._writer.write(block)

    def finish(self) -> None:
        """Return when what was written survives power loss."""
        with self._writing():
            if self._writer is not None:
                self._writer.flush()
                os.fsync(self._writer.fileno())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            assert self._path is not None
            problem = f"{self._path.name} cannot be read: {error.strerror}"
            raise CheckpointCorrupt(f"{problem} ({str(self._path.parent)!r}).", problems=(problem,)) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            assert self._sink is not None
            raise TierUnavailable(
                f"A file cannot be copied to {str(self._sink.parent)!r}: {error.strerror}.",
                hint="Check the disk behind it.",
            ) from error


@dataclass
class PendingMax:
    """An answer of the group that is on its way."""

    _tensor: torch.Tensor
    _work: Any

    def result(self) -> list[int]:
        """The largest of each value over all ranks; waits where it is not there yet."""
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in self._tensor.tolist()]


class Board:
    """A key-value store with deadlines.  Values are Python objects."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put_once(self, key: str, value: object) -> Any:
        """Write ``value`` unless somebody was first; either way, what stands there now."""
        return pickle.loads(self._store.compare_set(key, "", pickle.dumps(value)))

    def count(self, key: str) -> int:
        """Add one, and return how many have."""
        return int(self._store.add(key, 1))

    def has(self, key: str) -> bool:
        """Whether somebody has written ``key``."""
        return bool(self._store.check([key]))

    def wait(self, key: str, seconds: float) -> Any:
        """The value of ``key``, once somebody has written it.

        Raises:
            TimeoutError: nobody has for ``seconds``.
        """
        self._await([key], seconds)
        return pickle.loads(self._store.get(key))

    def wait_all(self, keys: Sequence[str], seconds: float) -> list[Any]:
        """The values of ``keys``, some hundred a request; see ``wait``."""
        values: list[Any] = []
        deadline = time.monotonic() + seconds
        for start in range(0, len(keys), TOGETHER):
            some = list(keys[start : start + TOGETHER])
            self._await(some, deadline - time.monotonic())
            values += map(pickle.loads, self._store.multi_get(some))
        return values

    def _await(self, keys: list[str], seconds: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=min(max(seconds, 0.001), FOREVER)))
        except dist.DistNetworkError:
            raise
        except (dist.DistStoreError, RuntimeError) as error:
            raise TimeoutError(f"nobody wrote {', '.join(keys[:3])} within {seconds:.1f} s") from error

    def forget(self, *keys: str) -> None:
        """Delete keys, so that a long run does not fill the store."""
        for key in keys:
            self._store.delete_key(key)


def _allow_connections(count: int) -> None:
    """Let this process have so many connections, beside what else it opens, where the machine lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning(
                "event=setup rank=0 reason='%d open files are allowed, %d ranks may need %d' note='raise ulimit -Hn'",
                allowed,
                count // CONNECTIONS,
                wanted,
            )


def attempt(compute: Callable[[], T]) -> T | BaseException:
    """The value, or the exception, so that it can be handed on where raising it would leave other ranks waiting."""
    try:
        return compute()
    except Exception as error:
        return portable(error)


def _error_of(action: Callable[[], object]) -> BaseException | None:
    """Why something failed, if it did."""
    answer = attempt(action)
    return answer if isinstance(answer, BaseException) else None


def portable(error: BaseException) -> BaseException:
    """``error`` itself where it can be sent to another process, otherwise its text in an error that can."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return ResilienceError(f"{type(error).__name__}: {error}")


def raise_first(answers: Sequence[T | BaseException]) -> None:
    """Raise the lowest rank's exception, if any rank had one."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
