"""The doorway into Lightning: the private names it relies on, strategies it takes and refuses, and ways to launch."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy, Strategy

from forks import run_forks as run_ranks
from lightning_resilience import EverySteps, ResilientCheckpoint, SetupError
from lightning_resilience.agreement import Agreement
from lightning_resilience.private_names import PRIVATE_NAMES
from lightning_resilience.ranks import Ranks
from lightning_resilience.strategies import family_of
from processes import run_alone
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle, strategy
from test_elastic import Recorder

PACKAGE = "lightning_resilience"


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_name_of_lightning_has_not_moved(name: str) -> None:
    module, path = name.split(":")
    owner: Any = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
        if inspect.isfunction(owner):  # an attribute that this method sets
            source = inspect.getsource(owner)
            assert any(text in source for text in (f"self.{attribute} =", f"self.{attribute}:", f'"{attribute}"'))
            return
    assert hasattr(owner, attribute)


def private_names_in(path: Path) -> tuple[set[str], set[str], set[str]]:
    """What a module imports that is private to others, the private attributes it uses, and those it makes."""
    imported, used, made = set(), set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.module.startswith(PACKAGE):
            imported |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (made if is_own else used).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
    imported = {name for name in imported if re.search(r"[.:]_[a-zA-Z]", name)}
    return imported, {name for name in used if re.match(r"_[a-zA-Z]", name)}, made


def test_every_private_name_that_is_used_is_listed() -> None:
    found = [private_names_in(path) for path in (Path(__file__).parent.parent / PACKAGE).glob("*.py")]
    imported, used, made = (set().union(*parts) for parts in zip(*found, strict=True))
    listed = {re.split(r"[.:]", name)[-1] for name in PRIVATE_NAMES}
    public = {"_replace", "_fields", "_exit"}  # of namedtuples and of os
    assert used - made - public <= listed
    assert {name for name in imported if not any(re.match(rf"{name}\b", one) for one in PRIVATE_NAMES)} == {
        "lightning_utilities.core.rank_zero:_"
    } - {"lightning_utilities.core.rank_zero:_"}


class Unknown(SingleDeviceStrategy):
    """A subclass of a strategy we know is fine."""


class Foreign(Strategy):
    """A strategy nobody knows."""

    broadcast = barrier = all_gather = reduce = model_to_device = None  # type: ignore[assignment]
    is_global_zero = root_device = None  # type: ignore[assignment]


def test_strategies_that_cannot_be_served_are_refused_with_what_to_use() -> None:
    deepspeed = object.__new__(DeepSpeedStrategy)
    with pytest.raises(SetupError, match=r"DeepSpeedStrategy.*use FSDPStrategy"):
        family_of(deepspeed)
    with pytest.raises(SetupError, match=r"XLAStrategy.*not supported"):
        family_of(type("XLAStrategy", (Foreign,), {})())
    with pytest.raises(SetupError, match=r"does not know Foreign.*Use a single device"):
        family_of(Foreign())
    assert family_of(Unknown(torch.device("cpu"))).prefix == "model"


def fit_by_launcher(folder: Path, launcher: str) -> tuple[str, str]:
    callback = checkpoint_every(folder / launcher, 2)
    trainer = make_trainer(folder, callback, settle(), strategy=launcher, devices=2)
    trainer.fit(TinyModel(), data(), ckpt_path="last")
    return callback.best_model_path, callback.last_model_path


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["ddp_spawn", "ddp_notebook"])
def test_ranks_that_lightning_spawns_or_forks_save_and_the_main_process_learns_of_it(
    tmp_path: Path, launcher: str
) -> None:
    best, _ = run_alone(fit_by_launcher, tmp_path, launcher, env={"PL_DISABLE_FORK": "0"})
    assert [m.step for m in committed(tmp_path / launcher)] == [2, 4]
    assert Path(best) == tmp_path / launcher / "epoch=0-step=4.ckpt"


# -- node-local folders -----------------------------------------------------------------------------------------------


def fit_on_local_disks(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Every rank has a folder of its own, as on nodes with local disks."""
    os.environ["LOCAL_DISK"] = str(folder / f"node{os.environ['RANK']}")
    model = TinyModel()
    trainer = make_trainer(
        folder,
        ResilientCheckpoint("$LOCAL_DISK/run", schedule=EverySteps(2)),
        settle(),
        strategy=strategy(name, 2),
        devices=2,
        max_steps=steps,
        max_epochs=-1,
    )
    trainer.fit(model, data(64), ckpt_path="last")
    return {"first": model.history[0][0] if model.history else None, "step": trainer.global_step}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp2"])
