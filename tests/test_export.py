"""``export``: one stock file from a checkpoint of any strategy, whole or not there at all."""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forks import run_fork
from forks import run_forks as run_ranks
from lightning_resilience import ResilientCheckpointIO, cli
from on_disk import flip, tree
from support import TinyModel, checkpoint_every, data, make_trainer, strategy
from test_elastic import Recorder

WEIGHTS = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "hparams_name", "hyper_parameters"}


def train(folder: Path, name: str, width: int = 16) -> Path:
    """A run of three steps, saved at its end with its state beside it; the path of the checkpoint."""
    torch.manual_seed(5)
    world = 1 if name == "single" else 2
    model = Recorder(width=width, lr=0.02)
    saving = checkpoint_every(folder / name, 100)
    trainer = make_trainer(folder, saving, strategy=strategy(name, world), devices=world, max_steps=3, max_epochs=-1)
    trainer.fit(model, data(64))
    if trainer.is_global_zero:
        torch.save(model.final, folder / f"{name}.pt")
    return only_checkpoint(folder / name)


def train_all(folder: Path, names: list[str]) -> None:
    for name in names:
        train(folder, name)


def only_checkpoint(folder: Path) -> Path:
    (path,) = folder.glob("*.ckpt")
    return path


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints hold the same."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_stock_goes_on(path: Path, target: Path, expected: dict[str, Tensor]) -> None:
    """Export a checkpoint, and let stock Lightning resume from the file and load it."""
    whole, weights = target / "whole.ckpt", target / "weights.ckpt"
    target.mkdir()
    assert cli.main(["export", str(path), str(whole)]) == 0
    assert cli.main(["export", str(path), str(weights), "--weights-only"]) == 0
    assert same(torch.load(whole, weights_only=False), ResilientCheckpointIO().load_checkpoint(path))
    assert torch.load(weights, weights_only=True).keys() == WEIGHTS
    assert weights.stat().st_size < whole.stat().st_size

    second = Recorder(width=16, lr=0.02)
    trainer = make_trainer(target, enable_checkpointing=False, max_steps=5, max_epochs=-1)
    trainer.fit(second, data(64), ckpt_path=whole)
    assert trainer.global_step == 5
    assert [step for step, _ in second.history] == [3, 4]
    assert same({key: value for key, value in second.first.items() if "running" not in key},
                {key: value for key, value in expected.items() if "running" not in key})  # fmt: skip
    assert any("exp_avg" in key for key in expected)
    for file in (whole, weights):
        loaded = Recorder.load_from_checkpoint(file)
        assert loaded.hparams["lr"] == 0.02
        assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items() if key in expected
                   and "running" not in key)  # fmt: skip
    assert sorted(path.name for path in target.iterdir()) == ["weights.ckpt", "whole.ckpt"]


def test_stock_lightning_goes_on_from_an_exported_checkpoint(tmp_path: Path) -> None:
    path = train(tmp_path, "single")
    check_stock_goes_on(path, tmp_path / "out", torch.load(tmp_path / "single.pt"))


@pytest.mark.ranks
def test_stock_lightning_goes_on_from_exported_checkpoints_of_every_strategy(tmp_path: Path) -> None:
    names = ["ddp", "fsdp", "fsdp2"]
    run_ranks(train_all, tmp_path, names, timeout=150)
    for name in names:
        path = only_checkpoint(tmp_path / name)
        check_stock_goes_on(path, tmp_path / f"{name}-out", torch.load(tmp_path / f"{name}.pt"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """``call("export", …)`` runs the command: exit code, document, stderr."""

    def run(*argv: object) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()  # what training printed
        code = cli.main([*map(str, argv), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


def test_checkpoint_behind_a_url_is_exported_and_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = train(tmp_path, "single")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    file = tmp_path / "model.ckpt"
    code, document, _ = call("export", f"local://{path}", file)
    assert (code, document["step"], document["size"]) == (0, 3, file.stat().st_size)
    assert same(torch.load(file, weights_only=False), ResilientCheckpointIO().load_checkpoint(path))
    flip(path / "__0_0.distcp", 999)
    code, document, _ = call("export", f"local://{path}", file, "--force")
    assert (code, document["error"]) == (1, "CheckpointCorrupt")
    assert not any((tmp_path / "tmp").iterdir())


def test_damaged_checkpoint_is_not_exported(tmp_path: Path, call: Any) -> None:
    path = train(tmp_path, "single")
    flip(path / "meta.pt", 99)
    code, document, _ = call("export", path, tmp_path / "model.ckpt")
    assert (code, document["error"]) == (1, "CheckpointCorrupt")
    assert "meta.pt has other content than was saved" in document["message"]
    assert not (tmp_path / "model.ckpt").exists()


def test_file_that_is_there_is_overwritten_only_when_forced(tmp_path: Path, call: Any) -> None:
    path = train(tmp_path, "single")
    file = tmp_path / "model.ckpt"
    file.write_bytes(b"precious")
    code, document, _ = call("export", path, file)
    assert (code, document["error"], file.read_bytes()) == (1, "SetupError", b"precious")
    assert "--force" in document["hint"]
    assert call("export", path, file, "--force")[0] == 0
    assert TinyModel.load_from_checkpoint(file).hparams["lr"] == 0.02


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("run", "model.ckpt", "is not a checkpoint"),
        ("run/step=9.ckpt", "model.ckpt", "There is no checkpoint"),
        ("model.ckpt", "other.ckpt", "is a file, such as stock Lightning writes"),
        ("run", ".", "is a folder. Give the name of a file"),
        ("run", "nowhere/model.ckpt", "Try mkdir -p"),
    ],
)
def test_what_cannot_be_exported_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, target: str, said: str
) -> None:
    (tmp_path / "run").mkdir()
    if source == "model.ckpt":
        (tmp_path / source).write_bytes(b"stock")
    before = tree(tmp_path)
    assert cli.main(["export", str(tmp_path / source), str(tmp_path / target)]) == 1
    assert said in " ".join(capsys.readouterr().err.split("\n"))
    assert tree(tmp_path) == before


def export_with_little_room(path: Path, file: Path) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    return cli.main(["export", str(path), str(file), "--force"])


def test_export_that_runs_out_of_room_says_so_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = train(tmp_path, "single", width=3000)
    file = tmp_path / "out" / "model.ckpt"
    file.parent.mkdir()
    file.write_bytes(b"precious")
    assert run_fork(export_with_little_room, path, file) == 1
    assert tree(file.parent) == {"model.ckpt": b"precious"}


class Mine:
    """Something that only the code of the training knows."""


class Odd(Recorder):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = Mine()


def test_class_that_cannot_be_imported_is_an_error_that_says_where_to_run(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 100), max_steps=1).fit(Odd(), data())
    path = only_checkpoint(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.delattr(f"{__name__}.Mine")
        code, document, _ = call("export", path, tmp_path / "model.ckpt")
    assert (code, document["error"]) == (1, "CheckpointIncompatible")
    assert "PYTHONPATH" in document["hint"]
    assert call("export", path, tmp_path / "model.ckpt", "--weights-only")[0] == 0
    assert isinstance(torch.load(tmp_path / "model.ckpt", weights_only=False)["mine"], Mine)  # the model's own stays
