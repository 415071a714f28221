"""Rows in = rows out + rejects, whatever a file holds."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from datetime import datetime

import pytest

from mtp_train.data.corpus import read_corpus
from mtp_train.interfaces import Conversation, Reject

USER, ANSWER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "system", "content": "be kind"}
TOOL = {"role": "tool", "content": "42"}
GOOD = {"messages": [USER, ANSWER]}


def jsonl(path, *rows):
    """Rows as lines; bytes and str go in as they are."""
    lines = [row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def only(path, row, **options):
    """What becomes of one row between two good ones, which always come through."""
    before, middle, after = read_corpus(jsonl(path / "rows.jsonl", GOOD, row, GOOD), **options)
    assert isinstance(before, Conversation) and isinstance(after, Conversation)
    return middle


def turns(*messages):
    return {"messages": list(messages)}


REJECTS = {
    "broken JSON line": ["{", "nonsense", b'{"text": "\xff\xfe"}', '{"text": ' + "9" * 5000 + "}", "[" * 100_000, '{"messages": [1, ]}'],
    "row is not an object": ["[]", "3", "null", '"text"', "NaN", [USER, ANSWER]],
    "no messages, conversations or text in the row": [
        {}, {"prompt": "a", "response": "b"}, {"messages": "hi"}, {"messages": None}, {"text": 3},
        {"messages": {"role": "user"}},
    ],
    "empty conversation": [turns(), {"conversations": []}],
    "only a system message": [turns(SYSTEM)],
    "first turn is not the user's": [turns(ANSWER), turns(ANSWER, USER), turns(SYSTEM, ANSWER), turns(TOOL), turns(SYSTEM, SYSTEM, USER, ANSWER)],
    "roles do not alternate": [
        turns(USER, USER, ANSWER), turns(USER, ANSWER, USER, USER), turns(USER, ANSWER, ANSWER), turns(USER, SYSTEM, ANSWER), turns(USER, TOOL, ANSWER),
        turns(USER, ANSWER, TOOL, USER, ANSWER), turns(USER, ANSWER, SYSTEM),
    ],
    "no assistant turn": [turns(USER), turns(SYSTEM, USER)],
    "unknown role": [
        turns({"role": "critic", "content": "x"}), turns({"content": "x"}), turns({"role": 3, "content": "x"}), turns({"role": None}),
        turns({"from": ["human"]}),
    ],
    "message is not an object": [turns("hi"), turns(USER, None), turns([USER]), turns(7)],
    "content is not text": [
        turns({"role": "user", "content": 5}, ANSWER), turns({"role": "user"}, ANSWER), turns({"role": "user", "content": None}, ANSWER),
        turns({"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "url": "x"}]}, ANSWER),
        turns({"role": "user", "content": [{"type": "text", "text": None}]}, ANSWER), turns({"role": "user", "content": [1]}, ANSWER),
        turns({"role": "user", "content": True}, ANSWER), turns({"role": "user", "content": {"type": "image"}}, ANSWER),
    ],
    "empty answer": [turns(USER, {"role": "assistant", **content}) for content in ({"content": " \n"}, {"content": None}, {})],
    "empty text": [{"text": ""}, {"text": " \n"}],
    "text is not valid Unicode": [
        '{"text": "a\\ud800b"}', turns(USER, {"role": "assistant", "content": "\ud83d"}), GOOD | {"id": "\udc00"}, GOOD | {"domain": "\udc00"},
    ],
    "tool arguments are not JSON": [turns(USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": text}]}) for text in ("{x", "9" * 5000)],
    "tool arguments have the wrong type": [turns(USER, ANSWER | {"tool_calls": [{"function": {"arguments": one}}]}) for one in ("[1]", 3, [1], '"x"')],
    "tool call is not an object": [turns(USER, ANSWER | {"tool_calls": [3]}), turns(USER, ANSWER | {"tool_calls": [{"function": "f"}]})],
    "tool calls have the wrong type": [turns(USER, ANSWER | {"tool_calls": 3}), turns(USER, ANSWER | {"tool_calls": {"a": 1}})],
    "tool calls are not JSON": [turns(USER, ANSWER | {"tool_calls": "call f"})],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "row"), [pytest.param(reason, row, id=f"{reason}-{n}") for reason, rows in REJECTS.items() for n, row in enumerate(rows)])
def test_bad_rows_are_rejected_by_file_line_and_reason(tmp_path, reason, row):
    got = only(tmp_path, row)
    assert isinstance(got, Reject) and (got.where, got.reason) == ("rows.jsonl:2", reason)
    assert len(got.detail) <= 300


ACCEPTS = {
    "system first": (turns(SYSTEM, USER, ANSWER), ["system", "user", "assistant"]),
    "tools": (turns(USER, ANSWER, TOOL, TOOL, ANSWER, USER, ANSWER), ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]),
    "ends with the user": (turns(USER, ANSWER, USER), ["user", "assistant", "user"]),
    "sharegpt": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        ["system", "user", "assistant"],
    ),
    "roles under conversations": ({"conversations": [USER, ANSWER]}, ["user", "assistant"]),
    "from under messages": (turns({"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}), ["user", "assistant"]),
    "conversation": ({"conversation": [USER, ANSWER]}, ["user", "assistant"]),
    "null columns": ({"messages": [USER | {"from": None, "tool_calls": None}, ANSWER], "conversations": None, "text": None}, ["user", "assistant"]),
    "capitals": (turns({"role": " User", "content": "q"}, {"role": "ASSISTANT", "content": "a"}), ["user", "assistant"]),
}


@pytest.mark.parametrize("name", ACCEPTS)
def test_accepted_forms(tmp_path, name):
    row, roles = ACCEPTS[name]
    got = only(tmp_path, row)
    assert [message["role"] for message in got.messages] == roles and got.text is None and got.where == "rows.jsonl:2"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, {"text": "b"}], "ab"),
        ({"type": "text", "text": "a"}, "a"),
        ([{"type": "text", "text": "a", "image": None}, "b"], "ab"),
    ],
)
def test_content_as_string_or_parts(tmp_path, content, text):
    assert only(tmp_path, turns({"role": "user", "content": content}, ANSWER)).messages[0]["content"] == text


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_tool_arguments_as_string_or_object(tmp_path, arguments, nested, as_text):
    function = {"name": "f", "arguments": arguments}
    calls = [{"type": "function", "function": function} if nested else function]
    got = only(tmp_path, turns(USER, {"role": "assistant", "content": None, "tool_calls": json.dumps(calls) if as_text else calls}, TOOL, ANSWER))
    (call,) = got.messages[1]["tool_calls"]
    assert (call["function"] if nested else call) == {"name": "f", "arguments": {"x": 1}} and got.messages[1]["content"] == ""


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_no_tool_arguments(tmp_path, arguments):
    got = only(tmp_path, turns(USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": arguments}]}))
    assert got.messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("calls", [None, [], "", "[]", "null"])
def test_no_tool_calls_are_no_key(tmp_path, calls):
    """Templates ask `'tool_calls' in message`."""
    assert only(tmp_path, turns(USER, ANSWER | {"tool_calls": calls})).messages[1] == ANSWER


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_extra_keys_stay_and_reasoning_has_one_name(tmp_path, key):
    got = only(tmp_path, turns(USER | {"name": "Ann"}, {"role": "assistant", "content": None, key: "hm", "score": 2}))
    assert got.messages[0]["name"] == "Ann"
    assert got.messages[1] == {"role": "assistant", "content": "", key: "hm", "score": 2, "reasoning_content": "hm"}


def test_prompts_need_no_answer(tmp_path):
    for row in (turns(USER), turns(USER, {"role": "assistant", "content": ""})):
        assert isinstance(only(tmp_path, row, need_answer=False), Conversation)
    assert only(tmp_path, turns(USER, USER), need_answer=False).reason == "roles do not alternate"


def test_form_is_obeyed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"text": "plain", **GOOD}, {"conversations": GOOD["messages"]})
    assert [row.text if isinstance(row, Conversation) else row.reason for row in read_corpus(path, form="text")] == ["plain", "no text in the row"]
    assert [isinstance(row, Conversation) for row in read_corpus(path, form="sharegpt")] == [False, True]
    with pytest.raises(ValueError, match=r"'alpaca'.*messages, sharegpt, text"):
        next(read_corpus(path, form="alpaca"))


def test_bom_crlf_blank_lines_and_separators(tmp_path):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"text": "a\u2028b\u0085"}, ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n  \n" + row)  # the last line without its newline
    assert [(one.where, one.text) for one in read_corpus(str(path))] == [("a.jsonl:1", "a\u2028b\u0085"), ("a.jsonl:4", "a\u2028b\u0085")]


def test_ids_are_unique_and_say_where_from(tmp_path):
    rows = [
        {"id": "x", **GOOD},
        GOOD,
        {"id": "x#2", **GOOD},
        {"id": "x", **GOOD},
        {"id": "x", **GOOD},
        {"id": 7, **GOOD},
        {"id": "", **GOOD},
        {"id": [1], **GOOD},
    ]
    ids = [row.id for row in read_corpus(jsonl(tmp_path / "my.data.v2.jsonl", *rows))]
    assert ids[:3] == ["my.data.v2:x", "my.data.v2:2", "my.data.v2:x#2"] and ids[5:] == ["my.data.v2:7", "my.data.v2:7#2", "my.data.v2:8"]
    assert len(set(ids)) == len(rows)


def test_sources_of_one_name_share_no_id(tmp_path):
    seen, ids = Counter(), []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = jsonl(tmp_path / folder / "train.jsonl", GOOD, GOOD | {"id": "x"})
        ids += [row.id for row in read_corpus(path, seen=seen)]
    assert ids == ["train:1", "train:x", "train:1#2", "train:x#2"]


def test_domain_is_the_rows_the_callers_or_the_files(tmp_path):
    path = jsonl(tmp_path / "code.jsonl", GOOD | {"domain": "maths"}, GOOD, GOOD | {"domain": None}, GOOD | {"domain": ["x"]})
    assert [row.domain for row in read_corpus(path)] == ["maths", "code", "code", "code"]
    assert [row.domain for row in read_corpus(path, domain="chat")] == ["maths", "chat", "chat", "chat"]


def test_limit_counts_rejects_and_reads_no_further(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", GOOD, "{", GOOD, GOOD)
    assert [type(row) for row in read_corpus(path, limit=3)] == [Conversation, Reject, Conversation]
    assert list(read_corpus(path, limit=0)) == []


def test_gzip_json_and_folders(tmp_path):
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    (tmp_path / "a.json").write_text(json.dumps([GOOD, 3]), "utf-8-sig")
    (tmp_path / "c.json").write_text(json.dumps({"version": 1, "data": [GOOD]}))
    (tmp_path / "d.json").write_text(json.dumps(GOOD))
    (tmp_path / "e.jsonl").write_text("")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    rows = list(read_corpus(str(tmp_path)))
    assert [row.where for row in rows] == ["a.json:1", "a.json:2", "b.jsonl.gz:1", "c.json:1", "d.json:1"]
    assert [row.id for row in rows if isinstance(row, Conversation)] == ["a:1", "b:1", "c:1", "d:1"]
    assert list(read_corpus(str(tmp_path / "e.jsonl"))) == []


def test_what_is_not_there_is_named(tmp_path):
    for name in ("none.jsonl", "none.json", "none.parquet", "none.jsonl.gz", "folder/none", "none.txt"):
        with pytest.raises(FileNotFoundError, match=name):
            next(read_corpus(str(tmp_path / name)))
    for name in ("none.jsonl", "data/none.parquet", "./none", "data/a/b"):  # no hub is asked for what is plainly a path
        with pytest.raises(FileNotFoundError, match="no such file"):
            next(read_corpus(name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty holds no"):
        next(read_corpus(str(tmp_path / "empty")))


def test_files_broken_as_a_whole_are_named(tmp_path):
    whole = gzip.compress(b"".join(json.dumps(GOOD | {"n": n}).encode() + b"\n" for n in range(2000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "fake.jsonl.gz").write_bytes(b"{}\n")
    (tmp_path / "lines.json").write_text("{}\n{}\n")
    (tmp_path / "odd.json").write_text('{"a": 1}')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "notes.txt").write_text("x")
    for name in ("cut.jsonl.gz", "fake.jsonl.gz", "lines.json", "odd.json", "bad.parquet", "notes.txt"):
        with pytest.raises(ValueError, match=name):
            list(read_corpus(str(tmp_path / name)))


def test_tables(tmp_path):
    """Parquet and saved data sets give all objects the same keys; the null ones are dropped, dates become text."""
    from datasets import Dataset, DatasetDict

    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": "2"}}]
    rows = [turns(USER, {"role": "assistant", "content": None, "tool_calls": [call], "at": datetime(2026, 1, 2)}) for call in calls] + [turns(USER)]
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
    for name in ("t.parquet", "saved", "splits"):
        first, second, third = read_corpus(str(tmp_path / name))
        assert first.messages == (USER, {"role": "assistant", "content": "", "tool_calls": [calls[0]], "at": "2026-01-02 00:00:00"})
        assert second.messages[1]["tool_calls"] == [calls[1]]
        assert third == Reject(f"{name}:3", "no assistant turn")
    assert len(list(read_corpus(str(tmp_path / "splits"), split="test"))) == 1
    with pytest.raises(ValueError, match=r"splits.*'dev'"):
        list(read_corpus(str(tmp_path / "splits"), split="dev"))


def test_tools_that_are_not_rendered_are_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        list(read_corpus(jsonl(tmp_path / "a.jsonl", GOOD, GOOD | {"tools": [{"name": "f"}]}, GOOD | {"tools": [{"name": "f"}]})))
    assert [record.getMessage().split(":", 2)[:2] for record in caplog.records] == [["a.jsonl", "2"]]


def test_rows_in_are_rows_out_and_rejects(tmp_path):
    """1,000 rows of all kinds at once: each line is accounted for, in order, once (D03, D05)."""
    bad = [row for rows in REJECTS.values() for row in rows]
    rows = [GOOD if n % 3 else bad[n % len(bad)] for n in range(1000)]
    got = list(read_corpus(jsonl(tmp_path / "a.jsonl", *rows)))
    assert [row.where for row in got] == [f"a.jsonl:{n + 1}" for n in range(1000)]
    assert all(isinstance(row, Conversation) == bool(n % 3) for n, row in enumerate(got))
