"""Reading into tensors that are there: whatever they are like, they get what was saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_resilience import reader as reader_module
from lightning_resilience.errors import CheckpointCorrupt
from lightning_resilience.manifest import shard_file
from lightning_resilience.reader import DIRECT, CheckpointReader
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
    original = reader_module._read_direct

    def counted(fd: int, into: list[object], path: Path) -> None:
        counts.append(len(into))
        original(fd, into, path)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "_read_direct", counted)
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
    assert direct == [1 if is_direct else 0]
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
    monkeypatch.setattr(reader_module, "_AT_ONCE", 1000)
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
    original = reader_module._read_direct

    def cut(fd: int, into: list[object], path: Path) -> None:
        with open(tmp_path / shard_file(0), "r+b") as file:
            file.truncate(math.ceil(saved.nbytes / 2))
        original(fd, into, path)  # type: ignore[arg-type]

    monkeypatch.setattr(reader_module, "_read_direct", cut)
    with pytest.raises(CheckpointCorrupt, match="in the middle of a tensor"):
        open_reader(tmp_path).read_into({"model.w": torch.zeros_like(saved)})
