"""A report measured in parts and joined is the report that is measured at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eval import parts
from eval.run import Evaluation, alone, mark_of, what_is_read
from eval.run import stage as evaluate
from mtp_train.config import compose
from mtp_train.export import export
from mtp_train.train import stage as train
from precompute.run import stage as precompute

RUN = "{{num_draft_tokens: {}, temperature: {}, draft_sampling: {}, draft_vocab_size: {}}}"
RUNS = f"eval.runs=[{RUN.format(2, 0.7, 'probabilistic', 'null')}, {RUN.format(3, 0.0, 'greedy', 'null')}, {RUN.format(1, 0.0, 'greedy', 12)}]"
TIMED = ("seconds", "tokens_per_second", "speedup", "parts")


@pytest.fixture
def trained(overrides):
    """A trained and exported run, and its command line."""
    for stage in (precompute, train, export):
        stage(compose(*overrides, "train.num_steps=6"))
    return [*overrides, RUNS]


def report(tmp_path):
    return json.loads((tmp_path / "run" / "eval" / "report.json").read_text())


def without_times(found):
    speed = [{key: value for key, value in row.items() if key not in TIMED} for row in found["speed"]]
    return {key: value for key, value in found.items() if key not in ("created", "speed", "reproduce")} | {"speed": speed}


@pytest.mark.slow
def test_parts_join_to_the_report_that_is_measured_at_once(trained, tmp_path):
    evaluate(compose(*trained))
    whole = report(tmp_path)
    (tmp_path / "run" / "eval" / "done.json").unlink()
    for part in (2, 0, 1):
        evaluate(compose(*trained, f"eval.part={part}", "eval.steps=[measure]"))
    stamp = (tmp_path / "run" / "eval" / "parts" / "1.json").stat().st_mtime_ns
    evaluate(compose(*trained, "eval.part=1"))
    assert (tmp_path / "run" / "eval" / "parts" / "1.json").stat().st_mtime_ns == stamp, "a part that is there is not measured again"
    evaluate(compose(*trained, "eval.steps=[report]"))
    joined = report(tmp_path)
    # A sampled run has no losslessness and no speed of its own: those of the greedy run beside it are taken, and its plain row is named apart.
    beside = [row for row in joined["speed"] if row["name"].endswith("(beside K=1, greedy, draft vocabulary 12)")]
    assert len(beside) == 1
    joined["speed"] = [row for row in joined["speed"] if row not in beside]
    for row in joined["speed"]:
        row["name"] = row["name"].partition(" (beside")[0]
    assert without_times(joined)["lossless"]["num_equal"] == 8
    plain = [row for row in joined["speed"] if row["kind"] == "plain"]
    joined["speed"] = [plain[0], *(row for row in joined["speed"] if row["kind"] != "plain")]
    assert without_times(joined) == without_times(whole)
    assert joined["reproduce"]["config"].count("num_draft_tokens") == 3
    assert (tmp_path / "run" / "eval" / "done.json").exists()


@pytest.mark.slow
def test_a_part_that_is_missing_or_of_other_settings_is_refused(trained):
    evaluate(compose(*trained, "eval.part=0"))
    evaluate(compose(*trained, "eval.part=1"))
    with pytest.raises(FileNotFoundError, match=r"2\.json is not there: measure it first, with eval\.part=2"):
        evaluate(compose(*trained, "eval.steps=[report]"))
    evaluate(compose(*trained, "eval.part=2", "eval.max_new_tokens=9"))
    with pytest.raises(ValueError, match=r"max_new_tokens: 9 there, 24 here"):
        evaluate(compose(*trained, "eval.steps=[report]"))


def test_other_files_behind_the_same_paths_are_measured_anew(trained, tmp_path):
    """A head trained again with as many steps, other prompts: the report that is there is not theirs."""
    shutil.copytree(tmp_path / "run" / "export" / "hf", tmp_path / "other")
    config = compose(*trained, f'eval.heads=["{tmp_path / "other"}"]')
    before = mark_of(config, what_is_read(config))
    assert mark_of(config, what_is_read(config)) == before
    for path in (tmp_path / "run" / "export" / "hf" / "head.safetensors", tmp_path / "other" / "target_config.json", Path(config.eval.prompts)):
        kept = path.read_bytes()
        path.write_bytes(kept + b" ")
        assert mark_of(config, what_is_read(config)) != before, path
        path.write_bytes(kept)
    assert mark_of(config, what_is_read(config)) == before


def test_other_heads_are_opened_before_anything_is_decoded(trained):
    with pytest.raises(FileNotFoundError, match=r"nowhere holds no head\.json"):
        Evaluation(compose(*trained, "eval.heads=[nowhere]"))
    with pytest.raises(ValueError, match=r"none of eval\.runs has draft_vocab_size=null"):
        evaluate(compose(*trained, f"eval.runs=[{RUN.format(1, 0.0, 'greedy', 12)}]", "eval.heads=[nowhere]"))


def test_heads_are_compared_in_the_parts_whose_run_drafts_from_their_own_vocabulary():
    config = compose("experiment=tiny", "target.path=x", RUNS, "eval.heads=[other]")
    assert [alone(config, part).eval.heads for part in range(3)] == [["other"], ["other"], []]
    empty = {"speed": [], "warnings": [], "runs": [], "parity": None, "lossless": {"checked": False}}
    assert parts.join([{**empty, "heads": [row]} for row in ("K=3", "K=2")])["heads"] == ["K=3", "K=2"]


@pytest.mark.parametrize(("override", "message"), [("eval.part=3", "eval.part=3 is not below 3"), ("eval.steps=[]", "eval.steps is empty")])
def test_wrong_parts_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        compose("experiment=tiny", "target.path=x", RUNS, override)
