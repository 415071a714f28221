"""The head and its unroll: the index convention, held against decoding step by step and against a brute-force oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mtp_train.config import HeadConfig, HeadLayout
from mtp_train.heads.base import supervised, unroll
from mtp_train.heads.table import build_head
from mtp_train.interfaces import Batch
from mtp_train.spec_decode.drafters import HeadDrafter
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.hf import Target
from tests.tiny import tiny_target

FAMILIES = ["llama", "llama_rope3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "deepseek_v2", "deepseek_v3"]
LAYOUTS = [("eh", False, "post"), ("he", True, "post"), ("eh", False, "pre")]


def head_config(concat="eh", mask_position_0=False, recycled="post", num_layers=1, draft_vocab_size=None, dense_mlp=True, init="identity"):
    return HeadConfig("mtp", HeadLayout(concat, mask_position_0, recycled), num_layers, dense_mlp, init, draft_vocab_size)


def noisy_head(model, ends, config, seed=0):
    """A head whose every parameter matters: random, norms away from 1."""
    torch.manual_seed(seed)
    head = build_head(config, model.config, ends.norm_weight)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


def captured(model, lengths=(24,), seed=5):
    """Documents of random tokens with the target's states, laid side by side in one row, and the documents themselves."""
    target = Target(model, 1, max(lengths))
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


def decoded_logits(head, ends, ids, states, row, num_steps, shift=0):
    """What decoding sees at `row`: a drafter that has read states 0..row, then is fed the true tokens. `shift` seeds an off-by-one."""
    drafter = HeadDrafter(head, ends, num_steps, 1, len(ids) + num_steps + 1)
    drafter.begin(ids[:1], slice(None))
    drafter.commit(ids[None, 1 - shift : row + 2 - shift], states[None, : row + 1], torch.tensor([row + 1]))
    drafter.start_chain()
    out = [drafter.first_logits()[0]]
    for step in range(1, num_steps):
        out.append(drafter.next_logits(ids[row + 1 + step][None])[0])
    drafter.end_chain()
    return torch.stack(out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_unroll_equals_decoding_step_by_step(family, layout):
    model = tiny_target(family)
    ends, [(ids, states)], batch = captured(model)
    head = noisy_head(model, ends, head_config(*layout), seed=1).eval()
    with torch.no_grad():
        trained = ends.logits(unroll(head, ends, batch, 4))  # (K, 1, T, V)
    for row in (0, 1, 8, len(ids) - 6):
        torch.testing.assert_close(trained[:, 0, row], decoded_logits(head, ends, ids, states, row, 4), rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2"])
def test_a_deeper_head_unrolls_as_it_decodes(family):
    model = tiny_target(family)
    ends, [(ids, states)], batch = captured(model)
    head = noisy_head(model, ends, head_config(num_layers=3), seed=1).eval()
    with torch.no_grad():
        trained = ends.logits(unroll(head, ends, batch, 3))
    for row in (0, 8):
        torch.testing.assert_close(trained[:, 0, row], decoded_logits(head, ends, ids, states, row, 3), rtol=0, atol=5e-4)


@pytest.mark.parametrize("fault", ["shifted token", "missing norm", "pre-norm recycled", "halves swapped"])
def test_unroll_against_decoding_catches_seeded_faults(fault):
    model = tiny_target("llama")
    ends, [(ids, states)], batch = captured(model)
    head = noisy_head(model, ends, head_config()).eval()
    with torch.no_grad():
        trained = ends.logits(unroll(head, ends, batch, 3))[:, 0, 8]
    shift = 1 if fault == "shifted token" else 0
    if fault == "missing norm":
        head.hnorm = nn.Identity()
    elif fault == "pre-norm recycled":
        head.config = head_config(recycled="pre")
    elif fault == "halves swapped":
        head.config = head_config(concat="he")
    assert not torch.allclose(trained, decoded_logits(head, ends, ids, states, 8, 3, shift), atol=1e-2)


def test_packed_documents_do_not_see_each_other():
    model = tiny_target("qwen3")
    ends, documents, batch = captured(model, lengths=(14, 10, 9))
    head = noisy_head(model, ends, head_config()).eval()
    with torch.no_grad():
        packed = unroll(head, ends, batch, 3)[:, 0]
    start = 0
    for ids, states in documents:
        size = len(ids)
        alone = Batch(ids[None], torch.arange(size)[None], torch.zeros(1, size, dtype=torch.long), torch.ones(1, size, dtype=torch.bool), states[None])
        with torch.no_grad():
            expected = unroll(head, ends, alone, 3)[:, 0]
        for step in range(3):  # rows whose tokens all lie inside the document
            torch.testing.assert_close(packed[step, start : start + size - step - 1], expected[step, : size - step - 1], rtol=0, atol=2e-5)
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


@pytest.mark.parametrize("layers", [1, 2])
def test_every_parameter_of_the_head_is_trained_and_the_ends_are_not(layers):
    model = tiny_target("llama")
    ends, _, batch = captured(model)
    head = noisy_head(model, ends, head_config(num_layers=layers))
    ends.logits(unroll(head, ends, batch, 2)).square().mean().backward()
    dead = [name for name, parameter in head.named_parameters() if parameter.grad is None or not parameter.grad.abs().sum() > 0]
    assert not dead
    assert all(parameter.grad is None for parameter in ends.parameters())


def test_final_norm_starts_as_the_targets_and_eh_proj_as_the_identity_on_the_hidden_half():
    model = tiny_target("gemma3")
    ends = FrozenEnds.from_model(model)
    for concat in ("eh", "he"):
        head = build_head(head_config(concat), model.config, ends.norm_weight)
        assert torch.equal(head.norm.weight, ends.norm_weight)
        e, h = torch.randn(2, 3, 64)
        joined = torch.cat([e, h] if concat == "eh" else [h, e], -1)
        assert torch.equal(head.eh_proj(joined), h)
