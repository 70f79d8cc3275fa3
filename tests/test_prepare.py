"""The first save is prepared: after the first step plan and slots are there, and hold as long as the shape does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_resilience import Keep, planning
from lightning_resilience.engine import Engine
from lightning_resilience.errors import SaveFailed
from lightning_resilience.persistence import Persistence
from lightning_resilience.ranks import Ranks
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.saves import Facts, Snapshot, no_keys
from lightning_resilience.staging import Staging
from lightning_resilience.tiers import LocalTier
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle

FACTS = Facts(step=1, epoch=0, reason="test", strategy="SingleDeviceStrategy")


def snapshot(**model: Any) -> Callable[[], Snapshot]:
    return lambda: Snapshot({"model": model}, no_keys, b"meta", b"rank")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The keys of each plan that was made."""
    made: list[list[str]] = []
    original = planning.plan_locally

    def counted(flat: Any, identical: Any) -> Any:
        made.append(list(flat.keys))
        return original(flat, identical)

    monkeypatch.setattr(planning, "plan_locally", counted)
    return made


@pytest.fixture
def engine() -> Any:
    made = Engine(Ranks(0, 1))
    yield made
    made.close()


def save(engine: Engine, root: Path, capture: Callable[[], Snapshot]) -> dict[str, Any]:
    started = engine.save(engine.open_folder(LocalTier(root)), "a.ckpt", FACTS, capture)
    assert started is not None
    path = Path(started.wait(60).path)
    return CheckpointReader(lambda file: path / file, plain=True).read_full()


def test_a_save_uses_what_was_prepared_and_saves_what_is_there_then(
    tmp_path: Path, engine: Engine, plans: list[list[str]]
) -> None:
    weight = torch.zeros(100)
    engine.prepare(snapshot(w=weight, note="early"))
    engine.prepare(snapshot(w=weight, note="early"))
    assert plans == [["model.w", "model.note"]]
    weight.fill_(7)
    assert not list(tmp_path.iterdir())
    loaded = save(engine, tmp_path, snapshot(w=weight, note="late"))
    assert torch.equal(loaded["w"], weight)
    assert loaded["note"] == "late"
    assert len(plans) == 1


def test_what_was_prepared_is_thrown_away_when_the_shape_has_changed(
    tmp_path: Path, engine: Engine, plans: list[list[str]]
) -> None:
    engine.prepare(snapshot(w=torch.zeros(100)))
    loaded = save(engine, tmp_path, snapshot(w=torch.ones(50), more=torch.ones(2)))
    assert plans == [["model.w"], ["model.w", "model.more"]]
    assert loaded["w"].shape == (50,)
    assert loaded["more"].shape == (2,)


def test_what_cannot_be_prepared_is_left_to_the_save(tmp_path: Path, engine: Engine, plans: list[list[str]]) -> None:
    def fails() -> Snapshot:
        raise RuntimeError("no state yet")

    engine.prepare(fails)
    assert plans == []
    assert torch.equal(save(engine, tmp_path, snapshot(w=torch.ones(3)))["w"], torch.ones(3))


def test_an_engine_closes_while_it_prepares(engine: Engine) -> None:
    engine.prepare(snapshot(**{f"w{i}": torch.zeros(10) for i in range(500)}))
    engine.close()


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_run_prepares_after_its_first_step_and_plans_no_more(
    tmp_path: Path, plans: list[list[str]], weights_only: bool
) -> None:
    planned: list[tuple[int, int]] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            planned.append((trainer.global_step, len(plans)))

    run = checkpoint_every(tmp_path / "run", 4, save_weights_only=weights_only)
    make_trainer(tmp_path, run, Look()).fit(TinyModel(), data())
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [4, 8]
    assert planned == [(0, 0), *((step, 1) for step in range(1, 8))]
    assert len(plans) == 1
    assert any(key.startswith("optimizer_0") for key in plans[0]) is not weights_only


def test_a_callback_for_weights_alone_beside_another_has_a_plan_of_its_own(
    tmp_path: Path, plans: list[list[str]]
) -> None:
    all_of_it = checkpoint_every(tmp_path / "run", 2, keep=Keep(last=-1))
    weights = checkpoint_every(tmp_path / "weights", 3, keep=Keep(last=-1), save_weights_only=True)
    model = TinyModel()
    make_trainer(tmp_path, all_of_it, weights, settle(), max_steps=8).fit(model, data())
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2, 4, 6, 8]
    assert [manifest.step for manifest in committed(tmp_path / "weights")] == [3, 6, 8]
    assert sorted(any(key.startswith("optimizer_0") for key in plan) for plan in plans) == [False, True]


def test_more_kinds_of_saves_than_there_is_memory_for_take_turns(
    tmp_path: Path, engine: Engine, plans: list[list[str]]
) -> None:
    for round_ in (1, 2):
        for part in ("model", "optimizer_0", "optimizer_1"):
            state = {part: {"w": torch.full((3,), float(round_))}}
            taken = Snapshot(state, no_keys, b"meta", b"rank")
            started = engine.save(engine.open_folder(LocalTier(tmp_path)), "a.ckpt", FACTS, lambda taken=taken: taken)
            assert started is not None
            started.wait(60)
    assert len(plans) == 6


def test_nothing_that_can_fail_on_one_rank_alone_is_made_for_another_kind_of_save(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("the other ranks would wait")

    monkeypatch.setattr(planning.SlotMemory, "__init__", fails)
    for part in ("model", "optimizer_0", "optimizer_1"):
        taken = Snapshot({part: {"w": torch.ones(3)}}, no_keys, b"meta", b"rank")
        started = engine.save(engine.open_folder(LocalTier(tmp_path)), "a.ckpt", FACTS, lambda taken=taken: taken)
        assert started is not None
        started.wait(60)


def test_what_goes_wrong_in_the_background_ends_neither_its_thread_nor_the_saves_after_it(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("nobody expected this")

    with monkeypatch.context() as patch:
        patch.setattr(planning.Planner, "map_rest", fails)
        assert torch.equal(save(engine, tmp_path, snapshot(w=torch.zeros(3)))["w"], torch.zeros(3))
        assert torch.equal(save(engine, tmp_path, snapshot(w=torch.ones(3)))["w"], torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(Persistence, "persist", fails)
        patch.setattr(Staging, "wait", fails)
        state = {"model": {"w": torch.full((3,), 2.0)}}
        moving = Snapshot(state, no_keys, b"meta", b"rank", still=lambda _: {"model.w"})
        started = engine.save(engine.open_folder(LocalTier(tmp_path)), "a.ckpt", FACTS, lambda: moving, overlap=True)
        assert started is not None
        with pytest.raises(SaveFailed, match="nobody expected this"):
            started.wait(60)
    assert torch.equal(save(engine, tmp_path, snapshot(w=torch.full((3,), 3.0)))["w"], torch.full((3,), 3.0))
    assert "event=background error=RuntimeError('nobody expected this')" in caplog.text
