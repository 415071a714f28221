"""Shared material: a tiny saved target and a small corpus."""

from __future__ import annotations

import json
import os
import random

import pytest

from mtp_train.config import compose
from precompute.run import stage as precompute
from tests.slurm_cluster import Cluster
from tests.tiny import save_tiny, tiny_target

WORDS = ["red", "blue", "cat", "dog", "runs", "sleeps", "fast", "slow", "tree", "house"]


def write_conversations(path, num, seed=0, domain="toy", answers=True):
    """A JSONL of short conversations of one or two turns."""
    rng = random.Random(seed)
    rows = []
    for index in range(num):
        messages = []
        for _ in range(rng.choice([1, 1, 2])):
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))})
            messages.append({"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 6)))})
        rows.append({"id": f"{domain}{index}", "domain": domain, "messages": messages if answers else messages[:-1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory):
    """A saved tiny Llama with a toy ChatML tokenizer."""
    return save_tiny(tiny_target("llama"), tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """train.jsonl, validation.jsonl and heldout.jsonl."""
    folder = tmp_path_factory.mktemp("corpus")
    write_conversations(folder / "train.jsonl", 24, seed=1)
    write_conversations(folder / "validation.jsonl", 6, seed=2)
    both = [write_conversations(folder / f"{name}.part", 4, seed=3 + index, domain=name, answers=False) for index, name in enumerate(("sun", "moon"))]
    (folder / "heldout.jsonl").write_text("".join(part.read_text() for part in both))
    return folder


def source(path):
    """A source as an override's value."""
    return f'{{path: "{path}", form: auto, domain: null, split: train, limit: null}}'


@pytest.fixture
def overrides(target_dir, corpus, tmp_path):
    """The command line of a tiny run."""
    return [
        "experiment=tiny", f'run_dir="{tmp_path / "run"}"', f'target.path="{target_dir}"',
        f"data.train=[{source(corpus / 'train.jsonl')}]", f"data.validation=[{source(corpus / 'validation.jsonl')}]",
        f'eval.prompts="{corpus / "heldout.jsonl"}"',
    ]  # fmt: skip


@pytest.fixture(scope="session")
def captured(target_dir, corpus, tmp_path_factory):
    """A run directory with shards that every head can train on, and the overrides that train in it."""
    run = tmp_path_factory.mktemp("captured")
    overrides = [
        "experiment=tiny", f'target.path="{target_dir}"', f"data.train=[{source(corpus / 'train.jsonl')}]",
        f"data.validation=[{source(corpus / 'validation.jsonl')}]",
    ]  # fmt: skip
    precompute(compose(*overrides, f'run_dir="{run}"', "precompute.tap_layers=[1,2,3]"))
    return run, overrides


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """SLURM, on this machine. Where it cannot be had: skipped at home, an error in CI."""
    if os.getuid() != 0 and "CI" not in os.environ:
        pytest.skip("a SLURM cluster of its own needs root")
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.down()
