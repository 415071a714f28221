"""Timing of one arm of a benchmark, for both sides. Standard library alone: the peer's environment does not hold our package."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def peak_mib() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(step: Callable[[], float], num_tokens: int, num_steps: int, **about: Any) -> None:
    """Run `step` (it returns its loss) and write one JSON line, of the fastest step. The first two steps warm up and are not timed.

    CPU seconds are the process': on one thread they do not depend on who else uses the machine. `peak_mib` holds everything, imports and weights too;
    `before_mib` is what was there before the first step.
    """
    before, cpu, wall, losses = peak_mib(), [], [], []
    for _ in range(2 + num_steps):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step())
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    result = {
        **about,
        "cpu_s": min(cpu[2:]),
        "wall_s": min(wall[2:]),
        "tokens_per_cpu_s": num_tokens / min(cpu[2:]),
        "tokens_per_wall_s": num_tokens / min(wall[2:]),
        "before_mib": before,
        "peak_mib": peak_mib(),
        "losses": losses,
    }
    sys.stdout.write(json.dumps(result) + "\n")
