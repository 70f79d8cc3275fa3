"""Checkpoints in a real folder: what exists, what is noticed, and what a crash at any moment leaves."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import store, tiers
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    CheckpointUncommitted,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.manifest import MANIFEST, FileEntry, digest
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.tiers import BLOCK, LocalTier, local_path
from on_disk import FILES, begin, crash_at, dies_before, flip, listening, manifest, save, stock_folder, tree


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "run")


def check_invariant(tier: LocalTier) -> None:
    """Whatever happened: something can be restored, and whatever counts as a checkpoint is whole."""
    committed = store.list_checkpoints(tier).committed
    assert committed
    for name, found in committed.items():
        assert store.verify(tier, name, found) == []


# -- listing ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_lists_nothing(tmp_path: Path) -> None:
    listing = store.list_checkpoints(LocalTier(tmp_path / "nowhere"))
    assert (listing.committed, listing.unusable) == ({}, {})


def test_a_listing_is_newest_first_by_save_not_by_name_step_or_time(tier: LocalTier) -> None:
    save(tier, "a.ckpt", step=900, sequence=1)
    save(tier, "c.ckpt", step=200, sequence=2)
    save(tier, "b.ckpt", step=300, sequence=3)
    os.utime(tier.path("a.ckpt"), (2e9, 2e9))
    assert store.list_checkpoints(tier).newest_first() == ["b.ckpt", "c.ckpt", "a.ckpt"]


def test_a_listing_says_why_each_other_folder_is_unusable(tier: LocalTier) -> None:
    whole = save(tier, step=1)
    flip(tier.path(save(tier, step=2), MANIFEST), 30)
    tier.path(save(tier, step=3), MANIFEST).unlink()
    save(tier, step=4)
    later = tier.path("step=4.ckpt", MANIFEST)
    later.write_bytes(later.read_bytes().replace(b'"format":1', b'"format":9'))
    begin(tier, "step=5.ckpt.partial-77")
    tier.begin("step=6.ckpt.removed-77")
    (tier.root / "notes").mkdir()
    (tier.root / "backup.ckpt.d").mkdir()
    (tier.root / "stock.ckpt").write_bytes(b"a file")
    (tier.root / "last.ckpt").symlink_to(whole)
    listing = store.list_checkpoints(tier)
    assert list(listing.committed) == [whole]
    assert {name: type(error) for name, error in listing.unusable.items()} == {
        "step=2.ckpt": CheckpointCorrupt,
        "step=3.ckpt": CheckpointUncommitted,
        "step=4.ckpt": CheckpointIncompatible,
        "step=5.ckpt.partial-77": CheckpointUncommitted,
        "step=6.ckpt.removed-77": CheckpointUncommitted,
    }
    assert "saved" in str(listing.unusable["step=5.ckpt.partial-77"])
    assert "removed" in str(listing.unusable["step=6.ckpt.removed-77"])


def test_a_checkpoint_that_goes_while_it_is_listed_is_not_reported(tier: LocalTier, monkeypatch) -> None:
    stays = save(tier, step=1)
    monkeypatch.setattr(tier, "names", lambda: [stays, "gone.ckpt"])
    listing = store.list_checkpoints(tier)
    assert (list(listing.committed), listing.unusable) == ([stays], {})


# -- opening an explicit path -----------------------------------------------------------------------------------------


def test_an_explicit_path_opens_also_through_a_link(tier: LocalTier) -> None:
    name = save(tier, step=7)
    tier.point("last.ckpt", name)
    for path in (tier.path(name), tier.path("last.ckpt")):
        found_tier, found_name, found = store.open_checkpoint(path)
        assert (found_tier.root, found_name, found.step) == (tier.root, name, 7)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("step=9.ckpt", CheckpointNotFound),
        ("empty.ckpt", CheckpointUncommitted),
        ("step=3.ckpt.partial-1", CheckpointUncommitted),
        ("step=3.ckpt.removed-1", CheckpointUncommitted),
    ],
)
def test_an_explicit_path_that_is_no_checkpoint_lists_what_is_there(tier: LocalTier, asked: str, error: type) -> None:
    save(tier, step=1)
    save(tier, step=2)
    tier.begin("empty.ckpt")
    save(tier, "step=3.ckpt.partial-1")
    with pytest.raises(error, match=asked) as caught:
        store.open_checkpoint(tier.path(asked))
    assert caught.value.hint == f"'{tier.root}' has: step=2.ckpt, step=1.ckpt."


def test_an_explicit_path_in_an_empty_folder_says_that_it_is_empty(tier: LocalTier) -> None:
    with pytest.raises(CheckpointNotFound, match="There are no checkpoints in"):
        store.open_checkpoint(tier.path("a.ckpt"))


def test_a_long_list_of_what_is_there_is_cut(tier: LocalTier) -> None:
    for step in range(1, 14):
        save(tier, step=step, files={"a.pt": b"a"})
    assert store.available(tier).endswith("step=4.ckpt and 3 more.")


# -- verifying --------------------------------------------------------------------------------------------------------


def damage_nothing(path: Path) -> None:
    return


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said", "size_tells"),
    [
        (damage_nothing, None, False),
        (Path.unlink, "__1_0.distcp is missing", True),
        (truncate, "__1_0.distcp is truncated: 1,189 bytes of 1,190", True),
        (lengthen, "__1_0.distcp is longer: 1,191 bytes of 1,190", True),
        (flip, "__1_0.distcp has other content than was saved (digest differs)", False),
    ],
)
def test_damage_to_a_file_is_named(
    tier: LocalTier, damage: Callable[[Path], None], said: str | None, size_tells: bool
) -> None:
    name = save(tier)
    found = store.read_manifest(tier, name)
    damage(tier.path(name, "__1_0.distcp"))
    assert store.verify(tier, name, found) == ([said] if said else [])
    assert store.verify(tier, name, found, content=False) == ([said] if size_tells else [])


def test_a_folder_in_place_of_a_file_is_a_problem_not_a_crash(tier: LocalTier) -> None:
    name = save(tier)
    replace_by_folder(tier.path(name, "meta.pt"))
    (problem,) = store.verify(tier, name, store.read_manifest(tier, name))
    assert problem.startswith("meta.pt ")


def test_a_file_that_cannot_be_read_is_a_problem_not_a_crash(tier: LocalTier, monkeypatch) -> None:
    name = save(tier)

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tier, "size", refuse)
    entry = store.read_manifest(tier, name).files[0]
    assert store.content_problem(tier, name, entry) == "__0_0.distcp cannot be read: Permission denied"


def test_every_flipped_byte_of_every_file_is_noticed(tier: LocalTier) -> None:
    name = save(tier, files={"a.distcp": b"payload", "meta.pt": b"m"})
    found = store.read_manifest(tier, name)
    for file, data in (("a.distcp", b"payload"), ("meta.pt", b"m")):
        for position in range(len(data)):
            flip(tier.path(name, file), position)
            assert len(store.verify(tier, name, found)) == 1
            flip(tier.path(name, file), position)
    assert store.verify(tier, name, found) == []


def test_bytes_that_another_checkpoint_holds_are_looked_for_there(tier: LocalTier) -> None:
    base = save(tier, step=1)
    shard = store.read_manifest(tier, base).files[0]
    begin(tier, "step=2.ckpt.partial-1", files={})
    second = manifest(2, files=(replace(shard, at=base),))
    store.commit(tier, "step=2.ckpt.partial-1", "step=2.ckpt", second)
    assert store.verify(tier, "step=2.ckpt", second) == []
    flip(tier.path(base, shard.path))
    assert len(store.verify(tier, "step=2.ckpt", second)) == 1


# -- the tier ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, tiers.BLOCK - 1, tiers.BLOCK, tiers.BLOCK + 1])
def test_a_written_file_is_whole_and_its_entry_true(tier: LocalTier, size: int) -> None:
    data = os.urandom(size)
    tier.begin("a.ckpt.partial-1")
    entry = tier.write("a.ckpt.partial-1", "a.pt", data, rank=3)
    assert entry == FileEntry("a.pt", size, digest(data), rank=3)
    assert tier.read("a.ckpt.partial-1", "a.pt") == data
    assert tier.size("a.ckpt.partial-1", "a.pt") == size
    assert tier.digest("a.ckpt.partial-1", "a.pt") == digest(data)


def test_a_short_write_of_the_kernel_is_continued(tier: LocalTier, monkeypatch) -> None:
    write = os.write
    monkeypatch.setattr(tiers.os, "write", lambda fd, block: write(fd, block[:7]))
    tier.begin("a.ckpt.partial-1")
    tier.write("a.ckpt.partial-1", "a.pt", b"0123456789" * 9)
    assert tier.read("a.ckpt.partial-1", "a.pt") == b"0123456789" * 9


def test_a_file_is_never_written_twice(tier: LocalTier) -> None:
    tier.begin("a.ckpt.partial-1")
    tier.write("a.ckpt.partial-1", "a.pt", b"first")
    with pytest.raises(FileExistsError):
        tier.write("a.ckpt.partial-1", "a.pt", b"second")
    assert tier.read("a.ckpt.partial-1", "a.pt") == b"first"


def test_a_file_is_synced_before_it_is_reported_written(tier: LocalTier, monkeypatch) -> None:
    """Each file, the folder that lists it, and the run folder after the rename: in this order, or power loss shows."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).relative_to(tier.root)}")
        fsync(fd)

    def spy_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(tiers.os, "fsync", spy_fsync)
    monkeypatch.setattr(tiers.os, "rename", spy_rename)
    save(tier, "a.ckpt", files={"a.pt": b"a"})
    partial = "a.ckpt.partial-1234"
    assert events == [f"sync {partial}/a.pt", f"sync {partial}/{MANIFEST}", f"sync {partial}", "rename", "sync ."]


