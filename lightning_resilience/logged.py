"""What an epoch has logged so far: sums behind ``self.log(on_epoch=True)``, torchmetrics, and what was logged last.

Lightning saves none of it, so after a resume inside an epoch its mean would be that of the rest of the epoch, and a
scheduler or an early stopping that looks at the last validation would find nothing.  Each rank has its own part: what
ranks accumulate is brought together at the end of the epoch, by Lightning and torchmetrics.

On another number of ranks the parts are added up and divided, so that the epoch's value still is that of all its
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_resilience.module_state import modules
from lightning_resilience.names import canonical

Logged = dict[str, Any]
"""One rank's part, in plain values and tensors of its own; see ``capture``."""

_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx")


def capture(trainer: Trainer) -> Logged:
    """This rank's part as it is now."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    return {
        "shown": {name: _copy(getattr(connector, name)) for name in _SHOWN},
        "place": {name: getattr(connector, name) for name in _PLACE},
        "results": {key: _result_state(result) for key, result in results.items() if not result.has_reset},
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(trainer) if metric.update_called},
    }


def restore(trainer: Trainer, parts: Sequence[Logged]) -> None:
    """Put this rank's part back, or several that are now one, in the place of what there is.

    What is logged again goes on where it was; what is not, keeps its value to the end of the epoch.
    """
    if not parts:
        return
    forget(trainer)  # a sanity check has moved metrics, and the fits of a Tuner have left their results
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    for name, value in {**parts[0]["shown"], **parts[0]["place"]}.items():
        setattr(connector, name, _to(value, device))
    live = dict(_metrics(trainer))
    for part in parts:
        for name, state in part["metrics"].items():
            if name in live:
                _add_to_metric(live[name], _to(state, device), name)
    results = trainer.fit_loop.epoch_loop._results
    for part in parts:
        for key, state in part["results"].items():
            saved = _result(trainer, _to(state, device), live)
            if saved is not None and key in results:
                _add(results[key], saved)
            elif saved is not None:
                results[key] = saved
    results.log = _joining(results, dict(results))


def forget(trainer: Trainer) -> None:
    """Let the epoch have logged nothing so far."""
    results = trainer.fit_loop.epoch_loop._results
    results.reset()
    results.clear()
    for _, metric in _metrics(trainer):
        # What is part of the model's state may just have been loaded.  Wrappers, such as a running mean, never say that
        # they were updated.
        if metric.update_called or not metric.state_dict():
            metric.reset()


def divided(parts: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    """The results of all ranks there were, in equal parts for so many: Lightning averages over ranks unweighted."""
    together: dict[str, dict[str, Any]] = {}
    for part in parts:
        for key, state in part.items():
            before = together.get(key)
            together[key] = dict(state) if before is None or "value" not in state else _sum(before, state)
    return {key: _divide(state, ranks) for key, state in together.items()}


def _sum(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    if one["reduce_fx"] in ("max", "min"):
        return {**one, "value": getattr(torch, f"{one['reduce_fx']}imum")(one["value"], other["value"])}
    weight = None if one["weight"] is None else one["weight"] + other["weight"]
    return {**one, "value": one["value"] + other["value"], "weight": weight}


def _divide(state: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    if "value" not in state or state["reduce_fx"] in ("max", "min"):
        return dict(state)
    weight = None if state["weight"] is None else state["weight"] / ranks
    return {**state, "value": state["value"] / ranks, "weight": weight}


def _joining(results: Any, saved: dict[str, _ResultMetric]) -> Callable[..., None]:
    """In the place of ``results.log``: a saved result meets the first new one of its name, which alone knows how the
    user logs it today."""
    original = type(results).log

    def log(fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        key = f"{fx}.{name}"
        before = saved.pop(key, None)
        if before is not None and results.get(key) is before:
            del results[key]
        original(results, fx, name, *args, **kwargs)
        if before is not None and not before.has_reset:
            _add(results[key], before)
        if not saved:
            del results.log

    return log


# -- one result, one metric -------------------------------------------------------------------------------------------


def _result_state(result: _ResultMetric) -> dict[str, Any]:
    state = {name: getattr(result.meta, name) for name in _META}
    state["reduce_fx"] = result.meta.reduce_fx.__name__
    state["metric_attribute"] = result.meta.metric_attribute
    state["sync"] = (result.meta.sync.should, result.meta.sync.rank_zero_only)
    state["last"] = _copy(result._forward_cache)
    if result.is_tensor:
        state["value"] = _copy(result.value)
        state["weight"] = _copy(getattr(result, "cumulated_batch_size", None))
    return state


def _result(trainer: Trainer, state: Mapping[str, Any], metrics: Mapping[str, Metric]) -> _ResultMetric | None:
    """A result as it was, of a metric that the model still has."""
    attribute = state["metric_attribute"]
    is_tensor = "value" in state
    if not is_tensor and attribute not in metrics:
        return None
    meta = _Metadata(**{name: state[name] for name in _META}, reduce_fx=state["reduce_fx"], metric_attribute=attribute)
    should, rank_zero_only = state["sync"]
    meta.sync = _Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    result = _ResultMetric(meta, is_tensor)
    result._forward_cache = state["last"]
    result._update_count = 1
    result.value = state["value"] if is_tensor else metrics[attribute]
    if is_tensor and state["weight"] is not None:
        result.cumulated_batch_size = state["weight"]
    return result


def _add(result: _ResultMetric, other: _ResultMetric) -> None:
    """Let ``result`` cover what ``other`` covers too; where it is a metric, both refer to that."""
    if not result.is_tensor or not other.is_tensor or not result.meta.on_epoch:
        return
    if result.meta.is_max_reduction or result.meta.is_min_reduction:
        result.value = result.meta.reduce_fx(result.value, other.value)
        return
    result.value = other.value + result.value
    if result.meta.is_mean_reduction:
        result.cumulated_batch_size = other.cumulated_batch_size + result.cumulated_batch_size


def _metrics(trainer: Trainer) -> list[tuple[str, Metric]]:
    """The metrics that the model holds, by name."""
    model = trainer.lightning_module
    if not any(issubclass(kind, Metric) for kind in set(map(type, modules(model)))):
        return []
    return [(canonical(name), module) for name, module in model.named_modules() if isinstance(module, Metric)]


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {"state": _copy(metric.metric_state), "updates": metric.update_count}


def _add_to_metric(metric: Metric, saved: Mapping[str, Any], name: str) -> None:
    """Put a metric's state back, or add it to what the metric has got from another part already."""
    if not metric.update_called:
        for key, value in saved["state"].items():
            setattr(metric, key, value)
    else:
        try:
            metric.merge_state(dict(saved["state"]))
        except Exception as error:  # metrics may refuse this with anything
            rank_zero_warn(
                f"{type(metric).__name__} {name!r} cannot take over what other ranks had accumulated ({error}): its"
                " value at the end of this epoch is that of fewer samples."
            )
            return
    metric._update_count += saved["updates"]
    metric._computed = None


def _copy(value: Any) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def _to(value: Any, device: torch.device) -> Any:
    return apply_to_collection(value, Tensor, lambda tensor: tensor.to(device))
