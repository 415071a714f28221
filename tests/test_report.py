"""The report of a golden fixture: its numbers, its escapes, and that the page is well formed and needs nothing from outside."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eval.report import KEYS, terminal_table, write_report
from eval.report_page import md, ticks, visible

GOLDEN = Path(__file__).parent / "golden" / "report.json"
VOID = {"meta", "br", "hr", "img", "input", "link"}


@pytest.fixture
def report():
    return json.loads(GOLDEN.read_text())


def texts(report, folder):
    return {suffix: path.read_text(encoding="utf-8") for suffix, path in write_report(report, folder).items()}


class Page(HTMLParser):
    """Checks that every element is closed in order; keeps text, tags and attributes."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.tags, self.attributes, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")
        self.text += " "

    def handle_data(self, data):
        self.text += data if not self.open or self.open[-1] != "style" else ""


def loads_from_outside(text):
    """Whatever a browser would fetch or run."""
    page = Page(text)
    found = [f"<{tag}>" for tag in page.tags if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "use", "image", "foreignobject")]
    for name, value in page.attributes:
        if name.startswith("on") or (name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster") and not value.startswith("#")):
            found.append(f"{name}={value}")
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    return found + re.findall(r"url\(|@import|https?:", style)


# ---------------------------------------------------------------- several heads


def test_heads_stand_side_by_side_by_k_with_their_costs(report, tmp_path):
    one = {"value": 1.9, "low": 1.8, "high": 2.0}
    row = {"name": "runs/a", "kind": "mtp", "K": 3, "acceptance_length": one, "difference": {"value": 0.0, "low": 0.0, "high": 0.0}, "batch_size": 8,
           "acceptance_rate_at": [{"value": 0.5, "low": 0.4, "high": 0.6}], "propose_ms": 12.5, "state_bytes": 1152, "num_parameters": 4_200_000,
           "training_flop": 2.5e13}  # fmt: skip
    other = row | {"name": "runs/b", "kind": "eagle3", "difference": {"value": -0.12, "low": -0.2, "high": -0.04}, "state_bytes": 4608, "training_flop": None}
    report["heads"] = [row, other, row | {"K": 1}]
    text = texts(report, tmp_path)["md"]
    assert "**Heads side by side, K=3**" in text and "**Heads side by side, K=1**" in text
    assert "| runs/a | mtp | 1.90 (1.80 to 2.00) | 0.00 (0.00 to 0.00) | 50.0 % (40.0 to 60.0) | 12.50 | 1,152 | 4.20 | 25.00 |" in text.replace(
        "12.34", "12.35"
    )
    assert "| runs/b | eagle3 | 1.90 (1.80 to 2.00) | -0.12 (-0.20 to -0.04) | 50.0 % (40.0 to 60.0) |" in text
    assert "4,608 | 4.20 | – |" in text


# ---------------------------------------------------------------- the golden report


def test_golden_markdown_has_every_number_with_what_belongs_to_it(report, tmp_path):
    text = texts(report, tmp_path)["md"]
    for part in (
        "# Acceptance of an MTP head on SmolLM2-135M-Instruct",
        "- **Acceptance length: 1.89** (95 %: 1.82 to 1.97; 1,525 accepted in 1,715 drafts)",
        "- **First draft accepted: 52.9 %** (95 %: 49.5 to 56.7; 908 of 1,715 drafts)",
        "- **Speed at batch 1: 0.85x** (slower than plain decoding; K=3, greedy, bfloat16, 8 prompts)",
        "- **Lossless: 41 / 42** (prompts equal to plain decoding; greedy, float32)",
        "K=3, temperature 0, greedy drafts, draft vocabulary: whole, float32, batch 8, up to 128 new tokens, 42 prompts, embedded engine",
        "K=1, temperature 0, greedy drafts, draft vocabulary: 8192, float32",
        "K=3, temperature 1, probabilistic drafts, draft vocabulary: whole",
        "| all prompts | 42 | 1.89 (1.82 to 1.97) | 29.6 % (27.4 to 32.2) | 52.9 % (49.5 to 56.7) | 25.3 % (22.6 to 28.4) | 10.7 % (9.0 to 12.5) |",
        "| all prompts | 1,715 | 5,145 | 1,525 | 3,240 | 41 | 908 | 434 | 183 |",
        "| without 3 looping answers | 39 |",
        "| K=3, greedy | bfloat16 | 1 | 3 | whole | 8 | 520 | 28.3 | 18.1 | 0.85x slower |",
        "| K=1, greedy, draft vocabulary 8192 | bfloat16 | 1 | 1 | 8192 | 8 | 520 | 19.6 | 26.1 | 1.22x faster |",
        "Acceptance is not speed-up",
        "A teacher-forced proxy is not acceptance in decoding",
        "| chat/11 | a near-tie explains it | 57 | 284 | 260 | 0.000210 |",
        "> **Warning:** prompts and answers reach 640 tokens",
        "| figure | held-out shards, step 300 | live head, live target |",
        "A draft⟦ head⟧⟦ is⟧⟦ a⟧ small",
    ):
        assert part in text, part


def numbers(run):
    """Every counter and every value and interval end of a run, as the report writes them."""
    for row in (run["overall"], *run["domains"].values(), *filter(None, [run["without_loops"]])):
        for value in row["counters"].values():
            yield from (f"{one:,}" for one in (value if isinstance(value, list) else [value]))
        yield from (f"{row['acceptance_length'][key]:.2f}" for key in ("value", "low", "high"))
        for entry in (row["acceptance_rate"], *row["acceptance_rate_at"], *row["conditional_acceptance_rate_at"]):
            yield from (f"{100 * entry[key]:.1f}" for key in ("value", "low", "high"))


@pytest.mark.parametrize("format", ["md", "html"])
def test_all_counters_and_intervals_are_present(report, tmp_path, format):
    text = texts(report, tmp_path)[format]
    shown = set(re.findall(r"[\d,]+(?:\.\d+)?", Page(text).text if format == "html" else text))
    for run in report["runs"]:
        assert not {one for one in numbers(run) if one not in shown}


@pytest.mark.parametrize("format", ["md", "html"])
def test_no_counter_is_lost(report, tmp_path, format):
    """Every counter of every row gets a number of its own, so that none is found by chance."""
    fresh = itertools.count(1_000_003, 7)
    for run in report["runs"]:
        for row in (run["overall"], *run["domains"].values(), *filter(None, [run["without_loops"]])):
            row["counters"] = {key: [next(fresh) for _ in value] if isinstance(value, list) else next(fresh) for key, value in row["counters"].items()}
    shown = texts(report, tmp_path)[format]
    expected = [f"{number:,}" for number in range(1_000_003, next(fresh), 7)]
    assert len(expected) > 90
    assert [one for one in expected if one not in shown] == []


def test_page_is_well_formed_and_self_contained(report, tmp_path):
    text = texts(report, tmp_path)["html"]
    page = Page(text)
    assert page.faults == []
    assert loads_from_outside(text) == []
    assert text.startswith("<!doctype html>")
    assert ("lang", "en") in page.attributes
    assert any("default-src 'none'" in (value or "") for _, value in page.attributes)
    assert page.tags.count("svg") >= 4
    assert len(text) < 200_000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</h1>", "</h1><script src=x></script>"),
        ("</h1>", "</h1><img src='https://example.com/x.png'>"),
        ("<style>", "<style>@import 'x';"),
        ("<h1>", "<h1 onclick=x>"),
        ("href='#s0'", "href='https://example.com'"),
    ],
)
def test_the_self_contained_check_sees_a_fault(report, tmp_path, old, new):
    text = texts(report, tmp_path)["html"]
    assert loads_from_outside(text.replace(old, new, 1)) != []


