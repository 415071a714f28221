"""Conversations in. Every row becomes a Conversation or a Reject with its file, line and reason: rows in = rows out + rejects."""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import UnionType
from typing import Any

from mtp_train.interfaces import Conversation, Reject

log = logging.getLogger(__name__)

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response", "function_response"), "tool"),
}
FORMS = {"messages": ("messages",), "sharegpt": ("conversations", "conversation"), "text": ("text",)}
"""Columns that hold a row's content, by form."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that data sets give to an answer's reasoning; templates read the first."""


class BadRow(Exception):
    """A row that cannot be used; becomes a Reject. `reason` is a fixed phrase, `detail` is about this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail[:300]


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path.name}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if line:
                        yield where, json.loads(line)
                except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an integer of over 4,300 digits, too deep
                    yield where, BadRow("broken JSON line", str(error))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a broken gzip file: {error}") from error


def _json_file(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, an object with one list of rows in it, or one row."""
    try:
        data = json.loads(path.read_text("utf-8-sig") or "[]")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}; if it has one object a line, name it .jsonl") from error
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        is_row = any(column in data for columns in FORMS.values() for column in columns)
        data = [data] if is_row else lists[0] if len(lists) == 1 else data
    if not isinstance(data, list):
        raise ValueError(f"{path} holds a {type(data).__name__}, expected a list of rows")
    for number, row in enumerate(data, start=1):
        yield f"{path.name}:{number}", row


def _without_nulls(value: Any) -> Any:
    """A table gives every object all the keys that any row has: the null ones say nothing."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _table(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """Parquet, a saved `datasets` directory or a hub id."""
    import datasets  # takes seconds to import

    path = Path(source)
    try:
        if path.suffix == ".parquet":
            rows = datasets.load_dataset("parquet", data_files=source, split="train", streaming=True)
        elif path.is_dir():
            loaded = datasets.load_from_disk(source)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(source, split=split, streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{path.name}:{number}", _without_nulls(row)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise FileNotFoundError(f"{source} is neither a file ({', '.join(SUFFIXES)}) nor a data set that can be had here: {error}") from error
    except (ValueError, KeyError) as error:  # no such split, or a broken file
        raise ValueError(f"{source}, split {split!r}, cannot be read: {error}") from error


def _raw_rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    path = Path(source)
    if path.is_dir() and not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and not file.name.startswith("."))
        if not files:
            raise FileNotFoundError(f"{path} holds no {', '.join(SUFFIXES)} file")
        for file in files:
            yield from _raw_rows(str(file), split)
        return
    is_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and not source.startswith(".") and not source.endswith((*SUFFIXES, ".gz", ".txt", ".csv"))
    if not path.exists() and not is_hub_id:
        raise FileNotFoundError(f"no such file or folder: {source}")
    if path.is_file() and not path.name.endswith(SUFFIXES):
        raise ValueError(f"{source} has an unknown ending, expected one of {', '.join(SUFFIXES)}")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_lines(path)
    else:
        yield from _json_file(path) if path.suffix == ".json" else _table(source, split)


def _content(value: Any) -> str:
    """A message's text: a string, nothing, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = [{"text": part} if isinstance(part, str) else part for part in (value if isinstance(value, list) else [value])]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in (None, "text", "input_text", "output_text")]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in parts})
        raise BadRow("content is not text", ", ".join(kinds))
    return "".join(map(str, texts))