def test_publish_refuses_to_overwrite_and_leaves_both(tier: LocalTier) -> None:
    save(tier, "a.ckpt", step=1)
    with pytest.raises(FileExistsError, match="never written again"):
        save(tier, "a.ckpt", step=2)
    assert store.read_manifest(tier, "a.ckpt").step == 1
    assert store.read_manifest(tier, "a.ckpt.partial-1234").step == 2


def test_publish_refuses_a_name_that_a_dangling_link_holds(tier: LocalTier) -> None:
    begin(tier, "a.ckpt.partial-1")
    tier.path("a.ckpt").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        tier.publish("a.ckpt.partial-1", "a.ckpt")


def test_publish_with_replace_puts_the_new_one_in_place_and_frees_the_old(tier: LocalTier) -> None:
    save(tier, "a.ckpt", step=1)
    begun = begin(tier, "a.ckpt.partial-9", step=2)
    store.commit(tier, "a.ckpt.partial-9", "a.ckpt", begun, replace=True)
    assert store.read_manifest(tier, "a.ckpt").step == 2
    assert os.listdir(tier.root) == ["a.ckpt"]


def test_the_bytes_of_the_old_one_stay_until_the_new_one_is_in_place(tier: LocalTier) -> None:
    save(tier, "a.ckpt", step=1)
    begun = begin(tier, "a.ckpt.partial-9", step=2)
    seen: list[str] = []

    def look(point: str) -> None:
        steps = {store.read_manifest(tier, path.parent.name).step for path in tier.root.glob(f"*/{MANIFEST}")}
        if point in ("commit.manifest", "commit.renamed"):
            assert steps == {1, 2}
            seen.append(point)

    with listening(look):
        store.commit(tier, "a.ckpt.partial-9", "a.ckpt", begun, replace=True)
    assert seen == ["commit.manifest", "commit.renamed"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_replace_gives_way_for_what_stock_lightning_left_there(tier: LocalTier, what: str) -> None:
    tier.root.mkdir()
    if what == "file":
        tier.path("a.ckpt").write_bytes(b"stock")
    else:
        stock_folder(tier.root, "a.ckpt")
    store.commit(tier, "a.ckpt.partial-9", "a.ckpt", begin(tier, "a.ckpt.partial-9"), replace=True)
    check_invariant(tier)
    assert os.listdir(tier.root) == ["a.ckpt"]


@pytest.mark.parametrize("how", ["replace", "remove", "discard"])
def test_taking_out_a_link_leaves_the_checkpoint_it_points_to(tier: LocalTier, how: str) -> None:
    name = save(tier, step=1)
    before = tree(tier.path(name))
    tier.point("last.ckpt", name)
    if how == "replace":
        store.commit(tier, "last.ckpt.partial-1", "last.ckpt", begin(tier, "last.ckpt.partial-1"), replace=True)
    else:
        getattr(tier, how)("last.ckpt")
    assert not tier.path("last.ckpt").is_symlink()
    assert tree(tier.path(name)) == before


def test_removal_takes_the_manifest_before_any_other_file(tier: LocalTier, monkeypatch) -> None:
    name = save(tier)
    gone: list[str] = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **kw: (gone.append(os.path.basename(path)), unlink(path, **kw)))
    tier.remove(name)
    assert gone[0] == MANIFEST
    assert sorted(gone) == sorted([MANIFEST, *FILES])
    assert os.listdir(tier.root) == []


