"""Loading a checkpoint into a Trainer: model and optimizers in place, then what each rank has for itself.

Lightning asks for the parts at moments of its own, and some of them only once everything that start-up does is done.
So a *source* is taken first, each part is given where Lightning asks for it, and the rest is put back just before the
first epoch, the random generators last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_resilience import logged, run_state, trainer_state
from lightning_resilience.data import DataPosition
from lightning_resilience.doorway import Doorway
from lightning_resilience.engine import Engine
from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible, ResilienceError
from lightning_resilience.manifest import META, WEIGHTS_ONLY, Manifest, rank_file
from lightning_resilience.model_loading import edits_loaded_state
from lightning_resilience.module_state import parameters
from lightning_resilience.named_optimizers import numbered, raw_optimizer
from lightning_resilience.names import canonical
from lightning_resilience.places import Source
from lightning_resilience.ranks import Ranks, raise_first
from lightning_resilience.reader import OPTIMIZER, CheckpointReader, Part
from lightning_resilience.strategies import Family
from lightning_resilience.trusted import load_trusted


class Resumption:
    """What one Trainer is loaded from.  Loading is collective.

    Args:
        trainer: the Trainer.
        family: how its strategy's state is loaded.
        ranks: the ranks that load together.
        doorway: the way into Lightning.
        data: where this rank is in its data.
        engine: saves of the run, which goes on under the same id.
    """

    def __init__(
        self, trainer: Trainer, family: Family, ranks: Ranks, doorway: Doorway, data: DataPosition, engine: Engine
    ) -> None:
        self.trainer = trainer
        self.family = family
        self.ranks = ranks
        self.data = data
        self.engine = engine
        self._doorway = doorway
        self.resumed: Source | None = None
        """What training goes on from."""
        self.exact_data = True
        self.restores_optimizers = True
        self._rolls_back = False
        self._source: Source | None = None
        self.is_aside = False
        """Whether what is loaded now is no resume; see ``aside``."""
        self._reader: CheckpointReader | None = None
        self._model_is_loaded = False
        self._optimizers_are_in_it = False
        self._loaded: dict[str, Any] = {}
        self._generators: Callable[[], None] | None = None
        self._settled = False
        self._stop_is_wanted = False
        self._logged: list[logged.Logged] = []
        self._buffers: dict[str, torch.Tensor] = {}
        self._thawed: Sequence[str] = ()
        self._syncs_buffers: bool | None = None
        self._accumulation: tuple[int, int] | None = None

    def take(self, source: Source | None) -> None:
        """This is what Lightning is about to load; None where it is nothing of ours."""
        self._source, self._reader, self._model_is_loaded, self._optimizers_are_in_it = source, None, False, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While somebody puts a state of their own back, and the resume that may be under way is to go on after it."""
        source, reader, loaded = self._source, self._reader, self._loaded
        model_is_loaded, optimizers_are_in_it = self._model_is_loaded, self._optimizers_are_in_it
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            self._source, self._reader, self._loaded = source, reader, loaded
            self._model_is_loaded, self._optimizers_are_in_it = model_is_loaded, optimizers_are_in_it

    def end(self) -> None:
        """Lightning has loaded all it wants."""
        self._reader, self._loaded = None, {}
        if self._doorway.fitting and self._source is not None:
            self._go_on_from(self._source)
        if self.resumed is not None and self._stop_is_wanted:
            self.trainer.should_stop = True
        why = self._doorway.stopped_early() if self.resumed is not None else None
        if why is not None:
            self.trainer.should_stop = True
            rank_zero_info(
                f"The run that is resumed had been stopped by EarlyStopping, and stays so: {why} To train on,"
                " remove the EarlyStopping callback or give it another monitor."
            )

    def _go_on_from(self, source: Source) -> None:
        """This run is the one that was saved, from now on."""
        self.resumed = source
        if source.manifest is not None:
            self.engine.go_on(source.manifest, {source.name, *source.copies})
            if self.exact_data:
                self._doorway.hush_inexact(self.data.exact)
        self._doorway.before_training(self._restore_the_rest)

    def forget(self) -> None:
        """Refer to nothing that was read any more."""
        self._reader = None

    def needs(self, source: Source) -> set[str]:
        """Names of the files that this rank reads of a checkpoint.  Collective: some state dicts communicate."""
        manifest = source.manifest
        assert manifest is not None
        of_ranks = [rank_file(number) for number in range(manifest.world_size)]
        mine = {of_ranks[0], *of_ranks[self.ranks.rank :: self.ranks.world_size]}
        if not self.family.loads_late:
            return mine | (manifest.paths - set(of_ranks))
        return mine | self.family.files_to_read(CheckpointReader(source.locate, plain=True))

    # -- in the place of Lightning's loading ---------------------------------------------------------------------------

    def make_load_checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            if self._source is None:
                return original(checkpoint_path, weights_only=weights_only)  # type: ignore[no-any-return]
            wanted: list[Part] = []
            self._together(lambda: self._open_source(weights_only))
            self._together(lambda: wanted.extend(self._parts()))
            self._together(lambda: self._fetch(wanted))
            self._together(lambda: self._install(wanted))
            if self._logged and self._source.manifest and self._source.manifest.world_size != self.ranks.world_size:
                parts = self.ranks.all_gather([part["results"] for part in self._logged])
                self._logged[0]["results"] = logged.divided([part for some in parts for part in some], len(parts))
                for part in self._logged[1:]:
                    part["results"] = {}
            return self._loaded

        return load_checkpoint

    def _open_source(self, weights_only: bool | None) -> None:
        """What can go wrong on one rank alone, before anything is asked of the others."""
        source = self._source
        assert source is not None
        trusted = source.manifest is not None
        if self._doorway.fitting and source.manifest is not None and WEIGHTS_ONLY in source.manifest.labels:
            raise CheckpointIncompatible(
                f"{source.path} holds weights only: training cannot go on from it.",
                hint="Pass it to trainer.validate or test, or load the weights yourself and start a new run.",
            )
        self._reader = CheckpointReader(
            source.locate, plain=trusted, weights_only=weights_only, unchecked=source.unchecked
        )
        self._loaded = trainer_state.load(source.locate(META), weights_only, trusted=trusted)

    def _parts(self) -> list[Part]:
        """What the source is loaded by: the model, and the optimizers too where they exist already."""
        reader, strict = self._reader, self.trainer.lightning_module.strict_loading
        assert reader is not None
        wants_optimizers = self._doorway.fitting and (self.restores_optimizers or self._rolls_back)
        if self.family.loads_late:
            return [self.family.model_part(reader, strict), *(self._optimizer_parts() if wants_optimizers else [])]
        if edits_loaded_state(self.trainer):
            return self._parts_as_saved(reader)
        self._model_is_loaded = True
        parts = [self.family.model_part(reader, strict)]
        # There are no optimizers yet to read into: their tensors are kept until there are.  Beside a device that would
        # take host memory that may not be there; its shards are read a second time instead.
        if wants_optimizers and self.trainer.strategy.root_device.type == "cpu":
            parts.append(Part([reader.fetch_ahead(OPTIMIZER)]))
        return parts

    def _parts_as_saved(self, reader: CheckpointReader) -> list[Part]:
        """All that was saved, for user code to look at before it is loaded."""
        names = {canonical(name): name for name in self.trainer.lightning_module.state_dict()}
        model, optimizers = reader.tree("model"), [reader.tree(f"optimizer_{i}") for i in range(reader.optimizers)]
        self._optimizers_are_in_it = True

        def install() -> None:
            self._loaded["state_dict"] = {names.get(name, name): value for name, value in model.build().items()}
            self._loaded["optimizer_states"] = [numbered(optimizer.build()) for optimizer in optimizers]

        return [Part([model.request, *(optimizer.request for optimizer in optimizers)], install)]

    def _fetch(self, parts: Sequence[Part]) -> None:
        assert self._reader is not None
        self._reader.fetch(request for part in parts for request in part.requests)

    def _together(self, work: Callable[[], None]) -> None:
        """Do a part of the loading on all ranks, or fail on all of them; what cannot be read in a checkpoint that was
        not checked before is damage."""

        def here() -> None:
            assert self._source is not None
            try:
                work()
            except ResilienceError:
                raise  # says already what is wrong
            except OSError as error:
                if self._source.is_checked:
                    raise
                problem = f"{error.filename or self._source.path} cannot be read: {error.strerror}"
                raise CheckpointCorrupt(f"{problem}.", problems=(problem,)) from error

        raise_first(self.ranks.gathered(here))

    def _install(self, parts: Sequence[Part]) -> None:
        """All that was fetched is what was saved: load it."""
        source, checkpoint = self._source, self._loaded
        assert source is not None
        for part in parts:
            part.install()
        if self._model_is_loaded:
            checkpoint["state_dict"] = {}
            checkpoint.setdefault("optimizer_states", [])
        if not self.restores_optimizers and not self._rolls_back:
            checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
        if self._rolls_back:
            self._read_what_goes_back(source)
        elif self._doorway.fitting and not self.is_aside:
            self._read_rank_state(source)

    def roll_back(self, source: Source) -> None:
        """Take parameters, optimizers, schedulers and callbacks back to a checkpoint in the middle of training; the
        data, the generators and the epoch stay where they are.  Between two batches."""
        self.take(source)
        self._rolls_back = True
        try:
            self._doorway.load_again(source.path)
            run_state.restore_buffers(self.trainer.lightning_module, self._buffers)
            logged.forget(self.trainer)
            logged.restore(self.trainer, self._logged)
        finally:
            self._rolls_back = False
            self.take(None)
            self._loaded, self._buffers, self._logged = {}, {}, []

    def make_load_model_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            if not self._model_is_loaded:
                original(checkpoint, strict=strict)

        return load_model_state_dict

    def make_load_optimizer_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
            if self._source is None or self._optimizers_are_in_it:
                original(checkpoint)
            elif self.restores_optimizers or self._rolls_back:
                parts = self._optimizer_parts()
                self._fetch(parts)
                for part in parts:
                    part.install()

        return load_optimizer_state_dict

    def _optimizer_parts(self) -> list[Part]:
        assert self._reader is not None
        optimizers = [one for one in self.trainer.strategy.optimizers if "param_groups" in one.state_dict()]
        saved = self._reader.optimizers
        if optimizers and not saved:
            rank_zero_warn("The checkpoint has no optimizer state; the optimizers start fresh.")
            return []
        if saved != len(optimizers):
            raise CheckpointIncompatible(
                f"The model configures {len(optimizers)} optimizers, the checkpoint has the state of {saved}.",
                hint="Configure the optimizers as they were when the checkpoint was saved.",
            )
        if self._rolls_back:
            for optimizer in optimizers:
                raw_optimizer(optimizer).state.clear()  # a device may have no room for both
        return [
            self.family.optimizer_part(self._reader, index, optimizer) for index, optimizer in enumerate(optimizers)
        ]

    def _read_rank_state(self, source: Source) -> None:
        """This rank's own file: where it was in its data, and its random generators, which are restored later."""
        self._generators = None
        if source.manifest is None:
            return
        # Rank 0's position of loaders with a state of their own; each rank has its own.
        if self.exact_data:
            self._loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)
        if source.manifest.world_size != self.ranks.world_size:
            self._read_others_state(source, source.manifest)
            return
        state = self._state_of(source, self.ranks.rank)
        self._generators = lambda: run_state.restore(state)
        self._settled = state.get("settled", False)
        self._stop_is_wanted = state.get("stop_is_wanted", False)
        self._logged = [state["logged"]] if "logged" in state else []
        self._buffers = state.get("buffers", {})
        self._thawed = state.get("thawed", ())
        self._syncs_buffers = state.get("syncs_buffers")
        self._accumulation = state.get("accumulation")
        if self.exact_data and (saved := state.get("data")) is not None:
            self.data.go_to(saved)

    def _read_others_state(self, source: Source, manifest: Manifest) -> None:
        """More or fewer ranks than there were: what each had for itself is dealt out, and never one's given to all."""
        rank, ranks, saved_ranks = self.ranks.rank, self.ranks.world_size, manifest.world_size
        rank_zero_warn(
            f"The checkpoint was saved by {saved_ranks} ranks and is resumed by {ranks}: random generators are seeded"
            " anew for each rank, from the saved state of rank 0, the step and the rank."
        )
        base = source.locate(rank_file(0)).read_bytes()
        self._generators = lambda: run_state.derive(base, manifest.step, rank)
        first = load_trusted(base)
        mine = [first if number == 0 else self._state_of(source, number) for number in range(rank, saved_ranks, ranks)]
        self._settled = first.get("settled", False)
        self._stop_is_wanted = first.get("stop_is_wanted", False)
        self._accumulation = first.get("accumulation")
        self._thawed = first.get("thawed", ()) if rank == 0 else ()
        if "logged" in first:
            self._logged = [state["logged"] for state in mine] or [{**first["logged"], "results": {}, "metrics": {}}]
        if self.exact_data and first.get("data") is not None:
            self.data.go_to_part(
                first["data"], mine[0]["data"] if mine else None, f"{manifest.run}/{manifest.sequence}".encode()
            )

    def _read_what_goes_back(self, source: Source) -> None:
        """What is this rank's own in the model, and what this epoch had logged, where the number of ranks is the
        same."""
        manifest = source.manifest
        if manifest is not None and manifest.world_size == self.ranks.world_size:
            state = self._state_of(source, self.ranks.rank)
            self._buffers = state.get("buffers", {})
            if "logged" in state and manifest.epoch == self.trainer.current_epoch:
                self._logged = [state["logged"]]

    @staticmethod
    def _state_of(source: Source, rank: int) -> dict[str, Any]:
        return load_trusted(source.locate(rank_file(rank)).read_bytes())  # type: ignore[no-any-return]

    def look_at_what_is_trained(self) -> None:
        """After the first batch, when whatever freezes and unfreezes has had its turn: warn of what had been unfrozen
        when it was saved and is frozen now.  Lightning does not save that, and hooks that ran as the epoch began do not
        run again inside it."""
        if not self._thawed:
            return
        live = {canonical(name): one for name, one in parameters(self.trainer.lightning_module).items()}
        lost = [name for name in self._thawed if name in live and not live[name].requires_grad]
        self._thawed = ()
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            rank_zero_warn(
                f"{lost[0]}{more} of the model's {len(live)} parameters had been unfrozen when the checkpoint was"
                " saved, and are frozen now. A callback that unfreezes in the middle of a run (BaseFinetuning, your"
                " own) has to do so again after a resume: let it remember that it has (state_dict) and unfreeze in"
                " on_fit_start. If they are to be frozen from here on, all is well."
            )

    def _restore_the_rest(self) -> None:
        """Just before the first epoch: what start-up would have changed, the generators last of all."""
        if self.exact_data:
            self.data.epoch_begins()
        self._doorway.resume_epoch(self._settled)
        run_state.restore_buffers(self.trainer.lightning_module, self._buffers)
        if self._syncs_buffers is not None:
            self._doorway.syncs_buffers = self._syncs_buffers
        if self._accumulation is not None:
            self._doorway.resume_accumulation(*self._accumulation)
        if self._logged:
            logged.restore(self.trainer, self._logged)
        if self._generators is not None:
            self._generators()
        self._generators, self._logged, self._buffers, self._accumulation = None, [], {}, None
