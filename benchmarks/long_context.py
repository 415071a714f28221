"""A head trained on rows of 8,192 tokens, measured at half, once and twice that length: does acceptance fall beyond what it was trained on?

    python benchmarks/long_context.py --out runs/long_context

A tiny target learns the tests' Markov text on rows of up to 16,384 tokens; the head is trained on its answers to long prompts (train.seq_len=8192) and measured
by decoding answers to prompts of 4,096, 8,192 and 16,384 tokens. What is done already is not done again, so a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eval.run import stage as evaluate
from mtp_train import cli
from mtp_train.config import compose
from mtp_train.data.chat import tokenize
from mtp_train.export import export
from mtp_train.interfaces import Conversation, TokenRow
from mtp_train.train import stage as train
from precompute.run import stage as precompute
from tests.conftest import source
from tests.markov import markov_target, sentence, write
from tests.tiny import save_tiny
from tests.toy import toy_tokenizer

TRAINED = 8192
ANSWER = 128
LENGTHS = {"half": TRAINED // 2, "once": TRAINED, "twice": 2 * TRAINED}
TOKENS_PER_WORD = 5.3  # of the text, by byte, a little more than it is


def conversation(index: int, seed: int, domain: str, num_tokens: int) -> dict:
    """A question that makes a row of about `num_tokens` with its answer, and an answer to learn the form from."""
    rng = random.Random(1000 * seed + index)
    question = sentence(rng, round((num_tokens - ANSWER - 40) / TOKENS_PER_WORD))
    return {
        "id": f"{domain}{index}", "domain": domain,
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": sentence(rng, 24)}],
    }  # fmt: skip


def long_target(folder: Path, num_steps: int) -> Path:
    """The tests' tiny Llama, trained further on rows of 1,024 to 16,384 tokens."""
    if (folder / "config.json").exists():
        return folder
    short = markov_target("llama", folder.with_name("short"), max_position_embeddings=4 * TRAINED, rope_theta=1e6)
    model, tokenizer, rng = AutoModelForCausalLM.from_pretrained(short, attn_implementation="sdpa"), toy_tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        row = conversation(step, 7, "target", 2 ** rng.randint(10, 14))
        known = Conversation(row["id"], row["domain"], tuple(row["messages"]), "here")
        tokens = tokenize(known, tokenizer, max_length=3 * TRAINED, turns="all", template_kwargs={})
        assert isinstance(tokens, TokenRow), tokens
        ids = torch.tensor(tokens.input_ids)[None]
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stderr.write(f"target, step {step + 1} of {num_steps}: {ids.shape[1]} tokens, loss {float(loss):.3f}\n")
    return save_tiny(model.eval(), folder)


def main() -> None:
    """Make the target, run the four stages, print acceptance by length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=48, help="training rows of 8,192 tokens")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts of each length")
    parser.add_argument("--steps", type=int, default=150, help="of the head's training, a row each")
    parser.add_argument("--override", nargs="*", default=[], help="more overrides, such as head=eagle1")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cli.set_up_logging()
    target = long_target(out / "target", num_steps=60)
    rows = {name: [conversation(i, seed, name, TRAINED) for i in range(num)] for name, num, seed in (("train", options.rows, 1), ("validation", 4, 2))}
    files = {name: write(out / f"{name}.jsonl", some) for name, some in rows.items()}
    heldout = [conversation(i, 3, name, length) for name, length in LENGTHS.items() for i in range(options.prompts)]
    config = compose(
        "experiment=tiny", f"run_dir='{out / 'run'}'", f"target.path='{target}'", *(f"data.{name}=[{source(file)}]" for name, file in files.items()),
        f"data.max_length={TRAINED}", f"precompute.regenerate.max_new_tokens={ANSWER}", "precompute.batch_tokens=8192", "precompute.shard_tokens=65536",
        f"train.seq_len={TRAINED}", "train.rows_per_batch=1", f"train.num_steps={options.steps}", "train.validate_every=50", "train.save_every=50",
        "train.optim.lr=3.0e-3", "train.optim.warmup_steps=10", f"eval.prompts='{write(out / 'heldout.jsonl', heldout)}'", f"eval.max_new_tokens={ANSWER}",
        "eval.speed_prompts=0", *options.override,
    )  # fmt: skip
    for stage in (precompute, train, export, evaluate):
        stage(config)
    report = json.loads((out / "run" / "eval" / "report.json").read_text())
    print("| prompt | acceptance length (95 %) | of the first, second, third draft | drafts |\n|---|---|---|---|")
    for name, length in LENGTHS.items():
        row = report["runs"][0]["domains"][name]
        value, rates = row["acceptance_length"], " / ".join(f"{100 * rate['value']:.1f} %" for rate in row["acceptance_rate_at"])
        print(f"| {length} tokens | {value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}] | {rates} | {row['counters']['num_drafts']} |")
    print("\n".join(report["warnings"]))


if __name__ == "__main__":
    main()
