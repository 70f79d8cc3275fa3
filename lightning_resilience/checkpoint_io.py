"""``ResilientCheckpointIO``: the format, its commits and its checks for a stock ``ModelCheckpoint``, without our
callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_resilience import run_state, trainer_state
from lightning_resilience.engine import Engine
from lightning_resilience.errors import SaveFailed
from lightning_resilience.manifest import WEIGHTS_ONLY
from lightning_resilience.ranks import Ranks
from lightning_resilience.resume import open_explicit
from lightning_resilience.saves import Facts, Folder, Snapshot, no_keys
from lightning_resilience.store import list_checkpoints
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.whole import read_whole


class ResilientCheckpointIO(CheckpointIO):
    """Writes a Trainer's checkpoint as a folder of this package's format, and reads one.

    For strategies that call a plugin, which are those where rank 0 has all of the state (a single device, DDP);
    FSDPStrategy and ModelParallelStrategy never do, so use ``ResilientCheckpoint`` there (it needs no plugin, and
    ignores this one).  A save returns when the checkpoint is committed, because ``ModelCheckpoint`` removes the one
    before it then.

    Args:
        memory: where state is staged; see ``ResilientCheckpoint``.
    """

    def __init__(self, memory: str | bool = "auto") -> None:
        super().__init__()
        self._memory = memory
        self._engine: Engine | None = None
        self._folders: dict[Path, Folder] = {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` as the folder ``path``; one of that name gives way once the new one is whole.

        Raises:
            SaveFailed: it could not be written; what was there before is untouched.
        """
        if storage_options is not None:
            raise TypeError("ResilientCheckpointIO takes no storage_options: it writes to a folder.")
        target = local_path(os.fspath(path)).absolute()
        if self._engine is None:
            self._engine = Engine(Ranks(), memory=self._memory)
        folder = self._folders.get(target.parent)
        if folder is None:
            folder = self._folders[target.parent] = self._engine.open_folder(LocalTier(target.parent))
            self._engine.count_from(list_checkpoints(folder.tier).committed.values())
        state, rest = trainer_state.split(checkpoint)
        snapshot = Snapshot(state, no_keys, trainer_state.dump(rest), run_state.to_bytes(run_state.capture()))
        facts = Facts(
            step=checkpoint.get("global_step", 0),
            epoch=checkpoint.get("epoch", 0),
            reason="CheckpointIO.save_checkpoint",
            strategy=type(self).__name__,
            labels=() if "optimizer_states" in checkpoint else (WEIGHTS_ONLY,),
            versions=trainer_state.VERSIONS,
        )
        save = self._engine.save(folder, target.name, facts, lambda: snapshot, replace=True)
        if save is None:
            raise SaveFailed(f"A save is under way already, so {str(target)!r} was not written.", step=facts.step)
        save.wait()

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint as ``Strategy`` expects it, on the CPU; also one that stock Lightning wrote.

        Raises:
            CheckpointNotFound, CheckpointUncommitted, CheckpointCorrupt: there is no whole checkpoint at ``path``.
        """
        target = local_path(os.fspath(path)).absolute()
        if target.is_file():
            return TorchCheckpointIO().load_checkpoint(target, map_location, weights_only)
        source = open_explicit(Ranks(), target)
        return read_whole(source.locate, trusted=source.manifest is not None, weights_only=weights_only)

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint; one that is gone already is fine."""
        target = local_path(os.fspath(path)).absolute()
        if os.path.lexists(target):
            LocalTier(target.parent).remove(target.name)

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._folders.clear()
