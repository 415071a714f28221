"""Formats an acceptance report: report.json, report.md, one self-contained report.html, and a table for the terminal. Computes no number.

A report is a dictionary. ROW is `spec_decode.stats.summarise`, INT is {"value", "low", "high"}; nan, None and an empty section read "not measured":

    title, created, warnings [str]
    target      the fields of TargetInfo
    head        kind, num_parameters, checkpoint, step, layout {}, draft_vocab_size | None
    data        train_rows, train_tokens, train_supervised_tokens, regenerated, max_length
    runs        [name, engine, K, temperature, draft_sampling, draft_vocab_size | None, dtype, batch_size, max_new_tokens, num_prompts,
                 overall ROW, domains {name: ROW}, without_loops ROW | None, num_looping_prompts]; the first one is the headline
    heads       [name, kind, K, acceptance_length INT, difference INT (to the first head of the same K), acceptance_rate_at [INT], propose_ms, batch_size,
                 state_bytes, num_parameters, training_flop | None]: heads on the same prompts; [] where there is one alone
    lossless    checked, dtype, num_prompts, num_equal, differences [id, position, token_plain, token_draft, top2_gap, explained]
    checks      [name, passed, found]: self-checks of the engine
    parity      [name, equal, verdict, predicted {} | None, embedded {}, vllm {} (counters, acceptance_length, acceptance_rate_at), num_prompts,
                 differences [id, position, what, top2_gap, explained]] | None
    speed       [name, kind plain | speculative, engine, batch_size, dtype, K, draft_vocab_size | None, num_prompts, num_tokens, seconds,
                 tokens_per_second | None, speedup | None, parts {propose_ms, extend_ms, verify_ms, commit_ms} | None, num_steps | None]; speedup against the
                 plain row of the same batch size; an engine that does not time its parts is timed with its prefill
    examples    [id, domain, prompt, tokens [text, kind first | accepted | recovered | bonus]]
    validation  shards {step, loss, kl, feature, proxy_acceptance_at, top1_match_at, predicted_acceptance_length} | None, live (the same) | None
    training    [step, loss, kl, feature, lr, tokens_per_second, val_loss?, predicted_acceptance_length?, decoded_acceptance_length?]
    reproduce   command, config (YAML), provenance {}
"""

from __future__ import annotations

import json
import math
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eval import report_page as pieces
from eval.report_heads import heads
from eval.report_page import Block, Cell, Code, Example, Note, Plots, Table, known, length, md, number, one_line, percent, rate
from eval.report_parity import parity
from mtp_train.provenance import atomic_write

Report = dict[str, Any]
KEYS = (
    "title",
    "created",
    "warnings",
    "target",
    "head",
    "data",
    "runs",
    "heads",
    "lossless",
    "checks",
    "parity",
    "speed",
    "examples",
    "validation",
    "training",
    "reproduce",
)
RUN_KEYS = (
    "name", "engine", "K", "temperature", "draft_sampling", "draft_vocab_size", "dtype", "batch_size", "max_new_tokens", "num_prompts",
    "overall", "domains", "without_loops", "num_looping_prompts",
)  # fmt: skip
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_committed_tokens", "num_cut_tokens")
PARTS = ("propose", "extend", "verify", "commit")
UNMEASURED = "Not measured."
CONVENTION = (
    "Acceptance length = 1 + accepted / drafts: it includes the target's own next token (vLLM's convention). Acceptance rate = accepted / drafted. "
    "The rate at a position divides by all drafts, the conditional rate by the drafts accepted up to the position before. Counters count what "
    "verification accepted before a stop token or the budget cut it; what was cut is counted apart. Small figures: 95 % interval, bootstrap over prompts."
)
NO_SPEED_UP = (
    "Acceptance is not speed-up: every draft costs its own passes, and verifying K + 1 tokens costs more than one. Against plain decoding of the same batch "
    "size and dtype; one pass, so no interval. A step: propose (draft K tokens), extend (the target's pass), verify (decide), commit (refill the drafter)."
)
PROXY = (
    "A teacher-forced proxy is not acceptance in decoding: the true token is fed at every step. The predicted length walks the recorded answers as decoding "
    "would. Shard figures and live figures of one head should agree; where they do not, capture and decoding disagree."
)


def check(report: Report) -> None:
    """Raise ValueError naming the missing and the unknown keys of the report and of its runs."""
    places = [("the report", KEYS, report), *((f"runs[{index}]", RUN_KEYS, run) for index, run in enumerate(report.get("runs") or []))]
    for place, expected, found in places:
        missing, unknown = [key for key in expected if key not in found], [key for key in found if key not in expected]
        if missing or unknown:
            raise ValueError(f"{place} lacks {missing} and has unknown {unknown}; expected {list(expected)}")


