"""Who writes what: numbers of all ranks at once give what one look at each item of each rank gives."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from forks import run_forks
from lightning_resilience import planning
from lightning_resilience.engine import Engine
from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import FlatState
from lightning_resilience.inventory import LocalPlan, heard, pieces_of, plan_locally, tell
from lightning_resilience.manifest import shard_file
from lightning_resilience.ranks import Ranks
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.record import metadata_bytes
from lightning_resilience.saves import Facts, Snapshot
from lightning_resilience.shards import Piece, in_order, lay_out
from lightning_resilience.sharing import GlobalPlan, share_out
from lightning_resilience.tiers import LocalTier

BIG = (3000, 4)
MIDDLE = (40, 3)


@dataclass
class Rank:
    """What one rank has, as a planner is told of it."""

    items: list[WriteItem] = field(default_factory=list)
    mappings: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    identical: set[str] = field(default_factory=set)
    tied: dict[str, str] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)

    def add(self, key: str, *items: WriteItem) -> None:
        self.mappings[key] = tuple(key.split("."))
        self.items += items

    def plan(self) -> LocalPlan:
        return LocalPlan.of(self.items, self.mappings, identical=self.identical, tied=self.tied, empty=self.empty)


def tensor(
    key: str,
    size: Sequence[int],
    offsets: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> WriteItem:
    """A plain tensor, or the part of a sharded one."""
    where = torch.Size([0] * len(size) if offsets is None else offsets)
    box = ChunkStorageMetadata(where, torch.Size(size if sizes is None else sizes))
    data = TensorWriteData(box, TensorProperties(dtype), torch.Size(size))
    kind = WriteItemType.TENSOR if offsets is None else WriteItemType.SHARD
    return WriteItem(MetadataIndex(key, where), kind, tensor_data=data)


def thing(key: str) -> WriteItem:
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


def edges(rows: int, parts: int) -> list[int]:
    """As ``torch.chunk`` cuts, the last parts short or empty."""
    each = math.ceil(rows / parts)
    return [min(rows, i * each) for i in range(parts + 1)]


# -- one look at each item of each rank -------------------------------------------------------------------------------


def plainly(ranks: Sequence[Rank]) -> tuple[list[list[Piece]], dict[str, str]]:
    """Who writes what, and what is tied."""
    world = len(ranks)
    tied = {key: first for rank in ranks for key, first in rank.tied.items()}
    tied = {k: f for k, f in tied.items() if all(rank.tied.get(k) == f or k in rank.empty for rank in ranks)}
    owners: dict[Any, list[int]] = {}
    items: dict[Any, WriteItem] = {}
    for number, rank in enumerate(ranks):
        for item in rank.items:
            data = item.tensor_data
            is_hollow = data is not None and math.prod(data.chunk.sizes) == 0 < math.prod(data.size)
            if item.index.fqn not in tied and not is_hollow:
                owners.setdefault((item.index.fqn, item.index.offset), []).append(number)
                items.setdefault((item.index.fqn, item.index.offset), item)
    pieces: list[list[Piece]] = [[] for _ in ranks]
    load = [0] * world
    shared = []
    sharded = any(len(holders) < world for holders in owners.values())
    for where, holders in owners.items():
        item = items[where]
        one_number = item.tensor_data is not None and math.prod(item.tensor_data.size) == 1
        common = sharded and (len(holders) == world or one_number)
        alike = item.type == WriteItemType.SHARD or all(
            item.index.fqn in rank.identical
            for rank in ranks
            if any(one.index.fqn == item.index.fqn for one in rank.items)
        )
        if len(holders) > 1 and alike and not (common and bytes_of(item) <= 4096):
            shared.append((item, holders))
        else:
            pieces[holders[0]].append(Piece(item, base(item), common))
            load[holders[0]] += bytes_of(item)
    even = math.ceil((sum(load) + sum(bytes_of(item) for item, _ in shared)) / world)
    for item, holders in sorted(shared, key=lambda entry: -bytes_of(entry[0])):
        for part in cut(item, max(even, 1)):
            least = min(holders, key=lambda number: load[number])
            pieces[least].append(Piece(part, base(item), sharded and len(holders) == world))
            load[least] += bytes_of(part)
    return pieces, tied


def cut(item: WriteItem, limit: int) -> Iterator[WriteItem]:
    data = item.tensor_data
    assert data is not None
    rows = data.chunk.sizes[0] if data.chunk.sizes else 1
    count = min(rows, math.ceil(bytes_of(item) / limit))
    if count <= 1:
        yield item
        return
    for start, stop in pairwise(rows * i // count for i in range(count + 1)):
        offsets = (data.chunk.offsets[0] + start, *data.chunk.offsets[1:])
        part = tensor(item.index.fqn, data.size, offsets, (stop - start, *data.chunk.sizes[1:]), data.properties.dtype)
        yield part


def base(item: WriteItem) -> tuple[int, ...]:
    return () if item.tensor_data is None else tuple(item.tensor_data.chunk.offsets)


def bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def recorded(
    pieces: list[list[Piece]], tied: dict[str, str], ranks: Sequence[Rank], extents: Sequence[Any]
) -> tuple[Any, dict[str, Any], dict[Any, Any]]:
    """What DCP's planner says of the pieces, the paths of their keys, and where they lie."""
    plans, metadata = create_default_global_save_plan([SavePlan([piece.item for piece in rank]) for rank in pieces])
    assert _validate_global_plan(plans, metadata) in ([], True)  # older torch says whether it is valid
    positions: dict[Any, Any] = {}
    for number, (rank, plan) in enumerate(zip(pieces, plans, strict=True)):
        order = in_order([piece.common for piece in rank], [piece.is_object for piece in rank])
        for place, extent in zip(order, extents[number], strict=True):
            index = plan.items[place].index
            where = (shard_file(number, int(rank[place].common)), *extent)
            positions[index.fqn, index.offset] = (index.index, *where)
            for key in (key for key, first in tied.items() if first == index.fqn):
                positions[key, index.offset] = (index.index, *where)
    for key, first in tied.items():
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[first]
    paths = {key: path for rank in reversed(ranks) for key, path in rank.mappings.items()}
    return metadata.state_dict_metadata, {k: paths[k] for k in metadata.state_dict_metadata}, positions