def test_removing_one_leaves_the_hard_links_of_another_whole(tier: LocalTier) -> None:
    first = save(tier, step=1, files={"a.pt": b"shared"})
    entry = store.read_manifest(tier, first).files[0]
    tier.begin("step=2.ckpt.partial-1")
    os.link(tier.path(first, "a.pt"), tier.path("step=2.ckpt.partial-1", "a.pt"))
    store.commit(tier, "step=2.ckpt.partial-1", "step=2.ckpt", manifest(2, files=(entry,)))
    tier.remove(first)
    check_invariant(tier)


def test_discarding_what_is_already_gone_is_fine(tier: LocalTier) -> None:
    tier.root.mkdir()
    tier.discard("a.ckpt.removed-1")
    assert os.listdir(tier.root) == []


def test_the_last_link_moves_in_one_step_and_never_replaces_a_folder(tier: LocalTier) -> None:
    first, second = save(tier, step=1), save(tier, step=2)
    tier.point("last.ckpt", first)
    tier.point("last.ckpt", second)
    assert os.readlink(tier.path("last.ckpt")) == second
    assert sorted(os.listdir(tier.root)) == ["last.ckpt", first, second]
    with pytest.raises(FileExistsError):
        tier.point(first, second)
    check_invariant(tier)


def test_a_name_that_is_taken_gets_a_version(tier: LocalTier) -> None:
    assert store.free_name("a.ckpt", tier.exists) == "a.ckpt"
    save(tier, "a.ckpt")
    assert store.free_name("a.ckpt", tier.exists) == "a-v1.ckpt"
    tier.path("a-v1.ckpt").symlink_to("nowhere")
    assert store.free_name("a.ckpt", tier.exists) == "a-v2.ckpt"


