"""The heads and their unroll: the index convention, held against decoding step by step; each head's equation, written out by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from mtp_train.config import compose
from mtp_train.heads.base import Start, supervised, unroll
from mtp_train.heads.table import build_head, resolve, taps_of
from mtp_train.interfaces import Batch, Tap
from mtp_train.spec_decode.drafters import HeadDrafter
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.hf import Target
from tests.tiny import tiny_config, tiny_target

FAMILIES = ["llama", "llama_rope3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "deepseek_v2", "deepseek_v3"]
WIRED_AS_LLAMA = FAMILIES[:5]
HEADS = {  # every head there is, and each way of its layout
    "mtp": ("mtp", {}),
    "mtp, MiMo's layout": ("mtp", {"concat": "he", "mask_position_0": True}),
    "mtp, pre-norm recycled": ("mtp", {"recycled": "pre"}),
    "eagle1": ("eagle1", {}),
    "eagle3": ("eagle3", {}),
    "eagle3, other norms": ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    "eagle3, draft vocabulary": ("eagle3", {"draft_vocab_size": 100, "taps": [0, 4]}),
    "eagle3.1": ("eagle31", {}),
}
EVERY_KIND = pytest.mark.parametrize("name", ["mtp", "eagle1", "eagle3", "eagle3.1"])


@cache
def from_conf(kind):
    return compose("target.path=x", f"head={kind}").head


def head_config(kind="mtp", num_layers=1, draft_vocab_size=None, dense_mlp=True, init="identity", **layout):
    """As conf/head/ has it, with these changes; the tiny targets are too shallow for the default taps."""
    default = from_conf(kind)
    layout = default.layout | ({"taps": [1, 2, 3]} if "taps" in default.layout else {}) | layout
    return replace(default, layout=layout, num_layers=num_layers, draft_vocab_size=draft_vocab_size, dense_mlp=dense_mlp, init=init)


def named(name, **more):
    """The configuration of one of HEADS."""
    kind, settings = HEADS[name]
    return head_config(kind, **settings, **more)


def draft_vocab(config, vocab_size=256):
    """Ids spread over the vocabulary."""
    return None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size) * vocab_size // config.draft_vocab_size


def start(ends, vocab=None, read_layer=lambda index: {}):
    return Start(ends.norm_weight, ends.head_weight if vocab is None else ends.head_weight[vocab], read_layer)


def noisy_head(model, ends, config, seed=0):
    """A head whose every parameter matters: random, norms away from 1."""
    torch.manual_seed(seed)
    head = build_head(config, model.config, start(ends, draft_vocab(config)))
    generator = torch.Generator().manual_seed(seed)
    noise = 0.03 if config.kind == "eagle1" else 0.1  # without norms it amplifies rounding
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return head


def captured(model, lengths=(24,), seed=5, config=None):
    """Documents of random tokens with the target's states, laid side by side in one row, and the documents themselves."""
    target = Target(model, 1, max(lengths), taps_of(config or head_config(), model.config.num_hidden_layers))
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(0, 256, (1, length), generator=generator)
        target.resize(1, length)
        documents.append((ids[0], target.prefill(ids, torch.tensor([length]), "none").hidden_states[0]))
    batch = Batch(
        torch.cat([ids for ids, _ in documents])[None],
        torch.cat([torch.arange(len(ids)) for ids, _ in documents])[None],
        torch.cat([torch.full((len(ids),), index) for index, (ids, _) in enumerate(documents)])[None],
        torch.ones(1, sum(lengths), dtype=torch.bool),
        torch.cat([states for _, states in documents])[None],
    )
    return target.ends, documents, batch


def logits_of(head, ends, readouts):
    """Over the draft vocabulary."""
    vocab = draft_vocab(head.config)
    return ends.logits(readouts, vocab, head.lm_head_weight)


def decoded_logits(head, ends, ids, states, row, num_steps, shift=0):
    """What decoding sees at `row`: a drafter that has read states 0..row, then is fed the true tokens. `shift` seeds an off-by-one."""
    drafter = HeadDrafter(head, ends, num_steps, 1, len(ids) + num_steps + 1, vocab=draft_vocab(head.config))
    drafter.begin(ids[:1], slice(None))
    drafter.commit(ids[None, 1 - shift : row + 2 - shift], states[None, : row + 1], torch.tensor([row + 1]))
    drafter.start_chain()
    out = [drafter.first_logits()[0]]
    for step in range(1, num_steps):
        out.append(drafter.next_logits(ids[row + 1 + step][None])[0])
    drafter.end_chain()
    return torch.stack(out)


