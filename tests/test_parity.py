"""Parity of two engines: what counts as equal, and that each fault of wiring is named. The second engine is the embedded one, spoiled."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoTokenizer

from eval.engine import Decoded
from eval.engine_hf import EmbeddedEngine
from eval.faults import CHAIN, EAGLE1, EAGLE3, MTP, faults_of, spoiled
from eval.parity import accepted_by_step, compare, first_difference, verdict
from eval.prompts import Prompt, read_prompts
from eval.report_parity import parity
from mtp_train.checkpoint import load_head
from mtp_train.config import EvalRunConfig, compose
from mtp_train.data.chat import stop_ids
from mtp_train.spec_decode.engine import Completion
from mtp_train.spec_decode.stats import AcceptanceStats
from precompute.run import stage as precompute
from tests.markov import markov_target, run_overrides, trained_run

RUN = EvalRunConfig(3, 0.0, "greedy", None)


def test_the_first_difference_of_two_sequences():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1
    assert first_difference([], [4]) == 0


def test_steps_follow_from_where_tokens_came():
    kinds = ["first", "accepted", "accepted", "recovered", "recovered", "accepted", "bonus", "accepted"]
    one = Completion("a", [0] * len(kinds), kinds, AcceptanceStats(), "length")
    assert accepted_by_step(one) == [2, 0, 1, 1]


def test_a_verdict_needs_near_ties_and_few_of_them():
    tie, fault = ({"id": "a", "position": 3, "what": "draft 1", "explained": explained} for explained in (True, False))
    assert verdict([], 100, 400, 0.5) == (True, "equal to the last counter")
    assert verdict([tie], 100, 400, 0.5)[0]
    assert not verdict([tie] * 3, 100, 400, 0.5)[0]
    equal, words = verdict([fault], 100, 400, 0.5)
    assert not equal and "a at token 3 (draft 1)" in words
    assert "weak evidence" in verdict([], 100, 50, 0.5)[1]
    assert "weak evidence" in verdict([], 100, 400, 0.99)[1]


def test_engines_that_drafted_nothing_are_equal_and_say_so():
    prompts = [Prompt("a", "chat", "", [1])]
    one = Decoded({"a": Completion("a", [2], ["first"], AcceptanceStats(), "stop")}, None, 1.0)
    row = compare(prompts, "K=3", one, one, None, RUN, None)
    assert row["equal"] and "0 drafts and a first-draft rate of –" in row["verdict"]
    table = parity({"checks": [], "parity": [row]})[0]
    assert table.rows[1] == ["embedded engine", "–", "–", "0", "0", "0", "–"]


HEADS = {  # with the faults that are seeded for each; those of every head once
    "mtp": ("head=mtp", list(MTP)),
    "eagle1": ("head=eagle1", [name for name in EAGLE1 if name not in CHAIN]),
    "eagle3": ("head=eagle3", [*(name for name in EAGLE3 if name not in CHAIN), "the tapped layers [1, 2, 3] are read as [2, 1, 3]"]),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """kind -> the embedded engine on a trained head, its prompts and what it decodes."""
    folder = tmp_path_factory.mktemp("parity")
    target = markov_target("llama", folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    precompute(compose(*run_overrides(folder / "base", target, "precompute.tap_layers=[1,2,3]")))

    @cache
    def engine(kind):
        extra = (HEADS[kind][0], *(["head.layout.taps=[1,2,3]", "head.draft_vocab_size=60"] if kind == "eagle3" else []))
        config = compose(*trained_run(folder / kind, target, *extra, captured=folder / "base" / "run"))
        prompts = read_prompts(config.eval.prompts, tokenizer, None, {})
        embedded = EmbeddedEngine(config, load_head(config.eval.head), stop_ids(tokenizer), max(len(one.token_ids) for one in prompts))
        embedded.load("float32")
        return embedded, prompts, embedded.decode(RUN, prompts, 8, 40, "healthy")

    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_an_engine_equals_itself_at_another_batch_size(engines, kind):
    embedded, prompts, healthy = engines(kind)
    row = compare(prompts, "itself", healthy, embedded.decode(RUN, prompts, 3, 40, "again"), embedded, RUN, None)
    assert row["equal"] and not row["differences"]
    assert row["embedded"] == row["vllm"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, names) in HEADS.items() for name in names])
def test_each_fault_of_wiring_is_named(engines, kind, name):
    embedded, prompts, healthy = engines(kind)
    gain, head = embedded.target.ends.norm_weight.float(), embedded.loaded.head
    faulty = embedded.decode(RUN, prompts, 8, 40, name, spoiled(head, faults_of(head)[name], gain))
    row = compare(prompts, name, healthy, faulty, embedded, RUN, None)
    if name == "the embedding at position 0 is zeroed" and row["equal"]:
        return  # one row of each prompt, far from the answer: a head may not care
    assert not row["equal"]
    assert name in row["verdict"].split(": simulated")[0].split(". ", 1)[1].split(", or "), row["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_a_healthy_head_is_not_changed_by_the_simulation(engines, kind):
    embedded, _, _ = engines(kind)
    head, before = embedded.loaded.head, {name: value.clone() for name, value in embedded.loaded.head.state_dict().items()}
    for fault in faults_of(head).values():
        spoiled(head, fault, embedded.target.ends.norm_weight.float())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
