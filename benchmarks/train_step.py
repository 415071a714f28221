"""Our training step beside those of its peers, on the same random data: tokens per second and peak memory.

    benchmarks/peers/install_speculators.sh FOLDER; benchmarks/peers/install_specforge.sh FOLDER2
    python benchmarks/train_step.py --peer speculators=FOLDER/bin/python --out mtp.jsonl
    python benchmarks/train_step.py --recipe eagle3 --peer speculators=FOLDER/bin/python --peer specforge=FOLDER2/bin/python --out eagle3.jsonl

Every arm is a process of its own, ours and the peers' in turn, so that peak memory is its own and all see the same machine: on one thread (CPU seconds) and
on two (wall). The fastest step of --rounds such processes counts: other work on the machine only ever adds time. What is in --out already is not measured
again: a killed run goes on.

Half or all of the tokens are supervised.
mtp: K=1 and K=3, at the demo target's shapes. All build the same Qwen3 layer. Ours has soft labels (KL to the target's logits) and the exact attention of
decoding; the peer has hard labels, keeps all logits and takes keys from the same step.
eagle3: three taps, a draft vocabulary of half the target's with an lm_head that is trained, three steps, soft labels and the exact attention on all sides
(arXiv 2503.01840); the same trained parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.measure import measure

HERE = Path(__file__).resolve().parent
KEYS = ("dtype", "threads", "unroll_steps", "share")


@dataclass(frozen=True)
class Recipe:
    """What every side trains."""

    sizes: dict[str, int]
    tokens: int
    overrides: tuple[str, ...]
    steps: tuple[int, ...]
    shares: tuple[float, ...]
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]


RECIPES = {
    "mtp": Recipe(
        sizes={
            "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        tokens=1024, overrides=(), steps=(1, 3), shares=(0.5, 1.0), dtypes=("float32", "bfloat16"), peers=("speculators",),
    ),
    "eagle3": Recipe(
        sizes={
            "hidden_size": 512, "intermediate_size": 1408, "vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        tokens=512, overrides=("head=eagle3", "head.layout.taps=[1,2,3]", "head.draft_vocab_size=4096"), steps=(3,), shares=(0.5, 1.0), dtypes=("float32",),
        peers=("speculators", "specforge"),
    ),
}  # fmt: skip


def our_arm(arm: dict[str, Any]) -> None:
    """One optimiser step as in mtp_train/train.py."""
    import torch
    from transformers import LlamaConfig, Qwen3Config

    from mtp_train.config import compose
    from mtp_train.heads.base import Start, supervised, unroll
    from mtp_train.heads.table import build_head, taps_of
    from mtp_train.interfaces import Batch
    from mtp_train.loss import draft_loss
    from mtp_train.optim import make_optimizer
    from mtp_train.target.ends import FrozenEnds

    torch.set_num_threads(arm["threads"])
    torch.manual_seed(0)
    config, sizes, num_tokens, dtype = compose("target.path=none", *arm["overrides"]), arm["sizes"], arm["tokens"], getattr(torch, arm["dtype"])
    target = {"mtp": Qwen3Config, "eagle3": LlamaConfig}[arm["recipe"]](**sizes, num_hidden_layers=4, tie_word_embeddings=False)
    embed, lm_head = (torch.randn(target.vocab_size, target.hidden_size).mul_(0.02).to(dtype) for _ in range(2))
    ends = FrozenEnds(target, embed, torch.ones(target.hidden_size, dtype=dtype), lm_head)
    size = config.head.draft_vocab_size
    vocab = None if size is None else torch.randperm(target.vocab_size)[:size].sort().values
    head = build_head(config.head, target, Start(torch.ones(target.hidden_size), lm_head if vocab is None else lm_head[vocab], lambda index: {}))
    optimizer = make_optimizer(head, config.train.optim)
    positions = torch.arange(num_tokens)[None]
    batch = Batch(
        input_ids=torch.randint(0, target.vocab_size, (1, num_tokens)),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        loss_mask=positions >= num_tokens - round(num_tokens * arm["share"]),
        hidden_states=torch.randn(1, num_tokens, len(taps_of(config.head, target.num_hidden_layers)), target.hidden_size).to(dtype),
    )

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            rows = supervised(unroll(head, ends, batch, arm["unroll_steps"]), batch)
            sums, _ = draft_loss(ends, rows, config.train.loss, vocab, head.lm_head_weight)
        loss = sums.loss / sums.count[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    measure(step, num_tokens, arm["repeats"], **arm, trained=sum(parameter.numel() for parameter in head.parameters()))


def run_arm(python: str, script: Path, arm: dict[str, Any]) -> dict[str, Any]:
    """One arm in a fresh process."""
    command = [python, str(script), *(["--arm"] if arm["side"] == "ours" else []), json.dumps(arm)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(arm["threads"])}, check=False)
    if done.returncode:
        sys.exit(f"{script.name} {arm} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: list[dict[str, Any]], peers: Sequence[str]) -> str:
    """Ours, each peer's, and the ratios, one line a setting."""
    lines = []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        known = found.setdefault((result["side"], *(result[key] for key in KEYS)), dict(result))
        for figure in ("tokens_per_cpu_s", "tokens_per_wall_s"):
            known[figure] = max(known[figure], result[figure])
    for key in dict.fromkeys(tuple(result[name] for name in KEYS) for result in results):
        rate = "tokens_per_cpu_s" if key[1] == 1 else "tokens_per_wall_s"  # CPU seconds on one thread, wall on two
        for peer in peers or ("-",):
            sides = [found.get((side, *key)) for side in ("ours", peer)]
            cells = [peer, key[0], str(key[1]), str(key[2]), f"{key[3]:.0%}"]
            for figure, form, unit in ((rate, ".0f", 1), ("peak_mib", ".2f", 1024)):
                values = [side[figure] / unit if side else None for side in sides]
                cells += ["-" if value is None else format(value, form) for value in values]
                cells.append("-" if None in values else f"{values[0] / values[1]:.2f}")
            lines.append("| " + " | ".join(cells) + " |")
    head = "| peer | dtype | threads | K | supervised | ours tok/s | peer tok/s | ratio | ours GiB | peer GiB | ratio |"
    return "\n".join([head, "|---" * 11 + "|", *lines]) + "\n"


