"""The points of a sweep side by side: `python -m slurm.compare points.json SWEEP_DIR` writes comparison.md and comparison.json there.

Figures are those of each point's report by the configured engine: the acceptance length of its first run with its 95 % interval, and its best speed-up.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.provenance import atomic_write

log = logging.getLogger(__name__)


def row_of(name: str, overrides: list[str], report: dict[str, Any]) -> dict[str, Any]:
    """One point's figures, with their counters."""
    first = report["runs"][0]
    speedups = [row["speedup"] for row in report["speed"] if row["kind"] != "plain" and row["speedup"] is not None]
    return {
        "name": name,
        "overrides": overrides,
        "run": first["name"],
        "acceptance_length": first["overall"]["acceptance_length"],
        "counters": first["overall"]["counters"],
        "num_prompts": first["num_prompts"],
        "lossless": report["lossless"],
        "best_speedup": max(speedups, default=None),
    }


def compare(points: list[dict[str, Any]], folder: Path, engine: str) -> list[dict[str, Any]]:
    """Rows of all points, the longest acceptance first. Raises FileNotFoundError for a point that `engine` has not measured."""
    rows = []
    for point in points:
        path = cfg.report_dir(folder / point["name"], engine) / "report.json"
        if not path.exists():
            raise FileNotFoundError(f"the sweep's point {point['name']} was not measured with engine={engine}: there is no {path}")
        rows.append(row_of(point["name"], point["overrides"], json.loads(path.read_text())))
    return sorted(rows, key=lambda row: -(row["acceptance_length"]["value"] or 0.0))


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table."""
    lines = ["# Comparison of the sweep's points", "", "Acceptance length (with its 95 % interval over prompts) of each point's first run.", ""]
    lines += ["| overrides | run | length [95 %] | accepted / drafts | prompts | best speed-up | report |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        length, counters, speed = row["acceptance_length"], row["counters"], row["best_speedup"]
        figure = "not measured" if length["value"] is None else f"{length['value']:.3f} [{length['low']:.3f}, {length['high']:.3f}]"
        accepted = f"{counters['num_accepted_tokens']:,} / {counters['num_drafts']:,}"
        lines.append(
            f"| {' '.join(row['overrides'])} | {row['run']} | {figure} | {accepted} | {row['num_prompts']} "
            f"| {'not measured' if speed is None else f'{speed:.2f}x'} | {row['name']} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, help="points.json of a submission, whose config.yaml is beside it")
    parser.add_argument("folder", type=Path, help="sweep/ of the run directory")
    options = parser.parse_args()
    cli.set_up_logging()
    with cli.one_line_errors():
        engine = cfg.read(options.points.with_name("config.yaml")).engine.name
        rows = compare(json.loads(options.points.read_text()), options.folder, engine)
        atomic_write(options.folder / "comparison.json", json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        atomic_write(options.folder / "comparison.md", markdown(rows))
        log.info("%s", markdown(rows))


if __name__ == "__main__":
    main()
