"""What a commit and a plan cost by number of ranks.

    python tests/benchmarks/scale.py [--ranks 8 64 512 4096] [--node 8] [--planned 8 64 512 4096] [--replicas 1]

**A commit**: simulated ranks, threads of one process, over a real key-value store.  Each rank hands in three files, as
a save does, and waits for the verdict; one rank of each node commits the node's folder.  No model, no shards: what is
left is what ranks have to tell each other.  All of them share this machine's cores and one interpreter, so the seconds
are an upper bound; what counts is how bytes and seconds grow.

**A plan**: what ranks tell rank 0 of 1,000 sharded tensors and hear from it, pickled as the group does it, and how long
rank 0 computes, on its training thread and behind.  The way between them is left out, and what a rank does for itself
is the same for any number of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would like to know the names of clients
import numpy as np  # after it is told so
import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_resilience import store
from lightning_resilience.flat import FlatState
from lightning_resilience.inventory import Holding, LocalPlan, heard, pieces_of, tell
from lightning_resilience.manifest import META, METADATA, PARTIAL, FileEntry, Manifest, digest, rank_file, shard_file
from lightning_resilience.ranks import Board, _allow_connections
from lightning_resilience.record import metadata_bytes
from lightning_resilience.shards import lay_out
from lightning_resilience.sharing import share_out
from lightning_resilience.tiers import LocalTier
from lightning_resilience.verdict import Report, Verdict


@dataclass(frozen=True)
class SimulatedRanks:
    """What a verdict asks of its ranks."""

    rank: int
    world_size: int


class Metered:
    """A store's connection that counts the bytes of values that go through it."""

    def __init__(self, connection: TCPStore) -> None:
        self._connection = connection
        self.sent = self.received = self.requests = 0

    def compare_set(self, key: str, expected: str, value: bytes) -> bytes:
        stands: bytes = self._connection.compare_set(key, expected, value)
        self._count(len(value), len(stands))
        return stands

    def get(self, key: str) -> bytes:
        value: bytes = self._connection.get(key)
        self._count(0, len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._connection.multi_get(keys)
        self._count(0, sum(map(len, values)))
        return values

    def _count(self, sent: int, received: int) -> None:
        self.sent += sent
        self.received += received
        self.requests += 1

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._connection, name)


def report(rank: int) -> Report:
    """What a rank hands in: its shards, its own state and, of rank 0, what the trainer has."""
    names = [shard_file(rank), rank_file(rank), *((META, METADATA) if rank == 0 else ())]
    return Report([FileEntry(name, 10**9, digest(name.encode()), rank) for name in names])


def manifest_of(reports: list[Report]) -> Manifest:
    """The commit record."""
    files = tuple(entry for report in reports for entry in report.files)
    return Manifest("scale", 1, 0, "2026-01-01T00:00:00Z", "benchmark", files, sequence=1, world_size=len(reports))


def one_rank(
    rank: int, leaders: list[int], board: Board, root: Path, world_size: int, verdicts: dict[int, Verdict]
) -> None:
    """A save from the report to the verdict, as the engine has it."""
    verdict = Verdict(board, "scale/1", SimulatedRanks(rank, world_size), leaders, 600.0)  # type: ignore[arg-type]
    verdicts[rank] = verdict
    if rank == 0:
        verdict.name("step=1.ckpt")
    name = verdict.wait_name()
    verdict.report(report(rank))
    verdict.wait_reports()
    tier, partial = LocalTier(root / str(rank)), f"{name}{PARTIAL}scale-1"
    if rank == 0:
        manifest = manifest_of(verdict.reports())
        if len(leaders) > 1:
            verdict.hand_over(manifest, {META: b"m" * 50_000, METADATA: b"p" * 1000})
            for leader in leaders[1:]:
                verdict.wait_folder(leader)
        tier.begin(partial)
        store.commit(tier, partial, name, manifest)
        verdict.commit(manifest)
    elif rank in leaders:
        content, _ = verdict.take_over()
        verdict.copy(META)
        tier.begin(partial)
        store.commit(tier, partial, name, content)
        verdict.folder_done()
    assert verdict.wait_commit().size == 10**9 * (2 * world_size + 2)


