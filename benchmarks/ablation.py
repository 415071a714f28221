"""What each choice of the head and its training is worth, at equal counted FLOP, on the demo's data: a table of predicted acceptance.

    python benchmarks/ablation.py --run runs/demo --out runs/ablation              # arms on the demo's shards (make demo made them)
    python benchmarks/ablation.py --run runs/demo --out runs/ablation --long       # the same norms on prompts of 2 to 4 thousand tokens

Each arm and seed trains in a directory of its own with the FLOP of --flop (planner.training_flop); what is done already is not done again, so a
killed run goes on. Every arm is judged by walking the held-out rows with K = 3 drafts, whatever it was trained on. The winner is for the engine to
confirm: mtp-eval eval.head=OUT/ARM/checkpoints/...
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from equal_flop import demo_overrides, link_shards, steps_for, with_steps

from mtp_train.config import Config, compose
from mtp_train.metrics import read_metrics
from mtp_train.setup import set_up
from mtp_train.train import train, validate
from precompute.run import stage as precompute

JUDGED_STEPS = 3


ARMS: dict[str, tuple[str, ...]] = {
    "norms restored, unroll 3, KL + 0.1 feature, identity": (),
    "unroll 1": ("train.unroll_steps=1",),
    "unroll 2": ("train.unroll_steps=2",),
    "unroll 3 in the last fifth of the steps": ("train.unroll_from=0.8",),
    "soft labels alone": ("train.loss.feature_weight=0",),
    "start: target's last layer": ("head.init=last_layer",),
    "start: target's last layer, a quarter of the rate": ("head.init=last_layer", "train.optim.lr=5.0e-4"),
    "norms removed (EAGLE-1)": ("head=eagle1",),
}
MORE_ARMS: dict[str, tuple[str, ...]] = {
    "loss: lk_hybrid": ("train.loss.kind=lk_hybrid",),
    "loss: hard labels": ("train.loss.kind=hard_ce",),
    "muon": ("train.optim.name=muon",),
}
LONG_ARMS: dict[str, tuple[str, ...]] = {"long prompts, norms restored": (), "long prompts, norms removed (EAGLE-1)": ("head=eagle1",)}


def source_prompts(path: Path, num: int, seed: int, tokens: tuple[int, int]) -> Path:
    """Questions about pieces of the standard library's source of about `tokens` tokens (3.2 characters each)."""
    rng, files = random.Random(seed), sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows = []
    while len(rows) < num:
        text = rng.choice(files).read_text(encoding="utf-8", errors="ignore")
        size = int(3.2 * rng.randint(*tokens))
        if len(text) < size:
            continue
        start = rng.randrange(len(text) - size + 1)
        question = "What does this code do? Explain it.\n\n" + text[start : start + size]
        rows.append({"id": f"source{seed}-{len(rows)}", "domain": "source", "messages": [{"role": "user", "content": question}]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def capture_long(run: Path, out: Path) -> tuple[Path, tuple[str, ...]]:
    """Regenerate and capture answers to long prompts with the demo's target; returns their shards and what training needs beside."""
    files = {name: source_prompts(out / f"{name}.jsonl", num, seed, (2000, 4000)) for name, num, seed in (("train", 24, 1), ("validation", 6, 2))}
    sources = [f"data.{name}=[{{path: '{file}', form: messages, domain: null, split: train, limit: null}}]" for name, file in files.items()]
    precompute(
        compose(
            *demo_overrides(run, out / "data"),
            *sources,
            "precompute.steps=[corpus,rows,capture,merge,verify]",
            "data.max_length=5120",
            "precompute.regenerate.max_new_tokens=256",
        )
    )
    return out / "data" / "shards", ("train.seq_len=5120",)


def configure(run: Path, folder: Path, seed: int, flop: float, overrides: tuple[str, ...]) -> Config:
    """The configuration of an arm, with the steps that its FLOP allow."""
    fixed = [f"train.seed={seed}", "train.unroll_from=0", "train.validate_every=0", "train.save_every=100000", "train.optim.warmup_steps=5"]
    config = compose(*demo_overrides(run, folder), *fixed, *overrides)
    return with_steps(config, max(10, steps_for(config, flop)))


def run_arm(run: Path, shards: Path, folder: Path, seed: int, flop: float, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train one arm with one seed and walk the held-out rows."""
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    link_shards(shards, folder)
    config = configure(run, folder, seed, flop, overrides)
    train(config)
    figures = validate(set_up(config), JUDGED_STEPS)
    norms = [line["grad_norm"] for line in read_metrics(folder / "metrics.jsonl") if "grad_norm" in line]
    row = {
        "length": figures["predicted_acceptance_length"], "rates": figures["predicted_acceptance_rate_at"], "drafts": figures["num_walked_drafts"],
        "kl_at": figures["kl_at"], "steps": config.train.num_steps, "grad_norm_median": statistics.median(norms), "grad_norm_max": max(norms),
    }  # fmt: skip
    result.write_text(json.dumps(row))
    return row


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean and range over seeds."""
    lines = ["| arm | steps | predicted length, mean (lowest to highest) | at 1 / 2 / 3 | gradient norm, median / largest |", "|---|---|---|---|---|"]
    for name, rows in found.items():
        lengths = [row["length"] for row in rows]
        rates = " / ".join(f"{100 * statistics.mean(row['rates'][k] for row in rows):.1f} %" for k in range(JUDGED_STEPS))
        norms = f"{statistics.mean(row['grad_norm_median'] for row in rows):.2f} / {max(row['grad_norm_max'] for row in rows):.1f}"
        spread = f"{statistics.mean(lengths):.3f} ({min(lengths):.3f} to {max(lengths):.3f})"
        lines.append(f"| {name} | {rows[0]['steps']} | {spread} | {rates} | {norms} |")
    return "\n".join(lines)


def main() -> None:
    """Run the arms that are not done, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run directory of a finished make demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--flop", type=float, default=3.0e12, help="of each arm: one to two minutes on one core")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="arms whose name contains this")
    parser.add_argument("--more", action="store_true", help="other losses and Muon, too")
    parser.add_argument("--long", action="store_true", help="the arms on long prompts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shards, extra, arms = options.run / "shards", (), ARMS | (MORE_ARMS if options.more else {})
    if options.long:
        (shards, extra), arms = capture_long(options.run, options.out / "long"), LONG_ARMS
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for name, arm in arms.items():
            if options.only is None or options.only in name:
                folder = options.out / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"
                found.setdefault(name, []).append(run_arm(options.run, shards, folder, seed, options.flop, (*arm, *extra)))
    print(table(found))


if __name__ == "__main__":
    main()
