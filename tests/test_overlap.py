"""What is copied while the next forward and backward run is what there was when the save began, to the bit."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from forks import run_forks, start_forks
from lightning_resilience import Keep, points
from lightning_resilience.engine import Engine
from lightning_resilience.errors import SaveFailed
from lightning_resilience.named_optimizers import read_numbered
from lightning_resilience.preemption import Preempted
from lightning_resilience.ranks import Ranks
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.session import Session
from lightning_resilience.staging import THREAD, Staging
from support import FEATURES, TinyModel, checkpoint_every, committed, data, make_trainer, strategy

LONGEST = 30.0
"""Seconds after which a copy that nothing lets go on fails."""


class Hold(L.Callback):
    """Keeps each copy behind the training thread from ending, or from beginning, until ``passes`` more backward passes
    are done; and has each save end before the one after it."""

    def __init__(self, passes: int = 1, linger: float = 0.0) -> None:
        self.passes = passes
        self.linger = linger  # seconds that a copy goes on after that
        self.held = 0
        self._done = self._until = 0
        self._news = threading.Condition()

    def __enter__(self) -> Hold:
        original, self._start = Staging.start, Staging.start

        def start(staging: Staging) -> None:
            self._until = self._done + self.passes
            original(staging)

        Staging.start = start  # type: ignore[method-assign]
        self._stop = points.listen(self._wait)
        return self

    def __exit__(self, *_: object) -> None:
        Staging.start = self._start  # type: ignore[method-assign]
        self._stop()

    def _wait(self, name: str) -> None:
        if name == "stage.piece" and threading.current_thread().name == THREAD:
            with self._news:
                self.held += self._done < self._until
                if not self._news.wait_for(lambda: self._done >= self._until, LONGEST):
                    raise TimeoutError("no backward pass while a copy was held")
            time.sleep(self.linger)

    def release(self, passes: int = 1) -> None:
        with self._news:
            self._done += passes
            self._news.notify_all()

    def on_after_backward(self, *_: Any) -> None:
        self.release()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        in_window = trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
        if not in_window and (session := Session.of(trainer)) is not None:
            session.engine.drain(LONGEST)


# -- the same run, copied at once and copied behind --------------------------------------------------------------------


class Momentum(TinyModel):
    """A frozen copy of the network follows it, and changes in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = deepcopy(self.net).requires_grad_(False)
        self.free = nn.Parameter(torch.zeros(FEATURES))  # trainable by its looks, and no optimizer's

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, own in zip(self.follower.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(own, 0.1)
            self.free.add_(1.0)
        return super().training_step(batch, batch_idx) + self.follower(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class ByHand(TinyModel):
    """Two optimizers, stepped one after the other; of ``raw`` ones Lightning does not hear."""

    raw = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=not self.raw)
        for optimizer, network in ((first, self.net), (second, self.critic)):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(network(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        ]


class ByHandRaw(ByHand):
    raw = True


class InBackward(TinyModel):
    """Each parameter's optimizer steps as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in self.parameters()}

        def step(parameter: Tensor) -> None:
            hold = next(one for one in self.trainer.callbacks if isinstance(one, Hold))  # type: ignore[attr-defined]
            hold.release()  # the backward pass is not over, and yet this is as far as a copy may go on
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        return list(optimizers.values())


class Newton(TinyModel):
    """LBFGS runs forward and backward several times a step, and changes weights in between."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Large(TinyModel):
    """Has tensors of more than one piece, one of them transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(FEATURES, 600_000).div_(1000))
        self.across = nn.Parameter(torch.randn(40_000, FEATURES).div_(1000).t())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        wide = (batch[0] @ self.wide).square().mean() + (batch[0] @ self.across).square().mean()
        return super().training_step(batch, batch_idx) + wide


class Adjusts(TinyModel):
    """Changes weights by hand at the latest moment before a step, past what torch counts."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.99)


class Swaps(L.Callback):
    """Validates with other weights."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)
        time.sleep(0.3)  # longer than a copy lingers

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            parameter.data.neg_()


WITHIN_A_WINDOW = {
    "callbacks": [Swaps],
    "every": 1,
    "linger": 0.1,
    "accumulate_grad_batches": 2,
    "val_check_interval": 3,
    "max_epochs": 1,
}
"""Validates between two batches of a window, with no step since the save."""

RUNS: dict[str, tuple[type[TinyModel], dict[str, Any], int]] = {
    "batch norm": (TinyModel, {}, 1),
    "accumulated gradients": (TinyModel, {"accumulate_grad_batches": 2, "max_epochs": 4}, 2),
    "momentum encoder": (Momentum, {}, 1),
    "by hand": (ByHand, {}, 1),
    "by hand, raw": (ByHandRaw, {}, 1),
    "in backward": (InBackward, {}, 1),
    "LBFGS": (Newton, {}, 1),
    "large": (Large, {}, 1),
    "weights changed before a step": (Adjusts, {}, 1),
    "16 bits": (TinyModel, {"precision": "bf16-mixed"}, 1),
    "16 bits throughout": (TinyModel, {"precision": "bf16-true"}, 1),
    "averages": (TinyModel, {"callbacks": [EMAWeightAveraging], "val_check_interval": 3}, 1),
    "other weights for validation": (TinyModel, WITHIN_A_WINDOW, 1),
}


def train(
    root: Path, run: str = "batch norm", how: str = "single", overlap: bool = True, **kwargs: Any
) -> tuple[int, list[str]]:
    """Train, saving often; how many copies were held while a forward and a backward pass ran, and what the ranks told
    each other."""
    cls, trainer_kwargs, passes = RUNS[run]
    options = {"max_epochs": 2, **trainer_kwargs, **kwargs}
    L.seed_everything(1, verbose=False)
    every, linger = options.pop("every", 3), options.pop("linger", 0.0)
    choice = "auto" if overlap else False
    saver = checkpoint_every(
        root / str(overlap), every, keep=Keep(last=-1), overlap_staging=choice, on_save_error="raise"
    )
    talk: list[str] = []
    others = [cls() for cls in options.pop("callbacks", [])]
    warnings.filterwarnings("ignore", "You're using the WeightAveraging callback")
    with Hold(passes, linger) as hold, pytest.MonkeyPatch.context() as patch:
        listen_in(patch, talk)
        trainer = make_trainer(root, hold, *others, saver, strategy=strategy(how), **options)
        if how != "single":
            trainer_devices = {"devices": 2, "use_distributed_sampler": False}
            trainer = make_trainer(root, hold, saver, strategy=strategy(how), **trainer_devices, **options)
        trainer.fit(cls(), data(), data(4) if "val_check_interval" in options else None)
    return hold.held, talk


def listen_in(patch: pytest.MonkeyPatch, talk: list[str]) -> None:
    """Note all that ranks say to each other on their training threads."""
    for name in ("any_max", "broadcast", "gather", "scatter", "all_gather", "gathered"):
        original = getattr(Ranks, name)

        def noting(ranks: Ranks, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            talk.append(_name)
            return _original(ranks, *args, **kwargs)

        patch.setattr(Ranks, name, noting)


def content(folder: Path) -> dict[str, dict[str, Any]]:
    """All tensors of all checkpoints."""
    found = {}
    assert committed(folder)
    for path in sorted(folder.glob("*.ckpt")):
        reader = CheckpointReader(lambda file, path=path: path / file, plain=True)  # type: ignore[misc]
        tensors = {f"model.{name}": value for name, value in reader.read_full().items()}
        for index in range(reader.optimizers):
            for name, entry in read_numbered(reader, index)["state"].items():
                tensors |= {f"{index}.{name}.{key}": value for key, value in entry.items()}
        found[path.name] = tensors
    return found


def assert_same(root: Path) -> None:
    at_once, behind = content(root / "False"), content(root / "True")
    assert len(at_once) >= 3
    assert at_once.keys() == behind.keys()
    for name, tensors in at_once.items():
        assert tensors.keys() == behind[name].keys()
        assert any(key.startswith("0.") for key in tensors)
        for key, value in tensors.items():
            assert is_same(value, behind[name][key]), f"{key} of {name}"


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("run", RUNS)
def test_what_is_copied_behind_the_training_thread_is_what_is_copied_at_once(tmp_path: Path, run: str) -> None:
    held, said = train(tmp_path, run)
    assert held >= 3
    held, said_at_once = train(tmp_path, run, overlap=False)
    assert held == 0
    assert said == said_at_once
    assert_same(tmp_path)


def both(root: Path, how: str) -> Any:
    return train(root, how=how), train(root, how=how, overlap=False)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp2"])
def test_ranks_copy_behind_their_training_threads_without_a_word_more(tmp_path: Path, how: str) -> None:
    for (held, said), (held_at_once, said_at_once) in run_forks(both, tmp_path, how, world_size=2, timeout=120):
        assert held >= 3
        assert held_at_once == 0
        assert said == said_at_once
    assert_same(tmp_path)


# -- where it goes wrong -----------------------------------------------------------------------------------------------


class Clamped(TinyModel):
    """Changes weights where nothing waits for a copy."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.3, 0.3)


def test_weights_changed_outside_of_a_step_void_that_copy_and_the_next_ones_are_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpoint_every(tmp_path / "run", 2, keep=Keep(last=-1))
    truth: dict[int, Tensor] = {}
    original = Session.save

    def save(session: Session, *args: Any, **kwargs: Any) -> Any:
        truth[session.trainer.global_step] = session.trainer.lightning_module.net[0].weight.detach().clone()
        return original(session, *args, **kwargs)

    monkeypatch.setattr(Session, "save", save)
    with Hold() as hold:
        trainer = make_trainer(tmp_path, hold, saver, max_steps=8)
        with pytest.warns(UserWarning, match="dropped") as warned:
            trainer.fit(Clamped(), data())
    [said] = [str(one.message) for one in warned if "dropped" in str(one.message)]
    assert "step 2" in said
    assert "model.net.0.weight was changed outside of an optimizer's step" in said
    assert "overlap_staging=False" in said
    assert hold.held == 1
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [4, 6, 8]
    for name, tensors in content(tmp_path / "run").items():
        assert torch.equal(tensors["model.net.0.weight"], truth[int(name.split("step=")[1].split(".")[0])])


def fail_on_rank_1(root: Path) -> list[str]:
    """The second copy behind the training thread fails, on one rank."""
    copies = 0

    def fail(name: str) -> None:
        nonlocal copies
        copies += name == "stage.piece"
        if name == "stage.piece" and copies == 2 and os.environ["RANK"] == "1":
            raise OSError("no more")

    saver = checkpoint_every(root / "run", 2, keep=Keep(last=-1))
    points.listen(fail)
    trainer = make_trainer(root, Hold(), saver, strategy=strategy("ddp"), devices=2, max_steps=8)
    with warnings.catch_warnings(record=True) as warned:
        trainer.fit(TinyModel(), data(64))
    return [str(one.message) for one in warned if "dropped" in str(one.message)]


@pytest.mark.ranks
def test_a_copy_that_fails_on_one_rank_drops_the_save_on_all(tmp_path: Path) -> None:
    said, _ = run_forks(fail_on_rank_1, tmp_path, world_size=2, timeout=60)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2, 6, 8]
    [only] = said
    assert "no more" in only
    assert "Rank 1" in only


class Stop(L.Callback):
    """Raises while a copy is held."""

    def __init__(self, hold: Hold, let_go: bool) -> None:
        self.hold, self.let_go = hold, let_go

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            raise RuntimeError("out of luck")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self.let_go:
            self.hold.release()


@pytest.mark.parametrize("let_go", [True, False], ids=["ends in time", "does not end"])
def test_an_exception_in_the_middle_of_a_copy(tmp_path: Path, let_go: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_resilience.fit.DRAIN_AFTER_EXCEPTION", 10.0 if let_go else 0.3)
    saver = checkpoint_every(tmp_path / "run", 2)
    with Hold() as hold:
        model = TinyModel()
        with pytest.raises(RuntimeError, match="out of luck"):
            make_trainer(tmp_path, Stop(hold, let_go), hold, saver).fit(model, data())
        weights = deepcopy(model.state_dict())
        hold.release(100)
    steps = [manifest.step for manifest in committed(tmp_path / "run")]
    assert steps == ([2, 4] if let_go else [2])
    if let_go:
        saved = content(tmp_path / "run")["epoch=0-step=4.ckpt"]
        assert all(torch.equal(saved[f"model.{name}"], weights[name]) for name, _ in model.named_parameters())


class Signalled(L.Callback):
    """Is sent a signal while a copy is held."""

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def be_signalled(root: Path) -> int:
    with Hold() as hold:
        trainer = make_trainer(root, Signalled(), hold, checkpoint_every(root / "run", 2), max_epochs=50)
        try:
            trainer.fit(TinyModel(), data())
        except Preempted:
            return trainer.global_step
    raise AssertionError("not preempted")


def test_a_signal_in_the_middle_of_a_copy_ends_with_the_step_that_training_stops_at(tmp_path: Path) -> None:
    [stopped_at] = run_forks(be_signalled, tmp_path, world_size=1, timeout=60)
    steps = [manifest.step for manifest in committed(tmp_path / "run")]
    assert steps[0] == 2
    assert steps[-1] == stopped_at


def be_killed(root: Path) -> None:
    with Hold() as hold:

        class Kill(L.Callback):
            def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
                if trainer.global_step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)

        make_trainer(root, Kill(), hold, checkpoint_every(root / "run", 2)).fit(TinyModel(), data())


def test_a_kill_in_the_middle_of_a_copy_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with start_forks(be_killed, tmp_path, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2]


class CompiledStep(TinyModel):
    """Its optimizer's step is compiled while a copy is under way."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers().optimizer  # type: ignore[union-attr]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 2:
            torch.compile(optimizer.step, backend="eager")()
        else:
            optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's own compiler
def test_a_step_that_is_compiled_waits_for_a_copy_as_any_other(tmp_path: Path) -> None:
    model = CompiledStep()
    with Hold() as hold:
        saver = checkpoint_every(tmp_path / "run", 2, keep=Keep(last=-1))
        make_trainer(tmp_path, hold, saver, max_steps=-1, max_epochs=1, limit_train_batches=4).fit(model, data())
    assert hold.held
    assert len(model.history) == 4
    assert committed(tmp_path / "run")


def test_waiting_for_a_copy_counts_as_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes one second on whenever it is read."""
    stalls: list[tuple[float, float]] = []
    original = Engine.finish_staging

    def finish_staging(engine: Engine) -> None:
        save, waits = engine._in_flight, engine._staging is not None
        before = save.stall if save is not None else 0.0
        original(engine)
        if save is not None and waits:
            stalls.append((before, save.stall))

    monkeypatch.setattr(Engine, "finish_staging", finish_staging)
    with Hold() as hold:
        make_trainer(tmp_path, hold, checkpoint_every(tmp_path / "run", 2), max_steps=6).fit(TinyModel(), data())
    assert len(stalls) >= 2
    assert all(after > before for before, after in stalls)


def test_the_end_of_an_epoch_and_of_training_copy_at_once(tmp_path: Path) -> None:
    """What epoch ends do to weights is anybody's guess, and after the last step nothing follows."""
    with Hold() as hold:
        saver = checkpoint_every(tmp_path / "run", 4, keep=Keep(last=-1))
        make_trainer(tmp_path, hold, saver, max_epochs=2, max_steps=10).fit(TinyModel(), data())
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [4, 8, 10]
    assert hold.held == 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(LONGEST)
            assert not thread.is_alive()


def test_a_failed_save_says_at_which_stage(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "stage.piece":
            raise OSError("no more")

    stop = points.listen(fail)
    try:
        saver = checkpoint_every(tmp_path / "run", 2, on_save_error="raise")
        with pytest.raises(SaveFailed, match="no more"), pytest.warns(UserWarning, match="no more"):
            make_trainer(tmp_path, Hold(), saver, max_epochs=5).fit(TinyModel(), data())
    finally:
        stop()
    assert committed(tmp_path / "run") == []
