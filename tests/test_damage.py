"""A resume takes the newest checkpoint that is whole, says what is wrong with newer ones, and never guesses."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from forks import run_fork, run_forks
from lightning_resilience import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    CheckpointUncommitted,
    Keep,
    filling,
    shard_file,
    tiers,
)
from lightning_resilience.lookup import Lookup
from lightning_resilience.manifest import Manifest, digest
from lightning_resilience.places import Source
from lightning_resilience.resumption import Resumption
from lightning_resilience.tiers import LocalTier
from probes import Witness, fit, whole_steps
from support import TinyModel, settle

NEWEST, PREVIOUS = "epoch=0-step=6.ckpt", "epoch=0-step=4.ckpt"


def train(root: Path, how: str = "single", world_size: int = 1) -> None:
    """Leave checkpoints of the steps 2, 4 and 6."""
    checkpoint = Witness(root, 2, keep=Keep(last=-1), filename="{epoch}-{step}")
    fit(root, checkpoint, settle(), how=how, world_size=world_size, steps=6)


def resume(root: Path, ckpt_path: str | Path = "last", model: TinyModel | None = None, **kwargs: Any) -> int | None:
    """The step that training went on from."""
    checkpoint = Witness(root, 100, **kwargs)
    fit(root, checkpoint, model=model, steps=8, resume=ckpt_path)
    return checkpoint.began


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    run_fork(train, root)
    assert whole_steps(root) == [2, 4, 6]
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A folder of three checkpoints, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "root"))


# -- kinds of damage --------------------------------------------------------------------------------------------------


def missing(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def flipped(file: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / file).write_bytes(data)

    return damage


def truncated(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1]) and None


def emptied(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(b"") and None


def swapped(file: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(folder.parent / PREVIOUS / file, folder / file) and None


DAMAGES = {
    "no manifest": (missing("manifest.json"), r"no manifest\.json"),
    "no .metadata": (missing(".metadata"), r"\.metadata is missing"),
    "no meta.pt": (missing("meta.pt"), r"meta\.pt is missing"),
    "a shard missing": (missing("__0_0.distcp"), r"__0_0\.distcp is missing"),
    "a generator file missing": (missing("rank_00000.pt"), r"rank_00000\.pt is missing"),
    "a bit flipped in a shard": (flipped("__0_0.distcp"), r"__0_0\.distcp has other content"),
    "a bit flipped in meta.pt": (flipped("meta.pt"), r"meta\.pt has other content"),
    "a bit flipped in the generators": (flipped("rank_00000.pt"), r"rank_00000\.pt has other content"),
    "a bit flipped in .metadata": (flipped(".metadata"), r"\.metadata has other content"),
    "a bit flipped in the manifest": (flipped("manifest.json"), r"manifest\.json"),
    "a manifest cut short": (truncated("manifest.json"), r"manifest\.json"),
    "an empty manifest": (emptied("manifest.json"), r"manifest\.json"),
    "a shard cut short": (truncated("__0_0.distcp"), r"__0_0\.distcp is truncated"),
    "an empty meta.pt": (emptied("meta.pt"), r"meta\.pt is truncated"),
    "a shard of another step": (swapped("__0_0.distcp"), r"__0_0\.distcp has other content"),
    "a generator file of another step": (swapped("rank_00000.pt"), r"rank_00000\.pt has other content"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_to_the_newest_checkpoint_is_named_and_the_one_before_it_is_resumed(
    root: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, cause = DAMAGES[what]
    damage(root / "run" / NEWEST)
    assert resume(root) == 4
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == "lightning_resilience"
    ]
    assert NEWEST in warning
    assert re.search(cause, warning), warning


def test_a_folder_in_the_place_of_a_file_is_damage_like_any_other(root: Path) -> None:
    for file in ("meta.pt", "manifest.json"):
        (root / "run" / NEWEST / file).unlink()
        (root / "run" / NEWEST / file).mkdir()
        assert resume(root) == 4
        shutil.rmtree(root / "run" / "epoch=0-step=8.ckpt", ignore_errors=True)
        for left_by_resume in (root / "run").glob("*step=8*"):
            shutil.rmtree(left_by_resume)


def test_nothing_of_a_damaged_checkpoint_is_unpickled(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("meta.pt", "rank_00000.pt", ".metadata"):
        flipped(file)(root / "run" / NEWEST)
    read: list[Path] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or original(self))
    assert resume(root) == 4
    assert {path.name for path in read if path.parent.name == NEWEST} <= {"manifest.json"}
    assert {path.name for path in read if path.parent.name == PREVIOUS} > {"manifest.json"}


def test_a_resume_reads_each_shard_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once: list[str] = []
    original = filling.fill_and_digest
    monkeypatch.setattr(shard_file, "fill_and_digest", lambda path, pieces: once.append(path) or original(path, pieces))
    monkeypatch.setattr(shard_file, "fill", lambda path, pieces: pytest.fail(f"{path} is read again"))
    digested: list[str] = []
    digest_of = LocalTier.digest
    monkeypatch.setattr(LocalTier, "digest", lambda self, *of: digested.append(of[-1]) or digest_of(self, *of))
    assert resume(root, memory=False) == 6
    assert once == [root / "run" / NEWEST / "__0_0.distcp"]
    assert sorted(digested) == [".metadata", "meta.pt", "rank_00000.pt"]


class Trap:
    """Says so when it is unpickled."""

    sprung: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Trap.sprung.append, ("by the pickle",)


def test_no_object_of_a_shard_that_turns_out_to_be_damaged_is_unpickled(root: Path) -> None:
    path = root / "run" / NEWEST / "__0_0.distcp"
    stored = pickle.loads((path.parent / ".metadata").read_bytes())
    info = next(
        stored.storage_data[index]
        for index in stored.storage_data
        if isinstance(stored.state_dict_metadata[index.fqn], BytesStorageMetadata)
        and stored.storage_data[index].relative_path == path.name
    )
    stream = io.BytesIO()
    torch.save(Trap(), stream)
    data = bytearray(path.read_bytes())
    data[info.offset : info.offset + info.length] = stream.getvalue().ljust(info.length, b"\0")[: info.length]
    path.write_bytes(data)
    Trap.sprung.clear()
    assert resume(root) == 4
    assert Trap.sprung == []


def test_where_a_run_may_start_over_a_damaged_shard_never_touches_the_model(root: Path) -> None:
    for name in (NEWEST, PREVIOUS, "epoch=0-step=2.ckpt"):
        flipped("__0_0.distcp")(root / "run" / name)
    model = TinyModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen: list[dict[str, torch.Tensor]] = []
    model.on_train_start = lambda: seen.append({n: v.clone() for n, v in model.state_dict().items()})  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="Starting over"):
        assert resume(root, model=model, on_unrestorable="fresh") == 0
    assert all(torch.equal(value, before[name]) for name, value in seen[0].items())


@pytest.mark.parametrize("others", [0, 2])
def test_a_checkpoint_that_goes_while_it_is_resumed(root: Path, monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """By somebody else's hand, between the search and the reading."""
    for name in [PREVIOUS, "epoch=0-step=2.ckpt"][others:]:
        shutil.rmtree(root / "run" / name)
    original = Lookup.choose

    def choose(self: Lookup, path: Any, **kwargs: Any) -> Any:
        source = original(self, path, **kwargs)
        shutil.rmtree(root / "run" / NEWEST)
        return source

    monkeypatch.setattr(Lookup, "choose", choose)
    if others:
        assert resume(root, memory=False) == 4
    else:
        with pytest.raises(CheckpointCorrupt, match="cannot be read"):
            resume(root, memory=False)