def test_a_writable_folder_is_made_and_left_empty(tier: LocalTier) -> None:
    tier.check_writable()
    assert os.listdir(tier.root) == []


def test_a_file_in_place_of_the_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    for root in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(TierUnavailable, match="it is a file") as caught:
            LocalTier(root).check_writable()
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(("number", "error"), [(13, TierDenied), (28, TierUnavailable), (30, TierUnavailable)])
def test_a_folder_that_cannot_be_written_is_told_by_cause(
    tier: LocalTier, monkeypatch, number: int, error: type
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(error, match=os.strerror(number)):
        tier.check_writable()


@pytest.mark.parametrize("given", ["/a/b", "file:///a/b", Path("/a/b")])
def test_paths_and_file_urls_are_local(given: str | Path) -> None:
    assert local_path(given) == Path("/a/b")


def test_another_url_is_not_local_and_says_so() -> None:
    with pytest.raises(CheckpointNotFound, match="s3://bucket/run7"):
        local_path("s3://bucket/run7")


def test_file_that_arrives_whole_takes_its_place(tier: LocalTier) -> None:
    name = save(tier)
    entry = store.read_manifest(tier, name).files[1]
    before = tree(tier.root)
    flip(tier.path(name, entry.path))
    with tier.arriving(name, entry, "another node") as sink:
        sink.write_bytes(FILES[entry.path])
        assert tier.read(name, entry.path) != FILES[entry.path]
    assert tree(tier.root) == before


@pytest.mark.parametrize("came", [b"", b"else", bytes(len(FILES["__1_0.distcp"]))])
def test_file_that_does_not_arrive_whole_leaves_its_place_as_it_was(tier: LocalTier, came: bytes) -> None:
    name = save(tier)
    entry = store.read_manifest(tier, name).files[1]
    flip(tier.path(name, entry.path))
    before = tree(tier.root)
    with (
        pytest.raises(CheckpointCorrupt, match=r"__1_0.distcp from s3://bucket has other content"),
        tier.arriving(name, entry, "s3://bucket") as sink,
    ):
        sink.write_bytes(came)
    assert tree(tier.root) == before


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (ConnectionResetError("it is gone"), ConnectionResetError, "it is gone"),
        (
            OSError(errno.ENOSPC, "No space left"),
            TierUnavailable,
            r"__1_0.distcp \([\d,]+ bytes\) from .* finds no place",
        ),
        (OSError(errno.EROFS, "Read-only"), TierUnavailable, "finds no place"),
    ],
)
def test_file_whose_way_here_breaks_off_leaves_its_place_as_it_was(
    tier: LocalTier, error: OSError, raised: type[OSError], says: str
) -> None:
    name = save(tier)
    entry = store.read_manifest(tier, name).files[1]
    before = tree(tier.root)

    def breaks_off(sink: Path) -> None:
        sink.write_bytes(FILES[entry.path][:10])
        raise error

    with pytest.raises(raised, match=says), tier.arriving(name, entry, "another node") as sink:
        breaks_off(sink)
    assert tree(tier.root) == before


