"""What the benchmarks of trained arms share: the demo's configuration, as many steps as a budget of FLOP allows, and one set of captured states for all."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from mtp_train.config import Config
from mtp_train.planner import measure, read_target, training_flop


def demo_overrides(run: Path, folder: Path) -> list[str]:
    """The demo's configuration in `folder`, of the target that `run` was captured from."""
    target = json.loads((run / "shards" / "train" / "manifest.json").read_text())["target"]["name"]
    return ["experiment=demo", f"run_dir='{folder}'", f"target.path='{target}'"]


def steps_for(config: Config, flop: float) -> int:
    """Optimiser steps that `flop` allow, at the average of the configured training."""
    whole = config.train.num_steps
    return round(flop * whole / training_flop(config, measure(config.head, read_target(config.target)), whole))


def with_steps(config: Config, num_steps: int) -> Config:
    """The same training, of so many steps."""
    return replace(config, train=replace(config.train, num_steps=num_steps))


def link_shards(shards: Path, folder: Path) -> None:
    """Let the run in `folder` train on `shards`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        os.symlink(shards.resolve(), folder / "shards")