def test_what_an_older_checkpoint_lacks_is_not_taken_from_a_damaged_newer_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grown(TinyModel):
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.late = torch.nn.Linear(3, 5)

    grown, first = Grown(), Grown()
    monkeypatch.setattr(grown, "late", torch.nn.Linear(3, 5))
    checkpoint = Witness(root, 100, keep=Keep(last=-1), filename="{epoch}-{step}")
    fit(root, checkpoint, model=grown, steps=8, resume="last")
    flipped("__0_0.distcp")(root / "run" / "epoch=0-step=8.ckpt")
    initial = first.late.weight.detach().clone()
    seen: list[torch.Tensor] = []
    first.on_train_start = lambda: seen.append(first.late.weight.detach().clone())  # type: ignore[method-assign]
    assert resume(root, model=first) == 6
    assert torch.equal(seen[0], initial)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_shard_that_shrinks_while_it_is_resumed(root: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    original = Lookup.choose

    def choose(self: Lookup, path: Any, **kwargs: Any) -> Any:
        source = original(self, path, **kwargs)
        os.truncate(root / "run" / NEWEST / "__0_0.distcp", size)
        return source

    monkeypatch.setattr(Lookup, "choose", choose)
    assert resume(root, memory=False) == 4


def test_when_every_shard_is_damaged_each_is_named(root: Path) -> None:
    for name in (NEWEST, PREVIOUS, "epoch=0-step=2.ckpt"):
        flipped("__0_0.distcp")(root / "run" / name)
    with pytest.raises(CheckpointCorrupt) as caught:
        resume(root)
    assert sum("__0_0.distcp has other content" in problem for problem in caught.value.problems) == 3
    assert "None" not in str(caught.value)


# -- none is left -----------------------------------------------------------------------------------------------------


def damage_all(root: Path) -> None:
    missing("manifest.json")(root / "run" / "epoch=0-step=2.ckpt")
    truncated("__0_0.distcp")(root / "run" / PREVIOUS)
    flipped("meta.pt")(root / "run" / NEWEST)


def test_when_all_are_damaged_the_run_stops_and_lists_each_with_its_cause(root: Path) -> None:
    damage_all(root)
    with pytest.raises(CheckpointCorrupt) as caught:
        resume(root)
    message = caught.value.message
    for name, cause in (
        ("epoch=0-step=2.ckpt", "no manifest"),
        (PREVIOUS, "__0_0.distcp is truncated"),
        (NEWEST, "meta.pt has other content"),
    ):
        assert name in message
        assert cause in message
        assert any(name in problem and cause in problem for problem in caught.value.problems)
    assert "on_unrestorable='fresh'" in caught.value.hint


def test_when_all_are_damaged_and_fresh_was_asked_for_training_starts_over_with_a_warning(root: Path) -> None:
    damage_all(root)
    with pytest.warns(UserWarning, match=r"none can be resumed from: .*step=6.*meta\.pt.*Starting over"):
        assert resume(root, on_unrestorable="fresh") == 0


def test_an_empty_folder_is_a_first_run_and_nothing_to_warn_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert resume(tmp_path) == 0
    assert not [str(warning.message) for warning in warned if "checkpoint" in str(warning.message).lower()]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "event=" in record.message]


