"""Examples do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_exact_resume_finds_the_runs_equal(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "exact_resume.py", "--folder", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("equal, bit for bit") == 2
    assert "Each of the 48 samples came once." in result.stdout
