"""Model cards: what was measured is written beside the exported head, once an engine, and only where it is that very head."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from eval.card import write_figures

GOLDEN = Path(__file__).parent / "golden" / "report.json"


@pytest.fixture
def exports(tmp_path):
    """hf and vllm of one head, sglang of another."""
    for name, mark in (("hf", "a"), ("vllm", "a"), ("sglang", "b")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "source.sha256").write_text(mark)
        if name != "hf":
            (folder / "README.md").write_text("# MTP draft head\n\n    vllm serve\n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("of nothing that was exported\n")
    return tmp_path


def test_figures_and_their_provenance_are_written_once_an_engine(exports):
    report = json.loads(GOLDEN.read_text())
    assert write_figures(exports / "hf", report, Path("runs/eval")) == [exports / "vllm" / "README.md"]
    newer = copy.deepcopy(report)
    newer["created"] = "2031-01-01 00:00 UTC"
    newer["runs"][0]["overall"]["acceptance_length"]["value"] = 1.5
    write_figures(exports / "hf", newer, Path("runs/eval"))
    other = copy.deepcopy(report)
    other["runs"][0]["engine"] = "vLLM 9.9"
    write_figures(exports / "hf", other, Path("runs/eval-vllm"))
    card = (exports / "vllm" / "README.md").read_text()
    assert card.startswith("# MTP draft head\n\n    vllm serve\n")
    assert card.count("## Measured with") == 2
    assert "2031-01-01" in card and report["created"] in card, "the newer one took the place of its engine's older one"
    length = newer["runs"][0]["overall"]["acceptance_length"]
    assert f"1.50 [{length['low']:.2f}, {length['high']:.2f}]" in card
    assert f"{report['runs'][0]['overall']['counters']['num_drafts']:,}" in card
    assert report["reproduce"]["command"] in card and report["reproduce"]["provenance"]["cpu"] in card
    assert "Measured" not in (exports / "sglang" / "README.md").read_text(), "another head"


def test_a_checkpoint_has_no_card(exports):
    (exports / "hf" / "source.sha256").unlink()
    assert write_figures(exports / "hf", json.loads(GOLDEN.read_text()), Path("runs/eval")) == []