# -- states -----------------------------------------------------------------------------------------------------------


def ddp(ranks: list[Rank], draw: random.Random, key: str) -> None:
    size = draw.choice([BIG, MIDDLE, (7,), (), (0, 3), (1,), (3, 3, 2, 2)])
    dtype = draw.choice([torch.float32, torch.bfloat16])
    for rank in ranks:
        rank.add(key, tensor(key, size, dtype=dtype))
        rank.identical.add(key)
    if draw.random() < 0.2:
        draw.choice(ranks).identical.discard(key)  # changed on that rank alone


def buffers(ranks: list[Rank], draw: random.Random, key: str) -> None:
    """Plain, of other values on each rank, and maybe of another size."""
    for number, rank in enumerate(ranks):
        rank.add(key, tensor(key, (5 + number * draw.choice([0, 1]),)))


def sharded(ranks: list[Rank], draw: random.Random, key: str, replicas: int = 1) -> None:
    """By rows, on so many ranks each; uneven, with ranks that have nothing."""
    rows, parts = draw.choice([3, 16, 40, 1, 3001]), max(len(ranks) // replicas, 1)
    is_left_out = draw.random() < 0.3  # as ShardedTensors are where they have no part
    cuts = edges(rows, parts)
    for number, rank in enumerate(ranks):
        part = number % parts
        start, stop = cuts[part], cuts[part + 1]
        is_empty = start == stop
        rank.add(key, *(() if is_empty and is_left_out else (tensor(key, (rows, 4), (start, 0), (stop - start, 4)),)))
        if is_empty:
            rank.empty.add(key)


def hybrid(ranks: list[Rank], draw: random.Random, key: str) -> None:
    sharded(ranks, draw, key, replicas=draw.choice([2, len(ranks)]))


def tiles(ranks: list[Rank], draw: random.Random, key: str) -> None:
    """By rows and columns; several to a rank."""
    rows, columns = draw.choice([12, 200]), 8
    boxes = [
        ((top, left), (bottom - top, right - left))
        for top, bottom in pairwise(edges(rows, draw.choice([2, 3])))
        for left, right in pairwise(edges(columns, 2))
    ]
    draw.shuffle(boxes)
    for number, rank in enumerate(ranks):
        mine = [tensor(key, (rows, columns), *box) for box in boxes[number :: len(ranks)]]
        rank.add(key, *mine)
        if not mine:
            rank.empty.add(key)


def objects(ranks: list[Rank], draw: random.Random, key: str) -> None:
    for rank in ranks if draw.random() < 0.5 else ranks[draw.randrange(len(ranks)) :]:
        rank.add(key, thing(key))


def of_some(ranks: list[Rank], draw: random.Random, key: str) -> None:
    """What some ranks alone have, as stages of a pipeline do."""
    some = sorted(draw.sample(range(len(ranks)), draw.randint(1, len(ranks))))
    draw.choice([ddp, buffers, sharded, objects])([ranks[number] for number in some], draw, key)


def ties(ranks: list[Rank], draw: random.Random, key: str) -> None:
    """Two keys of one memory, on all ranks or on the first alone."""
    first, second = f"{key}.first", f"{key}.second"
    kind, state = draw.choice([ddp, sharded]), draw.getstate()
    kind(ranks, draw, first)
    draw.setstate(state)
    kind(ranks, draw, second)
    for rank in ranks if draw.random() < 0.7 else ranks[:1]:
        if second not in rank.empty:
            rank.tied[second] = first


KINDS = (ddp, buffers, sharded, hybrid, tiles, objects, of_some, ties)


def random_ranks(seed: int) -> list[Rank]:
    draw = random.Random(seed)
    ranks = [Rank() for _ in range(draw.choice([1, 2, 3, 4, 6, 8]))]
    few = draw.sample(KINDS, draw.randint(1, len(KINDS)))
    for number in range(draw.randint(1, 10)):
        draw.choice(few)(ranks, draw, f"model.{number}")
    if draw.random() < 0.2:
        draw.shuffle(ranks[-1].items)
    return ranks


def told(ranks: Sequence[Rank]) -> tuple[list[LocalPlan], GlobalPlan]:
    """Each rank's plan, and that of all, as it comes about when they talk to each other."""
    plans = [rank.plan() for rank in ranks]
    digests = [plan.holding.inventory.digest for plan in plans]
    told = [pickle.loads(pickle.dumps(tell(plan.holding, digests, rank))) for rank, plan in enumerate(plans)]
    return plans, share_out(heard(digests, told))


def record_of(plans: list[LocalPlan], whole: GlobalPlan) -> Any:
    """What is in ``.metadata``; objects are ``w``."""
    values = FlatState.of({"w": "an object"})
    pieces = [pieces_of(local.items, share) for local, share in zip(plans, whole.shares, strict=True)]
    return pickle.loads(metadata_bytes(whole, [lay_out(rank, values).extents for rank in pieces]))


def same(piece: Piece) -> Any:
    return replace(piece.item, index=None), piece.item.index, piece.base, piece.common


@pytest.mark.parametrize("tens", range(10))
def test_all_ranks_at_once_share_out_as_one_look_at_each_item_does(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        ranks = random_ranks(seed)
        expected, tied = plainly(ranks)
        plans, plan = told(ranks)
        pieces = [pieces_of(local.items, share) for local, share in zip(plans, plan.shares, strict=True)]
        assert [list(map(same, rank)) for rank in pieces] == [list(map(same, rank)) for rank in expected], seed
        values = FlatState.of({"model": {str(number): "an object" for number in range(10)}})
        extents = [lay_out(rank, values).extents for rank in pieces]
        record = pickle.loads(metadata_bytes(plan, extents))
        entries, paths, positions = recorded(expected, tied, ranks, extents)
        assert record.state_dict_metadata == entries
        assert list(record.state_dict_metadata) == list(entries)
        assert record.planner_data == paths
        assert {
            (index.fqn, index.offset): (index.index, info.relative_path, info.offset, info.length)
            for index, info in record.storage_data.items()
        } == positions


def test_ranks_that_hold_the_same_tell_it_once() -> None:
    ranks = [Rank() for _ in range(8)]
    for number in range(100):
        for rank, part in enumerate(ranks):
            part.add(f"model.{number}", tensor(f"model.{number}", (80, 4), (10 * rank, 0), (10, 4)))
    plans = [rank.plan() for rank in ranks]
    digests = [plan.holding.inventory.digest for plan in plans]
    sizes = [len(pickle.dumps(tell(plan.holding, digests, rank))) for rank, plan in enumerate(plans)]
    assert max(sizes[1:]) < 100 * 40
    assert sizes[0] > 100 * 40
    whole = share_out([plan.holding for plan in plans])
    assert max(len(pickle.dumps(share)) for share in whole.shares) < 1000


@pytest.mark.parametrize(("start", "stop"), [(5, 10), (3, 10), (4, 11)], ids=["hole", "overlap", "beyond"])
def test_shards_that_do_not_cover_their_tensor_once_are_refused(start: int, stop: int) -> None:
    ranks = [Rank(), Rank()]
    ranks[0].add("w", tensor("w", (10, 4), (0, 0), (4, 4)))
    ranks[1].add("w", tensor("w", (10, 4), (start, 0), (stop - start, 4)))
    plans, whole = told(ranks)
    extents = [
        lay_out(pieces_of(p.items, s), FlatState.of({})).extents for p, s in zip(plans, whole.shares, strict=True)
    ]
    with pytest.raises(SaveFailed, match=r"key:w|see the warnings of torch") as caught:
        metadata_bytes(whole, extents)
    assert caught.value.stage == "plan"


@pytest.mark.parametrize("others", [thing("w"), tensor("w", (4,)), tensor("w", (2, 3, 4))], ids=["object", "1", "3"])
def test_a_key_that_is_another_thing_on_another_rank_is_refused(others: WriteItem) -> None:
    ranks = [Rank(), Rank()]
    ranks[0].add("w", tensor("w", (10, 4)))
    ranks[1].add("w", others)
    with pytest.raises(SaveFailed, match="w is not the same on all ranks"):
        record_of(*told(ranks))


@pytest.mark.parametrize(
    "other", [tensor("w", (8, 4)), tensor("w", (10, 4), dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_what_ranks_hold_identically_must_be_as_large(other: WriteItem) -> None:
    ranks = [Rank(), Rank(), Rank()]
    for rank, item in zip(ranks, (tensor("w", (10, 4)), tensor("w", (10, 4)), other), strict=True):
        rank.add("w", item)
        rank.identical.add("w")
    with pytest.raises(SaveFailed, match="w is of another shape or dtype on rank 2 than on rank 0"):
        told(ranks)


def test_a_state_of_nothing_is_shared_out() -> None:
    local = plan_locally(FlatState.of({}))
    whole = share_out([local.holding, local.holding])
    assert [pieces_of(local.items, share) for share in whole.shares] == [[], []]
    assert pickle.loads(metadata_bytes(whole, [[], []])).state_dict_metadata == {}


# -- ranks that talk to each other ------------------------------------------------------------------------------------


def save_what_fits_and_what_does_not(root: Path) -> list[tuple[str, str]]:
    """What becomes of each save of a rank: the stage that it failed in and the first words, or its name."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    engine = Engine(Ranks(rank, 2, timeout=30), memory=False, timeout=30)
    folder = engine.open_folder(LocalTier(root))
    rows = torch.arange(5.0)[:3] if rank == 0 else torch.arange(5.0)[3:]
    fits = {"w": DTensor.from_local(rows, mesh, [Shard(0)], shape=(5,), stride=(1,)), "b": torch.ones(64, 64), "o": "x"}
    became = []

    def save(name: str, state: dict[str, Any]) -> None:
        snapshot = Snapshot({"model": state}, lambda _: {"model.b"} & {f"model.{key}" for key in state}, b"m", b"r")
        started = engine.save(folder, name, Facts(1, 0, "test", "DDPStrategy"), lambda: snapshot)
        assert started is not None
        try:
            became.append(("", Path(started.wait(60).path).name))
        except SaveFailed as failure:
            became.append((failure.stage, failure.message))

    def fails(*_: Any) -> None:
        raise RuntimeError("no plan here")

    save("fits.ckpt", fits)
    save("another.ckpt", fits if rank == 0 else {**fits, "w": "an object"})
    save("shape.ckpt", {**fits, "b": torch.ones(64, 64 + rank)})
    original = planning.plan_locally
    planning.plan_locally = original if rank == 0 else fails  # type: ignore[assignment]
    save("fails.ckpt", {"b": fits["b"]})
    planning.plan_locally = original
    save("again.ckpt", fits if rank == 0 else {**fits, "more": torch.ones(2)})
    engine.close()
    engine.ranks.close()
    dist.destroy_process_group()
    return became


@pytest.mark.ranks
def test_a_save_of_what_does_not_fit_together_fails_on_all_ranks_and_the_next_one_does_not(tmp_path: Path) -> None:
    first, second = run_forks(save_what_fits_and_what_does_not, tmp_path, world_size=2, timeout=90)
    for became in (first, second):
        fits, another, shape, fails, again = became
        assert (fits, again) == (("", "fits.ckpt"), ("", "again.ckpt"))
        assert another[0] == shape[0] == "plan"
        assert "do not fit together: model.w is not the same on all ranks" in another[1]
        assert "model.b is of another shape or dtype on rank 1 than on rank 0" in shape[1]
        assert "no plan here" in fails[1]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["again.ckpt", "fits.ckpt"]
    full = CheckpointReader(lambda file: tmp_path / "again.ckpt" / file, plain=True).read_full()
    assert full.keys() == {"w", "b", "o", "more"}
    assert torch.equal(full["w"], torch.arange(5.0))
