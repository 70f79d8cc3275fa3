"""Whatever changes between two saves, the later one saves what there is then: nothing is taken for granted because it
was so before."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from lightning_resilience import Keep, SaveFailed
from lightning_resilience.flat import FlatState, Outline
from lightning_resilience.module_state import ModuleState
from lightning_resilience.named_optimizers import named_optimizer_state
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.saveable import check_saveable
from lightning_resilience.session import Session
from lightning_resilience.strategies import PlainFamily
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle

# -- a model's state dict ----------------------------------------------------------------------------------------------


class Counter(nn.Module):
    def get_extra_state(self) -> dict[str, Any]:
        return {"count": torch.ones(1)}

    def set_extra_state(self, state: Any) -> None:
        pass


class Renames(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "other"] = self.weight.detach()


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4, bias=False))
        self.second = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("table", torch.zeros(4, 4))
        self.register_module("missing", None)


def set_data(value: Tensor, other: Tensor) -> None:
    value.data = other


def hook(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "more"] = torch.ones(1)


CHANGES_OF_A_MODULE: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "values": lambda m: nn.init.ones_(m.second[0].weight),
    "parameter replaced": lambda m: setattr(m.second[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter of another shape": lambda m: setattr(m.second[0], "weight", nn.Parameter(torch.ones(2, 4))),
    "parameter removed": lambda m: setattr(m.second[0], "bias", None),
    "parameter added": lambda m: m.second.register_parameter("late", nn.Parameter(torch.ones(1))),
    "parameter is a buffer": lambda m: (delattr(m, "scale"), m.register_buffer("scale", torch.ones(()))),
    "frozen": lambda m: m.second[0].weight.requires_grad_(False),
    "same memory, new object": lambda m: setattr(m.second[0], "weight", nn.Parameter(m.second[0].weight.data)),
    "swapped with the same memory": lambda m: torch.utils.swap_tensors(
        m.second[0].weight, nn.Parameter(m.second[0].weight.data)
    ),
    "memory replaced": lambda m: set_data(m.second[0].weight, torch.ones(4, 4)),
    "transposed": lambda m: set_data(m.second[0].weight, m.second[0].weight.data.t()),
    "reshaped": lambda m: set_data(m.second[0].weight, m.second[0].weight.data.view(2, 8)),
    "shortened": lambda m: set_data(m.second[0].weight, m.second[0].weight.data[:2]),
    "moved within its memory": lambda m: set_data(m.second[0].weight, m.second[0].weight.data[1:]),
    "other dtype": lambda m: m.second[0].double(),
    "other dtype, same memory": lambda m: set_data(m.table, m.table.data.view(torch.int32)),
    "tied": lambda m: setattr(m.second[0], "weight", m.second[2].weight),
    "module added": lambda m: m.second.append(nn.Linear(4, 4)),
    "module removed": lambda m: m.second.pop(-1),
    "module removed by name": lambda m: setattr(m, "second", None),
    "module shared": lambda m: m.second.__setitem__(2, m.second[0]),
    "module of another class": lambda m: m.second.__setitem__(1, nn.Identity()),
    "modules swapped": lambda m: m.second.insert(0, m.second.pop(-1)),
    "buffer replaced": lambda m: setattr(m, "table", torch.ones(4, 4)),
    "buffer added": lambda m: m.second.register_buffer("late", torch.ones(1)),
    "buffer persistent": lambda m: m._non_persistent_buffers_set.discard("mask"),
    "buffer not persistent": lambda m: m._non_persistent_buffers_set.add("table"),
    "buffer None": lambda m: setattr(m, "table", None),
    "hook": lambda m: m.second._register_state_dict_hook(hook),
    "hook before": lambda m: m.second.register_state_dict_pre_hook(
        lambda module, *_: module.register_buffer("late", module[0].bias.detach())
    ),
    "hook after": lambda m: m.second.register_state_dict_post_hook(hook),
    "overridden on the object": lambda m: setattr(m.second, "state_dict", lambda destination, **_: destination),
    "overridden by a class": lambda m: m.second.__setitem__(1, Renames(4, 4)),
    "extra state": lambda m: m.second.__setitem__(1, Counter()),
    "sparse": lambda m: setattr(m, "table", torch.eye(4).to_sparse()),
}


def assert_same_state(state: dict[str, Any], wanted: Any) -> None:
    assert list(state) == list(wanted)
    assert state._metadata == wanted._metadata  # type: ignore[attr-defined]
    for name, value in wanted.items():
        mine = state[name]
        assert type(mine) is type(value)
        if isinstance(value, Tensor):
            assert (mine.dtype, mine.layout, mine.requires_grad) == (value.dtype, value.layout, False)
            if name.partition(".")[2] != "more" and value.layout == torch.strided:
                assert mine.is_set_to(value)
                torch.autograd.graph.increment_version(value)
                assert mine._version == value._version  # what changes the one is seen to change the other


@pytest.mark.parametrize("change", CHANGES_OF_A_MODULE)
def test_state_dict_is_that_of_torch_after_any_change(change: str) -> None:
    module, state = Root(), ModuleState()
    assert_same_state(state.state_dict(module), module.state_dict())
    assert_same_state(state.state_dict(module), module.state_dict())
    CHANGES_OF_A_MODULE[change](module)
    for _ in range(2):
        assert_same_state(state.state_dict(module), module.state_dict())
        assert set(state.parameters) == {name for name, _ in module.named_parameters(remove_duplicate=False)}


def test_what_is_done_to_a_state_dict_is_not_in_the_next_one() -> None:
    module, state = Root(), ModuleState()
    first = state.state_dict(module)
    tensor = first.pop("second.0.weight")
    first["more"] = torch.ones(1)
    first._metadata.clear()  # type: ignore[attr-defined]
    tensor.t_()
    second = state.state_dict(module)
    assert_same_state(second, module.state_dict())
    second["scale"].data = torch.zeros(7)
    assert_same_state(state.state_dict(module), module.state_dict())


def test_buffer_made_in_inference_mode_is_given_again() -> None:
    """As one that a validation has put there."""
    module, state = Root(), ModuleState()
    with torch.inference_mode():
        module.table = torch.ones(4, 4)
    for _ in range(2):
        assert torch.equal(state.state_dict(module)["table"], module.table)


def test_same_tensors_are_given_as_long_as_nothing_changes() -> None:
    module, state = Root(), ModuleState()
    first, second = state.state_dict(module), state.state_dict(module)
    assert first is not second
    assert all(second[name] is value for name, value in first.items())


# -- a whole state -----------------------------------------------------------------------------------------------------


class Run:
    """A model with its optimizer, as a strategy has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.lightning_module = Root()
        self.optimizers = [torch.optim.AdamW(self.lightning_module.second.parameters(), lr=0.1)]
        self.step()

    def step(self) -> None:
        for group in self.optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        self.optimizers[0].step()


