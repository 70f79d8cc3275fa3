"""The error tree, and the package's lazy front door."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

import lightning_resilience
from lightning_resilience import errors

BUILTINS = {
    "ResilienceError": Exception,
    "CheckpointNotFound": FileNotFoundError,
    "CheckpointUncommitted": FileNotFoundError,
    "CheckpointCorrupt": OSError,
    "CheckpointIncompatible": ValueError,
    "CrashLoop": RuntimeError,
    "Diverged": RuntimeError,
    "SaveFailed": RuntimeError,
    "TierUnavailable": OSError,
    "TierDenied": PermissionError,
    "SetupError": ValueError,
}
FIELDS = {
    "CheckpointCorrupt": {"problems": ("a.pt: gone",)},
    "SaveFailed": {"step": 7, "rank": 3, "stage": "persist"},
}


def instance(name: str) -> errors.ResilienceError:
    return getattr(errors, name)("It broke.", hint="Try again.", **FIELDS.get(name, {}))


def test_the_table_here_names_every_error() -> None:
    assert set(BUILTINS) == {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }


@pytest.mark.parametrize("name", BUILTINS)
def test_each_error_is_caught_by_those_who_catch_its_builtin(name: str) -> None:
    with pytest.raises(BUILTINS[name]) as caught:
        raise instance(name)
    assert isinstance(caught.value, errors.ResilienceError)


@pytest.mark.parametrize("name", BUILTINS)
def test_the_text_is_the_message_then_the_hint(name: str) -> None:
    error = instance(name)
    assert (error.message, error.hint, str(error)) == ("It broke.", "Try again.", "It broke. Try again.")
    assert str(type(error)("It broke.")) == "It broke."


@pytest.mark.parametrize("name", BUILTINS)
@pytest.mark.parametrize("through", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_each_error_crosses_processes_whole(name: str, through) -> None:
    error = instance(name)
    twin = through(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    for field in ("message", "hint", *FIELDS.get(name, {})):
        assert getattr(twin, field) == getattr(error, field)


def test_fields_of_a_failed_save_default_to_nobody_in_particular() -> None:
    error = errors.SaveFailed("It broke.")
    assert (error.step, error.rank, error.stage, error.hint) == (-1, None, "", "")


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_star_import_resolves_every_public_name() -> None:
    python("from lightning_resilience import *; ResilientCheckpoint, ResilientCheckpointIO, Keep, FirstOf, SetupError")


def test_every_public_name_is_what_its_module_defines() -> None:
    for name in lightning_resilience.__all__:
        if name != "__version__":
            assert getattr(lightning_resilience, name).__name__ == name


def test_importing_the_package_alone_does_not_import_torch_or_lightning() -> None:
    code = "import sys, lightning_resilience; print([m for m in ('torch', 'lightning', 'numpy') if m in sys.modules])"
    assert python(code).strip() == "[]"


def test_errors_and_rules_do_not_import_torch_either() -> None:
    code = "import sys; from lightning_resilience import Keep, FirstOf, SetupError; print('torch' in sys.modules)"
    assert python(code).strip() == "False"


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ResilientCheckpont'"):
        lightning_resilience.ResilientCheckpont  # noqa: B018
    assert not hasattr(lightning_resilience, "nonsense")


def test_dir_lists_the_public_names() -> None:
    assert dir(lightning_resilience) == sorted(lightning_resilience.__all__)
