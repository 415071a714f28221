"""Our MTP training step beside that of speculators, at the demo target's shapes: tokens per second and peak memory.

    benchmarks/peers/install_speculators.sh FOLDER
    python benchmarks/train_step.py --peer-python FOLDER/bin/python --out train_step.jsonl

Every arm is a process of its own, ours and the peer's in turn, so that peak memory is its own and both see the same machine: K=1 and K=3, half and all of
the tokens supervised, float32 and bfloat16, on one thread (CPU seconds) and on two (wall). Both build the same Qwen3 layer, on the same random tokens, states
and mask. Ours has soft labels (KL to the target's logits) and the exact attention of decoding; the peer has hard labels, keeps all logits and takes keys
from the same step. What is in --out already is not measured again: a killed run goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.measure import measure

HERE = Path(__file__).resolve().parent
KEYS = ("dtype", "threads", "unroll_steps", "share")


def our_arm(arm: dict[str, Any]) -> None:
    """One optimiser step as in mtp_train/train.py."""
    import torch
    from transformers import Qwen3Config

    from mtp_train.config import compose
    from mtp_train.heads.base import Start, supervised, unroll
    from mtp_train.heads.table import build_head
    from mtp_train.interfaces import Batch
    from mtp_train.loss import draft_loss
    from mtp_train.optim import make_optimizer
    from mtp_train.target.ends import FrozenEnds

    torch.set_num_threads(arm["threads"])
    torch.manual_seed(0)
    config, sizes, num_tokens, dtype = compose("target.path=none"), arm["sizes"], arm["tokens"], getattr(torch, arm["dtype"])
    target = Qwen3Config(**sizes, num_hidden_layers=1, tie_word_embeddings=False)
    embed, lm_head = (torch.randn(target.vocab_size, target.hidden_size).mul_(0.02).to(dtype) for _ in range(2))
    ends = FrozenEnds(target, embed, torch.ones(target.hidden_size, dtype=dtype), lm_head)
    head = build_head(config.head, target, Start(torch.ones(target.hidden_size), lm_head, lambda index: {}))
    optimizer = make_optimizer(head, config.train.optim)
    positions = torch.arange(num_tokens)[None]
    batch = Batch(
        input_ids=torch.randint(0, target.vocab_size, (1, num_tokens)),
        position_ids=positions,
        document_ids=torch.zeros_like(positions),
        loss_mask=positions >= num_tokens - round(num_tokens * arm["share"]),
        hidden_states=torch.randn(1, num_tokens, 1, target.hidden_size).to(dtype),
    )

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            rows = supervised(unroll(head, ends, batch, arm["unroll_steps"]), batch)
            sums, _ = draft_loss(ends, rows, config.train.loss)
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


def table(results: list[dict[str, Any]]) -> str:
    """Ours, the peer's, and the ratios, one line a setting."""
    lines = [
        "| dtype | threads | K | supervised | ours tok/s | peer tok/s | ratio | ours GiB | peer GiB | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = {(result["side"], *(result[key] for key in KEYS)): result for result in results}
    for key in dict.fromkeys(tuple(result[name] for name in KEYS) for result in results):
        ours, peer = found.get(("ours", *key)), found.get(("peer", *key))
        rate = "tokens_per_cpu_s" if key[1] == 1 else "tokens_per_wall_s"  # CPU seconds on one thread, wall on two

        def show(figure: str, form: str, ours: Any = ours, peer: Any = peer) -> list[str]:
            values = [side and side[figure] / (1024 if figure == "peak_mib" else 1) for side in (ours, peer)]
            return [*(format(value, form) if value else "-" for value in values), f"{values[0] / values[1]:.2f}" if all(values) else "-"]

        lines.append("| " + " | ".join([key[0], str(key[1]), str(key[2]), f"{key[3]:.0%}", *show(rate, ".0f"), *show("peak_mib", ".2f")]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every arm and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of the peer's environment; without it only our arms run")
    parser.add_argument("--out", type=Path, help="JSON lines of the results, added to")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576, help="a multiple of 192: 64 a head, three heads share a key")
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of an arm")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        our_arm(json.loads(options.arm))
        return
    heads = options.hidden // 64
    sizes = {
        "hidden_size": options.hidden, "intermediate_size": options.intermediate, "vocab_size": options.vocab, "num_attention_heads": heads,
        "num_key_value_heads": heads // 3, "head_dim": 64, "max_position_embeddings": 2048,
    }  # fmt: skip
    sides = [("ours", sys.executable, Path(__file__).resolve())]
    sides += [("peer", options.peer_python, HERE / "peers" / "speculators_mtp.py")] if options.peer_python else []
    results = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    for values in itertools.product(options.dtypes, (1, 2), (1, 3), (0.5, 1.0)):
        for side, python, script in sides:
            arm = {"side": side, **dict(zip(KEYS, values)), "sizes": sizes, "tokens": options.tokens, "repeats": options.repeats}
            if any(all(result[key] == arm[key] for key in arm) for result in results):
                continue
            results.append(run_arm(python, script, arm))
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            sys.stderr.write(f"{side} {values}: {results[-1]['cpu_s']:.2f} CPU s, {results[-1]['wall_s']:.2f} s, {results[-1]['peak_mib']:.0f} MiB\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
