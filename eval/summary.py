"""Small summaries that go into a report: names, loops, pieces of text, training figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import EvalRunConfig
from mtp_train.metrics import METRICS, read_metrics


def name_of(run: EvalRunConfig, vocab: torch.Tensor | None) -> str:
    """What a run is called in the report."""
    heat = "greedy" if run.temperature == 0 else f"T={run.temperature:g}, {run.draft_sampling} drafts"
    return f"K={run.num_draft_tokens}, {heat}" + ("" if vocab is None else f", draft vocabulary {len(vocab)}")


def loops(token_ids: list[int], period: int = 24, repeats: int = 3) -> bool:
    """Whether an answer ends in `repeats` copies of one piece of at most `period` tokens: loops flatter acceptance."""
    for size in range(1, period + 1):
        tail = token_ids[-size * repeats :]
        if len(tail) == size * repeats and size * repeats >= 12 and tail == tail[:size] * repeats:
            return True
    return False


def pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text of each token; bytes of a character that spans tokens appear with its last one."""
    out, done = [], ""
    for stop in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:stop])
        piece = "" if text.endswith("\ufffd") else text[len(done) :]
        done = text if piece else done
        out.append(piece)
    return out


def training_curve(run_dir: Path) -> list[dict[str, Any]]:
    """Loss and validation by step, of metrics.jsonl."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_metrics(run_dir / METRICS):
        row = steps.setdefault(line["step"], {"step": line["step"]})
        if "decoded_acceptance_length" in line:
            row.update(decoded_acceptance_length=line["decoded_acceptance_length"])
        elif "val_loss" in line:
            row.update(val_loss=line["val_loss"], predicted_acceptance_length=line["val_predicted_acceptance_length"])
        else:
            row.update({key: line[key] for key in ("loss", "kl", "feature", "lr", "tokens_per_second")})
    return [steps[step] for step in sorted(steps)]


def with_speedup(timed: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Timings of every way of decoding, each against plain decoding at its batch size (None where one of the two has no speed)."""
    every = [row for rows in timed for row in rows]
    plain = {row["batch_size"]: row["tokens_per_second"] for row in every if row["kind"] == "plain"}

    def ratio(row: dict[str, Any]) -> float | None:
        mine, reference = row["tokens_per_second"], plain.get(row["batch_size"])
        return mine / reference if mine and reference else None

    return [{**row, "speedup": ratio(row)} for row in every]