def measure(world_size: int, node: int) -> dict[str, float]:
    """One commit: seconds until the last rank has its verdict, and what went through rank 0's store."""
    leaders = list(range(0, world_size, node))
    _allow_connections(2 * world_size)
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(64) as pool:
        connect: Callable[[int], TCPStore] = lambda _: TCPStore("localhost", server.port, is_master=False)  # noqa: E731
        meters = [Metered(one) for one in pool.map(connect, range(world_size))]
    verdicts: dict[int, Verdict] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        threading.stack_size(256 * 1024)
        threads = [
            threading.Thread(target=one_rank, args=(rank, leaders, Board(meter), Path(root), world_size, verdicts))
            for rank, meter in enumerate(meters)
        ]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        size = (Path(root) / "0" / "step=1.ckpt" / "manifest.json").stat().st_size
    plain = [meter for rank, meter in enumerate(meters) if rank not in leaders] or meters
    begin = time.perf_counter()
    verdicts[0].clear()
    return {
        "ranks": world_size,
        "seconds": seconds,
        "clear_seconds": time.perf_counter() - begin,
        "manifest_bytes": size,
        "bytes_of_a_rank": max(meter.sent + meter.received for meter in plain),
        "requests_of_a_rank": max(meter.requests for meter in plain),
        "bytes_of_rank_0": meters[0].sent + meters[0].received,
        "bytes_of_all": sum(meter.sent + meter.received for meter in meters),
    }


TENSORS = 1000
DESCRIBED = 512
"""Ranks up to which ``.metadata`` is made: it has some 100 bytes for each tensor of each rank, and takes ten times as
much memory."""


def sharded_plan(parts: int) -> LocalPlan:
    """What a rank tells that has the first of so many parts of each tensor."""
    sizes, whole = torch.Size((16, 64)), torch.Size((16 * parts, 64))
    box = ChunkStorageMetadata(torch.Size((0, 0)), sizes)
    keys = [f"optimizer_0.state.model.layers.{number}.self_attn.q_proj.weight.exp_avg" for number in range(TENSORS)]
    items = [
        WriteItem(
            MetadataIndex(key, box.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(box, TensorProperties(torch.float32), whole),
        )
        for key in keys
    ]
    return LocalPlan.of(items, {key: ("optimizer_0", "state", key[18:-8], "exp_avg") for key in keys})


def measure_plan(world_size: int, replicas: int = 1) -> dict[str, float]:
    """A plan: bytes that a rank sends and gets, and seconds for which rank 0 computes."""
    parts = max(world_size // replicas, 1)
    local = sharded_plan(parts)
    holding, digests = local.holding, [local.holding.inventory.digest] * world_size
    told = []
    for rank in range(world_size):
        boxes = holding.boxes.copy()
        boxes[:, 0, 0] = rank % parts * boxes[:, 1, 0]
        told.append(pickle.dumps(tell(Holding(holding.inventory, boxes), digests, rank)))
    digested = [pickle.dumps(digest) for digest in digests]

    begin = time.process_time()
    plan = share_out(heard([pickle.loads(one) for one in digested], [pickle.loads(one) for one in told]))
    shares = [pickle.dumps(share) for share in plan.shares]
    seconds = time.process_time() - begin

    layout = lay_out(pieces_of(local.items, plan.shares[0]), FlatState.of({}))
    extents = [np.array(layout.extents[:1] * len(share.pieces()), np.int64) for share in plan.shares]
    placed = [pickle.dumps(one) for one in extents]
    begin = time.process_time()
    extents = [pickle.loads(one) for one in placed]
    seconds += time.process_time() - begin

    begin = time.process_time()
    metadata = metadata_bytes(plan, extents) if world_size <= DESCRIBED else b""
    return {
        "ranks": world_size,
        "bytes_a_rank_sends": len(digested[-1]) + len(told[-1]) + len(placed[-1]),
        "bytes_a_rank_gets": sum(map(len, digested)) + max(map(len, shares)),
        "bytes_of_rank_0": sum(map(len, digested + told + placed + shares)),
        "training_seconds": seconds,
        "background_seconds": time.process_time() - begin if metadata else math.nan,
        "metadata_bytes": len(metadata),
    }


def show(rows: list[dict[str, float]]) -> None:
    """A line for each."""
    for row in rows:
        print("  ".join(f"{name}={value:,.3f}" if isinstance(value, float) else f"{name}={value:,}"
                        for name, value in row.items()))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 4096])
    parser.add_argument("--node", type=int, default=8, help="ranks that share a folder; 0: all")
    parser.add_argument("--planned", type=int, nargs="*", default=[8, 64, 512, 4096], help="ranks of plans")
    parser.add_argument("--replicas", type=int, default=1, help="ranks that hold the same part of a tensor")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(ranks, arguments.node or ranks) for ranks in arguments.ranks]
    show(rows)
    plans = [measure_plan(ranks, arguments.replicas) for ranks in arguments.planned]
    show(plans)
    if arguments.json:
        arguments.json.write_text(json.dumps({"commits": rows, "plans": plans}))
