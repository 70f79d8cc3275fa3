"""The benchmark runs through and checks what it restores; what it measures is not looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parent / "benchmarks" / "run.py"


def test_the_benchmark_runs_and_restores_what_it_saved(tmp_path: Path) -> None:
    small = "--size-mib 2 --tensors 4 --ranks 1 --repeat 1 --steps 1 --many 0 --routes lightning_resilience dcp.save-1"
    command = [sys.executable, BENCHMARK, *small.split(), "--dir", tmp_path, "--json", tmp_path / "result.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| lightning_resilience " in result.stdout
    assert json.loads((tmp_path / "result.json").read_text())
