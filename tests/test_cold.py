"""The cold tier: what is there survives the machine, and what is not there yet is not given up here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from forks import run_forks, start_forks
from lightning_resilience import (
    CheckpointCorrupt,
    CheckpointNotFound,
    EverySteps,
    Keep,
    ResilientCheckpoint,
    SaveFailed,
    SetupError,
    TierDenied,
    TierUnavailable,
    housekeeping,
    store,
)
from lightning_resilience.fsspec_objects import FsspecObjects
from lightning_resilience.manifest import MANIFEST, FileEntry, Manifest, digest
from lightning_resilience.remote import UNSEALED, RemoteTier
from lightning_resilience.replication import Replicated
from lightning_resilience.tiers import LocalTier
from probes import at, die
from support import TinyModel, committed, data, make_trainer, settle, strategy


def url(root: Path) -> str:
    return f"file://{root}/cold"


def cold(root: Path) -> dict[str, Manifest]:
    """What a fresh machine finds in the cold tier, each checked byte by byte."""
    tier = RemoteTier(url(root))
    found = store.list_checkpoints(tier).committed
    for name, manifest in found.items():
        assert store.verify(tier, name, manifest) == []
    return found


def steps(manifests: dict[str, Manifest]) -> list[int]:
    return sorted(manifest.step for manifest in manifests.values())


def fit(
    root: Path, *callbacks: L.Callback, last: int = 8, every: int = 2, hot: str = "hot", **kwargs: Any
) -> TinyModel:
    """Train up to step ``last`` with a cold tier, going on from what is there."""
    model = TinyModel()
    kwargs.setdefault("remote", url(root))
    trainer_arguments = {name: kwargs.pop(name) for name in ("strategy", "devices") if name in kwargs}
    callback = kwargs.pop("callback", ResilientCheckpoint)
    checkpoint = callback(dirpath=root / hot, schedule=EverySteps(every), **kwargs)
    trainer = make_trainer(root, *callbacks, settle(), checkpoint, max_steps=last, max_epochs=-1, **trainer_arguments)
    trainer.fit(model, data(64), ckpt_path="last")
    return model


# -- from and to ------------------------------------------------------------------------------------------------------


def test_run_goes_on_from_the_cold_tier_when_the_folder_is_gone(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", last=12, remote=None)
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    model = fit(tmp_path, last=12)
    assert model.history == whole.history[8:]
    assert steps(cold(tmp_path))[-1] == 12


def test_what_is_copied_is_what_was_saved_file_for_file(tmp_path: Path) -> None:
    fit(tmp_path)
    hot = LocalTier(tmp_path / "hot")
    for name in cold(tmp_path):
        here, there = (
            {path.name: path.read_bytes() for path in folder.iterdir()}
            for folder in (hot.path(name), tmp_path / "cold" / name)
        )
        assert here == there
    assert steps(cold(tmp_path)) == [4, 6, 8]


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.pt", ".metadata", "rank_00000.pt", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_file_is_read_from_the_cold_tier_and_healed(tmp_path: Path, file: str, damage: str) -> None:
    fit(tmp_path)
    path = tmp_path / "hot" / "epoch=0-step=8.ckpt" / file
    content = path.read_bytes()
    path.unlink()
    if damage != "delete":
        path.write_bytes(content[: len(content) // 2] if damage == "truncate" else content[:-9] + b"X" + content[-8:])
    model = fit(tmp_path, last=10)
    assert model.history[0][0] == 8
    assert path.read_bytes() == content


def test_what_the_cold_tier_has_damaged_is_not_taken_and_the_one_before_it_is(tmp_path: Path) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    path = tmp_path / "cold" / "epoch=0-step=8.ckpt" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-9] + b"X" + path.read_bytes()[-8:])
    model = fit(tmp_path, last=10)
    assert model.history[0][0] == 6


def test_name_without_its_manifest_is_nothing_however_much_lies_under_it(tmp_path: Path) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    (tmp_path / "cold" / "epoch=0-step=8.ckpt" / MANIFEST).unlink()
    model = fit(tmp_path, last=10)
    assert model.history[0][0] == 6


def test_evaluation_finds_the_checkpoint_in_the_cold_tier(tmp_path: Path) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    callback = ResilientCheckpoint(dirpath=tmp_path / "hot", remote=url(tmp_path))
    [result] = make_trainer(tmp_path, callback).validate(TinyModel(), data(8), ckpt_path="last")
    assert result["val_loss"] > 0


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(
    root: Path, name: str, last: int, local: bool, kind: type[TinyModel] = TinyModel
) -> list[tuple[int, float]]:
    """One life on this rank; ``local``: a folder for each rank, as if each was a machine."""
    rank = os.environ["RANK"]
    ranks = int(os.environ["WORLD_SIZE"])
    hot = f"hot-{rank}" if local else "hot"
    if local:
        os.environ["HOT"] = str(root / hot)
    kwargs: dict[str, Any] = {"strategy": strategy(name, ranks), "devices": ranks}
    model = kind()
    checkpoint = ResilientCheckpoint(
        dirpath="$HOT" if local else root / "hot", schedule=EverySteps(2), remote=url(root)
    )
    trainer = make_trainer(root, settle(), checkpoint, max_steps=last, max_epochs=-1, **kwargs)
    trainer.fit(model, data(64), ckpt_path="last")
    return model.history


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("lost", "local"), [(["hot-1"], True), (["hot-0"], True), (["hot-0", "hot-1"], True), (["hot"], False)]
)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp2"])
def test_lost_folders_come_back_from_the_cold_tier(tmp_path: Path, name: str, lost: list[str], local: bool) -> None:
    run_forks(on_ranks, tmp_path, name, 4, local)
    assert steps(cold(tmp_path)) == [2, 4]
    for folder in lost:
        shutil.rmtree(tmp_path / folder)
    histories = run_forks(on_ranks, tmp_path, name, 8, local)
    assert [history[0][0] for history in histories] == [4, 4]
    assert steps(cold(tmp_path))[-1] == 8
    for folder in lost:
        listing = store.list_checkpoints(LocalTier(tmp_path / folder))
        assert listing.committed[listing.newest_first()[0]].step == 8
    if local and name != "ddp":
        for rank in {*lost}:
            assert_has_its_own_alone(tmp_path / rank / "epoch=0-step=4.ckpt", int(rank[-1]))


class Narrowed(TinyModel):
    """Optimizes its last layer alone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net[-1].parameters(), lr=0.01)


