"""The report's table of several heads on the same prompts."""

from __future__ import annotations

from typing import Any

from eval.report_page import Block, Cell, Table, length, number, rate

NOTE = (
    "The difference is to the first head of the table, on the same prompts: a paired bootstrap, so its interval is narrower than two side by side. "
    "A proposal is K drafted tokens for a whole batch. States are what capture stores of a token for this head."
)


def heads(report: dict[str, Any]) -> list[Block]:
    """One table for each K; nothing where there is one head."""
    blocks: list[Block] = []
    for num_drafts in dict.fromkeys(row["K"] for row in report["heads"]):
        rows: list[list[Cell]] = []
        for row in (row for row in report["heads"] if row["K"] == num_drafts):
            first: list[Cell] = [rate(one) for one in row["acceptance_rate_at"][:1]] or ["–"]
            figures: list[Cell] = [length(row["acceptance_length"]), length(row["difference"]), *first]
            flop = row["training_flop"]
            costs = [number(row["propose_ms"]), number(row["state_bytes"], 0), number(row["num_parameters"] / 1e6), number(flop and flop / 1e12)]
            rows.append([row["name"], row["kind"], *figures, *costs])
        batch = report["heads"][0]["batch_size"]
        costs_head = [f"ms a proposal, batch {batch}", "bytes of states a token", "M parameters", "training TFLOP"]
        head = ["head", "kind", "acceptance length", "difference", "at 1", *costs_head]
        blocks.append(Table(f"Heads side by side, K={num_drafts}", head, rows, NOTE, num_text=2))
    return blocks
