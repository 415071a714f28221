"""The whole flow on a tiny target: what each stage leaves, that a second run redoes nothing, and that bad input is refused."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.run import Evaluation
from eval.run import stage as evaluate
from mtp_train.checkpoint import checkpoints, choose, load_head
from mtp_train.config import compose, read
from mtp_train.data.chat import Tally
from mtp_train.data.shards import ShardReader
from mtp_train.export import export
from mtp_train.interfaces import Conversation
from mtp_train.pipeline import run as pipeline
from mtp_train.provenance import Claim
from mtp_train.spec_decode.engine import Completion
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import FrozenEnds
from mtp_train.train import stage as train
from precompute.regenerate import Journal, Regenerator
from precompute.run import Precompute
from precompute.run import stage as precompute
from tests.conftest import source
from tests.tiny import save_tiny, tiny_target
from tests.toy import TEMPLATES, toy_tokenizer

ROOT = Path(__file__).parent.parent


def stamps(folder):
    """Every file with its modification time."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name not in ("provenance.json", "config.yaml")}


def test_a_multimodal_targets_language_model_goes_through_every_stage(overrides, tmp_path):
    target = save_tiny(tiny_target("multimodal"), tmp_path / "target")
    config = compose(*overrides, f'target.path="{target}"', "head.init=last_layer", "export.formats=[hf]")
    for stage in (precompute, train, export, evaluate):
        stage(config)
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    assert report["lossless"]["num_equal"] == 8


def test_every_stage_and_a_second_run_that_redoes_nothing(overrides, target_dir, tmp_path):
    config = compose(*overrides)
    before = (target_dir / "model.safetensors").read_bytes()
    for stage in (precompute, train, export, evaluate):
        stage(config)
    run = tmp_path / "run"
    reader = ShardReader(run / "shards" / "train")
    assert len(reader) == 24
    # The stored teacher states give the target's own next token on every supervised position of greedy answers.
    ends = FrozenEnds.from_pretrained(target_dir, torch.float32)
    for index in range(len(reader)):
        sample = reader[index]
        predicted = ends.logits(sample.hidden_states[:-1, -1]).argmax(-1)
        marked = sample.loss_mask[1:]
        assert torch.equal(predicted[marked], sample.input_ids[1:][marked])
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step_00000006", "step_00000012"]
    report = json.loads((run / "eval" / "report.json").read_text())
    overall = report["runs"][0]["overall"]
    assert overall["num_prompts"] == 8
    assert set(report["runs"][0]["domains"]) == {"sun", "moon"}
    assert report["lossless"]["num_equal"] == 8
    assert overall["counters"]["num_drafts"] > 0
    for name in ("report.md", "report.html"):
        assert (run / "eval" / name).stat().st_size > 2000
    assert (target_dir / "model.safetensors").read_bytes() == before
    first = stamps(run)
    for stage in (precompute, train, export, evaluate):
        stage(config)
    changed = [path for path, stamp in stamps(run).items() if first.get(path) != stamp]
    assert not [path for path in changed if path.suffix in (".safetensors", ".html")], changed
    assert "the target was made for 512 positions" in Evaluation(compose(*overrides, "eval.max_new_tokens=512")).warnings[-1]
    # Answers of one token: nothing is drafted, nothing is timed, and the report says so.
    evaluate(compose(*overrides, "eval.max_new_tokens=1", "eval.speed_tokens=1", f'eval.heads=["{run / "export" / "hf"}"]'))
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["runs"][0]["overall"]["counters"]["num_drafts"] == 0
    assert {(row["tokens_per_second"], row["speedup"]) for row in report["speed"]} == {(None, None)}
    assert not re.search(
        r"\b(nan|None)\b", (run / "export" / "vllm" / "README.md").read_text() + (run / "eval" / "report.md").read_text().split("## Target")[0]
    )


def test_exported_head_equals_the_trained_one_in_both_formats(overrides, tmp_path):
    config = compose(*overrides)
    precompute(config)
    train(config)
    export(config)
    run = tmp_path / "run"
    trained = load_head(checkpoints(run / "checkpoints")[-1]).head.state_dict()
    again = load_head(run / "export" / "hf").head.state_dict()
    if json.loads((run / "export" / "hf" / "head.json").read_text())["step"] == 12:
        assert all(torch.equal(trained[name], again[name]) for name in trained)
    engine = json.loads((run / "export" / "vllm" / "config.json").read_text())
    assert engine["model_type"] == "deepseek_v3"
    assert engine["num_hidden_layers"] == 1
    assert engine["moe_intermediate_size"] == 128


