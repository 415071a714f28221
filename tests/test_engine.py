"""The embedded engine: speculative decoding gives exactly what plain decoding gives, whatever the drafter, K and batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtp_train.heads.table import taps_of
from mtp_train.interfaces import ALL_ROWS, Proposal
from mtp_train.spec_decode.drafters import HeadDrafter, LMDrafter, NoDrafter
from mtp_train.spec_decode.engine import Engine, Request
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.hf import Target
from tests.test_heads import EVERY_KIND, HEADS, captured, draft_vocab, head_config, named, noisy_head
from tests.tiny import tiny_target

NEW, SIZE = 24, 80


class ScriptedDrafter(NoDrafter):
    """Proposes the same tokens in every round."""

    def __init__(self, vocab_size, tokens):
        super().__init__(vocab_size)
        self.tokens, self.num_draft_tokens = torch.tensor(tokens), len(tokens)

    def propose(self, temperature, uniforms):
        ids = self.tokens.expand(len(temperature), -1)
        return Proposal(ids, torch.nn.functional.one_hot(ids, self.vocab_size).float())


class RandomDrafter(ScriptedDrafter):
    """Proposes random tokens."""

    def propose(self, temperature, uniforms):
        self.tokens = (uniforms[0] * 0 + torch.randint(0, self.vocab_size, (self.num_draft_tokens,))).long()
        return super().propose(temperature, uniforms)


def requests(num=5, temperature=0.0, stops=(), new=NEW):
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 256, (4 + 3 * index,), generator=generator).tolist() for index in range(num)]
    return [Request(str(index), prompt, new, frozenset(stops), temperature, seed=index) for index, prompt in enumerate(prompts)]


def decode(model, make_drafter, batch=1, chunk=0, name="mtp", **kinds):
    """Answers and counters by request; the target gives the states that the head of this name reads."""
    target = Target(model, batch, SIZE, taps_of(named(name), 4))
    return {one.id: one for one in Engine(target, make_drafter(target, batch), chunk).generate(requests(**kinds))}


def plainly(model, **kinds):
    return decode(model, lambda target, batch: NoDrafter(256), **kinds)


def make_head(model, num_draft, vocab=None, probabilistic=False, name="mtp"):
    ends, config = FrozenEnds.from_model(model), named(name)
    head = noisy_head(model, ends, config)
    vocab = draft_vocab(config) if vocab is None else vocab
    return lambda target, batch: HeadDrafter(head, target.ends, num_draft, batch, SIZE, vocab=vocab, probabilistic=probabilistic)


DRAFTERS = {
    "perfect": lambda model, k: lambda target, batch: LMDrafter(Target(model, batch, SIZE), k),
    **{name: partial(make_head, name=name) for name in HEADS},
    "random": lambda model, k: lambda target, batch: RandomDrafter(256, [0] * k),
    "hostile": lambda model, k: lambda target, batch: ScriptedDrafter(256, [255] * k),
}


@pytest.mark.parametrize(("num_draft", "batch"), [(1, 4), (2, 4), (5, 1)])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_output_equals_plain_decoding(kind, num_draft, batch):
    model = tiny_target("llama")
    expected = plainly(model)
    got = decode(model, DRAFTERS[kind](model, num_draft), batch, name=kind if kind in HEADS else "mtp")
    assert {id: one.token_ids for id, one in got.items()} == {id: one.token_ids for id, one in expected.items()}
    for one in got.values():
        stats = one.stats
        assert len(one.token_ids) == 1 + stats.num_accepted_tokens + stats.num_drafts - stats.num_cut_tokens


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen3", "deepseek_v2"])
def test_greedy_parity_on_other_families_with_windows_and_latents(family):
    model = tiny_target(family)
    expected = plainly(model, new=40)
    got = decode(model, make_head(model, 3), 3, new=40)
    assert {id: one.token_ids for id, one in got.items()} == {id: one.token_ids for id, one in expected.items()}
    assert sum((one.stats for one in got.values()), AcceptanceStats()).num_accepted_tokens >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft", [1, 3])
def test_a_perfect_drafter_has_every_draft_accepted(num_draft, temperature):
    model = tiny_target("llama")
    probabilistic = temperature > 0
    got = decode(model, lambda target, batch: LMDrafter(Target(model, batch, SIZE), num_draft, probabilistic=probabilistic), 4, temperature=temperature)
    total = sum((one.stats for one in got.values()), AcceptanceStats())
    assert total.num_accepted_tokens == total.num_draft_tokens > 0


@EVERY_KIND
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batch_and_order_do_not_change_an_answer_or_its_counters(temperature, name):
    model = tiny_target("qwen3")
    make = make_head(model, 3, probabilistic=True, name=name)
    one, four = (decode(model, make, batch, temperature=temperature, name=name) for batch in (1, 4))
    assert {id: (done.token_ids, done.stats) for id, done in one.items()} == {id: (done.token_ids, done.stats) for id, done in four.items()}


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_prefill_drafts_the_same(chunk):
    model = tiny_target("llama")
    a, b = decode(model, make_head(model, 3), 2), decode(model, make_head(model, 3), 2, chunk)
    assert {id: (one.token_ids, one.stats) for id, one in a.items()} == {id: (one.token_ids, one.stats) for id, one in b.items()}


def test_after_every_round_the_draft_cache_is_the_one_made_from_target_states():
    model = tiny_target("llama")
    target = Target(model, 1, SIZE)
    drafter = make_head(model, 4)(target, 1)
    engine = Engine(target, drafter)
    request = requests(1)[0]
    engine._admit(iter([request]))
    for _ in range(4):
        engine.step()
    tokens = request.prompt_ids + engine.slots[0].tokens
    fresh_target = Target(model, 1, SIZE)
    states = fresh_target.prefill(torch.tensor([tokens[:-1]]), torch.tensor([len(tokens) - 1]), "none").hidden_states
    fresh = make_head(model, 4)(fresh_target, 1)
    fresh.begin(torch.tensor(tokens[:1]), ALL_ROWS)
    fresh.commit(torch.tensor([tokens[1:]]), states, torch.tensor([len(tokens) - 1]))
    size = len(tokens) - 1
    assert int(drafter.cache.lengths[0]) == size
    for mine, theirs in zip(drafter.cache.buffers[0], fresh.cache.buffers[0], strict=True):
        torch.testing.assert_close(mine[:, :size], theirs[:, :size], rtol=0, atol=1e-5)
    torch.testing.assert_close(drafter.confirmed, fresh.confirmed, rtol=0, atol=1e-5)


def test_a_draft_vocabulary_changes_acceptance_never_the_output():
    model = tiny_target("llama")
    got = decode(model, make_head(model, 3, vocab=torch.arange(0, 256, 2)), 2)
    assert {id: one.token_ids for id, one in got.items()} == {id: one.token_ids for id, one in plainly(model).items()}


def test_stop_tokens_and_budgets_cut_inside_a_block_and_are_counted_apart():
    model = tiny_target("llama")
    free = plainly(model)
    stop = free["0"].token_ids[10]
    first = free["0"].token_ids.index(stop)
    got = decode(model, DRAFTERS["perfect"](model, 5), 2, stops=[stop])
    assert got["0"].token_ids == free["0"].token_ids[: first + 1]
    assert got["0"].finish == "stop"
    total = sum((one.stats for one in got.values()), AcceptanceStats())
    assert total.num_cut_tokens > 0
    assert total.num_accepted_tokens == total.num_draft_tokens  # counted before the cut


def test_a_drafted_stop_token_that_is_rejected_does_not_end_the_answer():
    model = tiny_target("llama")
    unused = next(token for token in range(256) if all(token not in one.token_ids for one in plainly(model).values()))
    got = decode(model, lambda target, batch: ScriptedDrafter(256, [unused]), stops=[unused])
    assert all(one.finish == "length" and len(one.token_ids) == NEW for one in got.values())


def test_an_aborted_run_leaves_nothing_behind():
    model = tiny_target("llama")
    target = Target(model, 2, SIZE)
    engine = Engine(target, make_head(model, 3)(target, 2))
    running = engine.generate(requests())
    next(running)
    running.close()
    again = {one.id: one.token_ids for one in engine.generate(requests())}
    assert again == {id: one.token_ids for id, one in plainly(model).items()}


def test_a_request_that_does_not_fit_is_refused_with_the_numbers():
    target = Target(tiny_target("llama"), 1, 32)
    with pytest.raises(ValueError, match="a prompt of 4 tokens and 28 new ones do not fit the 31 tokens"):
        list(Engine(target, NoDrafter(256)).generate(requests(1, new=28)))


def test_parity_check_sees_a_drafter_that_commits_its_own_guess():
    """Seeded fault: an engine whose target is not asked would give other tokens; the comparison must turn red."""
    model = tiny_target("llama")
    broken = tiny_target("llama")
    with torch.no_grad():
        broken.model.layers[2].mlp.down_proj.weight += 0.05
    assert {id: one.token_ids for id, one in plainly(model).items()} != {id: one.token_ids for id, one in plainly(broken).items()}


@pytest.mark.parametrize("kind", ["perfect", "head"])
def test_a_slot_that_fell_idle_at_its_full_length_does_not_overflow(kind):
    """A finished request's slot is carried along by those that still run; both fit their slots exactly."""
    model, num_draft = tiny_target("llama"), 5
    size = 48 + num_draft + 1
    target = Target(model, 2, size)
    ends, _, _ = captured(model)
    drafter = (
        LMDrafter(Target(model, 2, size), num_draft) if kind == "perfect" else HeadDrafter(noisy_head(model, ends, head_config()), ends, num_draft, 2, size)
    )
    long, short = requests(1, new=8)[0], requests(1, new=44)[0]
    prompts = [Request("long", (long.prompt_ids * 10)[:40], 8, frozenset()), Request("short", short.prompt_ids, 44, frozenset())]
    done = {one.id: len(one.token_ids) for one in Engine(target, drafter).generate(prompts)}
    assert done == {"long": 8, "short": 44}