def test_nodes_with_disks_of_their_own_commit_and_resume_together(tmp_path: Path, name: str) -> None:
    run_ranks(fit_on_local_disks, tmp_path, name, 4)
    shards = [sorted(path.name for path in (tmp_path / f"node{n}" / "run").glob("*step=4.ckpt/*")) for n in (0, 1)]
    assert "rank_00000.pt" in shards[0]
    assert "rank_00001.pt" in shards[1]
    assert "rank_00001.pt" not in shards[0]
    for n in (0, 1):
        assert {".metadata", "meta.pt", "manifest.json"} <= set(shards[n])
    results = run_ranks(fit_on_local_disks, tmp_path, name, 6)
    assert results == [{"first": 4, "step": 6}] * 2
    # With DDP each reads everything; sharded, each has its own already.
    assert (tmp_path / "node0" / "run" / "epoch=0-step=4.ckpt" / "__1_0.distcp").exists() == (name == "ddp")


@pytest.mark.ranks
def test_node_whose_disk_lost_everything_takes_the_run_back_to_what_is_whole(tmp_path: Path) -> None:
    """Without a second copy of a shard no step can be restored on all ranks: an error says so; no fresh start."""
    import shutil

    run_ranks(fit_on_local_disks, tmp_path, "ddp", 4)
    shutil.rmtree(tmp_path / "node1")
    with pytest.raises(AssertionError, match=r"none can be resumed from.*rank_00001.pt is missing"):
        run_ranks(fit_on_local_disks, tmp_path, "ddp", 6)


# -- agreement --------------------------------------------------------------------------------------------------------


def ask_many_times(batches: int) -> list[int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = Agreement(Ranks(rank, 2), seconds=0.01)
    answered = []
    for batch in range(batches):
        wish = "because" if rank == 0 and batch % 40 > 20 else None
        if agreement.ask(wish) is not None:
            answered.append(batch)
        time.sleep(0.001 * (1 + (batch + rank) % 3))  # ranks are not equally fast
    agreement.close()
    dist.destroy_process_group()
    return answered


@pytest.mark.ranks
def test_ranks_hear_the_same_answer_at_the_same_batch() -> None:
    first, second = run_ranks(ask_many_times, 300)
    assert first == second
    assert len(first) >= 2


# -- YAML -------------------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, list[Any]] = {
    "dirpath": ["ckpts"],
    "filename": ["{epoch}-{step}", None],
    "monitor": ["val_loss"],
    "verbose": [True],
    "save_last": [True, False, None, "link"],
    "save_top_k": [2, 1],
    "save_on_exception": [True],
    "save_weights_only": [True],
    "mode": ["max"],
    "auto_insert_metric_name": [False],
    "every_n_train_steps": [10, None],
    "train_time_interval": ["0:10:0"],
    "every_n_epochs": [2],
    "save_on_train_epoch_end": [True],
    "enable_version_counter": [False],
    "schedule": [
        {"class_path": "lightning_resilience.EverySteps", "init_args": {"n": 3}},
        {"class_path": "lightning_resilience.EverySeconds", "init_args": {"seconds": 2.5}},
        {
            "class_path": "lightning_resilience.FirstOf",
            "init_args": {
                "schedules": [
                    {"class_path": "lightning_resilience.EverySteps", "init_args": {"n": 3}},
                    {"class_path": "lightning_resilience.LossVariance", "init_args": {"near_best": None}},
                ]
            },
        },
        {"class_path": "lightning_resilience.AdaptiveSchedule", "init_args": {"max_overhead": 0.02}},
    ],
    "loss_key": ["mse"],
    "keep": [{"last": 5}, {"last": -1, "top_k": 2}, {"last": 2, "marked": 0}],
    "memory": ["auto", False],
    "overlap_staging": ["auto", False],
    "on_save_error": ["raise"],
    "max_failures": [7],
    "rollback": [None],  # which goes with few of the others; examples/config.yaml has one
    "log_metrics": [False],
    "on_unrestorable": ["fresh"],
    "save_timeout": [12.5],
    "signals": [["SIGTERM", "SIGINT"], [10], []],
    "grace_seconds": [30, 2.5, None],
    "max_attempts": [5, None],
    "exact_data": [False, True],
    "restore_optimizers": [False],
    "remote": ["memory://run7"],
    "storage_options": [{"key": "k"}],
    "peers": [1, 2],
    "remote_keep": [{"last": 2, "milestones": 1000}, {"last": 1, "milestones": [10, 20]}],
}


