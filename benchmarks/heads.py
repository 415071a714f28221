"""MTP, EAGLE-1, EAGLE-3 and 3.1 at equal counted training FLOP, on the demo's data: acceptance in decoding at K = 1, 3, 5, storage, draft cost.

    python benchmarks/heads.py --run runs/demo --out runs/heads                 # from where make demo ran

The rows of a finished demo are captured once more, with the taps of EAGLE-3, and every head trains on that one capture, in a directory of its own,
with the FLOP of --flop (planner.training_flop; attention, projections and a head's own lm_head included). Then all decode the same held-out prompts,
K by K, and the report of mtp-eval sets them side by side (OUT/report-K*/eval/report.md). What is done already is not done again: a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from equal_flop import demo_overrides, link_shards, steps_for, with_steps

from eval.run import stage as evaluate
from mtp_train.checkpoint import checkpoints
from mtp_train.config import Config, compose
from mtp_train.train import stage as train
from precompute.run import stage as precompute

PAPER = ("train.loss.kind=soft_ce", "train.loss.feature_weight=10", "train.feature_noise=0.1")
ARMS = {
    "mtp": (),
    "eagle1": ("head=eagle1",),
    "eagle1, the loss of its paper": ("head=eagle1", *PAPER),
    "eagle3": ("head=eagle3",),
    "eagle3.1": ("head=eagle31",),
}
DRAFTED = (3, 1, 5)


def base(run: Path, folder: Path) -> list[str]:
    """The demo's configuration, and its held-out prompts."""
    return [*demo_overrides(run, folder), f"eval.prompts='{run / 'data' / 'heldout.jsonl'}'"]


def capture(run: Path, folder: Path) -> None:
    """The same rows, answers included, with the taps of EAGLE-3."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        shutil.copytree(run / "data", folder / "data")
    precompute(compose(*base(run, folder), "head=eagle3", "precompute.steps=[capture,merge,verify]"))


def configure(run: Path, folder: Path, seed: int, flop: float, overrides: tuple[str, ...]) -> Config:
    """The configuration of a head, with the steps that its FLOP allow."""
    config = compose(*base(run, folder), f"train.seed={seed}", "train.validate_every=0", "train.save_every=200", *overrides)
    return with_steps(config, steps_for(config, flop))


def train_arm(run: Path, shards: Path, folder: Path, seed: int, flop: float, overrides: tuple[str, ...]) -> Path:
    """Train one head; returns its last checkpoint."""
    link_shards(shards, folder)
    train(configure(run, folder, seed, flop, overrides))
    return checkpoints(folder / "checkpoints")[-1]


def compare(run: Path, folder: Path, heads: list[Path], num_drafts: int) -> list[dict[str, Any]]:
    """Decode with every head; rows of the report."""
    ways = f"[{{num_draft_tokens: {num_drafts}, temperature: 0.0, draft_sampling: greedy, draft_vocab_size: null}}]"
    others = ",".join(f"'{path}'" for path in heads[1:])
    evaluate(compose(*base(run, folder), f"eval.head='{heads[0]}'", f"eval.heads=[{others}]", f"eval.runs={ways}", "eval.speed_prompts=0"))
    return json.loads((folder / "eval" / "report.json").read_text())["heads"]


def table(found: dict[int, list[dict[str, Any]]], names: list[str]) -> str:
    """Markdown: lengths with their intervals for each K, and the costs."""
    head = ["head", *(f"length, K={k}" for k in sorted(found)), f"difference to {names[0]}, K=3"]
    head += ["training TFLOP", "M parameters", "bytes of states a token", "ms a proposal, K=3"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for index, name in enumerate(names):
        lengths = [found[k][index]["acceptance_length"] for k in sorted(found)]
        row = found[3][index]
        cells = [f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})" for one in (*lengths, row["difference"])]
        costs = [f"{row['training_flop'] / 1e12:.2f}", f"{row['num_parameters'] / 1e6:.2f}", f"{row['state_bytes']:,}", f"{row['propose_ms']:.1f}"]
        lines.append(f"| {name} | {' | '.join([*cells, *costs])} |")
    return "\n".join(lines)


def main() -> None:
    """Train and measure what is not done, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run directory of a finished make demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flop", type=float, default=1.0e13, help="of each head; the demo spends 1.03e13")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    capture(options.run, options.out / "capture")
    heads = []
    for name, overrides in ARMS.items():
        folder = options.out / f"{''.join(c if c.isalnum() else '-' for c in name)}-{options.seed}"
        heads.append(train_arm(options.run, options.out / "capture" / "shards", folder, options.seed, options.flop, overrides))
    found = {k: compare(options.run, options.out / f"report-K{k}", heads, k) for k in DRAFTED}
    print(table(found, list(ARMS)))


if __name__ == "__main__":
    main()