def entry(run: Run, place: int = 0) -> dict[str, Any]:
    """What the optimizer keeps of one of its parameters."""
    return list(run.optimizers[0].state.values())[place]


def recreate(run: Run) -> None:
    """A parameter by another, also in the optimizer."""
    [optimizer], layer = run.optimizers, run.lightning_module.second[0]
    old, new = layer.weight, nn.Parameter(torch.ones(4, 4))
    layer.weight = new
    group = optimizer.param_groups[0]
    group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    optimizer.state[new] = optimizer.state.pop(old)


def add_group(run: Run) -> None:
    run.optimizers[0].add_param_group({"params": [run.lightning_module.scale], "lr": 0.01})
    run.step()


def tie(run: Run) -> None:
    run.lightning_module.second[0].weight = run.lightning_module.second[2].weight


def be_a_buffer(run: Run) -> None:
    """One that no optimizer has, in its own place."""
    layer = run.lightning_module.first[0]
    value = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", value)


def average(run: Run) -> None:
    """A moment that is the parameter itself."""
    entry(run)["exp_avg"] = run.lightning_module.second[0].weight.detach()


CHANGES_OF_A_RUN: dict[str, tuple[Callable[[Run], object], bool]] = {
    "nothing": (lambda run: None, False),
    "step": (lambda run: run.step(), False),
    "parameter re-created": (recreate, True),
    "parameter not optimized any more": (
        lambda run: run.optimizers[0].state.pop(run.optimizers[0].param_groups[0]["params"].pop()),
        True,
    ),
    "optimizer loaded": (
        lambda run: run.optimizers[0].load_state_dict(copy.deepcopy(run.optimizers[0].state_dict())),
        False,
    ),
    "optimizer reset": (lambda run: run.optimizers[0].state.clear(), True),
    "optimizer replaced": (
        lambda run: setattr(run, "optimizers", [torch.optim.SGD(run.lightning_module.parameters(), momentum=0.9)]),
        True,
    ),
    "second optimizer": (
        lambda run: run.optimizers.append(torch.optim.SGD([run.lightning_module.scale], momentum=0.9)),
        True,
    ),
    "group added": (add_group, True),
    "learning rate": (lambda run: run.optimizers[0].param_groups[0].update(lr=0.5), False),
    "option added": (lambda run: run.optimizers[0].param_groups[0].update(note=1), True),
    "frozen": (lambda run: run.lightning_module.second[0].weight.requires_grad_(False), False),
    "moment replaced": (lambda run: entry(run).update(exp_avg=torch.ones(4, 4)), False),
    "moment is another's": (lambda run: entry(run).update(exp_avg=entry(run)["exp_avg_sq"]), True),
    "moment is the parameter": (average, False),
    "moment moved": (lambda run: set_data(entry(run)["exp_avg"], torch.ones(4, 4)), False),
    "moment transposed": (lambda run: entry(run)["exp_avg"].t_(), False),
    "moment reshaped": (lambda run: set_data(entry(run)["exp_avg"], entry(run)["exp_avg"].view(2, 8)), True),
    "moment of another dtype": (lambda run: entry(run).update(exp_avg=torch.ones(4, 4).half()), True),
    "moment removed": (lambda run: entry(run).pop("exp_avg"), True),
    "moment added": (lambda run: entry(run).update(more=torch.ones(4, 4)), True),
    "moments renamed": (lambda run: entry(run).update(other=entry(run).pop("exp_avg")), True),
    "moment is a number": (lambda run: entry(run).update(step=3), True),
    "history of tensors": (lambda run: entry(run).update(history=[torch.ones(1), 2]), True),
    "history of numbers": (lambda run: entry(run).update(history=[1, 2]), True),
    "tied": (tie, True),
    "parameter is a buffer": (be_a_buffer, False),
    "module renamed": (
        lambda run: setattr(run.lightning_module, "third", run.lightning_module.__dict__["_modules"].pop("second")),
        True,
    ),
}


