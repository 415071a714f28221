"""Timing of one arm of a benchmark, for all sides. Nothing of our package: the peers' environments do not hold it."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


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


def measure_training(model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], arm: dict[str, Any]) -> None:
    """`measure` a peer's optimiser steps: its loss, backward, AdamW on all that it trains."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step() -> float:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    measure(step, arm["tokens"], arm["repeats"], **arm, trained=sum(parameter.numel() for parameter in trained))