# -- a crash at any moment --------------------------------------------------------------------------------------------


def commit_second(tier: LocalTier) -> None:
    partial = "step=2.ckpt.partial-9"
    store.commit(tier, partial, "step=2.ckpt", begin(tier, partial, step=2))


def commit_over_first(tier: LocalTier) -> None:
    partial = "step=1.ckpt.partial-9"
    store.commit(tier, partial, "step=1.ckpt", begin(tier, partial, step=2), replace=True)


def retain_newest(tier: LocalTier) -> None:
    save(tier, step=2)
    store.retain(tier, Keep(last=1))


@pytest.mark.parametrize(
    ("action", "point", "steps"),
    [
        (commit_second, "persist.file", {1}),
        (commit_second, "persist.mid-file", {1}),
        (commit_second, "commit.begin", {1}),
        (commit_second, "commit.manifest", {1, 2}),
        (commit_second, "commit.renamed", {1, 2}),
        (commit_second, "commit.end", {1, 2}),
        (commit_over_first, "persist.file", {1}),
        (commit_over_first, "persist.mid-file", {1}),
        (commit_over_first, "commit.begin", {1}),
        (commit_over_first, "commit.manifest", {1}),  # never published, and its name is taken
        (commit_over_first, "commit.renamed", {2}),
        (commit_over_first, "commit.end", {2}),
        (retain_newest, "forget.begin", {1, 2}),
        (retain_newest, "forget.renamed", {2}),
        (retain_newest, "forget.end", {2}),
    ],
)
def test_a_crash_at_a_point_leaves_a_checkpoint_and_nothing_half(
    tier: LocalTier, action: Callable[[LocalTier], None], point: str, steps: set[int]
) -> None:
    save(tier, step=1)
    with crash_at(point):
        action(tier)
    check_invariant(tier)  # what a reader sees that comes before the sweep
    store.sweep(tier)
    check_invariant(tier)
    assert {found.step for found in store.list_checkpoints(tier).committed.values()} == steps
    assert tier.leftovers() == []
    assert store.sweep(tier) == []


@pytest.mark.parametrize("action", [commit_second, commit_over_first, retain_newest])
def test_a_crash_before_any_change_of_the_file_system_is_mended_by_a_sweep(
    tmp_path: Path, monkeypatch, action: Callable[[LocalTier], None]
) -> None:
    k = 0
    while True:
        tier = LocalTier(tmp_path / f"run{k}")
        save(tier, step=1)
        died = dies_before(k, lambda tier=tier: action(tier), monkeypatch)
        store.sweep(tier)
        check_invariant(tier)
        assert tier.leftovers() == []
        if not died:
            break
        k += 1
    assert k > 10