@pytest.mark.ranks
def test_nodes_do_not_miss_the_moments_of_parameters_that_are_not_optimized_any_more(tmp_path: Path) -> None:
    run_forks(on_ranks, tmp_path, "fsdp2", 4, True)
    histories = run_forks(on_ranks, tmp_path, "fsdp2", 6, True, Narrowed)
    assert [history[0][0] for history in histories] == [4, 4]


def assert_has_its_own_alone(folder: Path, rank: int) -> None:
    """A node fetches what its own ranks read, and not the other's shard."""
    found = {path.name for path in folder.iterdir()}
    assert {f"__{rank}_0.distcp", f"rank_{rank:05d}.pt", "rank_00000.pt", ".metadata", "meta.pt", MANIFEST} <= found
    assert f"__{1 - rank}_0.distcp" not in found
    assert rank == 1 or "rank_00001.pt" not in found


# -- what is kept where -----------------------------------------------------------------------------------------------


def test_each_tier_has_its_own_rule(tmp_path: Path) -> None:
    fit(tmp_path, last=16, keep=Keep(last=1), remote_keep=Keep(last=2, milestones=6))
    assert [manifest.step for manifest in committed(tmp_path / "hot")] == [16]
    assert steps(cold(tmp_path)) == [6, 12, 14, 16]


def test_source_of_the_resume_stays_in_the_cold_tier_until_a_newer_one_is_there(tmp_path: Path) -> None:
    fit(tmp_path, keep=Keep(last=1))
    shutil.rmtree(tmp_path / "hot")
    assert steps(cold(tmp_path)) == [8]
    seen = []

    class Watching(ResilientCheckpoint):
        def on_checkpoint_replicated(self, trainer: Any, pl_module: Any, checkpoint: Replicated) -> None:
            seen.append(steps(cold(tmp_path)))

    fit(tmp_path, last=12, keep=Keep(last=1), callback=Watching)
    assert all(8 in found for found in seen)
    assert seen[-1][-1] == 12