def _parsed(value: Any, kind: type | UnionType, what: str) -> Any:
    """`value` as an object or list: data sets hold it as such or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise BadRow(f"{what} are not JSON", value) from None
    if not isinstance(value, kind):
        raise BadRow(f"{what} have the wrong type", type(value).__name__)
    return value


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, flat or in a "function" object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRow("tool call is not an object", type(call).__name__)
    arguments = function.get("arguments")
    function = {**function, "arguments": {} if arguments is None else _parsed(arguments, dict, "tool arguments")}
    return {**call, "function": function} if "function" in call else function


def _message(raw: Any) -> dict[str, Any]:
    """A template's message: {"role", "content", and what else there is}."""
    if not isinstance(raw, dict):
        raise BadRow("message is not an object", type(raw).__name__)
    role_key, text_key = ("from", "value") if raw.get("role") is None and "from" in raw else ("role", "content")
    name = raw.get(role_key)
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow("unknown role", repr(name))
    if raw.get(text_key) is None and role in ("user", "system"):
        raise BadRow("content is not text", f"none in a {role} message")
    extra = {key: value for key, value in raw.items() if key not in (role_key, text_key) and value is not None}
    if calls := _parsed(extra.get("tool_calls") or None, list | None, "tool calls"):
        extra["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        extra.pop("tool_calls", None)  # templates ask whether the key is there
    reasoning = next((extra[key] for key in REASONING if isinstance(extra.get(key), str)), None)
    if role == "assistant" and reasoning is not None:
        extra[REASONING[0]] = reasoning
    return {**extra, "role": role, "content": _content(raw.get(text_key))}


def _check_turns(messages: list[dict[str, Any]], need_answer: bool) -> None:
    roles = [message["role"] for message in messages]
    if not roles:
        raise BadRow("empty conversation")
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns:
        raise BadRow("only a system message")
    if turns[0] != "user":
        raise BadRow("first turn is not the user's", turns[0])
    allowed = {"user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant", "tool"}}
    for before, after in pairwise(turns):
        if after not in allowed[before]:
            raise BadRow("roles do not alternate", f"{after} after {before}")
    if need_answer and "assistant" not in turns:
        raise BadRow("no assistant turn")
    for message in messages if need_answer else ():
        if message["role"] == "assistant" and not (message["content"].strip() or message.get("tool_calls") or message.get(REASONING[0])):
            raise BadRow("empty answer")


def _plain(value: Any) -> Any:
    """`value` as JSON has it (a table's dates become text), in valid Unicode."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("text is not valid Unicode", f"lone surrogate {error.object[error.start]!r}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRow("row is not JSON", str(error)) from None
    return json.loads(text)


def _convert(raw: Any, form: str, need_answer: bool) -> tuple[list[dict[str, Any]], str | None]:
    """The messages of a row, or its plain text."""
    if isinstance(raw, BadRow):
        raise raw
    if not isinstance(raw, dict):
        raise BadRow("row is not an object", type(raw).__name__)
    for kind in FORMS if form == "auto" else (form,):
        value = next((raw[column] for column in FORMS[kind] if isinstance(raw.get(column), str if kind == "text" else list)), None)
        if kind == "text" and value is not None:
            if not value.strip():
                raise BadRow("empty text")
            return [], _plain(value)
        if value is not None:
            messages = _plain([_message(turn) for turn in value])
            _check_turns(messages, need_answer)
            return messages, None
    raise BadRow("no messages, conversations or text in the row" if form == "auto" else f"no {form} in the row", f"keys {sorted(map(str, raw))[:8]}")


def read_corpus(
    source: str,
    *,
    form: str = "auto",
    domain: str | None = None,
    split: str = "train",
    limit: int | None = None,
    need_answer: bool = True,
    seen: Counter[str] | None = None,
) -> Iterator[Conversation | Reject]:
    """Stream a corpus. An empty file has no rows; whether that will do is the caller's to say.

    Args:
        source: a .jsonl(.gz), .json or .parquet file, a folder of them, a saved `datasets` directory or a hub id.
        form: auto (found for each row), messages, sharegpt or text.
        domain: label of the rows that have no "domain" of their own; None: the file's name.
        split: of a `datasets` directory or id.
        limit: read at most this many rows, rejects included.
        need_answer: reject rows without an assistant turn (rows to be regenerated may end with the user).
        seen: the ids given so far, which are not given again; one of all sources that make a corpus together. None: there is no other source.

    Raises:
        FileNotFoundError: there is no such source. ValueError: unknown form, or a file that is broken as a whole.
    """
    if form != "auto" and form not in FORMS:
        raise ValueError(f"form is {form!r}, expected auto, {', '.join(FORMS)}")
    seen = Counter() if seen is None else seen
    warned = False
    for where, raw in islice(_raw_rows(source, split), limit):
        file, line = where.rsplit(":", 1)
        stem = next((file.removesuffix(suffix) for suffix in SUFFIXES if file.endswith(suffix)), file)
        try:
            messages, text = _convert(raw, form, need_answer)
            named = _plain({key: raw[key] for key in ("id", "domain") if isinstance(raw.get(key), (str, int)) and raw[key] != ""})
        except BadRow as bad:
            yield Reject(where, bad.reason, bad.detail)
            continue
        if raw.get("tools") and not warned:
            warned = True
            log.warning("%s: rows have a list of tools, which is not rendered (give tools for all rows in data.template_kwargs)", where)
        own = base = f"{stem}:{named.get('id', line)}"
        while own in seen:
            seen[base] += 1
            own = f"{base}#{seen[base]}"
        seen[own] += 1
        yield Conversation(own, str(named.get("domain") or domain or stem), tuple(messages), where, text)
