"""Asynchronous, sharded, crash-proof checkpoints for PyTorch Lightning.

Add ``callbacks=[ResilientCheckpoint()]`` to a ``lightning.pytorch.Trainer`` and call ``trainer.fit(model,
ckpt_path="last")``. The names below are loaded when they are first used, so that importing the package (and the
command line) stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_resilience._version import __version__

if TYPE_CHECKING:
    from lightning_resilience.adaptive import AdaptiveSchedule
    from lightning_resilience.callback import ResilientCheckpoint
    from lightning_resilience.checkpoint_io import ResilientCheckpointIO
    from lightning_resilience.divergence import Rollback
    from lightning_resilience.errors import (
        CheckpointCorrupt,
        CheckpointIncompatible,
        CheckpointNotFound,
        CheckpointUncommitted,
        CrashLoop,
        Diverged,
        ResilienceError,
        SaveFailed,
        SetupError,
        TierDenied,
        TierUnavailable,
    )
    from lightning_resilience.loss_variance import LossVariance
    from lightning_resilience.preemption import Preempted
    from lightning_resilience.retention import Keep
    from lightning_resilience.schedule import EverySeconds, EverySteps, FirstOf

_HOME = {
    "ResilientCheckpoint": "callback",
    "ResilientCheckpointIO": "checkpoint_io",
    "Keep": "retention",
    "Rollback": "divergence",
    "AdaptiveSchedule": "adaptive",
    "LossVariance": "loss_variance",
    "Preempted": "preemption",
    "EverySteps": "schedule",
    "EverySeconds": "schedule",
    "FirstOf": "schedule",
    "ResilienceError": "errors",
    "CheckpointNotFound": "errors",
    "CheckpointUncommitted": "errors",
    "CheckpointCorrupt": "errors",
    "CheckpointIncompatible": "errors",
    "CrashLoop": "errors",
    "Diverged": "errors",
    "SaveFailed": "errors",
    "TierUnavailable": "errors",
    "TierDenied": "errors",
    "SetupError": "errors",
}

__all__ = [
    "AdaptiveSchedule",
    "CheckpointCorrupt",
    "CheckpointIncompatible",
    "CheckpointNotFound",
    "CheckpointUncommitted",
    "CrashLoop",
    "Diverged",
    "EverySeconds",
    "EverySteps",
    "FirstOf",
    "Keep",
    "LossVariance",
    "Preempted",
    "ResilienceError",
    "ResilientCheckpoint",
    "ResilientCheckpointIO",
    "Rollback",
    "SaveFailed",
    "SetupError",
    "TierDenied",
    "TierUnavailable",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