def flatten(family: PlainFamily, run: Run, known: Outline | None) -> FlatState:
    state = {"model": family.model_state()}
    state |= {f"optimizer_{i}": family.optimizer_state(optimizer) for i, optimizer in enumerate(run.optimizers)}
    return FlatState.of(state, known)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.is_set_to(other) and one.dtype == other.dtype
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("change", CHANGES_OF_A_RUN)
def test_what_is_known_of_a_state_does_not_outlive_it(change: str) -> None:
    """Against a look at everything anew."""
    run = Run()
    make, is_another_shape = CHANGES_OF_A_RUN[change]
    family = PlainFamily(run)  # type: ignore[arg-type]  # as much of a strategy as is needed
    before = flatten(family, run, None)
    fingerprint, _ = before.fingerprint(), (family.identical(before), family.still(before))
    make(run)
    for _ in range(2):
        fresh = PlainFamily(run)  # type: ignore[arg-type]
        now, wanted = flatten(family, run, before.outline), flatten(fresh, run, None)
        assert now.keys == wanted.keys
        assert now.outline.paths == wanted.outline.paths
        assert all(map(same, now.values, wanted.values))
        assert now.fingerprint() == wanted.fingerprint()
        assert (now.fingerprint() != fingerprint) is is_another_shape
        for ask in ("identical", "still", "trained"):
            assert getattr(family, ask)(now) == getattr(fresh, ask)(wanted), ask
        before = now