def test_a_sweep_that_dies_is_finished_by_the_next(tmp_path: Path, monkeypatch) -> None:
    k = 0
    while True:
        tier = LocalTier(tmp_path / f"run{k}")
        save(tier, step=1)
        begin(tier, "step=2.ckpt.partial-1")
        save(tier, "step=3.ckpt.partial-1", step=3)
        tier.path(save(tier, step=4)).rename(tier.path("step=4.ckpt.removed-1"))
        died = dies_before(k, lambda tier=tier: store.sweep(tier), monkeypatch)
        check_invariant(tier)
        store.sweep(tier)
        check_invariant(tier)
        assert sorted(os.listdir(tier.root)) == ["step=1.ckpt", "step=3.ckpt"]
        if not died:
            break
        k += 1
    assert k > 8


# -- sweep ------------------------------------------------------------------------------------------------------------


def test_a_sweep_publishes_what_is_whole_deletes_the_rest_and_says_what_it_did(tier: LocalTier) -> None:
    save(tier, "whole.ckpt.partial-1", step=1)
    begin(tier, "early.ckpt.partial-1")
    flip(tier.path(save(tier, "rotten.ckpt.partial-1"), "meta.pt"))
    flip(tier.path(save(tier, "torn.ckpt.partial-1"), MANIFEST), 9)
    save(tier, "old.ckpt.removed-1")
    save(tier, "twice.ckpt.partial-1.removed-1")
    assert sorted(store.sweep(tier)) == [
        "deleted early.ckpt.partial-1: its save never finished",
        "deleted old.ckpt.removed-1: its removal had begun",
        "deleted rotten.ckpt.partial-1: its save never finished",
        "deleted torn.ckpt.partial-1: its save never finished",
        "deleted twice.ckpt.partial-1.removed-1: its removal had begun",
        "published whole.ckpt: it was whole but for its rename",
    ]
    assert os.listdir(tier.root) == ["whole.ckpt"]
    check_invariant(tier)


def test_a_whole_partial_never_overwrites_a_published_one(tier: LocalTier) -> None:
    save(tier, "a.ckpt", step=1)
    save(tier, "a.ckpt.partial-9", step=2)
    store.sweep(tier)
    assert store.read_manifest(tier, "a.ckpt").step == 1
    assert os.listdir(tier.root) == ["a.ckpt"]


def test_a_sweep_touches_nothing_that_is_not_a_leftover(tier: LocalTier, tmp_path: Path) -> None:
    save(tier, step=1)
    stock_folder(tier.root)
    tier.path(save(tier, step=2), MANIFEST).unlink()
    (tier.root / "file.ckpt").write_bytes(b"stock")
    (tier.root / "file.ckpt.partial-1").write_bytes(b"somebody's")
    (tier.root / "notes.partial-1").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"1")
    (tier.root / "link.ckpt.partial-1").symlink_to(tmp_path / "elsewhere")
    (tier.root / "link.ckpt.removed-1").symlink_to("step=1.ckpt")
    before, names = tree(tmp_path), sorted(os.listdir(tier.root))
    assert store.sweep(tier) == []
    assert (tree(tmp_path), sorted(os.listdir(tier.root))) == (before, names)


