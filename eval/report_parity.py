"""The report's section on what an engine was checked for, and on two engines side by side."""

from __future__ import annotations

from typing import Any

from eval.report_page import Block, Cell, Table, number, percent

COLUMNS = (("predicted", "predicted by walking shards"), ("embedded", "embedded engine"), ("vllm", "vLLM"))


def parity(report: dict[str, Any]) -> list[Block]:
    """Self-checks, then one table for each run that was compared, its verdict, and the prompts that differ."""
    blocks: list[Block] = []
    if report["checks"]:
        rows: list[list[Cell]] = [[one["name"], "passed" if one["passed"] else "FAILED", one["found"]] for one in report["checks"]]
        blocks.append(Table("Self-checks", ["check", "result", "found"], rows, num_text=3))
    for one in report["parity"] or []:
        lines: list[list[Cell]] = []
        for key, title in COLUMNS:
            column = one[key] or {}
            counts = [number(column.get(name), 0) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
            at = " / ".join(f"{count:,}" for count in column.get("num_accepted_tokens_per_pos", [])) or "–"
            rates = " / ".join(map(percent, column.get("acceptance_rate_at", []))) or "–"
            lines.append([title, number(column.get("acceptance_length")), rates, *counts, at])
        head = ["", "length", "rate at 1, 2, ...", "drafts", "drafted", "accepted", "accepted at 1, 2, ..."]
        words = "Equal: " if one["equal"] else "NOT equal: "
        blocks += [Table(f"{one['name']}: {one['num_prompts']} prompts", head, lines, num_text=1), words + one["verdict"] + "."]
        found: list[list[Cell]] = [
            [row["id"], "a near-tie explains it" if row["explained"] else "NOT explained", row["what"], str(row["position"]), number(row["top2_gap"], 6)]
            for row in one["differences"]
        ]
        if found:
            blocks.append(Table("Prompts that differ", ["prompt", "verdict", "first difference", "at token", "top-2 logit gap"], found, num_text=3))
    return blocks
