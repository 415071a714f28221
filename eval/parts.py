"""A report measured in parts: one of `eval.runs` in a process of its own (`eval.part`), joined afterwards (`eval.steps=[report]`).

    <report_dir>/parts/<part>.json    {mark, report}: mark says of which head and with which settings

Intervals are over the prompts of a run, so whole rows are joined and nothing is computed anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtp_train.provenance import atomic_write


def path_of(report_dir: Path, part: int) -> Path:
    """Where a part is kept."""
    return report_dir / "parts" / f"{part}.json"


def is_there(report_dir: Path, part: int, mark: dict[str, Any]) -> bool:
    """Whether a part was measured with this mark."""
    path = path_of(report_dir, part)
    return path.exists() and json.loads(path.read_text())["mark"] == mark


def write(report_dir: Path, part: int, mark: dict[str, Any], report: dict[str, Any]) -> None:
    """Keep a part."""
    atomic_write(path_of(report_dir, part), json.dumps({"mark": mark, "report": report}, ensure_ascii=False))


def read(report_dir: Path, part: int, mark: dict[str, Any]) -> dict[str, Any]:
    """A part's report. Raises FileNotFoundError where it is not there, ValueError where it is another head's or of other settings."""
    path = path_of(report_dir, part)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: measure it first, with eval.part={part}")
    kept = json.loads(path.read_text())
    if (found := kept["mark"]) != mark:
        different = [f"{key}: {found.get(key)!r} there, {value!r} here" for key, value in mark.items() if found.get(key) != value]
        raise ValueError(f"{path} was measured otherwise ({'; '.join(different)}): measure it again, with eval.part={part}")
    return kept["report"]


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of all parts, as if measured at once; the first is the headline. Each run's speed-up is against the plain decoding beside it."""
    first = parts[0]
    speed = list(first["speed"])
    for part in parts[1:]:
        names = ", ".join(run["name"] for run in part["runs"])
        speed += [{**row, "name": f"{row['name']} (beside {names})"} if row["kind"] == "plain" else row for row in part["speed"]]
    compared = [row for part in parts for row in part["parity"] or []]
    return {
        **first,
        "warnings": list(dict.fromkeys(warning for part in parts for warning in part["warnings"])),
        "runs": [run for part in parts for run in part["runs"]],
        "heads": [row for part in parts for row in part["heads"]],
        "lossless": next((part["lossless"] for part in parts if part["lossless"]["checked"]), first["lossless"]),
        "parity": compared if any(part["parity"] is not None for part in parts) else None,
        "speed": speed,
    }