def assert_same(found, expected, atol=3e-5):
    """Within float32's rounding of the largest: a head without norms has large ones."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * max(1.0, float(expected.detach().abs().max())))


@pytest.mark.parametrize(("name", "family"), [(name, family) for name in HEADS for family in (WIRED_AS_LLAMA if "eagle3" in name else FAMILIES)])
def test_unroll_equals_decoding_step_by_step(family, name):
    model, config = tiny_target(family), named(name)
    ends, [(ids, states)], batch = captured(model, config=config)
    head = noisy_head(model, ends, config, seed=1).eval()
    with torch.no_grad():
        trained = logits_of(head, ends, unroll(head, ends, batch, 4))  # (K, 1, T, D)
    for row in (0, 1, 8, len(ids) - 6):
        assert_same(trained[:, 0, row], decoded_logits(head, ends, ids, states, row, 4))


@pytest.mark.parametrize(("name", "family"), [*(("mtp", family) for family in ("llama", "gemma2", "deepseek_v2")), ("eagle1", "gemma2"), ("eagle3", "qwen3")])
def test_a_deeper_head_unrolls_as_it_decodes(name, family):
    model, config = tiny_target(family), named(name, num_layers=3)
    ends, [(ids, states)], batch = captured(model, config=config)
    head = noisy_head(model, ends, config, seed=1).eval()
    with torch.no_grad():
        trained = logits_of(head, ends, unroll(head, ends, batch, 3))
    for row in (0, 8):
        assert_same(trained[:, 0, row], decoded_logits(head, ends, ids, states, row, 3))


# ---------------------------------------------------------------- seeded faults


def without(path):
    def seed(head, states):
        parent, name = path.rsplit(".", 1) if "." in path else ("", path)
        setattr(head.get_submodule(parent), name, nn.Identity())
        return states

    return seed


def other_layout(**changes):
    def seed(head, states):
        head.layout = replace(head.layout, **changes)
        return states

    return seed


def halves_swapped(path):
    def seed(head, states):
        weight = head.get_submodule(path).weight
        weight.data = weight.data.roll(weight.shape[1] // 2, 1)
        return states

    return seed


def taps_swapped(head, states):
    return states[:, [1, 0, 2, 3]]


def taps_off_by_one(head, states):
    return captured(tiny_target("llama"), config=head_config("eagle3", taps=[0, 1, 2]))[1][0][1]


WIDE = "block.layers.0"
FAULTS = {
    "mtp": {
        "missing norm": without("hnorm"), "pre-norm recycled": other_layout(recycled="pre"), "halves swapped": other_layout(concat="he"),
        "fc halves swapped": halves_swapped("eh_proj"),
    },
    "eagle1": {"fc halves swapped": halves_swapped("fc")},
    "eagle3": {
        "hidden_norm missing": without(f"{WIDE}.hidden_norm"), "input norm missing": without(f"{WIDE}.input_layernorm"), "final norm missing": without("norm"),
        "post-norm recycled": other_layout(recycled="post"), "halves of q swapped": halves_swapped(f"{WIDE}.self_attn.q_proj"),
        "halves of v swapped": halves_swapped(f"{WIDE}.self_attn.v_proj"), "taps swapped": taps_swapped, "taps off by one": taps_off_by_one,
    },
    "eagle3.1": {"pre-norm recycled": other_layout(recycled="pre"), "a tap's norm missing": without("fc_norm.1")},
}  # fmt: skip


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in ("none", "shifted token", *faults)])
def test_unroll_against_decoding_catches_seeded_faults(name, fault):
    model, config = tiny_target("llama"), named(name)
    ends, [(ids, states)], batch = captured(model, config=config)
    head = noisy_head(model, ends, config).eval()
    with torch.no_grad():
        trained = logits_of(head, ends, unroll(head, ends, batch, 3))[:, 0, 8]
    if fault in FAULTS[name]:
        states = FAULTS[name][fault](head, states)
    found = decoded_logits(head, ends, ids, states, 8, 3, shift=int(fault == "shifted token"))
    assert torch.allclose(trained, found, atol=1e-2) == (fault == "none")


# ---------------------------------------------------------------- the equations, by hand


def rms(x, weight, eps=1e-6):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def attention_by_hand(weights, x, cos, sin, heads=4, kv=2):
    """Causal grouped attention with rotary positions, and qk-norm where the layer has it. x (T, width)."""
    q, k, v = (x @ weights[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (one.view(len(x), num, -1) for one, num in ((q, heads), (k, kv), (v, kv)))
    if "self_attn.q_norm.weight" in weights:
        q, k = rms(q, weights["self_attn.q_norm.weight"]), rms(k, weights["self_attn.k_norm.weight"])

    def turned(one):
        first, second = one.chunk(2, dim=-1)
        return one * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    q, out = turned(q), []
    k = turned(k)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // (heads // kv)].T / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        out.append(scores.softmax(-1) @ v[:, head // (heads // kv)])
    return torch.stack(out, dim=1).flatten(1) @ weights["self_attn.o_proj.weight"].T


def mlp_by_hand(weights, x):
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def by_hand(head, e, states, cos, sin):
    """Step 0 of EAGLE-1 and EAGLE-3 as vLLM's llama_eagle.py and llama_eagle3.py compute it; e (T, H), states (T, L, H) -> feature and readout."""
    weights, layout = dict(head.named_parameters()), head.config.layout
    layer = {name.removeprefix("block.layers.0."): weight for name, weight in weights.items() if name.startswith("block.layers.0.")}
    if head.config.kind == "eagle1":
        x = torch.cat([e, states[:, -1]], dim=-1) @ weights["fc.weight"].T
        x = x + attention_by_hand(layer, x, cos, sin)
        x = x + mlp_by_hand(layer, rms(x, layer["post_attention_layernorm.weight"]))
        return x, x
    joined = states[:, :-1].flatten(1)
    joined = rms(joined, weights["input_norm.weight"]) if layout["norm_before_fc"] else joined
    if layout["fc_norm"]:
        joined = torch.cat([rms(one, weights[f"fc_norm.{index}.weight"]) for index, one in enumerate(joined.split(64, dim=-1))], dim=-1)
    g = joined @ weights["fc.weight"].T
    normed = rms(g, layer["hidden_norm.weight"])
    x = normed if layout["norm_before_residual"] else g
    x = x + attention_by_hand(layer, torch.cat([rms(e, layer["input_layernorm.weight"]), normed], dim=-1), cos, sin)
    x = x + mlp_by_hand(layer, rms(x, layer["post_attention_layernorm.weight"]))
    post = rms(x, weights["norm.weight"])
    return (post if layout["recycled"] == "post" else x), post


