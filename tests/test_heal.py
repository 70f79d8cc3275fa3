"""A checkpoint in the folders of several nodes: what one lacks is brought from the others, and nothing is guessed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forks import run_forks
from lightning_resilience.places import Place, Source
from lightning_resilience.ranks import Ranks
from lightning_resilience.resume import find_last
from lightning_resilience.tiers import LocalTier
from on_disk import save, tree

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