# -- an explicit path -------------------------------------------------------------------------------------------------


def test_an_explicit_checkpoint_that_is_not_there_is_an_error_that_lists_what_is(root: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"epoch=0-step=999\.ckpt") as caught:
        resume(root, root / "run" / "epoch=0-step=999.ckpt")
    for name in (NEWEST, PREVIOUS, "epoch=0-step=2.ckpt"):
        assert name in caught.value.hint


def test_an_explicit_checkpoint_without_a_manifest_is_uncommitted(root: Path) -> None:
    missing("manifest.json")(root / "run" / NEWEST)
    with pytest.raises(CheckpointUncommitted, match="manifest") as caught:
        resume(root, root / "run" / NEWEST)
    assert PREVIOUS in caught.value.hint


def test_an_explicit_partial_folder_is_uncommitted(root: Path) -> None:
    partial = root / "run" / f"{NEWEST}.partial-0123"
    (root / "run" / NEWEST).rename(partial)
    missing("manifest.json")(partial)
    with pytest.raises(CheckpointUncommitted) as caught:
        resume(root, partial)
    assert PREVIOUS in caught.value.hint


@pytest.mark.parametrize("what", [what for what in DAMAGES if what != "no manifest"])
def test_an_explicit_damaged_checkpoint_is_corrupt_and_the_file_is_named(root: Path, what: str) -> None:
    damage, cause = DAMAGES[what]
    damage(root / "run" / NEWEST)
    with pytest.raises(CheckpointCorrupt, match=cause):
        resume(root, root / "run" / NEWEST)