def test_a_link_inside_a_leftover_goes_without_what_it_points_to(tier: LocalTier, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_bytes(b"1")
    begin(tier, "a.ckpt.partial-1")
    tier.path("a.ckpt.partial-1", "link").symlink_to(tmp_path / "data")
    store.sweep(tier)
    assert tree(tmp_path) == {"data/precious": b"1"}


def test_a_sweep_deletes_what_a_killed_repair_left_and_not_what_one_is_at(tier: LocalTier) -> None:
    name = save(tier)
    old, new = (tier.path(name, f".meta.pt.fetched-{token}") for token in ("0123456789ab", "ba9876543210"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    assert store.sweep(tier) == ["deleted 1 files that were being fetched"]
    assert not old.exists()
    assert new.exists()


def test_a_sweep_of_nothing_does_nothing(tier: LocalTier) -> None:
    assert store.sweep(tier) == []
    assert not tier.root.exists()


@pytest.mark.parametrize(
    ("change", "stock"),
    [
        (lambda folder: None, True),
        (lambda folder: (folder / "rank_00000.pt").write_bytes(b""), False),
        (lambda folder: (folder / MANIFEST).write_bytes(b""), False),
        (lambda folder: (folder / ".metadata").unlink(), False),
        (lambda folder: (folder / "meta.pt").unlink(), False),
    ],
)
def test_a_stock_folder_is_told_from_ours_without_its_manifest(tmp_path: Path, change, stock: bool) -> None:
    folder = stock_folder(tmp_path)
    change(folder)
    assert store.is_stock_folder(folder) is stock


# -- retain -----------------------------------------------------------------------------------------------------------


def steps(tier: LocalTier) -> list[int]:
    return sorted(found.step for found in store.list_checkpoints(tier).committed.values())


def test_retention_removes_what_its_rule_gives_up_and_returns_why(tier: LocalTier) -> None:
    for step, loss in enumerate((0.1, 0.9, 0.5, 0.7), start=1):
        save(tier, step=step, metrics={"loss": loss})
    removed = store.retain(tier, Keep(last=1, top_k=1), Ranking("loss"), in_use={"step=2.ckpt"})
    assert [(verdict.name, verdict.reasons) for verdict in removed] == [
        ("step=3.ckpt", ("not among the newest 1 nor among the 1 best",))
    ]
    assert steps(tier) == [1, 2, 4]
    assert tier.leftovers() == []


def test_retention_keeps_what_another_manifest_refers_to(tier: LocalTier) -> None:
    base = save(tier, step=1)
    shard = store.read_manifest(tier, base).files[0]
    save(tier, step=2)
    tier.begin("step=3.ckpt.partial-1")
    store.commit(tier, "step=3.ckpt.partial-1", "step=3.ckpt", manifest(3, files=(replace(shard, at=base),)))
    store.retain(tier, Keep(last=1))
    assert steps(tier) == [1, 3]
    check_invariant(tier)


def test_retention_does_not_count_or_touch_what_is_not_committed(tier: LocalTier) -> None:
    save(tier, step=1)
    save(tier, step=2)
    stock_folder(tier.root)
    flip(tier.path(save(tier, step=9), MANIFEST), 20)
    begin(tier, "step=8.ckpt.partial-1")
    store.retain(tier, Keep(last=2))
    assert sorted(os.listdir(tier.root)) == [
        "step=1.ckpt",
        "step=2.ckpt",
        "step=8.ckpt.partial-1",
        "step=9.ckpt",
        "stock.ckpt",
    ]


def test_a_removal_that_fails_is_reported_and_tried_again(tier: LocalTier, monkeypatch, caplog) -> None:
    for step in (1, 2, 3):
        save(tier, step=step)
    remove = tier.remove

    def stubborn(name: str) -> None:
        if name == "step=2.ckpt":
            raise PermissionError(13, "Permission denied")
        remove(name)

    with monkeypatch.context() as patch:
        patch.setattr(tier, "remove", stubborn)
        assert [verdict.name for verdict in store.retain(tier, Keep(last=1))] == ["step=1.ckpt"]
    assert "step=2.ckpt" in caplog.text
    assert [verdict.name for verdict in store.retain(tier, Keep(last=1))] == ["step=2.ckpt"]
    assert steps(tier) == [3]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097])
@pytest.mark.parametrize("aligned", [True, False])
def test_file_of_any_size_is_written_whole_and_with_the_digest_of_its_content(
    tmp_path: Path, size: int, aligned: bool
) -> None:
    """Large ones go past the page cache, which wants whole sectors of aligned memory; the rest goes through it."""
    content = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    memory = mmap.mmap(-1, size + 4096)
    start = 0 if aligned else 3
    memory[start : start + size] = content
    tier = LocalTier(tmp_path)
    tier.begin("a.ckpt")
    entry = tier.write("a.ckpt", "file", memoryview(memory)[start : start + size])
    assert tier.read("a.ckpt", "file") == content
    assert (entry.size, entry.xxh3_128) == (size, digest(content))
    assert tier.digest("a.ckpt", "file") == entry.xxh3_128


def test_file_system_that_takes_no_direct_io_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.write, []

    def write(fd: int, block: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(block))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, block)

    monkeypatch.setattr(os, "write", write)
    tier = LocalTier(tmp_path)
    tier.begin("a.ckpt")
    entry = tier.write("a.ckpt", "file", bytes(2 * BLOCK))
    assert refused
    assert tier.digest("a.ckpt", "file") == entry.xxh3_128 == digest(bytes(2 * BLOCK))
