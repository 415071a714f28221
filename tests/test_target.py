"""The slot cache and the target runner, against transformers' own full forward passes."""

from __future__ import annotations

import pytest
import torch

from mtp_train.interfaces import Tap
from mtp_train.target.hf import Target
from mtp_train.target.kv import SlotCache
from tests.tiny import tiny_target

FAMILIES = ["llama", "llama_rope3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "deepseek_v2", "multimodal"]
CLOSE = {"rtol": 0, "atol": 5e-5}


def reference(model, ids):
    """Logits (T, V) of every position by one plain forward pass, no cache."""
    return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_reject_roll_back_equals_fresh_passes(family):
    model = tiny_target(family)
    target = Target(model, num_slots=3, max_length=64)
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    rows, lengths = torch.tensor([2, 0]), torch.tensor([20, 13])
    with torch.no_grad():
        expected = [reference(model, row) for row in ids]
    out = target.prefill(ids[:, :20], lengths, rows=rows)
    for row in range(2):
        torch.testing.assert_close(out.logits[row], expected[row][lengths[row] - 1], **CLOSE)
    # Five wrong tokens of which one row commits none and the other two right ones; then the true continuation.
    tried = torch.full((2, 5), 7)
    tried[1, :2] = ids[1, 13:15]
    target.extend(tried, "all", rows=rows)
    target.commit(torch.tensor([0, 2]), rows)
    lengths = lengths + torch.tensor([0, 2])
    following = torch.stack([row[start : start + 6] for row, start in zip(ids, lengths.tolist(), strict=True)])
    out = target.extend(following, "all", rows=rows)
    for row, start in enumerate(lengths.tolist()):
        torch.testing.assert_close(out.logits[row], expected[row][start : start + 6], **CLOSE)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunked_prefill_gives_the_same_states_and_logits(family, chunk):
    model = tiny_target(family)
    ids = torch.randint(0, 256, (2, 23), generator=torch.Generator().manual_seed(2))
    num = torch.tensor([23, 9])
    whole, pieces = Target(model, 2, 40), Target(model, 2, 40)
    a, b = whole.prefill(ids, num), pieces.prefill(ids, num, chunk_size=chunk)
    torch.testing.assert_close(a.logits, b.logits, **CLOSE)
    for row in range(2):
        torch.testing.assert_close(a.hidden_states[row, : num[row]], b.hidden_states[row, : num[row]], **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
def test_taps_are_the_residuals_after_k_layers_and_the_last_is_post_norm(family):
    model = tiny_target(family)
    taps = [Tap(0, "pre"), Tap(2, "pre"), Tap(4, "pre"), Tap(4, "post")]
    target = Target(model, 1, 16, taps)
    ids = torch.randint(0, 256, (1, 10), generator=torch.Generator().manual_seed(3))
    states = target.prefill(ids, torch.tensor([10])).hidden_states[0]  # (T, L, H)
    seen = {}
    base = model.get_decoder()
    base.layers[1].register_forward_hook(lambda _m, _i, out: seen.__setitem__(2, out))
    base.layers[2].register_forward_pre_hook(lambda _m, args: seen.__setitem__("into 2", args[0]))
    with torch.no_grad():
        out = model(ids, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(states[:, 0], out.hidden_states[0][0], **CLOSE)
    torch.testing.assert_close(states[:, 1], seen["into 2"][0], **CLOSE)
    torch.testing.assert_close(base.norm(states[:, 2]), states[:, 3], **CLOSE)
    torch.testing.assert_close(target.ends.logits(states[:, 3]), out.logits[0], **CLOSE)
    # Seeded fault: the state before the norm does not give the target's logits.
    assert not torch.allclose(target.ends.logits(states[:, 2]), out.logits[0], atol=1e-2)


def test_which_layer_a_tap_reads_is_not_off_by_one():
    """Block i adds the constant i + 1 to the residual; the tap after k blocks must hold the sum of the first k."""
    model = tiny_target("llama")
    for index, layer in enumerate(model.model.layers):
        layer.forward = lambda hidden_states, index=index, past_key_values=None, **kwargs: (
            (  # a fake block; it still fills the cache
                past_key_values.update(hidden_states[:, None], hidden_states[:, None], index) and None
            )
            or hidden_states + index + 1
        )
    target = Target(model, 1, 8, [Tap(k, "pre") for k in range(4)] + [Tap(4, "post")])
    states = target.prefill(torch.tensor([[5, 6]]), torch.tensor([2])).hidden_states[0]
    added = (states[:, 1:4] - states[:, :1]).mean(-1)
    torch.testing.assert_close(added, torch.tensor([[1.0, 3.0, 6.0]]).expand(2, 3))


def test_padding_never_reaches_a_state():
    model = tiny_target("gemma3")
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(4))
    padded = Target(model, 2, 16).prefill(ids, torch.tensor([3, 9])).hidden_states
    alone = Target(model, 1, 16).prefill(ids[:1, :3], torch.tensor([3])).hidden_states
    torch.testing.assert_close(padded[0, :3], alone[0], **CLOSE)
    assert torch.isfinite(padded).all()


def test_a_slot_refuses_to_overflow_with_both_numbers():
    target = Target(tiny_target("llama"), 1, 8)
    target.prefill(torch.zeros(1, 6, dtype=torch.long), torch.tensor([6]))
    target.extend(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="reach 9 tokens, but its slot holds 8"):
        target.extend(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_targets_that_cannot_be_rolled_back_are_refused(changes, message):
    model = tiny_target("llama")
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        Target(model, 1, 8)


@pytest.mark.parametrize(
    "taps", [[Tap(3, "pre")], [Tap(9, "pre"), Tap(4, "post")], [Tap(2, "post"), Tap(4, "post")], [Tap(1, "pre"), Tap(1, "pre"), Tap(4, "post")]]
)
def test_wrong_taps_are_refused(taps):
    with pytest.raises(ValueError, match="tap"):
        Target(tiny_target("llama"), 1, 8, taps)


def test_cache_writes_at_each_rows_own_length():
    """A two-row example by hand: lengths 3 and 1, two new tokens each."""
    cache = SlotCache(2, 6)
    cache.lengths[:] = torch.tensor([3, 1])
    positions = cache.begin(2)
    assert positions.tolist() == [[3, 4], [1, 2]]
    keys, _ = cache.update(torch.ones(2, 1, 2, 1), torch.ones(2, 1, 2, 1), 0)
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]]
    assert cache.mask()[:, 0].long().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]
    assert cache.mask(window=2)[0, 0].long().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