@contextmanager
def broken(times: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the first so many writes to the cold tier fail after the probe; gives the keys that were asked for."""
    put, asked = FsspecObjects.put, []

    def failing(self: FsspecObjects, key: str, *args: Any) -> None:
        if not key.startswith(".probe"):
            asked.append(key)
            if len(asked) <= times:
                raise error
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", failing)
    monkeypatch.setattr("lightning_resilience.replication.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("lightning_resilience.replication.GIVE_UP", 0.1)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)
    yield asked


def test_outage_is_told_once_and_what_is_on_its_way_stays_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {"keep": Keep(last=1), "remote_keep": Keep(last=3)}
    with monkeypatch.context() as patch, broken(10**6, TierUnavailable("the bucket is down"), patch):
        fit(tmp_path, last=16, **rules)
    assert caplog.text.count("outcome=failed") == 1
    assert "the bucket is down" in caplog.text
    assert [manifest.step for manifest in committed(tmp_path / "hot")][-3:] == [12, 14, 16]
    assert cold(tmp_path) == {}
    assert fit(tmp_path, last=16, **rules).history == []  # the run is over; what was on its way goes on
    assert steps(cold(tmp_path)) == [12, 14, 16]


def test_end_of_an_outage_is_told_and_everything_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with broken(6, TierUnavailable("the bucket is down"), monkeypatch):
        fit(tmp_path, last=16)
    assert caplog.text.count("outcome=failed") == 1
    assert caplog.text.count("outcome=back") == 1
    assert steps(cold(tmp_path)) == [12, 14, 16]


class Blocked(ResilientCheckpoint):
    """Knows what is in the folder while the cold tier stands still."""

    release = threading.Event()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self.there = steps(store.list_checkpoints(LocalTier(str(self.dirpath))).committed)
        assert self._fit is not None
        assert self._fit.destination.replicator is not None
        self.lag = self._fit.destination.replicator.lag
        self.release.set()


def test_cold_tier_that_stands_still_delays_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, order = FsspecObjects.put, []
    Blocked.release.clear()

    def blocked(self: FsspecObjects, key: str, *args: Any) -> None:
        if not key.startswith(".probe"):
            Blocked.release.wait(60)
            if key.endswith(MANIFEST):
                order.append(key)
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", blocked)
    kept: list[Blocked] = []

    def callback(**kwargs: Any) -> Blocked:
        kept.append(Blocked(**kwargs))
        return kept[0]

    fit(tmp_path, last=16, keep=Keep(last=1), remote_keep=Keep(last=3), callback=callback)
    assert kept[0].there[-3:] == [12, 14, 16]  # the newest three are wanted there, so they stay here
    assert kept[0].lag > 0
    assert [int(key.split("step=")[1].split(".")[0]) for key in order] == sorted(
        int(key.split("step=")[1].split(".")[0]) for key in order
    )
    assert steps(cold(tmp_path)) == [12, 14, 16]


def test_end_of_a_fit_gives_up_nothing_that_is_still_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = FsspecObjects.put, []
    Blocked.release.clear()

    def ends_after_one(self: FsspecObjects, key: str, *args: Any) -> None:
        if not key.startswith(".probe"):
            Blocked.release.wait(60)
            if done:
                raise TierUnavailable("the bucket is down")
            done.extend([key] if key.endswith(MANIFEST) else [])
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", ends_after_one)
    monkeypatch.setattr("lightning_resilience.replication.GIVE_UP", 0.1)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)
    fit(tmp_path, last=16, keep=Keep(last=1), remote_keep=Keep(last=4), callback=Blocked)
    assert len(cold(tmp_path)) == 1
    assert {10, 12, 14, 16} <= {*steps(cold(tmp_path)), *(one.step for one in committed(tmp_path / "hot"))}


# -- kills ------------------------------------------------------------------------------------------------------------


def killed_while_copying(root: Path, point: str, nth: int) -> None:
    at(point, die, nth=nth)
    fit(root)


@pytest.mark.parametrize(
    ("point", "nth"), [("replicate.file", 3), ("replicate.manifest", 2), ("replicate.end", 2), ("forget.remote", 1)]
)
def test_kill_at_any_moment_of_a_copy_leaves_only_whole_checkpoints_and_the_next_start_goes_on(
    tmp_path: Path, point: str, nth: int
) -> None:
    with start_forks(killed_while_copying, tmp_path, point, nth, world_size=1) as ranks:
        assert ranks.wait() == [-9]
    before = steps(cold(tmp_path))
    fit(tmp_path)
    after = steps(cold(tmp_path))
    assert after[-3:] == [4, 6, 8]
    assert not [*(tmp_path / "hot").glob("*.partial-*")]  # what was held while it was sent
    assert max(before, default=0) <= 8


@pytest.mark.parametrize("straight", [False, True], ids=["remote", "dirpath"])
def test_what_a_kill_left_there_and_no_folder_has_any_more_is_swept_and_nothing_else(
    tmp_path: Path, straight: bool
) -> None:
    fit(tmp_path)
    there = tmp_path / "cold"
    newest = sorted(there.glob("*.ckpt"))[-1]

    def copy(name: str, *files: str, marked: float | str | None = None) -> None:
        (there / name).mkdir()
        for file in files:
            shutil.copy(newest / {"shard-0": "__0_0.distcp"}.get(file, file), there / name / file)
        if marked is not None:
            content = marked if isinstance(marked, str) else json.dumps({"time": time.time() - marked, "token": "1"})
            (there / name / UNSEALED).write_text(content)

    old, young = 90_000, 80_000
    copy("epoch=0-step=90.ckpt", "__0_0.distcp", marked=old)  # a copy that was killed
    copy("epoch=0-step=91.ckpt", "rank_00000.pt", ".metadata", "meta.pt", marked=old)  # a removal that was killed
    copy("epoch=0-step=92.ckpt", marked=old)  # one that was killed at its end
    left = {
        "stock.ckpt": [".metadata", "meta.pt", "__0_0.distcp"],  # stock Lightning's
        "plain.ckpt": [".metadata", "__0_0.distcp"],  # stock DCP's
        "rest.ckpt": ["__0_0.distcp"],
        "mine.ckpt": ["__0_0.distcp", "shard-0"],
    }
    for name, files in left.items():
        copy(name, *files)
    for name, marked in (("young.ckpt", young), ("odd.ckpt", "{"), ("odder.ckpt", "[1]")):
        left[name] = ["__0_0.distcp", UNSEALED]
        copy(name, "__0_0.distcp", marked=marked)
    left["with-mine.ckpt"] = ["__0_0.distcp", "shard-0", UNSEALED]
    copy("with-mine.ckpt", "__0_0.distcp", "shard-0", marked=old)
    if straight:
        callback = ResilientCheckpoint(f"local://{there}", schedule=EverySteps(2))  # file:// would be a folder
        make_trainer(tmp_path, settle(), callback, max_steps=10, max_epochs=-1).fit(TinyModel(), data(64))
    else:
        fit(tmp_path, last=10)
    assert not {f"epoch=0-step={step}.ckpt" for step in (90, 91, 92)} & {path.name for path in there.iterdir()}
    for name, files in left.items():
        assert sorted(path.name for path in (there / name).iterdir()) == sorted(files), name
    assert steps(cold(tmp_path))[-1] == 10
    assert [path.parent.name for path in there.glob(f"epoch*/{UNSEALED}")] == []


@pytest.mark.parametrize("straight", [False, True], ids=["remote", "dirpath"])
def test_every_name_without_a_manifest_has_a_marker_whatever_is_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: bool
) -> None:
    """So whatever a kill leaves can be told from what others keep there."""
    bare: list[set[str]] = []
    for what in ("put", "delete"):
        original = getattr(FsspecObjects, what)

        def watched(self: FsspecObjects, *args: Any, original: Any = original) -> None:
            original(self, *args)
            for folder in (tmp_path / "cold").glob("*.ckpt"):
                files = {path.name for path in folder.iterdir()}
                if files and not files & {MANIFEST, UNSEALED}:
                    bare.append(files)

        monkeypatch.setattr(FsspecObjects, what, watched)
    if straight:
        callback = ResilientCheckpoint(f"local://{tmp_path}/cold", schedule=EverySteps(2), keep=Keep(last=1))
        make_trainer(tmp_path, settle(), callback, max_steps=8, max_epochs=-1).fit(TinyModel(), data(64))
    else:
        fit(tmp_path, keep=Keep(last=1))
    assert steps(cold(tmp_path)) == [8]
    assert bare == []
    assert list((tmp_path / "cold").glob(f"*/{UNSEALED}")) == []


def test_save_to_a_url_whose_files_are_gone_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RemoteTier.write

    def robbed(self: RemoteTier, name: str, file: str, *args: Any) -> FileEntry:
        entry = write(self, name, file, *args)
        if file == "rank_00000.pt" and "step=4" in name:
            self.objects.delete([f"epoch=0-step=4.ckpt/{file}"])
        return entry

    monkeypatch.setattr(RemoteTier, "write", robbed)
    callback = ResilientCheckpoint(f"local://{tmp_path}/cold", schedule=EverySteps(2))
    with pytest.warns(UserWarning, match=r"lacks rank_00000\.pt"):
        make_trainer(tmp_path, settle(), callback, max_steps=6, max_epochs=-1).fit(TinyModel(), data(64))
    assert steps(cold(tmp_path)) == [2, 6]
    assert not (tmp_path / "cold" / "epoch=0-step=4.ckpt").exists()


def test_name_that_is_saved_again_and_again_is_there_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a URL nothing gives way in one step, so the older stays until the newer is whole."""
    whole: list[int] = []
    put = FsspecObjects.put

    def watched(self: FsspecObjects, key: str, *args: Any) -> None:
        whole.append(len(list((tmp_path / "cold").glob("*/manifest.json"))))
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", watched)
    fit(tmp_path, last=12, filename="best", enable_version_counter=False, keep=Keep(last=1))
    assert [path.name for path in (tmp_path / "hot").glob("*.ckpt")] == ["best.ckpt"]
    assert steps(cold(tmp_path)) == [12]
    first = next(place for place, count in enumerate(whole) if count)
    assert 0 not in whole[first:]
    shutil.rmtree(tmp_path / "hot")
    assert fit(tmp_path, last=14, filename="best", keep=Keep(last=1)).history[0][0] == 12


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_save_that_gives_way_while_it_is_sent_arrives_all_the_same_where_links_can_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, links: bool
) -> None:
    send, slow = RemoteTier.send, threading.Event()

    def late(self: RemoteTier, name: str, entry: FileEntry, source: Path) -> int:
        slow.wait(60)  # until the name is another save's
        return send(self, name, entry, source)

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(RemoteTier, "send", late)
    monkeypatch.setattr("lightning_resilience.replication.TELL_AFTER", 1)
    if not links:
        monkeypatch.setattr(os, "link", no_links)

    class Releases(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 7:
                slow.set()

    came: list[int] = []

    class Watching(ResilientCheckpoint):
        def on_checkpoint_replicated(self, trainer: Any, pl_module: Any, checkpoint: Replicated) -> None:
            came.append(checkpoint.manifest.step)

    again = {"filename": "best", "enable_version_counter": False, "keep": Keep(last=1)}
    fit(tmp_path, Releases(), last=8, callback=Watching, **again)
    assert steps(cold(tmp_path)) == [8]
    assert came[0] == 2 if links else 2 not in came
    assert ("no hard links" in caplog.text) is not links
    assert "damaged" not in caplog.text
    assert [path.name for path in (tmp_path / "hot").glob("*.ckpt*")] == ["best.ckpt"]


def test_pinned_checkpoint_never_gives_way_to_another_save_of_its_name(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"filename": "best", "enable_version_counter": False, "remote": None}
    fit(tmp_path, last=2, **kwargs)
    hot = LocalTier(tmp_path / "hot")
    housekeeping.label(hot, "best.ckpt", store.read_manifest(hot, "best.ckpt"), pinned=True)
    fit(tmp_path, last=6, keep=Keep(last=1), **kwargs)
    assert store.read_manifest(hot, "best.ckpt").step == 2
    assert [manifest.step for manifest in committed(tmp_path / "hot")] == [2, 6]


class Killed(BaseException):
    """The process is gone: nothing after it happens."""


@pytest.mark.parametrize("over", [False, True], ids=["a new name", "a name that an older run had"])
def test_kill_after_any_number_of_requests_leaves_the_one_before_it_to_a_fresh_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    fit(tmp_path, last=4)
    hot, name = LocalTier(tmp_path / "hot"), "epoch=0-step=4.ckpt"
    manifest = store.read_manifest(hot, name)
    left = [0]
    for what in ("put", "delete"):
        original = getattr(FsspecObjects, what)

        def counted(self: FsspecObjects, *args: Any, original: Any = original) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return original(self, *args)

        monkeypatch.setattr(FsspecObjects, what, counted)

    requests, done = 0, False
    while not done:
        left[0] = 99
        tier = RemoteTier(url(tmp_path))
        tier.remove(name)
        if over:  # the save of another run
            for entry in manifest:
                (tmp_path / entry.path).write_bytes(b"older" + entry.path.encode())
            older = [replace(e, size=5 + len(e.path), xxh3_128=digest(b"older" + e.path.encode())) for e in manifest]
            for entry in older:
                tier.send(name, entry, tmp_path / entry.path)
            tier.seal(name, replace(manifest, files=tuple(older), step=3, sequence=1))
        left[0] = requests
        with suppress(Killed):
            if over:
                tier.remove(name)
            for entry in manifest:
                tier.send(name, entry, hot.path(name, entry.path))
            tier.seal(name, manifest)
            done = True
        found = cold(tmp_path)  # reads every byte
        newest = max(found.values(), key=lambda one: one.order)
        # The first two of a removal put the marker and delete the manifest; the last of a copy deletes the marker.
        sealed = done or MANIFEST in tier.files(name)
        assert newest.step == (3 if over and requests < 2 else 4 if sealed else 2)
        assert sealed or UNSEALED in tier.files(name) or not tier.files(name)
        requests += 1
    assert requests > len(manifest.files)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"remote": "/no/url"}, "remote='/no/url' is not a URL"),
        ({"remote": "nosuch://bucket"}, "nosuch"),
        ({"remote": "s3://"}, "names no bucket"),
        ({"remote": "://x"}, "no protocol"),
        ({"remote": "file://rel/x"}, "not an absolute path"),
        ({"dirpath": "s3://"}, "names no bucket"),
        ({"dirpath": "memory://"}, "names no bucket or folder"),
        ({"dirpath": "gs:///"}, "names no bucket or folder"),
        ({"dirpath": "file://rel/x"}, "not an absolute path"),
        ({"remote": "s3://b/x", "storage_options": {"s3_additional_kwargs": "secret"}}, "s3_additional_kwargs"),
        ({"storage_options": {"key": "k"}}, "storage_options= is for a cold tier"),
        ({"remote_keep": Keep()}, "remote_keep= is for a cold tier"),
        ({"remote": "memory://x", "remote_keep": 3}, "remote_keep=3 is not a retention rule"),
        ({"remote": "memory://x", "storage_options": "secret"}, "storage_options of type str: a dict is wanted"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(SetupError, match=match) as caught:
        ResilientCheckpoint(**kwargs)
    assert "secret" not in str(caught.value)


def test_cold_tier_that_is_the_folder_or_in_a_checkpoint_of_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = tmp_path / "hot"
    hot.mkdir()
    (tmp_path / "link").symlink_to(hot)
    monkeypatch.chdir(tmp_path)
    for dirpath, remote in (
        (hot, f"file://{hot}"),
        ("hot", f"local://{hot}/"),
        (tmp_path / "link", f"file://{hot}"),
        (hot, f"file://{tmp_path}/link/../link"),
        (f"file://{hot}", f"file://{hot}/a.ckpt/cold"),
        (hot / "a.ckpt" / "hot", f"file://{hot}"),
    ):
        with pytest.raises(SetupError, match=r"itself|in a checkpoint"):
            ResilientCheckpoint(dirpath, remote=remote)
    for dirpath, remote in ((hot, f"file://{hot}/cold"), (hot / "7", f"file://{hot}"), (hot, f"file://{hot}-2")):
        ResilientCheckpoint(dirpath, remote=remote)
    late = ResilientCheckpoint(tmp_path / "later", remote=f"file://{hot}")
    (tmp_path / "later").symlink_to(hot)
    with pytest.raises(SetupError, match="itself"):
        make_trainer(tmp_path, late).fit(TinyModel(), data())


@pytest.mark.parametrize(
    "second", [{"remote": "{}/cold"}, {"dirpath": "{}/cold"}, {"dirpath": "local://{}/cold"}, {"dirpath": "{}/link"}]
)
def test_two_callbacks_with_one_place_are_refused(tmp_path: Path, second: dict[str, str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    given = {name: place.format(tmp_path) for name, place in second.items()}
    if "remote" in given:
        given = {"dirpath": str(tmp_path / "b"), "remote": f"local://{given['remote']}"}
    callbacks = ResilientCheckpoint(tmp_path / "a", remote=url(tmp_path)), ResilientCheckpoint(**given, filename="b")
    with pytest.raises(SetupError, match="Two checkpoint callbacks save to"):
        make_trainer(tmp_path, *callbacks).fit(TinyModel(), data())


@pytest.mark.parametrize(
    ("argument", "values"), [("memory", ("auto", False)), ("save_timeout", (60.0, 90.0))], ids=["memory", "timeout"]
)
def test_two_callbacks_that_want_what_they_share_to_be_different_are_refused(
    tmp_path: Path, argument: str, values: tuple[Any, Any]
) -> None:
    callbacks = [ResilientCheckpoint(tmp_path / str(i), **{argument: values[i]}, filename=str(i)) for i in (0, 1)]
    with pytest.raises(SetupError, match=f"{argument}={values[0]!r} and {argument}={values[1]!r}"):
        make_trainer(tmp_path, *callbacks).fit(TinyModel(), data())


@pytest.mark.parametrize("order", [("raise", "fresh"), ("fresh", "raise")])
def test_run_starts_over_only_where_all_callbacks_say_so(tmp_path: Path, order: tuple[str, str]) -> None:
    fit(tmp_path)
    for manifest in (tmp_path / "hot").glob(f"*/{MANIFEST}"):
        manifest.write_text("{")
    shutil.rmtree(tmp_path / "cold")
    other, mine = (
        ResilientCheckpoint(tmp_path / where, on_unrestorable=wish, filename=where)
        for where, wish in zip(("other", "hot"), order, strict=True)
    )
    with pytest.raises(CheckpointCorrupt, match="none can be resumed from"):
        make_trainer(tmp_path, other, mine).fit(TinyModel(), data(), ckpt_path="last")


def test_what_another_run_has_in_the_cold_tier_stays_and_takes_no_room(tmp_path: Path) -> None:
    fit(tmp_path, hot="a", filename="a-{step}")

    def another(last: int, ckpt_path: str | None) -> None:
        callback = ResilientCheckpoint(
            tmp_path / "b", filename="b-{step}", schedule=EverySteps(2), remote=url(tmp_path), remote_keep=Keep(last=2)
        )
        trainer = make_trainer(tmp_path, settle(), callback, max_steps=last, max_epochs=-1)
        trainer.fit(TinyModel(), data(64), ckpt_path=ckpt_path)

    another(8, None)
    of_a = {"a-step=4.ckpt", "a-step=6.ckpt", "a-step=8.ckpt"}
    assert set(cold(tmp_path)) == of_a | {"b-step=6.ckpt", "b-step=8.ckpt"}
    another(12, "last")
    # Of its own the newest two, and what it was resumed from.
    assert set(cold(tmp_path)) == of_a | {"b-step=8.ckpt", "b-step=10.ckpt", "b-step=12.ckpt"}


@pytest.mark.parametrize("error", [TierDenied("not yours"), TierUnavailable("not there")])
def test_cold_tier_that_cannot_be_written_stops_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def put(*_: Any) -> None:
        raise error

    monkeypatch.setattr(FsspecObjects, "put", put)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)
    with pytest.raises(type(error), match=str(error)):
        fit(tmp_path)


def test_nothing_ever_syncs_the_whole_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync() -> None:
        raise AssertionError("os.sync was called")

    monkeypatch.setattr(os, "sync", sync)
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    assert fit(tmp_path, last=10).history[0][0] == 8


def test_memory_of_fsspec_works_as_a_cold_tier(tmp_path: Path) -> None:
    fit(tmp_path, remote="memory://test-cold")
    shutil.rmtree(tmp_path / "hot")
    assert fit(tmp_path, last=10, remote="memory://test-cold").history[0][0] == 8


# -- no folder at all -------------------------------------------------------------------------------------------------


def without_a_folder(root: Path, name: str, last: int) -> list[tuple[int, float]]:
    """One life on this rank, saving straight to a URL; what is temporary is in ``root/tmp``."""
    tempfile.tempdir = str(root / "tmp")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    kwargs: dict[str, Any] = {"strategy": strategy(name, ranks), "devices": ranks}
    model = TinyModel()
    callback = ResilientCheckpoint(f"local://{root}/cold", schedule=EverySteps(2), keep=Keep(last=2))
    trainer = make_trainer(root, settle(), callback, max_steps=last, max_epochs=-1, **kwargs)
    trainer.fit(model, data(64), ckpt_path="last")
    assert callback.last_model_path.startswith(f"local://{root}/cold/")
    assert callback.last_model_path.endswith(f"step={last}.ckpt")
    return model.history


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_run_saves_to_a_url_and_goes_on_from_it_without_a_folder(tmp_path: Path, name: str, ranks: int) -> None:
    (tmp_path / "tmp").mkdir()
    run_forks(without_a_folder, tmp_path, name, 6, world_size=ranks)
    assert steps(cold(tmp_path)) == [4, 6]
    histories = run_forks(without_a_folder, tmp_path, name, 10, world_size=ranks)
    assert [history[0][0] for history in histories] == [6] * ranks
    assert steps(cold(tmp_path))[-2:] == [8, 10]
    assert [path.name for path in (tmp_path / "tmp").iterdir() if path.name.startswith("lightning_res")] == []


def test_url_is_not_both_the_folder_and_the_cold_tier() -> None:
    with pytest.raises(SetupError, match="is a URL already"):
        ResilientCheckpoint("memory://a", remote="memory://b")


def test_explicit_url_is_what_is_there_and_not_a_save_of_that_name_here(tmp_path: Path) -> None:
    fit(tmp_path, last=2, filename="same", remote=f"local://{tmp_path}/cold")
    shutil.rmtree(tmp_path / "hot")
    model = TinyModel()
    checkpoint = ResilientCheckpoint(tmp_path / "hot", filename="same", schedule=EverySteps(4))
    trainer = make_trainer(tmp_path, settle(), checkpoint, max_steps=4, max_epochs=-1)
    trainer.fit(model, data(64))
    resumed = TinyModel()
    again = ResilientCheckpoint(
        tmp_path / "hot", filename="same", schedule=EverySteps(4), remote=f"local://{tmp_path}/cold"
    )
    trainer = make_trainer(tmp_path, settle(), again, max_steps=4, max_epochs=-1)
    trainer.fit(resumed, data(64), ckpt_path=f"local://{tmp_path}/cold/same.ckpt")
    assert resumed.history[0][0] == 2


def test_explicit_url_of_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    fit(tmp_path)
    for hot in ("hot", "other"):
        model = TinyModel()
        checkpoint = ResilientCheckpoint(
            tmp_path / hot, schedule=EverySteps(2), remote=f"local://{tmp_path}/{'cold' if hot == 'hot' else 'more'}"
        )
        trainer = make_trainer(tmp_path, settle(), checkpoint, max_steps=10, max_epochs=-1)
        trainer.fit(model, data(64), ckpt_path=f"local://{tmp_path}/cold/epoch=0-step=6.ckpt")
        assert model.history[0][0] == 6
    assert not (tmp_path / "other" / "epoch=0-step=6.ckpt").exists()  # another run's: read, not taken in
    trainer = make_trainer(tmp_path, ResilientCheckpoint(tmp_path / "third"))
    with pytest.raises(CheckpointNotFound, match=r"has: .*step=10"):
        trainer.fit(TinyModel(), data(64), ckpt_path=f"local://{tmp_path}/cold/epoch=0-step=7.ckpt")


def test_checkpoint_that_is_damaged_here_does_not_hold_up_the_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, broken(10**6, TierUnavailable("down"), patch):
        fit(tmp_path, keep=Keep(last=-1))
    path = tmp_path / "hot" / "epoch=0-step=2.ckpt" / "meta.pt"
    path.write_bytes(path.read_bytes()[:-9] + b"X" + path.read_bytes()[-8:])
    monkeypatch.setattr("lightning_resilience.replication.FIRST_PAUSE", 0.01)
    fit(tmp_path, last=10, keep=Keep(last=-1))
    assert steps(cold(tmp_path)) == [4, 6, 8, 10]
    assert caplog.text.count("it is damaged here and is not sent") == 1


@contextmanager
def outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cold tier answers nothing, and nobody waits long for it, then or afterwards."""
    monkeypatch.setattr("lightning_resilience.replication.GIVE_UP", 0.1)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)

    def down(*_: Any) -> None:
        raise TierUnavailable("the bucket is down")

    with monkeypatch.context() as patch:
        for call in ("put", "folders", "entries", "stat"):
            patch.setattr(FsspecObjects, call, down)
        yield


def test_start_during_an_outage_goes_on_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path)
    with outage(monkeypatch):
        assert fit(tmp_path, last=10).history[0][0] == 8
    fit(tmp_path, last=12)
    assert steps(cold(tmp_path))[-1] == 12


def test_outage_during_a_resume_does_not_start_the_run_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)

    def down(*_: Any) -> None:
        raise TierUnavailable("the bucket is down")

    monkeypatch.setattr(FsspecObjects, "fetch", down)
    with pytest.raises(TierUnavailable, match="the bucket is down"):
        fit(tmp_path, on_unrestorable="fresh")


def test_pin_in_the_cold_tier_counts_while_the_run_goes_on(tmp_path: Path) -> None:
    class Pinning(ResilientCheckpoint):
        def on_checkpoint_replicated(self, trainer: Any, pl_module: Any, checkpoint: Replicated) -> None:
            if checkpoint.manifest.step == 2:
                housekeeping.label(RemoteTier(url(tmp_path)), "epoch=0-step=2.ckpt", checkpoint.manifest, pinned=True)

    fit(tmp_path, last=14, callback=Pinning, remote_keep=Keep(last=4))
    assert set(steps(cold(tmp_path))) >= {2, 14}


@pytest.mark.filterwarnings("ignore:The save of step")
def test_failed_save_to_a_url_leaves_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"local://{tmp_path}/cold"

    def train(last: int) -> None:
        callback = ResilientCheckpoint(target, filename="best", enable_version_counter=False, schedule=EverySteps(2))
        trainer = make_trainer(tmp_path, settle(), callback, max_steps=last, max_epochs=-1)
        trainer.fit(TinyModel(), data(64), ckpt_path="last")

    train(2)
    put, calls = FsspecObjects.put, []

    def failing(self: FsspecObjects, key: str, *args: Any) -> None:
        calls.append(key)
        if "meta" in key:
            raise TierDenied("no")
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", failing)
    with pytest.raises(SaveFailed):
        train(4)
    monkeypatch.setattr(FsspecObjects, "put", put)
    assert steps(cold(tmp_path)) == [2]


def test_explicit_path_that_is_gone_here_is_fetched(tmp_path: Path) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot" / "epoch=0-step=6.ckpt")
    model = TinyModel()
    checkpoint = ResilientCheckpoint(tmp_path / "hot", schedule=EverySteps(2), remote=url(tmp_path))
    trainer = make_trainer(tmp_path, settle(), checkpoint, max_steps=8, max_epochs=-1)
    trainer.fit(model, data(64), ckpt_path=tmp_path / "hot" / "epoch=0-step=6.ckpt")
    assert model.history[0][0] == 6


# -- what a resume takes for an answer --------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [TierUnavailable("503 SlowDown"), TierDenied("403")])
@pytest.mark.parametrize("which", ["manifest.json", "step=8.ckpt/manifest.json"], ids=["all", "newest"])
def test_manifest_that_cannot_be_read_now_is_an_outage_and_no_empty_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, which: str
) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    before = {path: path.read_bytes() for path in (tmp_path / "cold").rglob("*") if path.is_file()}
    get = FsspecObjects.get

    def failing(self: FsspecObjects, key: str, *args: Any) -> bytes:
        if key.endswith(which):
            raise error
        return get(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "get", failing)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)
    with pytest.raises(type(error), match=str(error)):
        fit(tmp_path, last=10, on_unrestorable="fresh")
    assert {path: path.read_bytes() for path in (tmp_path / "cold").rglob("*") if path.is_file()} == before
    listing = store.list_checkpoints(RemoteTier(url(tmp_path)), in_part=True)  # for people
    assert len(listing.unusable) == (3 if which == MANIFEST else 1)
    assert len(listing.committed) == 3 - len(listing.unusable)


def damage_manifest(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes(
        {
            "flip": content[:50] + b"#" + content[51:],
            "truncate": content[: len(content) // 2],
            "format 2": content.replace(b'"format":1', b'"format":2'),
        }[how]
    )


@pytest.mark.parametrize("how", ["flip", "truncate", "format 2"])
def test_damaged_manifests_in_the_cold_tier_are_unrestorable_checkpoints_and_not_none(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path)
    shutil.rmtree(tmp_path / "hot")
    damage_manifest(tmp_path / "cold" / "epoch=0-step=8.ckpt" / MANIFEST, how)
    broken = (tmp_path / "cold" / "epoch=0-step=8.ckpt" / MANIFEST).read_bytes()
    assert fit(tmp_path, last=8).history[0][0] == 6
    assert "cold/epoch=0-step=8.ckpt reason=" in caplog.text
    assert (tmp_path / "cold" / "epoch=0-step=8.ckpt" / MANIFEST).read_bytes() == broken  # nobody's to write over
    assert steps(cold(tmp_path))[-1] == 8
    shutil.rmtree(tmp_path / "hot")
    for path in (tmp_path / "cold").glob(f"*/{MANIFEST}"):
        damage_manifest(path, "truncate")
    with pytest.raises(CheckpointCorrupt, match="none can be resumed from"):
        fit(tmp_path, last=10)
    with pytest.warns(UserWarning, match="Starting over"):
        assert fit(tmp_path, last=2, on_unrestorable="fresh").history[0][0] == 0


AGAIN: dict[str, Any] = {"filename": "best", "enable_version_counter": False, "keep": Keep(last=1)}
"""One name that is saved again and again."""


def flip_shard(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-9] + b"X" + path.read_bytes()[-8:])


def test_older_save_of_a_name_is_found_in_the_cold_tier_beside_a_damaged_newer_one(tmp_path: Path) -> None:
    fit(tmp_path, last=2, **AGAIN)
    fit(tmp_path, last=4, remote=None, **AGAIN)
    flip_shard(tmp_path / "hot" / "best.ckpt")
    assert fit(tmp_path, last=6, **AGAIN).history[0][0] == 2
    assert steps(cold(tmp_path))[-1] == 6


def test_folder_with_an_older_save_of_a_name_does_not_hide_the_newer_one(tmp_path: Path) -> None:
    for hot, last in (("a", 2), ("b", 4), ("c", 8)):
        fit(tmp_path, last=last, hot=hot, **AGAIN)
    assert fit(tmp_path, last=10, hot="a", **AGAIN).history[0][0] == 8
    assert {8, 10} <= {*steps(cold(tmp_path))}
    for manifest in committed(tmp_path / "a"):  # each is whole, none is mixed of two
        assert manifest.step in (8, 10)


def test_damaged_save_is_healed_from_its_copy_of_another_name(tmp_path: Path) -> None:
    fit(tmp_path, last=2, **AGAIN)
    fit(tmp_path, last=4, **AGAIN)
    assert {name: one.step for name, one in cold(tmp_path).items()} == {"best.ckpt": 2, "best-v1.ckpt": 4}
    for path in ("last", tmp_path / "hot" / "best.ckpt"):
        flip_shard(tmp_path / "hot" / "best.ckpt")
        model = TinyModel()
        checkpoint = ResilientCheckpoint(tmp_path / "hot", schedule=EverySteps(9), remote=url(tmp_path), **AGAIN)
        trainer = make_trainer(tmp_path, settle(), checkpoint, limit_val_batches=1)
        trainer.validate(model, data(8), ckpt_path=path, verbose=False)
        assert [manifest.step for manifest in committed(tmp_path / "hot")] == [4]


def test_explicit_save_that_is_nowhere_whole_is_an_error_and_no_other_of_its_name(tmp_path: Path) -> None:
    fit(tmp_path, last=2, **AGAIN)
    fit(tmp_path, last=4, remote=None, **AGAIN)
    flip_shard(tmp_path / "hot" / "best.ckpt")
    checkpoint = ResilientCheckpoint(tmp_path / "hot", schedule=EverySteps(2), remote=url(tmp_path), **AGAIN)
    with pytest.raises(CheckpointCorrupt, match=r"best\.ckpt is damaged"):
        make_trainer(tmp_path, checkpoint).fit(TinyModel(), data(8), ckpt_path=tmp_path / "hot" / "best.ckpt")


def again_on_nodes(root: Path, name: str, last: int, remote: bool, action: str = "fit") -> Any:
    """One life on this rank, each with a folder of its own, saving one name again and again."""
    os.environ["HOT"] = str(root / f"hot-{os.environ['RANK']}")
    ranks = int(os.environ["WORLD_SIZE"])
    model = TinyModel()
    checkpoint = ResilientCheckpoint("$HOT", schedule=EverySteps(2), remote=url(root) if remote else None, **AGAIN)
    kwargs = {"strategy": strategy(name, ranks), "devices": ranks}
    trainer = make_trainer(root, settle(), checkpoint, max_steps=last, max_epochs=-1, **kwargs)
    if action == "validate":
        return trainer.validate(model, data(16), ckpt_path="last", verbose=False)
    trainer.fit(model, data(64), ckpt_path="last")
    return model.history[0][0] if model.history else last


@pytest.mark.ranks
@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_nodes_that_have_different_saves_of_a_name_agree_on_one_and_mix_none(
    tmp_path: Path, name: str, older: int
) -> None:
    """As a kill between the renames of two nodes leaves them."""
    run_forks(again_on_nodes, tmp_path, name, 2, True)
    shutil.copytree(tmp_path / f"hot-{older}", tmp_path / "saved")
    run_forks(again_on_nodes, tmp_path, name, 4, False)
    shutil.rmtree(tmp_path / f"hot-{older}")
    (tmp_path / "saved").rename(tmp_path / f"hot-{older}")
    for last, begins in ((2, 2), (4, 2), (6, 4)):
        assert run_forks(again_on_nodes, tmp_path, name, last, True) == [begins, begins]
        for node in (0, 1):
            tier = LocalTier(tmp_path / f"hot-{node}")
            for one, manifest in store.list_checkpoints(tier).committed.items():
                assert [problem for problem in store.verify(tier, one, manifest) if "missing" not in problem] == []
    assert steps(cold(tmp_path))[-1] == 6


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_evaluation_on_nodes_finds_out_that_they_share_no_folder(tmp_path: Path, name: str) -> None:
    run_forks(again_on_nodes, tmp_path, name, 2, True)
    shutil.rmtree(tmp_path / "hot-1")
    results = run_forks(again_on_nodes, tmp_path, name, 2, True, "validate")
    assert [len(result) for result in results] == [1, 1]


# -- what is not an outage --------------------------------------------------------------------------------------------


def test_outage_does_not_lead_to_an_older_checkpoint_than_the_cold_tier_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path)
    flip_shard(tmp_path / "hot" / "epoch=0-step=8.ckpt")
    with outage(monkeypatch), pytest.raises(TierUnavailable, match="the bucket is down"):
        fit(tmp_path, last=10)
    assert fit(tmp_path, last=10).history[0][0] == 8


class Fails(L.Callback):
    """Training ends with an exception at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("not ours")


def test_exception_lets_what_is_on_its_way_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = FsspecObjects.put

    def slow(self: FsspecObjects, key: str, *args: Any) -> None:
        threading.Event().wait(0.1)
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", slow)
    with pytest.raises(RuntimeError, match="not ours"):
        fit(tmp_path, Fails(5))
    assert steps(cold(tmp_path)) == [2, 4]


def test_exception_is_not_held_up_by_a_cold_tier_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, release = FsspecObjects.put, threading.Event()

    def blocked(self: FsspecObjects, key: str, *args: Any) -> None:
        if not key.startswith(".probe"):
            release.wait(60)
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", blocked)
    monkeypatch.setattr("lightning_resilience.fit.DRAIN_AFTER_EXCEPTION", 0.3)
    with pytest.raises(RuntimeError, match="not ours"):
        fit(tmp_path, Fails(5))
    assert not release.is_set()
    assert not [*(tmp_path / "cold").glob("*.ckpt")]
    release.set()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"endpont_url": "http://127.0.0.1:1"}, "endpont_url"), ({"client_kwargs": {"regionname": "x"}}, "regionname")],
)
def test_misspelled_storage_option_stops_the_run_at_setup_whatever_the_folder_has(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    options |= {"key": "k", "secret": "sesame"}
    for _ in range(2):
        with pytest.raises(SetupError, match=match) as caught:
            fit(tmp_path, last=2, remote="s3://bucket/run", storage_options=options)
        assert "sesame" not in str(caught.value)
        fit(tmp_path, last=2, remote=None)


def test_checkpoint_that_no_folder_has_whole_is_told_of_once_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, remote=None, keep=Keep(last=-1))
    (tmp_path / "hot" / "epoch=0-step=4.ckpt" / "__0_0.distcp").unlink()
    fit(tmp_path, last=10, keep=Keep(last=-1))
    assert steps(cold(tmp_path)) == [2, 6, 8, 10]
    assert caplog.text.count("outcome=failed") == 1
    assert "name=epoch=0-step=4.ckpt" in caplog.text
    assert "tried again" not in caplog.text
    assert "left=" not in caplog.text


def test_copy_of_another_name_that_lacks_only_its_manifest_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, last=2, **AGAIN)
    fit(tmp_path, last=4, **AGAIN)
    (tmp_path / "cold" / "best-v1.ckpt" / MANIFEST).unlink()
    swept: set[str] = set()
    monkeypatch.setattr(RemoteTier, "sweep", lambda self, names: swept.update(names))
    fit(tmp_path, last=4, **AGAIN)
    assert swept == set()
    assert {name: one.step for name, one in cold(tmp_path).items()}["best-v1.ckpt"] == 4


def test_two_saves_of_one_number_are_two_and_do_not_pile_up(tmp_path: Path) -> None:
    class Noise(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            torch.rand(1)

    fit(tmp_path, last=2, hot="a")
    fit(tmp_path, last=4, hot="a", remote=None)
    fit(tmp_path, Noise(), last=4, hot="b")  # the same run and number, other bytes
    for _ in range(3):
        fit(tmp_path, last=4, hot="a")
        assert {*cold(tmp_path)} == {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "epoch=0-step=4-v1.ckpt"}
