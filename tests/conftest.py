"""Settings for all tests."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# LightningCLI calls jsonargparse in ways that it deprecates, which is theirs to settle.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

pytest_plugins = ["s3_fixtures"]


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder on tmpfs that only this test uses."""
    folder = Path(f"/dev/shm/test-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