def rewrite_with_format(folder: Path, number: int) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    raw["format"] = number
    raw.pop("digest")
    plain = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    raw["digest"] = digest(plain.encode())
    (folder / "manifest.json").write_text(
        json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    )


def test_a_format_of_the_future_is_incompatible_and_not_guessed_at(root: Path) -> None:
    rewrite_with_format(root / "run" / NEWEST, 1)
    Manifest.from_bytes((root / "run" / NEWEST / "manifest.json").read_bytes())  # this test writes it right
    rewrite_with_format(root / "run" / NEWEST, 2)
    with pytest.raises(CheckpointIncompatible, match="format 2") as caught:
        resume(root, root / "run" / NEWEST)
    assert "newer lightning_resilience" in caught.value.hint
    assert resume(root) == 4


# -- another model ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_lists_both_sides_and_leaves_the_model_alone(root: Path) -> None:
    model = TinyModel(width=24)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointIncompatible, match=r"net\.0\.weight.*\(16, 8\).*\(24, 8\)"):
        resume(root, model=model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_layers_that_one_side_lacks_are_listed_by_name(root: Path) -> None:
    model = TinyModel()
    model.extra = torch.nn.Linear(3, 5)
    del model.net[3]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointIncompatible) as caught:
        resume(root, model=model)
    ours, theirs = caught.value.message.split("only in the checkpoint")
    assert "extra.weight (5, 3)" in ours
    assert "net.3.weight (1, 16)" in theirs
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


# -- two ranks --------------------------------------------------------------------------------------------------------


def resume_together(root: Path, how: str, blind: int | None, **kwargs: Any) -> tuple[Any, ...]:
    """Where both ranks go on from, or the error; rank ``blind`` sees empty folders until training begins."""
    names, leftovers = LocalTier.names, LocalTier.leftovers

    class Seeing(Witness):
        def on_train_start(self, *args: Any) -> None:
            LocalTier.names, LocalTier.leftovers = names, leftovers
            super().on_train_start(*args)

    if blind is not None and blind == int(os.environ["RANK"]):
        LocalTier.names = LocalTier.leftovers = lambda self: []  # type: ignore[method-assign]
    checkpoint = Seeing(root, 100, **kwargs)
    try:
        trainer = fit(root, checkpoint, how=how, world_size=2, steps=8, resume="last")
    except CheckpointCorrupt as error:
        return type(error).__name__, error.message
    return checkpoint.began, trainer.global_step


@pytest.fixture(scope="module", params=["ddp", "fsdp", "fsdp2"])
def trained_together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("trained")
    run_forks(train, root, request.param, 2)
    assert whole_steps(root) == [2, 4, 6]
    return request.param, root