@pytest.mark.parametrize("name", [name for name in HEADS if not name.startswith("mtp")])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_step_is_the_equation_of_the_engine(family, name):
    model, config = tiny_target(family), named(name)
    ends, [(ids, states)], batch = captured(model, config=config)
    head = noisy_head(model, ends, config).eval()
    positions = torch.arange(len(ids) - 1)[None]
    cos, sin = (one[0] for one in head.block.rotary(states, positions))
    with torch.no_grad():
        _, readout = by_hand(head, ends.embed(ids[1:]), states[:-1], cos, sin)
        torch.testing.assert_close(unroll(head, ends, batch, 1)[0, 0, :-1], readout, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- taps and layouts


def test_default_taps_are_vllms_and_are_written_out():
    assert [resolve(head_config("eagle3", taps=None), depth).layout["taps"] for depth in (7, 32, 80)] == [[2, 3, 4], [2, 16, 29], [2, 40, 77]]
    assert taps_of(head_config("eagle3"), 4) == (Tap(1, "pre"), Tap(2, "pre"), Tap(3, "pre"), Tap(4, "post"))
    assert taps_of(head_config("eagle1"), 4) == taps_of(head_config(), 4) == (Tap(4, "post"),)
    head = build_head(head_config("eagle3", taps=None), tiny_config("llama", num_hidden_layers=8))
    assert head.config.layout["taps"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("taps", "depth", "reason"),
    [(None, 4, r"taps=\[2, 2, 1\].*default for 4 layers"), (None, 6, r"\[2, 3, 3\]"), ([1, 1, 2], 8, "distinct"), ([3, 1], 8, "ascending"), ([], 8, "distinct"),
     ([1, 9], 8, "the target has 8 layers"), ([-1, 2], 8, "the target has 8 layers")],
)  # fmt: skip
def test_impossible_taps_are_refused(taps, depth, reason):
    with pytest.raises(ValueError, match=reason):
        resolve(head_config("eagle3", taps=taps), depth)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(head_config(), kind="medusa"), "head.kind='medusa' is not one of mtp, eagle1, eagle3"),
        (head_config(concat="ee"), "head.layout.concat='ee' is not one of eh, he"),
        (head_config("eagle3", recycled="both"), "head.layout.recycled='both'"),
        (head_config("eagle1", concat="eh"), r"kind eagle1 lacks \[\] and has unknown \['concat'\]"),
        (replace(head_config(), layout={"concat": "eh"}), r"kind mtp lacks \['mask_position_0', 'recycled'\]"),
        (head_config("eagle3", fc_norm="no"), "head.layout.fc_norm='no' is neither true nor false"),
        (head_config("eagle1", init="native"), "head.init='native' is not one of identity, last_layer"),
    ],
)
def test_what_a_head_does_not_have_is_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        build_head(config, tiny_config("llama"))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "granite", "deepseek_v2", "phi3"])
def test_a_layer_that_is_not_wired_as_llamas_is_refused(family):
    with pytest.raises(ValueError, match=f"wired as Llama's.*{tiny_config(family).model_type}"):
        build_head(head_config("eagle3"), tiny_config(family))