FORMS: dict[str, Callable[[], Any]] = {
    "empty": dict,
    "texts": lambda: {"1": torch.ones(1), "b": 2},
    "numbers": lambda: {1: torch.ones(1), "b": 2},
    "texts like numbers": lambda: {True: torch.ones(1), "b": 2},
    "empty below": lambda: {"a": {}, "t": torch.ones(1)},
    "numbers below": lambda: {"a": {1: 2}, "t": torch.ones(1)},
    "list of empty ones": lambda: {"a": [{}, torch.ones(1)]},
    "empty list": lambda: {"a": [], "t": torch.ones(1)},
    "ordered": lambda: OrderedDict(a=torch.ones(1)),
}
PLACES: dict[str, tuple[Callable[[Any], dict[str, Any]], tuple[str | int, ...]]] = {
    "extra state": (lambda value: {"model": {"w": torch.ones(2), "extra": value}}, ("model", "extra")),
    "state of a parameter": (
        lambda value: {"optimizer_0": {"state": {"v": {"a": 1}, "w": value}, "param_groups": []}},
        ("optimizer_0", "state", "w"),
    ),
    "below that": (
        lambda value: {"optimizer_0": {"state": {"w": {"more": value}}, "param_groups": [{"lr": 1}]}},
        ("optimizer_0", "state", "w", "more"),
    ),
    "option": (
        lambda value: {"optimizer_0": {"state": {}, "param_groups": [{"option": value, "params": ["w"]}]}},
        ("optimizer_0", "param_groups", 0, "option"),
    ),
    "part of its own": (
        lambda value: {"optimizer_0": {"state": {}, "more": value, "param_groups": []}},
        ("optimizer_0", "more"),
    ),
}


def read_back(flat: FlatState, path: tuple[str | int, ...]) -> Any:
    """The value at a path, put together as a resume does it."""
    tree: Any = {}
    for where, value in zip(flat.outline.paths.values(), flat.values, strict=True):
        set_element(tree, where, value)
    for name in path:
        tree = tree[name]
    return tree


def form(value: Any) -> Any:
    """What can be compared of it, with the types of keys."""
    if isinstance(value, Mapping):
        return [(type(key), key, form(inner)) for key, inner in value.items()]
    return list(map(form, value)) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("place", PLACES)
def test_mappings_come_back_as_they_were_whatever_they_were_before(place: str) -> None:
    make, path = PLACES[place]
    for first, then in itertools.product(FORMS, FORMS):
        known = FlatState.of(make(FORMS[first]())).outline
        value = FORMS[then]()
        state = make(value)
        now, wanted = FlatState.of(state, known), FlatState.of(state)
        assert (now.keys, now.outline.paths) == (wanted.keys, wanted.outline.paths), (first, then)
        assert all(map(same, now.values, wanted.values)), (first, then)
        assert now.outline is known or first != then
        if (place, then) == ("state of a parameter", "empty"):  # which is none
            assert [key for key in now.keys if ".w" in key] == []
        else:
            assert form(read_back(now, path)) == form(value), (first, then)


def test_parts_of_sharded_tensors_are_not_kept_as_objects() -> None:
    part = Tensor._make_subclass(DTensor, torch.ones(1))
    for value in ({1: part}, {"a": {2: [part]}}, {None: (part,)}):
        with pytest.raises(SaveFailed, match=r"has parts of sharded tensors in it, and keys that are not texts"):
            FlatState.of({"model": {"extra": value}})
    known = FlatState.of({"model": {"extra": {1: 1}}})
    with pytest.raises(SaveFailed, match=r"extra has parts"):
        FlatState.of({"model": {"extra": {1: part}}}, known.outline)
    with pytest.raises(SaveFailed, match=r"model\.extra is an object with parts of sharded tensors"):
        check_saveable(FlatState.of({"model": {"extra": (part, 1)}}))


def test_two_values_of_one_name_cannot_be_saved() -> None:
    with pytest.raises(SaveFailed, match=r"Two values have one name in the state: .*model\.a\.b"):
        FlatState.of({"model": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}})


def still_of(run: Run) -> set[str]:
    family = PlainFamily(run)  # type: ignore[arg-type]
    return set(family.still(flatten(family, run, None)))