def main() -> None:
    """Measure every arm and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(RECIPES), default="mtp")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="Python of a peer's environment; without any only our arms run")
    parser.add_argument("--out", type=Path, help="JSON lines of the results, added to")
    parser.add_argument("--rounds", type=int, default=3, help="processes of an arm")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of a process")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        our_arm(json.loads(options.arm))
        return
    recipe, peers = RECIPES[options.recipe], dict(peer.split("=", 1) for peer in options.peer)
    if unknown := peers.keys() - set(recipe.peers):
        parser.error(f"--peer {', '.join(sorted(unknown))}: the recipe {options.recipe} has {', '.join(recipe.peers)}")
    sides = [("ours", sys.executable, Path(__file__).resolve())]
    sides += [(name, python, HERE / "peers" / f"{name}_{options.recipe}.py") for name, python in peers.items()]
    results = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    for round_, *values in itertools.product(range(options.rounds), options.dtypes or recipe.dtypes, (1, 2), recipe.steps, recipe.shares):
        for side, python, script in sides:
            about = {"recipe": options.recipe, "sizes": recipe.sizes, "overrides": recipe.overrides, "tokens": recipe.tokens}
            arm = json.loads(json.dumps({"side": side, **dict(zip(KEYS, values)), **about, "repeats": options.repeats, "round": round_}))
            if any(all(result[key] == arm[key] for key in arm) for result in results):
                continue
            results.append(run_arm(python, script, arm))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            sys.stderr.write(f"{side} {values}: {results[-1]['cpu_s']:.2f} CPU s, {results[-1]['wall_s']:.2f} s, {results[-1]['peak_mib']:.0f} MiB\n")
    sys.stdout.write(table(results, list(peers)))


if __name__ == "__main__":
    main()