# ---------------------------------------------------------------- figures


def settings(run: dict[str, Any]) -> str:
    """How a run was made: what belongs to each of its numbers."""
    return (
        f"K={run['K']}, temperature {run['temperature']:g}, {run['draft_sampling']} drafts, draft vocabulary: {run['draft_vocab_size'] or 'whole'}, "
        f"{run['dtype']}, batch {run['batch_size']}, up to {run['max_new_tokens']} new tokens, {run['num_prompts']} prompts, {run['engine']} engine"
    )


def speed_words(row: dict[str, Any]) -> tuple[str, str]:
    """The ratio to plain decoding, and in a word that does not flatter."""
    if row["kind"] == "plain":
        return "", "the reference"
    if not known(row["speedup"]):
        return "–", "not measured"
    ratio = number(row["speedup"])
    return f"{ratio}x", "the same" if ratio == "1.00" else "faster" if row["speedup"] > 1 else "slower"


def groups(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a run by name."""
    calm = {f"without {run['num_looping_prompts']} looping answers": run["without_loops"]} if run["without_loops"] else {}
    return {"all prompts": run["overall"], **run["domains"], **calm}


# ---------------------------------------------------------------- sections


def run_tables(run: dict[str, Any]) -> list[Block]:
    """Rates with their intervals, and the counters they come from."""
    rates: list[list[Cell]] = []
    counts: list[list[Cell]] = []
    for name, row in groups(run).items():
        at, conditional, counters = row["acceptance_rate_at"], row["conditional_acceptance_rate_at"], row["counters"]
        rates.append([name, str(row["num_prompts"]), length(row["acceptance_length"]), *map(rate, [row["acceptance_rate"], *at, *conditional[1:]])])
        counts.append([name, *(number(count, 0) for count in (*map(counters.get, COUNTERS), *counters["num_accepted_tokens_per_pos"]))])
    positions = range(1, len(run["overall"]["acceptance_rate_at"]) + 1)
    head = ["domain", "prompts", "acceptance length", "acceptance rate", *(f"at {i}" for i in positions), *(f"{i} given {i - 1}" for i in positions[1:])]
    count_head = ["domain", "drafts", "drafted", "accepted", "committed", "cut", *(f"accepted at {i}" for i in positions)]
    return [Table(run["name"], head, rates, settings(run)), Table(f"{run['name']}: counters", count_head, counts)]


def acceptance(report: Report) -> list[Block]:
    """What decoding accepted."""
    runs = report["runs"]
    if not runs:
        return [UNMEASURED]
    names, domains = [run["name"] for run in runs], list(dict.fromkeys(name for run in runs for name in groups(run)))
    rates = [run["overall"]["acceptance_rate_at"] for run in runs]
    lengths = [[(row := groups(run).get(name)) and row["acceptance_length"] for name in domains] for run in runs]
    positions = [f"position {index + 1}" for index in range(max(map(len, rates)))]
    figures = [pieces.bars("Acceptance rate by draft position", positions, rates, names), pieces.forest("Acceptance length by domain", domains, lengths, names)]
    return [Plots(figures), *(table for run in runs for table in run_tables(run)), Note(CONVENTION)]


def lossless(report: Report) -> list[Block]:
    """Whether greedy output equals plain decoding."""
    found = report["lossless"] or {}
    if not found.get("checked"):
        return ["Losslessness was not measured: no greedy run was compared with plain decoding."]
    text = f"Greedy output equals plain decoding on {found['num_equal']} of {found['num_prompts']} prompts ({found['dtype']})."
    rows: list[list[Cell]] = []
    for one in found["differences"]:
        tokens = ["end of answer" if one[key] is None else str(one[key]) for key in ("token_plain", "token_draft")]
        verdict = "a near-tie explains it" if one["explained"] else "NOT explained: a fault"
        rows.append([one["id"], verdict, str(one["position"]), *tokens, number(one["top2_gap"], 6)])
    head = ["prompt", "verdict", "first difference", "plain token", "drafted token", "top-2 logit gap"]
    return [text, Table("Prompts whose output differs", head, rows, num_text=2)] if rows else [text]


def speed(report: Report) -> list[Block]:
    """Time."""
    if not report["speed"]:
        return [UNMEASURED, Note(NO_SPEED_UP)]
    rows: list[list[Cell]] = []
    steps: list[list[Cell]] = []
    stacks = []
    for row in report["speed"]:
        name, per_second = row["name"], number(row["tokens_per_second"], 1)
        parts = [(row["parts"] or {}).get(f"{part}_ms") for part in PARTS]
        drafts = ["–", "–"] if row["kind"] == "plain" else [str(row["K"]), str(row["draft_vocab_size"] or "whole")]
        time = [number(row["num_tokens"], 0), number(row["seconds"], 1), per_second]
        rows.append([name, row["dtype"], str(row["batch_size"]), *drafts, str(row["num_prompts"]), *time, " ".join(speed_words(row)).strip()])
        steps.append([name, str(row["batch_size"]), number(row["num_steps"], 0), *map(number, parts)])
        if row["parts"]:
            stacks.append((f"{name}, batch {row['batch_size']}, {row['dtype']}: {per_second} tokens/s", parts))
    head = ["decoding", "dtype", "batch", "K", "draft vocabulary", "prompts", "tokens", "seconds", "tokens/s", "against plain"]
    tables: list[Block] = [Note(NO_SPEED_UP), Table("Time by way of decoding", head, rows, num_text=2)]
    if not stacks:
        return tables
    plot = Plots([pieces.stacked("Cost of one step in ms (a plain step makes one token)", stacks, PARTS)])
    return [*tables, plot, Table("Milliseconds a step", ["decoding", "batch", "steps", *PARTS], steps)]


def proxies(report: Report) -> list[Block]:
    """Teacher-forced figures of shards beside live ones."""
    found = report["validation"] or {}
    columns = [(title, found[key]) for key, title in (("shards", "held-out shards"), ("live", "live head, live target")) if found.get(key)]
    if not columns:
        return []
    single = {"loss": "loss", "KL": "kl", "feature loss": "feature", "predicted acceptance length": "predicted_acceptance_length"}
    rows: list[list[Cell]] = [[name, *(number(column[key], 3) for _, column in columns)] for name, key in single.items()]
    for name, key in (("proxy acceptance", "proxy_acceptance_at"), ("top-1 match", "top1_match_at")):
        rows += [[f"{name} at {i}", *map(percent, line)] for i, line in enumerate(zip_longest(*(column[key] for _, column in columns)), start=1)]
    head = ["figure", *(title + (f", step {column['step']}" if "step" in column else "") for title, column in columns)]
    return [Table("Teacher-forced proxies", head, rows, PROXY)]


def training(report: Report) -> list[Block]:
    """The curves, and their figures where validation ran."""
    rows = report["training"] or []

    def line(key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in rows if known(row.get(key))]

    losses = {name: line(key) for name, key in (("training", "loss"), ("validation", "val_loss")) if line(key)}
    figures = [pieces.curves("Loss by optimiser step", losses)] if losses else []
    names = {"predicted: walked over held-out shards": "predicted_acceptance_length", "decoded, validation prompts": "decoded_acceptance_length"}
    if lengths := {name: line(key) for name, key in names.items() if line(key)}:
        figures.append(pieces.curves("Acceptance length by step", lengths))
    keys = ("loss", "kl", "feature", "val_loss", "predicted_acceptance_length")
    table: list[list[Cell]] = [
        [number(row["step"], 0), *(number(row.get(key), 3) for key in keys), number(row.get("lr"), 6), number(row.get("tokens_per_second"), 0)]
        for row in rows
        if known(row.get("val_loss")) or row is rows[-1]
    ]
    head = ["step", "loss", "KL", "feature", "validation loss", "predicted length", "learning rate", "tokens/s"]
    return [Plots(figures), Table("Training, where validation ran", head, table, num_text=0)] if figures else []


def material(report: Report) -> list[Block]:
    """What was trained, for which target, on what."""
    parts = {key: report[key] or {} for key in ("target", "head", "data")}
    rows: list[list[Cell]] = [[f"{part}: {key.replace('_', ' ')}", _value(value)] for part, found in parts.items() for key, value in found.items()]
    return [Table("What was measured", ["", "value"], rows, num_text=2)] if rows else ["Not recorded."]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_value(one)}" for key, one in value.items())
    return "–" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def reproduce(report: Report) -> list[Block]:
    """Command, configuration, versions."""
    if not (found := report["reproduce"]):
        return ["Not recorded."]
    provenance = json.dumps(found["provenance"], indent=1, ensure_ascii=False)
    return [Code("Command", found["command"]), Code("Configuration", found["config"]), Code("Provenance", provenance)]


def sections(report: Report) -> dict[str, list[Block]]:
    """The whole content, for every format."""
    examples: list[Block] = [Example(f"{one['domain']}: {one['id']}", one["prompt"], one["tokens"]) for one in report["examples"] or []]
    return {
        "Acceptance in decoding": acceptance(report) + heads(report),
        "Speed": speed(report),
        "Lossless": lossless(report),
        **({"Self-checks and parity": blocks} if (blocks := parity(report)) else {}),
        "Examples": examples or ["None recorded."],
        "Training and validation": training(report) + proxies(report) or [UNMEASURED],
        "Target, head, data": material(report),
        "Reproduce": reproduce(report),
    }


def headline(report: Report) -> list[tuple[str, str, str]]:
    """The figures a reader came for: (name, figure, what belongs to it)."""
    cards, name = [], ""
    for run in report["runs"][:1]:
        row, name, counters = run["overall"], run["name"], run["overall"]["counters"]
        drafts = f"{counters['num_drafts']:,} drafts"
        figures = [("Acceptance length", length(row["acceptance_length"]), f"{counters['num_accepted_tokens']:,} accepted in {drafts}")]
        for entry, count in list(zip(row["acceptance_rate_at"], counters["num_accepted_tokens_per_pos"], strict=True))[:1]:
            figures.append(("First draft accepted", rate(entry), f"{count:,} of {drafts}"))
        cards = [(title, value, f"95 %: {spread}\n{counted}") for title, (value, spread), counted in figures]
    timed = [row for row in report["speed"] or [] if row["kind"] == "speculative" and row["batch_size"] == 1]
    speed_card = ("–", "not measured")
    for row in sorted(timed, key=lambda row: row["name"] != name)[:1]:  # the headline's own run, not the fastest one
        ratio, word = speed_words(row)
        against = {"the same": "the same as plain decoding", "faster": "faster than plain decoding", "slower": "slower than plain decoding"}
        speed_card = ratio, f"{against.get(word, word)}\n{row['name']}, {row['dtype']}, {row['num_prompts']} prompts"
    found = report["lossless"] or {}
    equal = ("–", "not measured")
    if found.get("checked"):
        equal = f"{found['num_equal']} / {found['num_prompts']}", f"prompts equal to plain decoding\ngreedy, {found['dtype']}"
    return [*cards, ("Speed at batch 1", *speed_card), ("Lossless", *equal)]


# ---------------------------------------------------------------- the formats


def markdown(report: Report) -> str:
    """The report as markdown."""
    parts = [f"# {md(report['title'])}", md(report["created"]), *(f"> **Warning:** {md(warning)}" for warning in report["warnings"])]
    parts.append("\n".join(f"- **{name}: {md(figure)}** ({md(note.replace(chr(10), '; '))})" for name, figure, note in headline(report)))
    parts += [md(settings(run)) for run in report["runs"][:1]]
    for title, blocks in sections(report).items():
        parts += [f"## {title}", *map(pieces.block_markdown, blocks)]
    return "\n\n".join(filter(None, parts)) + "\n"


def terminal_table(report: Report) -> str:
    """A short aligned table for the end of a run."""
    lines = [["run", "domain", "K", "temperature", "drafts are", "length (95 %)", "at 1, 2, ...", "accepted / drafts"]]
    for run in report["runs"]:
        for index, (domain, row) in enumerate(groups(run).items()):
            own = ["", domain, "", "", ""] if index else [run["name"], domain, str(run["K"]), f"{run['temperature']:g}", run["draft_sampling"]]
            counters, rates = row["counters"], " / ".join(percent(entry["value"]) for entry in row["acceptance_rate_at"])
            lines.append([*own, pieces.plain(length(row["acceptance_length"])), rates, f"{counters['num_accepted_tokens']} / {counters['num_drafts']}"])
    lines = [list(map(one_line, line)) for line in lines]
    widths = [max(map(pieces.columns, column)) for column in zip(*lines, strict=True)]
    out = ["  ".join(cell + " " * (width - pieces.columns(cell)) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    out += ["", str(lossless(report)[0])]
    for row in report["speed"] or []:
        words = " ".join(speed_words(row)).strip()
        out.append(f"{row['name']}, batch {row['batch_size']}, {row['dtype']}: {number(row['tokens_per_second'], 1)} tokens/s, {words}")
    return "\n".join(map(one_line, ["", *out, *(f"warning: {warning}" for warning in report["warnings"]), ""]))


def page_html(report: Report) -> str:
    """The report as one self-contained page."""
    head = report["head"] or {}
    about = f" · {head['kind']} head, {head['num_parameters']:,} trained parameters, step {head['step']}" if head else ""
    caption = "".join(settings(run) for run in report["runs"][:1])
    return pieces.page(report["title"], report["created"] + about, report["warnings"], headline(report), caption, sections(report))


def finite(value: Any) -> Any:
    """The same with null for nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_report(report: Report, out_dir: Path) -> dict[str, Path]:
    """Write report.json, report.md and report.html; returns their paths by format. Raises ValueError where `report` lacks a key."""
    check(report)
    report = finite(report)
    texts = {"json": json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "md": markdown(report), "html": page_html(report)}
    paths = {suffix: out_dir / f"report.{suffix}" for suffix in texts}
    for suffix, path in paths.items():
        atomic_write(path, texts[suffix].encode("utf-8", "backslashreplace"))
    return paths