def test_still_is_what_optimizers_own_and_keep() -> None:
    run = Run()
    names = [f"second.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    kept = {f"optimizer_0.state.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert still_of(run) == kept | {f"model.{name}" for name in names}
    run.lightning_module.second[0].weight.requires_grad_(False)
    assert still_of(run) == kept | {f"model.{name}" for name in names if name != "second.0.weight"}
    CHANGES_OF_A_RUN["history of tensors"][0](run)
    assert "optimizer_0.state.second.0.weight.history.0" not in still_of(run)


def test_same_answers_are_given_as_long_as_nothing_changes() -> None:
    run = Run()
    family = PlainFamily(run)  # type: ignore[arg-type]
    first = flatten(family, run, None)
    answers = family.identical(first), family.still(first)
    run.step()
    second = flatten(family, run, first.outline)
    assert second.outline is first.outline
    assert (family.identical(second), family.still(second)) == answers
    assert family.identical(second) is answers[0]
    assert family.still(second) is answers[1]


def test_tensors_without_memory_are_tied_to_nothing() -> None:
    wrappers = {name: TwoTensor(torch.ones(2), torch.ones(2)) for name in "ab"}
    shared, empty = torch.ones(2), {name: torch.empty(0) for name in "cd"}
    flat = FlatState.of({"model": wrappers | empty})
    assert not flat.fingerprint()[-1]
    flat = FlatState.of({"model": wrappers | empty | {"e": shared, "f": shared}})
    assert flat.fingerprint()[-1] == [("model.f", "model.e")]


# -- in a run ----------------------------------------------------------------------------------------------------------


def recreate_in(trainer: L.Trainer, model: Any) -> None:
    [optimizer], layer = trainer.optimizers, model.net[3]
    old, layer.weight = layer.weight, nn.Parameter(torch.ones_like(layer.weight))
    group = optimizer.param_groups[0]
    group["params"] = [layer.weight if parameter is old else parameter for parameter in group["params"]]
    optimizer.state[layer.weight] = optimizer.state.pop(old)


def reshape_a_moment(trainer: L.Trainer, model: Any) -> None:
    moment = trainer.optimizers[0].state[model.net[0].weight]["exp_avg"]
    set_data(moment, moment.t().contiguous().t())


CHANGES_IN_A_RUN: dict[str, Callable[[L.Trainer, Any], object]] = {
    "parameter re-created": recreate_in,
    "optimizer loaded": lambda trainer, model: trainer.optimizers[0].load_state_dict(
        copy.deepcopy(trainer.optimizers[0].state_dict())
    ),
    "group added": lambda trainer, model: trainer.optimizers[0].add_param_group({"params": [model.spare]}),
    "frozen": lambda trainer, model: model.net[0].weight.requires_grad_(False),
    "memory replaced": lambda trainer, model: set_data(model.net[0].weight, torch.randn_like(model.net[0].weight)),
    "memory turned": reshape_a_moment,
    "buffer added": lambda trainer, model: model.register_buffer("late", torch.ones(3)),
    "tied": lambda trainer, model: setattr(model, "spare", model.net[3].bias),
}


class Spare(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.spare.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class Change(L.Callback):
    """Makes a change before a step."""

    def __init__(self, change: str, step: int) -> None:
        self.change, self.step = CHANGES_IN_A_RUN[change], step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.change(trainer, pl_module)


@pytest.mark.parametrize("change", CHANGES_IN_A_RUN)
def test_a_save_after_a_change_is_what_there_is_then(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth: dict[int, dict[str, Any]] = {}
    original = Session.save

    def save(session: Session, *args: Any, **kwargs: Any) -> Any:
        model = session.trainer.lightning_module
        optimizer = named_optimizer_state(model, session.trainer.optimizers[0])["state"]
        truth[session.trainer.global_step] = copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer})
        return original(session, *args, **kwargs)

    monkeypatch.setattr(Session, "save", save)
    saver = checkpoint_every(tmp_path / "run", 2, keep=Keep(last=-1), on_save_error="raise")
    make_trainer(tmp_path, Change(change, 5), settle(), saver, max_steps=8).fit(Spare(), data())
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2, 4, 6, 8]
    for step, wanted in truth.items():
        path = tmp_path / "run" / f"epoch=0-step={step}.ckpt"
        reader = CheckpointReader(lambda file, path=path: path / file, plain=True)  # type: ignore[misc]
        model, moments = reader.read_full("model"), reader.read_full("optimizer_0")["state"]
        assert model.keys() == wanted["model"].keys()
        assert all(torch.equal(value, wanted["model"][name]) for name, value in model.items())
        assert moments.keys() == wanted["optimizer"].keys()
        for name, kept in moments.items():
            assert kept.keys() == wanted["optimizer"][name].keys()
            assert all(torch.equal(value, wanted["optimizer"][name][key]) for key, value in kept.items())