@pytest.mark.slow
def test_pipeline_as_a_user_runs_it(overrides, tmp_path):
    """Each stage as a process of its own, with a path that holds a space, a comma and an equals sign."""
    odd = tmp_path / "my run, no=1"
    arguments = [one for one in overrides if not one.startswith("run_dir")] + [f'run_dir="{odd}"']
    done = subprocess.run([sys.executable, "-m", "mtp_train.pipeline", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (odd / "eval" / "report.html").exists()
    assert "acceptance" in (odd / "eval" / "report.md").read_text().lower()


PASSING_ON = """
import sys
from mtp_train.pipeline import run_stage
child = '''
import pathlib, signal, sys, time
seen = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: seen.append(number))
pathlib.Path(sys.argv[1]).touch()
end = time.monotonic() + 20
while signal.SIGTERM not in seen and time.monotonic() < end:
    time.sleep(0.01)
sys.exit(int(sys.argv[2]) if len(seen) == 2 else 3)
'''
sys.exit(run_stage([sys.executable, "-c", child, *sys.argv[1:]]) % 256)
"""


@pytest.mark.parametrize(("code", "returned"), [(75, 75), (0, 256 - signal.SIGUSR1)])
def test_signals_reach_the_stage_and_its_code_comes_back(tmp_path, code, returned):
    """A stage that ended well all the same is not followed by the next."""
    parent = subprocess.Popen([sys.executable, "-c", PASSING_ON, str(tmp_path / "ready"), str(code)], cwd=ROOT)
    while not (tmp_path / "ready").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        parent.send_signal(number)
        time.sleep(0.2)  # signals that wait together come in any order
    assert parent.wait(30) == returned


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_several_processes_are_refused_before_any_stage(overrides, tmp_path, mode):
    with pytest.raises(ValueError, match=rf"distributed\.mode={mode}, but mtp-pipeline trains in one process"):
        pipeline(compose(*overrides, f"distributed={mode}"), [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("train.num_steps=many", "train.num_steps"),
        ("head.kind=eagle9", "eagle9"),
        ("train.optim.warmup_steps=12", "train.optim.warmup_steps=12"),
        ("precompute.num_parts=0", "precompute.num_parts=0"),
        ("+train.speed=3", "speed"),
        ("target.path=/nowhere/at/all", "/nowhere/at/all"),
        ("data.train=[]", "data.train is empty"),
    ],
)
def test_wrong_values_are_refused_by_name(overrides, extra, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        precompute(compose(*overrides, extra))


@pytest.mark.slow
def test_an_unknown_override_is_one_clear_line_on_the_command_line(overrides, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "mtp_train.export", *overrides, "train.lr=1"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "lr" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "a refused command writes nothing"


BAD_FILES = {
    "empty": ("", "the source is empty"),
    "broken line": ('{"messages": [\n', "broken JSON line"),
    "unknown role": ('{"messages": [{"role": "wizard", "content": "x"}]}\n', "unknown role"),
    "no text": ('{"colour": "red"}\n', "no messages, conversations or text"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_input_stops_with_the_reason(overrides, tmp_path, kind):
    text, reason = BAD_FILES[kind]
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        precompute(compose(*overrides, f"data.train=[{source(path)}]"))


def test_one_bad_row_is_counted_and_named_and_the_rest_is_used(overrides, corpus, tmp_path):
    rows = (corpus / "train.jsonl").read_text().splitlines()
    rows[7] = '{"messages": []}'
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(rows) + "\n")
    precompute(compose(*overrides, f"data.train=[{source(path)}]", "precompute.regenerate.enabled=false"))
    counts = json.loads((tmp_path / "run" / "data" / "train.corpus.json").read_text())
    assert (counts["rows_in"], counts["rows_out"], counts["rejects"]) == (24, 23, {"empty conversation": 1})
    assert counts["examples"][0].startswith("mixed.jsonl:8")
    assert len(ShardReader(tmp_path / "run" / "shards" / "train")) == 23


def test_shards_of_another_target_are_refused(overrides, tmp_path):
    from tests.tiny import save_tiny, tiny_target

    config = compose(*overrides)
    precompute(config)
    other = save_tiny(tiny_target("llama", seed=9), tmp_path / "other")
    with pytest.raises(ValueError, match="another target"):
        train(compose(*overrides, f'target.path="{other}"'))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("precompute.state_dtype=bfloat16", "precompute.state_dtype is float32 there, bfloat16 here"),
        ("target.dtype=bfloat16", "target.dtype is float32 there, bfloat16 here"),
    ],
)
def test_a_complete_capture_of_another_dtype_is_refused_with_both(overrides, extra, message):
    precompute(compose(*overrides))
    with pytest.raises(ValueError, match=message):
        precompute(compose(*overrides, extra))


def test_a_complete_capture_by_another_engine_is_used_with_a_warning(overrides, caplog):
    precompute(compose(*overrides))
    with caplog.at_level(logging.WARNING):
        precompute(compose(*overrides, "target.dtype=fast"))
        assert not caplog.messages
        precompute(compose(*overrides, "engine=vllm"))
    assert "captured by engine=embedded, and is not captured anew by engine=vllm" in caplog.text


@pytest.mark.parametrize(("length", "warned"), [(512, False), (513, True)])
def test_a_length_beyond_the_targets_positions_is_said(overrides, caplog, length, warned):
    with caplog.at_level(logging.WARNING):
        Precompute(compose(*overrides, f"data.max_length={length}")).open_target()
    assert ("data.max_length=513 is beyond the 512 positions" in caplog.text) == warned


def test_sources_of_one_name_are_answered_apart(overrides, tmp_path):
    questions = {"a": ["red", "blue tree"], "b": ["cat runs", "dog"]}
    for name, texts in questions.items():
        (tmp_path / name).mkdir()
        rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        (tmp_path / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = ",".join(source(tmp_path / name / "train.jsonl") for name in questions)
    precompute(compose(*overrides, f"data.train=[{both}]"))
    reader = ShardReader(tmp_path / "run" / "shards" / "train")
    prompts = {toy_tokenizer().decode(sample.input_ids[~sample.loss_mask]) for sample in (reader[index] for index in range(len(reader)))}
    assert prompts == {f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for texts in questions.values() for text in texts}


def test_parts_share_a_corpus_and_merge_to_the_same_rows(overrides, tmp_path):
    whole = compose(*overrides)
    precompute(whole)
    split = [*overrides, f'run_dir="{tmp_path / "split"}"', "precompute.num_parts=3"]
    for part in (2, 0, 1):
        precompute(compose(*split, f"precompute.part={part}"))
    with pytest.raises((ValueError, FileNotFoundError), match="manifest"):
        ShardReader(tmp_path / "split" / "shards" / "train")
    precompute(compose(*split, "precompute.steps=[merge,verify]"))
    a, b = ShardReader(tmp_path / "run" / "shards" / "train"), ShardReader(tmp_path / "split" / "shards" / "train")
    rows = {sample.id: sample for sample in (b[index] for index in range(len(b)))}
    assert len(a) == len(b) == 24
    for sample in (a[index] for index in range(len(a))):
        assert torch.equal(sample.input_ids, rows[sample.id].input_ids)
        torch.testing.assert_close(sample.hidden_states, rows[sample.id].hidden_states, rtol=0, atol=1e-4)


def test_a_capture_without_the_taps_of_a_head_is_refused_and_one_with_more_serves_all(overrides, tmp_path):
    precompute(compose(*overrides))
    eagle3 = ("head=eagle3", "head.layout.taps=[1,3]")
    with pytest.raises(ValueError, match=r"after layers 4 \(post\); the head also reads 1 \(pre\), 3 \(pre\): capture them"):
        precompute(compose(*overrides, *eagle3))
    other = [*overrides, f'run_dir="{tmp_path / "other"}"']
    precompute(compose(*other, *eagle3))
    assert [(tap.layer, tap.norm) for tap in ShardReader(tmp_path / "other" / "shards" / "train").manifest.taps] == [(1, "pre"), (3, "pre"), (4, "post")]
    written = read(tmp_path / "other" / "shards" / "config.yaml")
    assert (written.precompute.tap_layers, written.head.layout["taps"]) == ([1, 3], [1, 3])
    precompute(compose(*other))  # an MTP head reads less


@pytest.mark.slow
def test_heads_on_one_capture_stand_side_by_side_in_one_report(overrides, tmp_path):
    precompute(compose(*overrides, "precompute.tap_layers=[1,2,3]"))
    taps, heads = "head.layout.taps=[1,2,3]", {}
    arms = {"mtp": (), "eagle1": ("head=eagle1",), "eagle3": ("head=eagle3", taps, "head.draft_vocab_size=64"), "eagle31": ("head=eagle31", taps)}
    for name, extra in arms.items():
        folder = tmp_path / name
        folder.mkdir()
        os.symlink(tmp_path / "run" / "shards", folder / "shards")
        config = compose(*overrides, f'run_dir="{folder}"', "export.formats=[hf]", *extra)
        train(config)
        export(config)
        assert load_head(folder / "export" / "hf").info == load_head(choose(folder / "checkpoints", "best")).info
        heads[name] = str(folder / "export" / "hf")
    others = ",".join(f'"{path}"' for name, path in heads.items() if name != "mtp")
    evaluate(compose(*overrides, f'eval.head="{heads["mtp"]}"', f"eval.heads=[{others}]"))
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    rows = {row["name"]: row for row in report["heads"]}
    assert [(row["name"], row["kind"]) for row in report["heads"]] == [(path, "eagle3" if name == "eagle31" else name) for name, path in heads.items()]
    assert rows[heads["mtp"]]["difference"] == {"value": 0, "low": 0, "high": 0}
    assert rows[heads["mtp"]]["acceptance_length"] == report["runs"][0]["overall"]["acceptance_length"]
    assert [rows[path]["state_bytes"] for path in heads.values()] == [256, 256, 1024, 1024]
    assert all(row["training_flop"] > 0 and row["propose_ms"] > 0 for row in rows.values())
    for name in heads:
        value = rows[heads[name]]["acceptance_length"]["value"] - rows[heads["mtp"]]["acceptance_length"]["value"]
        assert rows[heads[name]]["difference"]["value"] == pytest.approx(value)
    assert "Heads side by side, K=3" in (tmp_path / "run" / "eval" / "report.md").read_text()
    with pytest.raises(ValueError, match="draft_vocab_size=32, but the head has an lm_head of its own, of 64 tokens"):
        evaluate(compose(*overrides, f'eval.head="{heads["eagle3"]}"', "eval.runs.0.draft_vocab_size=32"))
    evaluate(compose(*overrides, f'eval.head="{heads["eagle3"]}"', "eval.runs.0.draft_vocab_size=256"))  # as the demo asks for the whole vocabulary
    report = json.loads((tmp_path / "run" / "eval" / "report.json").read_text())
    assert report["runs"][0]["draft_vocab_size"] == 64


def test_changed_settings_do_not_reuse_old_rows(overrides, tmp_path):
    precompute(compose(*overrides))
    rows = next((tmp_path / "run" / "data").glob("train.rows-*"))
    before = rows.read_text()
    with pytest.raises(ValueError, match="corpus_fingerprint"):
        precompute(compose(*overrides, "precompute.regenerate.max_new_tokens=12"))
    assert rows.read_text() != before


class Interrupted(Exception):
    """Stands for a kill."""


class CuttingEngine:
    """Answers as the engine it wraps, and is cut off after `limit` answers."""

    def __init__(self, engine, limit):
        self.engine, self.limit, self.asked = engine, limit, []

    def generate(self, requests, batch_size):
        self.asked += [request.id for request in requests]
        for number, completion in enumerate(self.engine.generate(requests, batch_size)):
            if number == self.limit:
                raise Interrupted
            yield completion


def test_a_regeneration_cut_in_the_middle_goes_on_at_the_answer(overrides, tmp_path):
    run = Precompute(compose(*overrides))
    run.open_target()
    run.corpus("train")
    conversations, options = run.conversations("train"), run.options.regenerate
    engine = run.engine

    def rows(engine, journal):
        maker = Regenerator(engine, run.tokenizer, run.stops, options, run.config.data.max_length, {})
        with Claim(tmp_path / ".lock") as claim:
            return list(maker.rows(conversations, Journal(tmp_path / journal, "mark", claim), Tally()))

    whole = rows(engine, "whole.journal")
    with pytest.raises(Interrupted):
        rows(CuttingEngine(engine, 7), "cut.journal")
    with (tmp_path / "cut.journal").open("a") as file:
        file.write('{"id": "toy9", "turn": 0, "ids": [1, 2')  # a kill in the middle of a line
    again = CuttingEngine(engine, -1)
    assert rows(again, "cut.journal") == whole
    kept = {json.loads(line)["id"] for line in (tmp_path / "cut.journal").read_text().splitlines()[1:8]}
    assert len(kept) == 7
    assert not kept & set(again.asked[: len(conversations) - 7]), "what was kept is not asked for again"


class Answering:
    """Answers every question by one and the same text."""

    def __init__(self, text, stop):
        self.ids, self.finish = toy_tokenizer()(text)["input_ids"] + ([toy_tokenizer().eos_token_id] if stop else []), "stop" if stop else "length"

    def generate(self, requests, batch_size):
        for one in requests:
            yield Completion(one.id, self.ids, ["first"] * len(self.ids), AcceptanceStats(), self.finish)


USER, ANSWER, TOOL = ({"role": role, "content": "hi"} for role in ("user", "assistant", "tool"))
CALL = ANSWER | {"tool_calls": [{"name": "f", "arguments": {}}]}
COUNTED = "{{ messages | length }}" + TEMPLATES["chatml"]
ENDINGS = {  # messages, template, does the answer stop, max_length -> turns that are answered, why no more
    "all of it": ([USER, ANSWER, USER, ANSWER], "chatml", True, 200, 2, None),
    "a question at the end": ([USER, ANSWER, USER], "chatml", True, 200, 2, None),
    "a call in place of an answer": ([USER, CALL], "chatml", True, 200, 1, None),
    "no room": ([USER, ANSWER, USER, ANSWER], "chatml", True, 50, 1, "the prompt leaves no room within max_length"),
    "tools": ([USER, CALL, TOOL, ANSWER], "chatml", True, 200, 1, "no question that can be regenerated"),
    "a template that rewrites": ([USER, ANSWER, USER, ANSWER], COUNTED, True, 200, 1, "the template rewrites earlier turns"),
    "cut before a question": ([USER, ANSWER, USER, ANSWER], "chatml", False, 200, 1, "an answer was cut, questions follow it"),
    "cut at the end": ([USER, ANSWER], "chatml", False, 200, 1, None),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_conversation_that_is_not_answered_to_its_end_is_counted_by_reason(overrides, tmp_path, case):
    messages, template, stop, limit, num_answers, reason = ENDINGS[case]
    tokenizer, tally = toy_tokenizer(template), Tally()
    options = compose(*overrides).precompute.regenerate
    maker = Regenerator(Answering("ho", stop), tokenizer, frozenset({tokenizer.eos_token_id}), options, limit, {})
    with Claim(tmp_path / ".lock") as claim:
        (row,) = tally.rows(maker.rows([Conversation("a", "chat", tuple(messages), "a:1")], Journal(tmp_path / "journal", "mark", claim), tally))
    assert sum(row.loss_mask) == num_answers * len(maker.engine.ids)
    assert tally.summary()["shortened"] == ({reason: 1} if reason else {})
    assert (tally.rows_in, tally.rows_out) == (1, 1)


class WrongCapture:
    """An engine whose states are spoiled on their way."""

    def __init__(self, engine, spoil):
        self.inner, self.info, self.generate, self.close, self.spoil = engine, engine.info, engine.generate, engine.close, spoil

    def capture(self, rows, batch_tokens):
        for sample in self.inner.capture(rows, batch_tokens):
            yield replace(sample, hidden_states=self.spoil(sample.hidden_states))


@pytest.mark.parametrize("fault", ["none", "before the final norm", "another layer", "shifted by a token"])
def test_a_wrong_capture_is_found_by_the_audit(overrides, target_dir, fault):
    run = Precompute(compose(*overrides, "precompute.tap_layers=[1]"))
    run.open_target()
    gain = FrozenEnds.from_pretrained(target_dir, torch.float32).norm_weight
    spoils = {
        "none": lambda states: states,
        "before the final norm": lambda states: states / gain,
        "another layer": lambda states: states[:, [0, 0]],
        "shifted by a token": lambda states: states.roll(1, 0),
    }
    run.engine = WrongCapture(run.engine, spoils[fault])
    if fault == "none":
        run.run()
        return
    with pytest.raises(ValueError, match="teacher states predict"):
        run.run()
