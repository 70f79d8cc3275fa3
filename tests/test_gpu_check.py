"""The script for machines with a CUDA device is rehearsed on a CPU, so that it runs where there is one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from gpu.check import MOST_STALL, Checks, quietly, run
from processes import run_alone
from support import strategy


def rehearse() -> dict[str, dict[str, Any]]:
    quietly()
    strategies = {name: partial(strategy, name, 1) for name in ("fsdp", "fsdp2")}
    return run(Checks("cpu", strategies, gib=0.01, most_stall=dict.fromkeys(MOST_STALL, math.inf)).by_name)


@pytest.mark.ranks
def test_every_check_of_the_script_for_cuda_devices_passes_on_a_cpu() -> None:
    results = run_alone(rehearse, timeout=150, env={"MASTER_ADDR": "127.0.0.1"})
    assert {name: result["trace"] for name, result in results.items() if not result["ok"]} == {}
    assert results["single"]["behind"] >= 3
