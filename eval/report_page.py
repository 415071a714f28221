"""The pieces of a report: blocks of content, their markdown and HTML, and small plots drawn as inline SVG.

Horizontal places are percentages and text is in pixels, so plots fit any width without script. Colours come from `report_page.css`.
Whatever comes from data passes through `esc`.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

Cell = str | tuple[str, str]
"""A text, or a figure and its interval."""
Interval = dict[str, float | None]
STYLE = (Path(__file__).parent / "report_page.css").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the page may load nothing and run nothing, whatever the data holds
KINDS = {
    "first": "made by the target alone, from the prompt", "accepted": "drafted by the head, accepted by the target",
    "recovered": "the target's own, in place of a rejected draft", "bonus": "the target's own, after a fully accepted draft",
}  # fmt: skip
REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True)
class Table:
    """Columns from `num_text` on are figures."""

    title: str
    head: list[str]
    rows: list[list[Cell]]
    note: str = ""
    num_text: int = 1


@dataclass(frozen=True)
class Note:
    """Small print."""

    text: str


@dataclass(frozen=True)
class Code:
    """Text shown as it is."""

    title: str
    text: str


@dataclass(frozen=True)
class Plots:
    """Finished figures, for the page alone: the tables hold the same numbers."""

    figures: list[str]


@dataclass(frozen=True)
class Example:
    """An answer, and where each of its tokens came from."""

    title: str
    prompt: str
    tokens: list[dict[str, str]]


Block = str | Table | Note | Code | Plots | Example


def visible(text: Any) -> str:
    """Text whose control characters, lone surrogates and reordering marks are spelled out; line ends and tabs stay."""
    hidden = (char not in "\n\t" and (unicodedata.category(char) in ("Cc", "Cs") or char in REORDERING) for char in str(text))
    return "".join(char.encode("unicode_escape").decode() if hide else char for char, hide in zip(str(text), hidden, strict=True))


def one_line(text: Any) -> str:
    """Visible text without line ends."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def columns(text: str) -> int:
    """Terminal columns: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def esc(text: Any) -> str:
    """Text from data, safe in HTML and in its attributes."""
    return html.escape(visible(text))


# ---------------------------------------------------------------- blocks as markdown


def plain(cell: Cell) -> str:
    """A cell as one text."""
    return cell if isinstance(cell, str) else f"{cell[0]} ({cell[1]})"


def md(text: Any) -> str:
    """Text from data as one line of markdown that stays text: no markup, no HTML, no table bar."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", one_line(text)).replace("&", "&amp;").replace("<", "&lt;")