def test_every_argument_is_tried_from_yaml() -> None:
    assert set(ARGUMENTS) == set(inspect.signature(ResilientCheckpoint).parameters)


TRIGGERS = {"every_n_train_steps", "train_time_interval"}


@pytest.mark.parametrize("without", [TRIGGERS, {"schedule"}], ids=["schedule", "triggers"])
@pytest.mark.parametrize("turn", range(max(map(len, ARGUMENTS.values()))))
def test_arguments_are_set_from_yaml_and_round_trip(
    tmp_path: Path,
    turn: int,
    without: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every argument in every type it takes, several at a time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    values = {name: choices[turn % len(choices)] for name, choices in ARGUMENTS.items() if name not in without}
    callback = {"class_path": "lightning_resilience.ResilientCheckpoint", "init_args": values}
    config = {"trainer": {"logger": False, "accelerator": "cpu", "callbacks": [callback]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def build(*arguments: str) -> ResilientCheckpoint:
        cli = LightningCLI(
            TinyModel,
            args=["--config", "config.yaml", *arguments],
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
        )
        (built,) = [c for c in cli.trainer.callbacks if isinstance(c, ResilientCheckpoint)]
        return built

    built = build()
    for name in (
        "memory",
        "overlap_staging",
        "max_failures",
        "on_save_error",
        "on_unrestorable",
        "save_timeout",
        "mode",
        "monitor",
    ):
        assert getattr(built, name) == values[name]
    assert built.keep.last == values["keep"]["last"]
    assert (type(built.schedule).__name__ in values.get("schedule", {}).get("class_path", "")) == ("schedule" in values)
    with pytest.raises(SystemExit):
        build("--print_config")
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    twin = build()
    assert twin.state_key == built.state_key
    assert twin.keep == built.keep


class WithData(TinyModel):
    """Brings its own data, for the CLI."""

    def train_dataloader(self) -> Any:
        return data()


def test_checkpoint_folder_as_ckpt_path_of_the_cli_resumes_and_explicit_values_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 8)).fit(WithData())
    path = next((tmp_path / "run").glob("*.ckpt"))
    for ckpt_path in (str(path), "last"):
        cli = LightningCLI(
            WithData,
            args=[
                "fit",
                f"--ckpt_path={ckpt_path}",
                "--model.lr=0.5",
                "--trainer.max_steps=8",
                "--trainer.logger=false",
                "--trainer.accelerator=cpu",
                f"--trainer.default_root_dir={tmp_path}",
                "--trainer.callbacks+=lightning_resilience.ResilientCheckpoint",
                f"--trainer.callbacks.dirpath={tmp_path / 'run'}",
            ],
            trainer_defaults={"enable_progress_bar": False},
            save_config_callback=None,
            seed_everything_default=False,
        )
        assert cli.trainer.global_step == 8
        assert cli.model.hparams["lr"] == 0.5


# -- the committed sample ---------------------------------------------------------------------------------------------

SAMPLE = Path(__file__).parent / "format-1" / "epoch=0-step=8.ckpt"


def test_sample_of_format_1_is_read(tmp_path: Path) -> None:
    expected = json.loads((SAMPLE.parent / "expected.json").read_text())
    (manifest,) = committed(SAMPLE.parent)
    assert (manifest.step, manifest.run) == (8, expected["run"])
    model = Recorder()
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 8), max_epochs=2)
    trainer.fit(model, data(), ckpt_path=SAMPLE)
    assert model.history[0][0] == 8
    assert {name: float(value.double().sum()) for name, value in model.first.items()} == expected["sums"]
