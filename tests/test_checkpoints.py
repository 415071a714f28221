"""Checkpoints measured by decoding while training goes on: the figures, which checkpoint is best, and what training hears of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eval.checkpoints import measure_all
from eval.run import stage as evaluate
from mtp_train.checkpoint import checkpoints, choose, prune
from mtp_train.config import compose
from mtp_train.dist import unlaunched
from mtp_train.measure import Measurer
from mtp_train.metrics import Metrics, read_metrics
from mtp_train.train import stage as train
from precompute.run import stage as precompute


def fake_checkpoint(root, step, predicted, measured=None):
    folder = root / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": step, "validation": {"predicted_acceptance_length": predicted}}))
    if measured is not None:
        (folder / "acceptance.json").write_text(json.dumps({"acceptance_length": {"value": measured}}))
    return folder


def test_a_measured_length_comes_before_a_predicted_one(tmp_path):
    first, second, third = (fake_checkpoint(tmp_path, step, predicted) for step, predicted in ((10, 1.9), (20, 1.5), (30, 1.7)))
    assert choose(tmp_path, "best") == first
    for folder, measured in ((second, 1.6), (third, 1.4)):
        shutil.rmtree(folder)
        fake_checkpoint(tmp_path, int(folder.name[5:]), 1.5, measured)
    assert choose(tmp_path, "best") == second
    prune(tmp_path, keep_last=1)
    assert checkpoints(tmp_path) == [second, third]


@pytest.mark.slow
def test_each_checkpoint_gets_the_acceptance_that_decoding_it_gives(overrides, tmp_path):
    config = compose(*overrides)
    for stage in (precompute, train):
        stage(config)
    run = tmp_path / "run"
    assert measure_all(run, None, watch=True) == 2, "with the last step's checkpoint there, watching ends"
    assert measure_all(run, None, watch=False) == 0, "nothing is measured twice"
    prompts = f'eval.prompts="{run / "data" / "validation.conversations.jsonl"}"'
    for path in checkpoints(run / "checkpoints"):
        evaluate(compose(*overrides, prompts, f'eval.head="{path}"', "eval.speed_prompts=0"))
        expected = json.loads((run / "eval" / "report.json").read_text())["runs"][0]["overall"]
        found = json.loads((path / "acceptance.json").read_text())
        assert {key: found[key] for key in expected} == expected
    lines = [json.loads(line) for line in (run / "acceptance.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [12, 6], "the newest first"


def test_training_hears_of_each_measurement_once(overrides, tmp_path):
    config = compose(*overrides, "train.validate_with=embedded")
    with pytest.raises(FileNotFoundError, match=r"validation\.conversations\.jsonl"):
        Measurer(config)
    data = Path(config.run_dir) / "data"
    data.mkdir(parents=True)
    (data / "validation.conversations.jsonl").write_text("")
    (data.parent / "metrics.jsonl").write_text('{"step": 10, "decoded_acceptance_length": 1.5}\n')
    measurer = Measurer(config)
    assert measurer.results() == []
    (Path(config.run_dir) / "acceptance.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (10, 30, 20)))
    assert [row["step"] for row in measurer.results()] == [20, 30], "what was known before training went on is not told again"
    assert measurer.results() == []
    with (Path(config.run_dir) / "acceptance.jsonl").open("a") as file:
        file.write('{"step": 40, "K"{"step": 50}\n{"step": 60}\n{"ste')
    assert [row["step"] for row in measurer.results()] == [60], "what a kill left half-written is left out"


class Signal:
    """One that has come."""

    received = True


def test_a_signal_ends_the_last_measurement_and_the_same_command_goes_on(overrides, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "MASTER_ADDR": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert not any(name.startswith(("TORCHELASTIC", "RANK", "MASTER")) for name in unlaunched())
    monkeypatch.undo()
    config = compose(*overrides, "train.validate_with=embedded")
    precompute(config)
    train(compose(*overrides))
    run = tmp_path / "run"
    measurer, metrics = Measurer(config), Metrics(run, config.train, 12, {}, torch.device("cpu"))
    measurer.saved()
    assert measurer.finish(metrics, Signal())
    assert measurer.process.returncode is not None, "and its process"
    metrics.close()
    train(config)
    assert all((path / "acceptance.json").exists() for path in checkpoints(run / "checkpoints"))
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl") if "decoded_acceptance_length" in line] == [6, 12]


def test_an_unknown_engine_or_run_directory_is_refused(overrides, tmp_path):
    with pytest.raises(ValueError, match=r"train\.validate_with='sglang'"):
        compose(*overrides, "train.validate_with=sglang")
    with pytest.raises(FileNotFoundError, match="run directory of a training"):
        measure_all(tmp_path, None, watch=False)


@pytest.mark.slow
def test_measuring_in_a_second_process_changes_nothing_in_training(overrides, tmp_path):
    precompute(compose(*overrides))
    config = compose(*overrides, "train.validate_with=embedded", "train.keep_last=2")
    train(config)
    run = tmp_path / "run"
    lines = read_metrics(run / "metrics.jsonl")
    assert sorted(line["step"] for line in lines if "decoded_acceptance_length" in line) == [6, 12]
    measured = {path: json.loads((path / "acceptance.json").read_text())["acceptance_length"]["value"] for path in checkpoints(run / "checkpoints")}
    assert choose(run / "checkpoints", "best") == max(measured, key=lambda path: (measured[path], path))
    shutil.copytree(run / "shards", tmp_path / "plain" / "shards")
    train(compose(*overrides, f'run_dir="{tmp_path / "plain"}"'))
    a, b = (load_file(choose(folder / "checkpoints", "last") / "head.safetensors") for folder in (run, tmp_path / "plain"))
    assert all(torch.equal(a[name], b[name]) for name in a)