def fence(text: str) -> str:
    """A code block; its fence is longer than any run of backticks inside."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}\n{visible(text).rstrip()}\n{marks}"


def block_markdown(block: Block) -> str:
    """One block as markdown; plots are left out, tables hold their numbers."""
    match block:
        case Table(title, head, rows, note, num_text):
            rule = ["---" if index < num_text else "---:" for index in range(len(head))]
            lines = "\n".join(f"| {' | '.join(line)} |" for line in [map(md, head), rule, *([md(plain(cell)) for cell in row] for row in rows)])
            return "\n\n".join(filter(None, [f"**{md(title)}**", md(note), lines]))
        case Note(text):
            return f"*{md(text)}*"
        case Code(title, text):
            return f"**{md(title)}**\n\n{fence(text)}"
        case Plots():
            return ""
        case Example(title, prompt, tokens):
            answer = "".join(f"⟦{token['text']}⟧" if token["kind"] == "accepted" else token["text"] for token in tokens)
            return f"**{md(title)}**\n\n{fence(prompt)}\n\nAnswer (accepted drafts in ⟦ ⟧):\n\n{fence(answer)}"
    return md(block)


# ---------------------------------------------------------------- blocks as HTML


def _cell(cell: Cell, index: int, table: Table) -> str:
    figure, note = cell if isinstance(cell, tuple) else (cell, "")
    tag = "th scope=row" if index == 0 else "td"
    kind = "" if index < table.num_text else " class=num"
    return f"<{tag}{kind}>{esc(figure)}{f' <small>{esc(note)}</small>' if note else ''}</{tag[:2]}>"


def _table(table: Table) -> str:
    heads = "".join(f"<th scope=col{'' if index < table.num_text else ' class=num'}>{esc(name)}</th>" for index, name in enumerate(table.head))
    body = "".join("<tr>" + "".join(_cell(cell, index, table) for index, cell in enumerate(row)) + "</tr>" for row in table.rows)
    grid = f"<div class=wide tabindex=0 role=region aria-label='{esc(table.title)}'><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<h3>{esc(table.title)}</h3>{block_html(Note(table.note)) if table.note else ''}{grid}"


def _example(one: Example) -> str:
    # One line: inside <pre> every line end would be shown.
    spans = (f'<span class="{esc(token["kind"])}" title="{esc(token["kind"])}">{esc(token["text"])}</span>' for token in one.tokens)
    return f"<article><h3>{esc(one.title)}</h3><pre class=prompt tabindex=0>{esc(one.prompt)}</pre><pre class=answer>{''.join(spans)}</pre></article>"


def block_html(block: Block) -> str:
    """One block as HTML."""
    match block:
        case Table():
            return _table(block)
        case Note(text):
            return f"<p class=note>{esc(text)}</p>"
        case Code(title, text):
            return f"<h3>{esc(title)}</h3><pre tabindex=0>{esc(text)}</pre>"
        case Plots(figures):
            return f"<div class=plots>{''.join(figures)}</div>"
        case Example():
            return _example(block)
    return f"<p>{esc(block)}</p>"


LEGEND = " ".join(f"<span class=pair><span class={kind}>{kind}</span> {meaning}</span>" for kind, meaning in KINDS.items())


def page(title: str, subtitle: str, warnings: Sequence[str], cards: Sequence[tuple[str, str, str]], caption: str, sections: dict[str, list[Block]]) -> str:
    """The whole file. A card is (name, figure, what belongs to it)."""
    links = "".join(f"<a href='#s{index}'>{esc(name)}</a>" for index, name in enumerate(sections))
    alarms = "".join(f"<p class=warning><b>Warning</b> {esc(text)}</p>" for text in warnings)
    strip = "".join(f"<div><dt>{esc(name)}</dt><dd><b>{esc(figure)}</b><span>{esc(note)}</span></dd></div>" for name, figure, note in cards)
    body = ""
    for index, (name, blocks) in enumerate(sections.items()):
        key = f"<p class=legend>{LEGEND}</p>" if any(isinstance(block, Example) for block in blocks) else ""
        body += f"<section id=s{index}><h2>{esc(name)}</h2>{key}{''.join(map(block_html, blocks))}</section>\n"
    return (
        f'<!doctype html>\n<html lang=en><head><meta charset=utf-8><meta http-equiv=Content-Security-Policy content="{POLICY}">'
        f"<meta name=viewport content='width=device-width, initial-scale=1'><title>{esc(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><header><h1>{esc(title)}</h1><p>{esc(subtitle)}</p></header>{alarms}<dl class=cards>{strip}</dl><p class=note>{esc(caption)}</p>"
        f"<nav aria-label=Sections>{links}</nav>\n{body}</main></body></html>\n"
    )


# ---------------------------------------------------------------- plots


def known(value: float | None) -> TypeGuard[float]:
    """Whether a number was measured."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where nothing was measured."""
    return f"{value:,.{digits}f}" if known(value) else "–"


def percent(value: float | None, unit: str = " %") -> str:
    """A rate in percent."""
    return f"{100 * value:.1f}{unit}" if known(value) else "–"


def length(entry: dict[str, Any]) -> tuple[str, str]:
    """An acceptance length and its interval."""
    return number(entry["value"]), f"{number(entry['low'])} to {number(entry['high'])}"


def rate(entry: dict[str, Any]) -> tuple[str, str]:
    """A rate and its interval, in percent."""
    return percent(entry["value"]), f"{percent(entry['low'], '')} to {percent(entry['high'], '')}"


def ticks(low: float, high: float) -> list[float]:
    """Two to six round numbers that enclose low..high."""
    span = max(high - low, 1e-6)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 4.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * index for index in range(first, max(last, first + 1) + 1)]


def _most(series: Sequence[Sequence[Interval | None]], least: float) -> float:
    """The highest value or interval end."""
    return max([least, *(value for line in series for entry in line if entry for value in entry.values() if known(value))])


def _text(x: float, y: float, text: str, kind: str = "middle") -> str:
    return f"<text x='{x:.2f}%' y='{y:.1f}' class='{kind}'>{esc(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f"<line x1='{x1:.2f}%' y1='{y1:.1f}' x2='{x2:.2f}%' y2='{y2:.1f}' class='{kind}'/>"


def _figure(title: str, body: str, height: int, names: Iterable[str], colour: str = "s", kind: str = "") -> str:
    keys = "".join(f"<li><i class={colour}{index % 6}></i>{esc(name)}</li>" for index, name in enumerate(names))
    svg = f"<svg height={height} class='{kind}' role=img aria-label='{esc(title)}'>{body}</svg>"
    return f"<figure><figcaption>{esc(title)}</figcaption><ul class=keys>{keys}</ul>{svg}</figure>"


def _grid(marks: list[float], top: float, height: float, unit: str = "") -> str:
    """Horizontal lines with their values; with a unit, rates in percent."""
    at = [(top + height * (1 - (mark - marks[0]) / (marks[-1] - marks[0])), 100 * mark if unit else mark) for mark in marks]
    return "".join(_line(0, y, 100, y, "grid") + f"<text x=-8 y='{y + 4:.1f}' class=end>{mark:g}{unit}</text>" for y, mark in at)


