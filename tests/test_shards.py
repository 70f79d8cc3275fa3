"""Planning and layout: who writes what, and that the layout is what ``torch.save`` and DCP would have written."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import FlatState
from lightning_resilience.inventory import pieces_of, plan_locally
from lightning_resilience.manifest import METADATA, shard_file
from lightning_resilience.names import canonical
from lightning_resilience.reader import CheckpointReader, empty
from lightning_resilience.record import metadata_bytes
from lightning_resilience.shards import Skeleton, dump_object, lay_out
from lightning_resilience.sharing import share_out
from lightning_resilience.slots import SlotMemory, dump_objects

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (5, 7), (1, 1, 1, 1), (300, 100)]


def values(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape) * 3).to(dtype)


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, in the order of its elements."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def write(folder: Path, *states: dict[str, Any], identical: tuple[str, ...] = ()) -> None:
    """Save the states of so many ranks through slots, as the engine does."""
    flats = [FlatState.of(state) for state in states]
    local = [plan_locally(flat, identical) for flat in flats]
    plan = share_out([of_rank.holding for of_rank in local])
    layouts = [
        lay_out(pieces_of(of_rank.items, share), flat)
        for of_rank, share, flat in zip(local, plan.shares, flats, strict=True)
    ]
    memory = SlotMemory(False)
    for rank, (layout, flat) in enumerate(zip(layouts, flats, strict=True)):
        (slot,) = memory.allocate(layout, copies=1)
        objects = dump_objects(layout, flat)
        assert objects is not None
        slot.fill(flat, objects)
        for file, where in layout.files(rank).items():
            (folder / file).write_bytes(slot.view()[where])
        slot.close()
    (folder / METADATA).write_bytes(metadata_bytes(plan, [layout.extents for layout in layouts]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_skeleton_around_a_payload_is_what_torch_save_writes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, *shape)
    skeleton = Skeleton.of(dtype, shape)
    loaded = torch.load(io.BytesIO(skeleton.head + raw(tensor) + skeleton.tail), weights_only=True)
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert raw(loaded) == raw(tensor)
    assert not shape or len(skeleton.head) % 64 == 0


@pytest.mark.parametrize("plain", [True, False], ids=["mapped", "stock streams"])
def test_every_kind_of_tensor_and_object_comes_back(tmp_path: Path, plain: bool) -> None:
    model: dict[str, Any] = {f"{dtype}-{shape}": values(dtype, *shape) for dtype in DTYPES for shape in SHAPES}
    model |= {
        "transposed": torch.randn(4, 6).t(),
        "view": torch.randn(100)[10:20],
        "strided": torch.randn(10, 10)[::2, ::3],
        "expanded": torch.ones(1, 5).expand(4, 5),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "extra_state": {"a": [1, (2, 3)], "b": None},
        "text": "naïve",
    }
    write(tmp_path, {"model": model})
    reader = CheckpointReader(lambda file: tmp_path / file, plain=plain)
    loaded = reader.read_tree("model", lambda _, entry: empty(entry))
    assert loaded.keys() == model.keys()
    for name, value in model.items():
        assert raw(loaded[name]) == raw(value) if isinstance(value, Tensor) else loaded[name] == value


@pytest.mark.parametrize("plain", [True, False], ids=["mapped", "stock streams"])
def test_what_all_ranks_read_is_in_a_file_of_its_own_where_the_rest_is_not(tmp_path: Path, plain: bool) -> None:
    shared: dict[str, Any] = {"lr": 0.1, "step": torch.tensor(3.0)}
    first, second = torch.randn(500), torch.randn(500)
    write(
        tmp_path,
        {"model": {"first": first, "one": torch.tensor([2.0])}, "optimizer_0": shared},
        {"model": {"second": second}, "optimizer_0": shared},
        identical=("optimizer_0.step",),
    )
    assert sorted(path.name for path in tmp_path.glob("*.distcp")) == ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp"]
    assert (tmp_path / "__0_1.distcp").stat().st_size % 4096 == 0
    reader = CheckpointReader(lambda file: tmp_path / file, plain=plain)
    assert reader.files_for({"first": first}) == {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp"}  # "second" is whole
    loaded = reader.read_full("model")
    assert torch.equal(loaded["first"], first)
    assert torch.equal(loaded["second"], second)
    assert torch.equal(loaded["one"], torch.tensor([2.0]))
    assert reader.read_full("optimizer_0") == shared
    (tmp_path / "__0_0.distcp").unlink()
    (tmp_path / "__1_0.distcp").unlink()
    assert reader.read_full("optimizer_0") == shared


def test_stock_dcp_reads_what_several_ranks_wrote(tmp_path: Path) -> None:
    state = {"model": {"big": torch.randn(1000, 10), "small": torch.randn(3)}, "optimizer_0": {"lr": 0.1}}
    write(tmp_path, state, state, state, identical=("model.big", "model.small"))
    target = {"model": {"big": torch.zeros(1000, 10), "small": torch.zeros(3)}, "optimizer_0": {"lr": 0.0}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=tmp_path)
    assert torch.equal(target["model"]["big"], state["model"]["big"])
    assert target["optimizer_0"]["lr"] == 0.1


def test_identical_state_is_written_once_and_spread_evenly(tmp_path: Path) -> None:
    model = {f"layer{i}": torch.randn(100, 50) for i in range(7)} | {"huge": torch.randn(5000, 50)}
    write(tmp_path, *[{"model": model}] * 4, identical=tuple(f"model.{name}" for name in model))
    sizes = [(tmp_path / shard_file(rank)).stat().st_size for rank in range(4)]
    total = sum(tensor.numel() * 4 for tensor in model.values())
    assert total < sum(sizes) < 1.05 * total
    assert max(sizes) < 1.1 * min(sizes)


def test_plain_values_that_ranks_may_hold_differently_come_from_rank_0(tmp_path: Path) -> None:
    states = [{"model": {"weight": torch.ones(8), "running_mean": torch.full((8,), float(rank))}} for rank in range(3)]
    write(tmp_path, *states, identical=("model.weight",))
    full = CheckpointReader(lambda file: tmp_path / file, plain=True).read_full()
    assert torch.equal(full["running_mean"], torch.zeros(8))


def test_tied_tensors_are_stored_once_under_both_names(tmp_path: Path) -> None:
    shared = torch.randn(100, 10)
    write(tmp_path, {"model": {"a": shared, "b": shared, "view": shared.t()}})
    assert (tmp_path / shard_file(0)).read_bytes().count(raw(shared)) == 1
    full = CheckpointReader(lambda file: tmp_path / file, plain=True).read_full()
    assert torch.equal(full["a"], shared)
    assert torch.equal(full["b"], shared)
    assert torch.equal(full["view"], shared.t())


def test_tensors_tied_on_one_rank_only_are_all_stored(tmp_path: Path) -> None:
    shared = torch.ones(4)
    write(tmp_path, {"model": {"a": shared, "b": shared}}, {"model": {"a": torch.ones(4), "b": torch.ones(4)}})
    full = CheckpointReader(lambda file: tmp_path / file, plain=True).read_full()
    assert full.keys() == {"a", "b"}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("a"),
        lambda m: m.update(c=torch.zeros(2)),
        lambda m: m.update(a=m["a"].double()),
        lambda m: m.update(a=torch.zeros(4, 2)),
        lambda m: m.update(b=m["a"]),
        lambda m: m.update(a=5),
    ],
    ids=["removed", "added", "dtype", "shape", "tied", "object"],
)
def test_fingerprint_changes_with_the_shape_of_the_state_and_with_nothing_else(change: Any) -> None:
    def fingerprint(model: dict[str, Any]) -> tuple[Any, ...]:
        return FlatState.of({"model": model}).fingerprint()

    model = {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}
    before = fingerprint(model)
    assert fingerprint({name: torch.randn(2, 4) for name in model}) == before
    change(model)
    assert fingerprint(model) != before


def test_slot_is_refilled_in_place_and_objects_may_grow_within_their_spot() -> None:
    state = {"model": {"w": torch.zeros(3)}, "optimizer_0": {"lr": 0.1, "steps": 1}}
    flat = FlatState.of(state)
    local = plan_locally(flat)
    layout = lay_out(pieces_of(local.items, share_out([local.holding]).shares[0]), flat)
    first, second = SlotMemory(False).allocate(layout)
    first.fill(flat, dump_objects(layout, flat) or {})
    before = bytes(first.view())
    changed = FlatState.of({"model": {"w": torch.ones(3)}, "optimizer_0": {"lr": 0.2, "steps": 2**40}})
    second.fill(changed, dump_objects(layout, changed) or {})
    assert bytes(first.view()) == before != bytes(second.view())
    assert len(before) == layout.size
    outgrown = FlatState.of({"model": {"w": torch.ones(3)}, "optimizer_0": {"lr": 0.2, "steps": "x" * 10_000}})
    assert dump_objects(layout, outgrown) is None


def test_padded_object_is_read_by_any_torch_load() -> None:
    padded = dump_object({"lr": 0.1, "betas": (0.9, 0.99)}) + b"\0" * 100
    for weights_only in (True, False):
        assert torch.load(io.BytesIO(padded), weights_only=weights_only) == {"lr": 0.1, "betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("net._orig_mod.weight", "net.weight"),
        ("_orig_mod.net.weight", "net.weight"),
        ("a._checkpoint_wrapped_module.b._fsdp_wrapped_module.w", "a.b.w"),
        ("my_orig_mod.w", "my_orig_mod.w"),
        ("w", "w"),
    ],
)
def test_names_lose_what_wrappers_insert(name: str, plain: str) -> None:
    assert canonical(name) == plain


def test_metadata_does_not_name_this_package() -> None:
    """Stock readers unpickle it without us."""
    flat = FlatState.of({"model": {"w": torch.zeros(3)}})
    local = plan_locally(flat)
    plan = share_out([local.holding])
    data = metadata_bytes(plan, [lay_out(pieces_of(local.items, plan.shares[0]), flat).extents])
    assert b"lightning_resilience" not in data
    assert pickle.loads(data).state_dict_metadata.keys() == {"model.w"}


def test_state_is_flattened_as_dcp_does() -> None:
    """But for mappings that would not come back as they were."""
    state: dict[str, Any] = {
        "model": {"a.b": torch.ones(2), "deep": {"er": {"1": torch.zeros(1), "2": 5}}, "list": [1, 2]},
        "optimizer_0": {
            "state": {"w": {"step": torch.tensor(1.0), "history": [torch.ones(1), [torch.ones(2), 3]]}, "v": {}},
            "param_groups": [{"lr": 0.1, "params": ["w"], "betas": (0.9, 0.99)}, {"lr": None, "params": []}],
        },
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    flat = FlatState.of(state)
    assert list(flat.keys) == list(planner.state_dict)
    assert flat.outline.paths == planner.mappings
    assert all(flat[key] is value for key, value in planner.state_dict.items())
    with pytest.raises(SaveFailed, match="duplicated"):
        FlatState.of({"a": {"b": {"c": 1}, "b.c": 2}})