@pytest.mark.ranks
@pytest.mark.parametrize(
    "damage",
    [
        missing("__1_0.distcp"),
        flipped("__1_0.distcp"),
        truncated("rank_00001.pt"),
        missing(".metadata"),
        missing("manifest.json"),
        swapped("__0_0.distcp"),
    ],
    ids=["shard missing", "shard flipped", "generators cut", "no metadata", "no manifest", "swapped"],
)
def test_both_ranks_go_back_to_the_same_step(
    trained_together: tuple[str, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    how, source = trained_together
    root = Path(shutil.copytree(source, tmp_path / "root"))
    damage(root / "run" / NEWEST)
    assert run_forks(resume_together, root, how, None) == [(4, 8), (4, 8)]


def resume_while_a_shard_goes(root: Path, how: str, becomes: str) -> tuple[Any, ...]:
    """The shard of rank 1 becomes unreadable, or is gone, between the search and the reading."""
    path, preadv, pread, choose = root / "run" / NEWEST / "__1_0.distcp", os.preadv, os.pread, Lookup.choose

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(fd: int, *args: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}") == str(path):
                raise OSError(errno.EIO, "Input/output error")
            return original(fd, *args)

        return read

    def chosen(self: Lookup, *args: Any, **kwargs: Any) -> Any:
        source = choose(self, *args, **kwargs)
        if becomes == "unreadable":
            os.preadv, os.pread = failing(preadv), failing(pread)
        elif os.environ["RANK"] == "0":
            path.unlink()
        torch.distributed.barrier()
        return source

    digest_of = tiers.digest_of

    def digested(file: Path) -> str:
        if becomes == "unreadable" and file == path:
            raise OSError(errno.EIO, "Input/output error")
        return digest_of(file)

    Lookup.choose, tiers.digest_of = chosen, digested  # type: ignore[method-assign]
    return resume_together(root, how, None)


@pytest.mark.ranks
@pytest.mark.parametrize("becomes", ["unreadable", "gone"])
def test_a_shard_that_one_rank_checks_and_all_read_fails_on_all(
    trained_together: tuple[str, Path], tmp_path: Path, becomes: str
) -> None:
    how, source = trained_together
    root = Path(shutil.copytree(source, tmp_path / "root"))
    assert run_forks(resume_while_a_shard_goes, root, how, becomes) == [(4, 8), (4, 8)]


def resume_where_a_ranks_own_file_fails_late(root: Path, how: str) -> tuple[Any, ...]:
    """It was checked, and cannot be read once on rank 1 when the shards have been."""
    state_of, failed = Resumption._state_of, []

    def once(source: Source, rank: int) -> dict[str, Any]:
        if os.environ["RANK"] == "1" and not failed:
            failed.append(rank)
            raise OSError(errno.EIO, "Input/output error", "rank_00001.pt")
        return state_of(source, rank)

    Resumption._state_of = staticmethod(once)  # type: ignore[method-assign]
    return *resume_together(root, how, None), len(failed)


@pytest.mark.ranks
def test_what_fails_on_one_rank_after_the_others_have_loaded_begins_anew_on_all(
    trained_together: tuple[str, Path], tmp_path: Path
) -> None:
    how, source = trained_together
    root = Path(shutil.copytree(source, tmp_path / "root"))
    assert run_forks(resume_where_a_ranks_own_file_fails_late, root, how) == [(6, 8, 0), (6, 8, 1)]


@pytest.mark.ranks
@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_sees_nothing_follows_the_one_that_does(
    trained_together: tuple[str, Path], tmp_path: Path, blind: int
) -> None:
    how, source = trained_together
    root = Path(shutil.copytree(source, tmp_path / "root"))
    assert run_forks(resume_together, root, how, blind) == [(6, 8), (6, 8)]


@pytest.mark.ranks
def test_both_ranks_stop_with_the_same_error_when_all_are_damaged(
    trained_together: tuple[str, Path], tmp_path: Path
) -> None:
    how, source = trained_together
    root = Path(shutil.copytree(source, tmp_path / "root"))
    damage_all(root)
    first, second = run_forks(resume_together, root, how, None)
    assert first == second
    assert first[0] == "CheckpointCorrupt"
    assert all(name in first[1] for name in (NEWEST, PREVIOUS, "epoch=0-step=2.ckpt"))