def test_the_well_formed_check_sees_a_fault(report, tmp_path):
    text = texts(report, tmp_path)["html"]
    assert Page(text.replace("</table>", "", 1)).faults
    assert Page(text.replace("&lt;script&gt;", "<script>", 1)).faults


# ---------------------------------------------------------------- text from data

HOSTILE = (
    "</pre><script>alert(1)</script> \"'& | ` ``` *b* [x](https://example.com) ![i](https://example.com/i.png) 代码 \x00\x1b[31m\x7f\x85\u202e\ud800 \n# h"
)


def plant(value, path=()):
    """The same report with hostile text wherever a reader's or a corpus' text can stand."""
    if isinstance(value, dict):
        return {key: plant(one, (*path, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [plant(one, path) for one in value]
    return value + HOSTILE if isinstance(value, str) and path[-1:] != ("kind",) else value


def test_hostile_text_is_harmless_everywhere(report, tmp_path):
    clean = {suffix: Page(text) for suffix, text in texts(report, tmp_path / "clean").items() if suffix == "html"}["html"]
    hostile = plant(report)
    for run in hostile["runs"]:
        run["domains"] = {name + HOSTILE: row for name, row in run["domains"].items()}
    written = texts(hostile, tmp_path / "hostile")
    page = Page(written["html"])
    assert page.faults == []
    assert loads_from_outside(written["html"]) == []
    assert page.tags == clean.tags
    assert "<script>alert(1)</script>" in page.text  # shown, not run
    raw = [char for suffix in ("html", "md") for char in written[suffix] if ord(char) < 32 and char != "\n"]
    assert raw == []
    assert not {"\x7f", "\x85", "\u202e"} & set(written["html"] + written["md"] + terminal_table(hostile))
    assert "\x1b" not in terminal_table(hostile)
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", written["md"], flags=re.S | re.M)
    assert not re.search(r"(?<!\\)!?\[[xi](?<!\\)\]\(", outside)
    assert "<script" not in outside
    assert "\n# h" not in outside
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in rows]
    rules = [bars[index] for index, line in enumerate(rows) if set(line) <= set("|-: ")]
    assert len(rules) == len(re.findall(r"^\| -", outside, re.M))
    assert set(bars) == set(rules)
    assert json.loads(written["json"])["title"].startswith(report["title"])


def test_markdown_fence_outlasts_the_text_inside(report, tmp_path):
    report["examples"][0]["prompt"] = "````\n# not a heading\n````"
    assert "`````\n````\n# not a heading\n````\n`````" in texts(report, tmp_path)["md"]


def test_visible_and_markdown_text():
    assert visible("a\tb\nc\r\x07é代\u2066") == "a\tb\nc\\r\\x07é代\\u2066"
    assert md("a|b\nc_<d>") == r"a\|b c\_&lt;d>"


# ---------------------------------------------------------------- missing parts and bad input


@pytest.mark.parametrize("key", [key for key in KEYS if key not in ("title", "created", "warnings")])
def test_each_section_may_be_empty(report, tmp_path, key):
    report[key] = type(report[key])()
    written = texts(report, tmp_path)
    assert Page(written["html"]).faults == []
    if key in ("runs", "speed", "lossless"):
        assert "not measured" in written["md"].lower()
    terminal_table(report)


def test_what_a_small_evaluation_leaves_out(report, tmp_path):
    report |= {"data": {}, "lossless": {"checked": False}, "speed": [], "examples": [], "training": [], "validation": {"shards": None, "live": None}}
    written = texts(report, tmp_path)
    assert "Losslessness was not measured" in written["md"]
    assert "- **Speed at batch 1: –** (not measured)" in written["md"]
    assert "Not measured." in Page(written["html"]).text


def test_nan_becomes_null_and_a_dash(report, tmp_path):
    row = report["runs"][0]["overall"]
    row["conditional_acceptance_rate_at"][2] = {"value": math.nan, "low": math.nan, "high": math.nan}
    row["acceptance_length"] |= {"low": math.nan, "high": math.inf}
    report["runs"][0]["domains"]["chat"]["acceptance_length"] = {"value": None, "low": None, "high": None}
    report["training"][0]["loss"] = math.nan
    report["speed"][1]["speedup"] = math.nan
    written = texts(report, tmp_path)

    def refuse(name):
        raise AssertionError(name)

    again = json.loads(written["json"], parse_constant=refuse)
    assert again["runs"][0]["overall"]["conditional_acceptance_rate_at"][2]["value"] is None
    assert "1.89 (– to –)" in written["md"]
    assert "**Speed at batch 1: –** (not measured;" in written["md"]
    assert not re.search(r"\b(nan|inf|None)\b", Page(written["html"]).text + written["md"])
    assert terminal_table(again) == terminal_table(report)


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(report, tmp_path, key):
    del report[key]
    with pytest.raises(ValueError, match=f"the report lacks .*{key}"):
        write_report(report, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_keys_and_incomplete_runs_are_named(report, tmp_path):
    with pytest.raises(ValueError, match=r"unknown .*acceptence"):
        write_report(report | {"acceptence": 1}, tmp_path)
    del report["runs"][1]["temperature"]
    with pytest.raises(ValueError, match=r"runs\[1\] lacks .*temperature"):
        write_report(report, tmp_path)


# ---------------------------------------------------------------- honesty, and the terminal


def test_slower_is_called_slower_and_a_fault_a_fault(report, tmp_path):
    report["speed"][1]["speedup"], report["speed"][2]["speedup"] = 1.004, 0.996
    report["lossless"]["differences"][0]["explained"] = False
    text = texts(report, tmp_path)["md"]
    assert "1.00x the same" in text
    assert "(the same as plain decoding; K=3" in text
    assert "NOT explained: a fault" in text
    assert "faster" not in text


def test_headline_speed_is_of_the_headline_run_at_batch_1(report, tmp_path):
    other = copy.deepcopy(report["speed"][1]) | {"batch_size": 8, "speedup": 3.0}
    report["speed"].insert(1, other)
    assert "**Speed at batch 1: 0.85x**" in texts(report, tmp_path)["md"]
    report["speed"] = [other]
    assert "**Speed at batch 1: –**" in texts(report, tmp_path)["md"]


def test_terminal_table_is_aligned(report):
    lines = terminal_table(report).splitlines()
    head = next(line for line in lines if line.startswith("run"))
    wide = sum(char > "\u2e80" for char in "代码")
    for line in lines[lines.index(head) + 1 : lines.index("", lines.index(head))]:
        shift = wide if "代码" in line else 0
        assert re.match(r"\d\.\d\d \(", line[head.index("length") - shift :]), line
    assert "K=3, greedy, batch 1, bfloat16: 18.1 tokens/s, 0.85x slower" in lines
    assert any(line.startswith("warning: ") for line in lines)


@pytest.mark.parametrize(("low", "high"), [(0, 0.63), (1, 2.2), (0, 300), (1.43, 1.62), (2, 2), (0, 1), (1e-9, 1e-8), (0, 123456)])
def test_ticks_are_few_and_enclose(low, high):
    marks = ticks(low, high)
    assert 2 <= len(marks) <= 7
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