def bars(title: str, groups: Sequence[str], series: Sequence[Sequence[Interval]], names: Sequence[str]) -> str:
    """Grouped bars of rates with their intervals; series[s][g]."""
    marks, step = ticks(0, _most(series, 0.1)), 100 / max(1, len(groups))
    width, labelled = min(9.0, 0.76 * step / max(1, len(series))), sum(map(len, series)) <= 9
    body = _grid(marks, 16, 180, " %") + "".join(_text(step * (g + 0.5), 216, name) for g, name in enumerate(groups))
    for s, line in enumerate(series):
        for g, entry in enumerate(line):
            if not known(value := entry["value"]):
                continue
            x = step * (g + 0.5) + (s - len(series) / 2) * width
            y, foot, top = (196 - 180 * (mark if known(mark) else value) / marks[-1] for mark in (value, entry["low"], entry["high"]))
            body += f"<g><title>{esc(names[s])}, {esc(groups[g])}: {100 * value:.1f} %</title>"
            body += f"<rect x='{x + 0.06 * width:.2f}%' y='{y:.1f}' width='{0.88 * width:.2f}%' height='{196 - y:.1f}' class=s{s % 6} />"
            body += _line(x + width / 2, top, x + width / 2, foot, "whisker") + "</g>"
            body += _text(x + width / 2, top - 5, f"{100 * value:.1f}", "middle value") if labelled else ""
    return _figure(title, body, 226, names)


def forest(title: str, groups: Sequence[str], series: Sequence[Sequence[Interval | None]], names: Sequence[str]) -> str:
    """A row a group: points with their intervals, from 1 on; series[s][g]."""
    marks = ticks(1, _most(series, 1.5))
    row, scale = 22 + 14 * len(series), 100 / (marks[-1] - 1)
    height = row * len(groups) + 6
    body = "".join(_line(scale * (mark - 1), 0, scale * (mark - 1), height, "grid") + _text(scale * (mark - 1), height + 17, f"{mark:g}") for mark in marks)
    for g, group in enumerate(groups):
        body += f"<text x=0 y={row * g + 15} class=name>{esc(group)}</text>"
        for s, line in enumerate(series):
            if (entry := line[g]) is None or not known(value := entry["value"]):
                continue
            low, high = (scale * ((mark if known(mark) else value) - 1) for mark in (entry["low"], entry["high"]))
            y = row * g + 26 + 14 * s
            body += f"<g><title>{esc(names[s])}, {esc(group)}: {value:.2f}</title>" + _line(low, y, high, y, f"range l{s % 6}")
            body += f"<circle cx='{scale * (value - 1):.2f}%' cy={y} r=4.5 class=s{s % 6} /></g>"
            body += f"<text x='{high:.2f}%' y={y + 4} dx=8 class=value>{value:.2f}</text>"
    return _figure(title, body, height + 24, names, kind="flush")


def stacked(title: str, rows: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str]) -> str:
    """A row a name: parts of a duration in milliseconds, side by side."""
    longest = max((sum(value for value in values if known(value)) for _, values in rows), default=0) or 1
    body = ""
    for index, (name, values) in enumerate(rows):
        x, y = 0.0, 48 * index
        body += f"<text x=0 y={y + 14} class=name>{esc(name)}</text>"
        for part, value in enumerate(values):
            width = 100 * value / longest if known(value) else 0.0
            body += f"<rect x='{x:.2f}%' y={y + 21} width='{width:.2f}%' height=18 class='p{part} part'><title>{esc(names[part])}: {value} ms</title></rect>"
            body += _text(x + width / 2, y + 34, f"{value:.1f}", "middle inside") if width > 9 else ""
            x += width
    return _figure(title, body, 48 * len(rows), names, "p", "flush")


def curves(title: str, lines: dict[str, list[tuple[float, float]]]) -> str:
    """Values by step; the last line also as points."""
    points = [point for line in lines.values() for point in line]
    marks, steps = ticks(min(value for _, value in points), max(value for _, value in points)), ticks(0, max(step for step, _ in points))
    body = _grid(marks, 8, 190) + "".join(_text(100 * mark / steps[-1], 218, f"{mark:,.10g}") for mark in steps)
    for index, line in enumerate(lines.values()):
        places = [(100 * step / steps[-1], 100 * (marks[-1] - value) / (marks[-1] - marks[0])) for step, value in line]
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        body += f"<svg x=0 y=8 width='100%' height=190 viewBox='0 0 100 100' preserveAspectRatio=none><polyline points='{path}' class='line l{index}'/></svg>"
        for (x, y), (step, value) in zip(places, line, strict=True) if index == len(lines) - 1 else ():
            body += f"<circle cx='{x:.2f}%' cy='{8 + 1.9 * y:.1f}' r=3.5 class=s{index}><title>step {step:g}: {value:.3f}</title></circle>"
    return _figure(title, body, 226, lines)
