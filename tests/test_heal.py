"""A checkpoint in the folders of several nodes: what one lacks is brought from the others, and nothing is guessed."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forks import run_forks
from lightning_resilience import inspection
from lightning_resilience.inspection import Found, Some
from lightning_resilience.places import Place, Source
from lightning_resilience.ranks import Ranks, attempt
from lightning_resilience.resume import find_last
from lightning_resilience.store import list_checkpoints
from lightning_resilience.tiers import LocalTier
from on_disk import flip, save, tree

RANK_0, RANK_1 = "__0_0.distcp", "__1_0.distcp"


def two_nodes(root: Path) -> tuple[str, str]:
    """Folders of two nodes with an older checkpoint, whole in both, and a newer one of which each has its own files;
    their names."""
    one, other = LocalTier(root / "0"), root / "1"
    older, newer = save(one, step=1), save(one, step=2)
    shutil.copytree(one.root, other)
    one.path(newer, RANK_1).unlink()
    (other / newer / RANK_0).unlink()
    return older, newer


def search(root: Path, needs: Callable[[Source], set[str]]) -> tuple[str, dict[str, str]]:
    """What the ranks of two nodes, one each, resume from, and what they skip."""
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), 2, timeout=30)
    tier = LocalTier(root / str(ranks.rank))
    found = find_last(ranks, [Place(tier, ranks.sharing(tier))], needs)
    assert found.source is not None
    ranks.close()
    dist.destroy_process_group()
    return found.source.name, {Path(where).name: why for where, why in found.skipped.items()}


def run(root: Path, *args: Any) -> list[Any]:
    return run_forks(search, root, *args, world_size=2, timeout=60)


def needs_all(source: Source) -> set[str]:
    return {RANK_0, RANK_1}


def loses_it(source: Source) -> set[str]:
    """Rank 1's file goes after it was found whole there and before it is sent."""
    if os.environ["RANK"] == "1":
        source.locate(RANK_1).unlink()
    return needs_all(source)


@pytest.mark.ranks
def test_what_a_folder_lacks_is_copied_from_the_other(tmp_path: Path) -> None:
    _, newer = two_nodes(tmp_path)
    assert run(tmp_path, needs_all) == [(newer, {})] * 2
    assert tree(tmp_path / "0") == tree(tmp_path / "1")


@pytest.mark.ranks
def test_file_that_is_gone_when_it_is_to_be_copied_takes_all_ranks_to_the_checkpoint_before_it(tmp_path: Path) -> None:
    older, newer = two_nodes(tmp_path)
    first, second = run(tmp_path, loses_it)
    assert first == second
    name, skipped = first
    assert name == older
    assert skipped == {newer: f"{RANK_1} cannot be read: No such file or directory"}


# -- many ranks, threads of this process ------------------------------------------------------------------------------


class Crowd:
    """Ranks that are threads, and count what they tell each other."""

    def __init__(self, size: int) -> None:
        self.size, self.told = size, 0
        self._box: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def gathered(self, rank: int, value: Any) -> list[Any]:
        content = pickle.dumps(value)
        self._box[rank] = pickle.loads(content)
        self._barrier.wait()
        answers = list(self._box)
        if rank == 0:
            self.told += sum(len(pickle.dumps(answer)) for answer in answers)
        self._barrier.wait()
        return answers


class OneOfMany:
    """What a resume asks of its ranks."""

    def __init__(self, crowd: Crowd, rank: int) -> None:
        self.crowd, self.rank, self.world_size = crowd, rank, crowd.size

    def gathered(self, compute: Callable[[], Any]) -> list[Any]:
        return self.crowd.gathered(self.rank, attempt(compute))


def look(root: Path, nodes: int, files: dict[str, bytes], of_node: Callable[[int], set[str]]) -> tuple[list[Any], int]:
    """What each of ``nodes``, of two ranks each, finds where it has only ``of_node`` its number; and what was told."""
    whole = LocalTier(root / "whole")
    name = save(whole, files=files)
    manifest = list_checkpoints(whole).committed[name]
    crowd = Crowd(2 * nodes)
    for node in range(nodes):
        folder = root / str(node) / name
        folder.mkdir(parents=True)
        for file in of_node(node):
            shutil.copy(whole.path(name, file), folder / file)

    def one(rank: int) -> Found:
        first = rank // 2 * 2
        place = Place(LocalTier(root / str(rank // 2)), (first, first + 1))
        source = Source(place.tier, name, manifest)
        return inspection.look(OneOfMany(crowd, rank), place, source, [{}] * crowd.size)  # type: ignore[arg-type]

    with ThreadPoolExecutor(crowd.size) as pool:
        return list(pool.map(one, range(crowd.size))), crowd.told


@pytest.mark.parametrize("has", ["its own", "all but one"])
def test_what_nodes_tell_of_their_files_does_not_grow_with_nodes_times_files(tmp_path: Path, has: str) -> None:
    def told(nodes: int) -> int:
        files = {f"__{rank}_0.distcp": b"%d" % rank for rank in range(8 * nodes)}

        def of_node(node: int) -> set[str]:
            own = {f"__{rank}_0.distcp" for rank in range(8 * node, 8 * node + 8)}
            return own if has == "its own" else set(files) - {f"__{8 * node}_0.distcp"}

        found, size = look(tmp_path / str(nodes), nodes, files, of_node)
        for rank, one in enumerate(found):
            assert one.lacking == set(files) - of_node(rank // 2)
            assert one.lost == {}
            assert not one.is_everywhere
            assert one.holding == found[0].holding
            assert all(file in of_node(holder // 2) for file, holder in one.holding.items())
        return size

    assert told(16) < 5 * told(4)  # 16 times as much if each told of all


def test_files_are_told_of_by_their_numbers_or_by_those_of_the_others() -> None:
    share = range(3, 30, 3)
    for chosen in (set(), {6}, {3, 6, 9, 27}, set(share) - {12}, set(share)):
        some = Some.of(chosen, share)
        assert set(some.out_of(share)) == chosen
        assert len(some.numbers) <= len(share) // 2


@pytest.mark.ranks
def test_file_that_nobody_has_whole_is_named_with_what_is_wrong_where_it_is(tmp_path: Path) -> None:
    _, newer = two_nodes(tmp_path)
    flip(tmp_path / "1" / newer / RANK_1)
    name, skipped = run(tmp_path, needs_all)[0]
    assert name != newer
    assert skipped == {newer: f"{RANK_1} has other content than was saved (digest differs)"}