@EVERY_KIND
def test_packed_documents_do_not_see_each_other(name):
    model, config = tiny_target("qwen3"), named(name)
    ends, documents, batch = captured(model, lengths=(14, 10, 9), config=config)
    head = noisy_head(model, ends, config).eval()
    with torch.no_grad():
        packed = unroll(head, ends, batch, 3)[:, 0]
    start = 0
    for ids, states in documents:
        size = len(ids)
        alone = Batch(ids[None], torch.arange(size)[None], torch.zeros(1, size, dtype=torch.long), torch.ones(1, size, dtype=torch.bool), states[None])
        with torch.no_grad():
            expected = unroll(head, ends, alone, 3)[:, 0]
        for step in range(3):  # rows whose tokens all lie inside the document
            assert_same(packed[step, start : start + size - step - 1], expected[step, : size - step - 1])
        start += size


def test_supervised_rows_of_the_documented_example():
    """3 prompt and 2 answer tokens: rows 1 and 2 of step 0 predict the answer tokens 3 and 4; step 1 has rows 0 and 1 for them."""
    batch = Batch(
        torch.arange(5)[None], torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.long),
        torch.tensor([[False, False, False, True, True]]), torch.arange(5.0)[None, :, None, None],
    )  # fmt: skip
    readouts = torch.stack([torch.arange(5.0), torch.arange(10.0, 15.0)])[:, None, :, None]  # (K, 1, T, 1)
    rows = supervised(readouts, batch)
    assert rows.token_ids.tolist() == [3, 4]
    assert rows.students[0, :, 0].tolist() == [1, 2]
    assert rows.students[1, :, 0].tolist() == [10, 11]
    assert rows.teacher[:, 0].tolist() == [2, 3]
    assert rows.valid.all()


@EVERY_KIND
@pytest.mark.parametrize("layers", [1, 2])
def test_every_parameter_of_the_head_is_trained_and_the_ends_are_not(layers, name):
    model, config = tiny_target("llama"), named(name, num_layers=layers)
    ends, _, batch = captured(model, config=config)
    head = noisy_head(model, ends, config)
    logits_of(head, ends, unroll(head, ends, batch, 2)).square().mean().backward()
    dead = [name for name, parameter in head.named_parameters() if parameter.grad is None or not parameter.grad.abs().sum() > 0]
    assert not dead
    assert all(parameter.grad is None for parameter in ends.parameters())


@EVERY_KIND
def test_a_head_starts_by_passing_what_it_knows_of_the_target(name):
    """The state (or the last tap) through the projection, the target's final norm, its rows of lm_head."""
    family = "llama" if name.startswith("eagle3") else "gemma3"
    ends, vocab = FrozenEnds.from_model(tiny_target(family)), torch.arange(0, 256, 4)
    for settings in [{"concat": "eh"}, {"concat": "he"}] if name == "mtp" else [{}]:
        head = build_head(named(name, **settings, draft_vocab_size=64), tiny_config(family), start(ends, vocab))
        *others, h = torch.randn(3 if name.startswith("eagle3") else 2, 5, 64)
        joined = torch.cat([h, *others] if settings.get("concat") == "he" else [*others, h], -1)
        assert torch.equal((head.eh_proj if name == "mtp" else head.fc)(joined), h)
        assert name == "eagle1" or torch.equal(head.norm.weight, ends.norm_weight)
        assert torch.equal(head.lm_head_weight, ends.head_weight[vocab]) if name.startswith("eagle3") else head.lm_head_weight is None
