"""Reading into tensors that are there: whatever they are like, they get what was saved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_resilience import filling, shard_file
from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.filling import DIRECT, Span
from lightning_resilience.manifest import FileEntry, digest
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.stored import HEAD, Stored
from test_shards import write

LARGE = DIRECT // 4
TARGETS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "contiguous": (torch.empty_like, True),
    "part of another": (lambda saved: torch.empty(saved.numel() + 3)[3:].view(saved.shape), True),
    "transposed": (lambda saved: torch.empty(saved.shape[::-1]).t(), False),
    "every second column": (lambda saved: torch.empty(saved.shape[0], 2 * saved.shape[1])[:, ::2], False),
    "another dtype": (lambda saved: torch.empty(saved.shape, dtype=torch.float64), False),
    "parameter": (lambda saved: torch.nn.Parameter(torch.empty_like(saved)), True),
}


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors of each file were read into their own memory."""
    counts: list[int] = []
    original = filling.fill

    def counted(path: Path, spans: list[Span]) -> None:
        counts.append(len(spans))
        original(path, spans)

    monkeypatch.setattr(shard_file, "fill", counted)
    return counts


def open_reader(folder: Path) -> CheckpointReader:
    return CheckpointReader(lambda file: folder / file, plain=True)


@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_a_target_is_like_it_gets_what_was_saved(tmp_path: Path, direct: list[int], kind: str) -> None:
    make, is_direct = TARGETS[kind]
    saved = torch.randn(113, LARGE // 100)
    write(tmp_path, {"model": {"small": torch.ones(3), "large": saved}})
    targets = {"model.small": torch.zeros(3), "model.large": make(saved)}
    version = targets["model.large"]._version
    open_reader(tmp_path).read_into(targets)
    assert direct == [2 if is_direct else 1]
    assert torch.equal(targets["model.large"], saved.to(targets["model.large"].dtype))
    assert torch.equal(targets["model.small"], torch.ones(3))
    assert targets["model.large"]._version > version  # autograd would notice


def test_a_tensor_of_several_files_is_read_from_all_of_them(tmp_path: Path, direct: list[int]) -> None:
    saved = torch.randn(7 * 3, LARGE)
    write(tmp_path, *[{"model": {"w": saved}}] * 3, identical=("model.w",))
    target = {"model.w": torch.zeros_like(saved)}
    open_reader(tmp_path).read_into(target)
    assert direct == [1, 1, 1]
    assert torch.equal(target["model.w"], saved)


def test_long_reads_are_cut_and_come_together(
    tmp_path: Path, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "AT_ONCE", 1000)
    saved = {name: torch.randn(LARGE + odd).to(torch.bfloat16) for odd, name in enumerate("abc", LARGE + 1)}
    write(tmp_path, {"model": saved})
    targets = {f"model.{name}": torch.zeros_like(value) for name, value in saved.items()}
    open_reader(tmp_path).read_into(targets)
    assert direct == [3]
    assert all(torch.equal(targets[f"model.{name}"], value) for name, value in saved.items())


def test_of_targets_that_share_memory_the_last_of_the_file_counts(tmp_path: Path, direct: list[int]) -> None:
    saved = {name: torch.full((LARGE * 40,), float(number)) for number, name in enumerate("abcd")}
    write(tmp_path, {"model": saved})
    shared = torch.empty(LARGE * 40)
    open_reader(tmp_path).read_into({f"model.{name}": shared for name in saved})
    assert direct == [4]
    assert torch.equal(shared, saved["d"])


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torch.randn(4 * LARGE)
    write(tmp_path, {"model": {"w": saved}})
    original = filling.fill

    def cut(path: Path, spans: list[Span]) -> None:
        with open(path, "r+b") as file:
            file.truncate(math.ceil(saved.nbytes / 2))
        original(path, spans)

    monkeypatch.setattr(shard_file, "fill", cut)
    with pytest.raises(CheckpointCorrupt, match="in the middle of a tensor"):
        open_reader(tmp_path).read_into({"model.w": torch.zeros_like(saved)})


# -- digested on the way ----------------------------------------------------------------------------------------------


def unchecked(folder: Path, file: str = "__0_0.distcp") -> CheckpointReader:
    """A reader that knows what the file had when it was written, and not whether it still has."""
    content = (folder / file).read_bytes()
    entry = FileEntry(file, len(content), digest(content))
    return CheckpointReader(lambda name: folder / name, plain=True, unchecked={folder / file: entry})


def span_at(offset: int, target: torch.Tensor) -> Span:
    """What takes bytes of a file without heads."""
    stored = Stored(Path("file"), offset, target.nbytes, target.nbytes)
    stored.begin = offset
    return Span(target, stored)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were filled while their file was digested, for each of the files."""
    counts: list[int] = []
    original = filling.fill_and_digest

    def counted(path: Path, spans: list[Span]) -> str:
        counts.append(len(spans))
        return original(path, spans)

    monkeypatch.setattr(shard_file, "fill_and_digest", counted)
    return counts


@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_digested_on_the_way_is_read_once_whatever_a_target_is_like(
    tmp_path: Path, direct: list[int], once: list[int], kind: str
) -> None:
    make, takes_bytes = TARGETS[kind]
    saved = torch.randn(113, LARGE // 100)
    write(tmp_path, {"model": {"small": torch.ones(3), "large": saved, "other": torch.arange(5)}})
    targets = {"model.small": torch.zeros(3), "model.large": make(saved)}  # the other is only digested
    version = targets["model.large"]._version
    reader = unchecked(tmp_path)
    reader.read_into(targets)
    assert once == [2 if takes_bytes else 1]
    assert direct == []
    assert torch.equal(targets["model.large"], saved.to(targets["model.large"].dtype))
    assert torch.equal(targets["model.small"], torch.ones(3))
    assert targets["model.large"]._version > version
    reader.read_into(targets)
    assert len(once) == 1  # it is known now


@pytest.mark.parametrize("block", [1, 64, 1000, 1 << 20])
def test_blocks_of_any_size_fill_tensors_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(filling, "BLOCK", block)
    monkeypatch.setattr(filling, "DIRECT", 300)
    content = bytes(torch.randint(0, 256, (5000,), dtype=torch.uint8).numpy())
    (tmp_path / "file").write_bytes(content)
    for spans in (
        [(0, 5000)],
        [(4999, 1), (0, 1)],
        [(10, 400), (410, 20), (430, 299), (1000, 300), (1300, 3700)],
        [(start, 7) for start in range(0, 4990, 8)],
        [],
    ):
        targets = [span_at(offset, torch.zeros(size, dtype=torch.uint8)) for offset, size in spans]
        assert filling.fill_and_digest(tmp_path / "file", targets) == digest(content)
        for span in targets:
            assert bytes(span.target.numpy()) == content[span.offset :][: span.size]


@pytest.mark.parametrize("block", [HEAD, 5000, 1 << 20])
@pytest.mark.parametrize("direct_from", [300, 10_000, 1 << 30])
def test_where_tensors_begin_is_learnt_on_the_way_wherever_a_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, direct_from: int
) -> None:
    monkeypatch.setattr(filling, "BLOCK", block)
    monkeypatch.setattr(filling, "DIRECT", direct_from)
    sizes = [0, 1, 50, 2500, 3, 900, 8, 4096, 1, 7000, 12, 2]
    saved = {f"{number:02}": torch.randn(size) for number, size in enumerate(sizes)}
    write(tmp_path, {"model": {**saved, "matrix": torch.arange(6000.0).view(60, 100)}})
    targets = {f"model.{name}": torch.zeros_like(value) for name, value in saved.items()}
    reader = unchecked(tmp_path)
    apart: list[int] = []
    monkeypatch.setattr(filling, "locate", lambda *where: apart.append(len(where)))
    reader.read_into(targets)  # the matrix is passed over
    assert apart == []
    assert all(torch.equal(targets[f"model.{name}"], value) for name, value in saved.items())


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("mark", [b"PK\x03\x04", b"/data/0"], ids=["a ZIP header", "the name of a record"])
def test_something_else_where_a_tensor_should_be_is_an_error(tmp_path: Path, checked: bool, mark: bytes) -> None:
    saved = torch.randn(4 * LARGE)
    write(tmp_path, {"model": {"w": saved}})
    path = tmp_path / "__0_0.distcp"
    reader = open_reader(tmp_path) if checked else unchecked(tmp_path)
    path.write_bytes(path.read_bytes().replace(mark, bytes(len(mark))))
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp.*no tensor at byte"):
        reader.read_into({"model.w": torch.zeros_like(saved)})


@pytest.mark.parametrize("fill", [filling.fill_and_digest, filling.fill])
def test_memory_of_a_device_is_filled_from_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Callable[[Path, list[Span]], object]
) -> None:
    """With host memory that passes for a device's."""
    monkeypatch.setattr(filling, "BLOCK", 1000)
    monkeypatch.setattr(filling, "AT_ONCE", 999)
    saved = torch.randn(70_000).to(torch.bfloat16)
    (tmp_path / "file").write_bytes(b"xyz" + bytes(saved.view(torch.uint8).numpy()))
    span = span_at(3, torch.zeros(70_000, dtype=torch.bfloat16))
    assert span.is_read_in_place
    span.is_in_host_memory = False
    assert not span.is_read_in_place
    fill(tmp_path / "file", [span])
    assert torch.equal(span.target, saved)


def test_targets_of_the_same_bytes_all_get_them(tmp_path: Path) -> None:
    saved = torch.randn(LARGE)
    write(tmp_path, {"model": {"w": saved}})
    one, two = torch.zeros(LARGE), torch.zeros(LARGE)
    reader = unchecked(tmp_path)
    reader.fetch([reader.request({"model.w": one}), reader.request({"model.w": two})])
    assert torch.equal(one, saved)
    assert torch.equal(two, saved)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("a bit", "has other content"),
        ("an end that is missing", "has other content"),
        ("more of it", "has other content"),
        ("no file", "cannot be read: No such file"),
        ("a folder", "cannot be read: Is a directory"),
    ],
)
def test_a_damaged_file_is_named_when_it_is_read(tmp_path: Path, damage: str, says: str) -> None:
    write(tmp_path, {"model": {"w": torch.randn(4 * LARGE)}})
    path, reader = tmp_path / "__0_0.distcp", unchecked(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "a bit":
        path.write_bytes(content)
    elif damage == "more of it":
        path.write_bytes(path.read_bytes() + b"0")
    elif damage == "an end that is missing":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    with pytest.raises(CheckpointCorrupt, match=rf"__0_0\.distcp.*{says}") as caught:
        reader.read_into({"model.w": torch.zeros(4 * LARGE)})
    assert len(caught.value.problems) == 1


def test_what_was_fetched_ahead_is_what_a_tree_gets_whatever_it_is_like(tmp_path: Path, once: list[int]) -> None:
    moments = {"a": torch.randn(LARGE), "b": torch.randn(3, 5), "left out": torch.randn(7)}
    write(tmp_path, {"model": {"w": torch.ones(4)}, "optimizer_0": {"state": moments, "lr": 0.5}})
    reader, weights = unchecked(tmp_path), torch.zeros(4)
    ahead = reader.fetch_ahead(re.compile(r"optimizer_\d+"))
    reader.fetch([reader.request({"model.w": weights}), ahead])
    (tmp_path / "__0_0.distcp").rename(tmp_path / "gone")

    def allocate(path: tuple[str | int, ...], entry: Any) -> Tensor | None:
        transposed = torch.zeros(5, 3).t()
        return {"a": torch.zeros(LARGE), "b": transposed}.get(str(path[-1]))

    tree = reader.tree("optimizer_0", allocate)
    reader.fetch([tree.request])
    (tmp_path / "gone").rename(tmp_path / "__0_0.distcp")  # for the object
    built = tree.build()
    assert once == [4]
    assert built["lr"] == 0.5
    assert set(built["state"]) == {"a", "b"}
    assert all(torch.equal(value, moments[name]) for name, value in built["state"].items())
    assert built["state"]["b"].stride() == (1, 3)
