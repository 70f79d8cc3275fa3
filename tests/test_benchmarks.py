"""The benchmark runs through and checks what it restores; what it measures is not looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import scale

BENCHMARK = Path(__file__).parent / "benchmarks" / "run.py"


def test_the_benchmark_runs_and_restores_what_it_saved(tmp_path: Path) -> None:
    small = "--size-mib 2 --tensors 4 --ranks 1 --repeat 1 --steps 1 --many 0 --routes lightning_resilience dcp.save-1"
    command = [sys.executable, BENCHMARK, *small.split(), "--dir", tmp_path, "--json", tmp_path / "result.json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "| lightning_resilience " in result.stdout
    assert json.loads((tmp_path / "result.json").read_text())


def test_what_a_rank_tells_and_hears_for_a_commit_does_not_grow_with_the_number_of_ranks() -> None:
    few, many = scale.measure(16, node=4), scale.measure(256, node=4)
    assert abs(many["requests_of_a_rank"] - few["requests_of_a_rank"]) <= 1  # the last to report says so; it may lead
    assert many["bytes_of_a_rank"] < 1.1 * few["bytes_of_a_rank"]


def test_what_a_rank_tells_for_a_plan_does_not_grow_with_the_number_of_ranks() -> None:
    few, many = scale.measure_plan(8), scale.measure_plan(40)
    assert many["bytes_a_rank_sends"] == few["bytes_a_rank_sends"] < 60 * scale.TENSORS
    assert many["bytes_a_rank_gets"] < 10 * scale.TENSORS
