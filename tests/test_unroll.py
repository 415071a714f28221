"""The unroll's attention against a brute-force oracle that writes out every row's keys one by one; its memory; the rows it leaves out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtp_train.config import compose
from mtp_train.heads.attention import UnrollAttention
from mtp_train.heads.base import chained, supervised, unroll
from mtp_train.heads.table import build_head, taps_of
from mtp_train.interfaces import Batch
from mtp_train.loss import draft_loss
from mtp_train.target.ends import FrozenEnds
from tests.test_heads import EVERY_KIND, assert_same, head_config, named, noisy_head, start
from tests.tiny import tiny_target

DOCUMENTS = [5, 4, 2, 7]
SHAPES = {"equal heads": (3, 3, 8, 8), "grouped": (4, 2, 8, 8), "mla": (4, 4, 12, 8), "wide values": (2, 1, 8, 20)}  # heads, kv heads, D, Dv


# ---------------------------------------------------------------- attention of flat rows against explicit key lists


def documents_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))


def random_steps(shape, num_steps, rows, chosen, dtype=torch.float64, seed=0):
    """Leaf queries, keys and values of every step: step 0 has all rows, the others the chosen ones."""
    heads, kv, size, value_size = shape
    generator = torch.Generator().manual_seed(seed)
    make = lambda num, count, width: torch.randn(1, num, count, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    counts = [rows] + [chosen] * (num_steps - 1)
    return [(make(heads, count, size), make(kv, count, size), make(kv, count, value_size)) for count in counts]


def oracle(steps, documents, chosen, scale, softcap=None):
    """Every row's softmax over the list of keys that it may see, in float64."""
    steps = [tuple(tensor.double() for tensor in step) for step in steps]
    group = steps[0][0].shape[1] // steps[0][1].shape[1]
    outs = []
    for k, (queries, *_) in enumerate(steps):
        rows = list(range(len(documents))) if k == 0 else chosen.tolist()
        out = []
        for place, row in enumerate(rows):
            seen = [other for other in range(row + 1) if documents[other] == documents[row]]
            for head in range(queries.shape[1]):
                kv = head // group
                keys = [steps[0][1][0, kv, other] for other in seen] + [steps[j][1][0, kv, place] for j in range(1, k + 1)]
                values = [steps[0][2][0, kv, other] for other in seen] + [steps[j][2][0, kv, place] for j in range(1, k + 1)]
                scores = scale * torch.stack(keys) @ queries[0, head, place]
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                out.append(scores.softmax(0) @ torch.stack(values))
        outs.append(torch.stack(out).view(1, len(rows), queries.shape[1], -1))
    return outs


def outputs(attention, steps, scale, softcap=None):
    return [attention(0, *step, scale, softcap) for step in steps]


def gradients(outs, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    total = sum((out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)).sum() for out in outs)
    leaves = [tensor for step in steps for tensor in step]
    return torch.autograd.grad(total, leaves)


CHOSEN = torch.tensor([1, 2, 4, 5, 6, 7, 8, 11, 14, 15, 17])  # two runs in the first document, all of the second, three in the last


@pytest.mark.parametrize(("num_steps", "softcap"), [(1, None), (2, None), (3, None), (4, None), (1, 2.0), (3, 2.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_equal_explicit_key_lists(shape, num_steps, softcap):
    documents = documents_of(DOCUMENTS)
    steps = random_steps(SHAPES[shape], num_steps, len(documents), len(CHOSEN))
    outs, expected = outputs(UnrollAttention(documents, CHOSEN), steps, 0.4, softcap), oracle(steps, documents, CHOSEN, 0.4, softcap)
    tight = {"rtol": 0, "atol": 1e-12} if softcap is None else {"rtol": 0, "atol": 1e-6}  # the dense path's softmax is float32
    for out, want in zip(outs, expected):
        torch.testing.assert_close(out, want, **tight)
    for mine, want in zip(gradients(outs, steps), gradients(expected, steps)):
        torch.testing.assert_close(mine, want, **tight)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_and_bfloat16_are_within_their_rounding(shape, device, dtype, tolerance):
    documents = documents_of(DOCUMENTS)
    steps = random_steps(SHAPES[shape], 3, len(documents), len(CHOSEN), dtype)
    moved = [tuple(tensor.detach().to(device).requires_grad_() for tensor in step) for step in steps]
    outs, expected = outputs(UnrollAttention(documents.to(device), CHOSEN.to(device)), moved, 0.4), oracle(steps, documents, CHOSEN, 0.4)
    for mine, want in [*zip(outs, expected), *zip(gradients(outs, moved), gradients(expected, steps))]:
        assert float((mine.cpu().double() - want).detach().abs().max()) < tolerance * float(want.detach().abs().max())


def forget_documents(attention):
    attention.later = UnrollAttention(torch.zeros(18, dtype=torch.long), CHOSEN).later


def forget_own_keys(attention):
    attention.steps[0].pop(1)


def see_one_row_less(attention):
    attention.later = [span._replace(start=span.start - 1, stop=span.stop - 1) for span in attention.later if span.start > span.first]


def swap_queries(attention):
    attention.later = [span._replace(at=len(CHOSEN) - span.at - span.stop + span.start) for span in attention.later]


@pytest.mark.parametrize("fault", [forget_documents, forget_own_keys, see_one_row_less, swap_queries])
def test_seeded_faults_show(fault):
    documents = documents_of(DOCUMENTS)
    steps = random_steps(SHAPES["grouped"], 3, len(documents), len(CHOSEN))
    attention, expected = UnrollAttention(documents, CHOSEN), oracle(steps, documents, CHOSEN, 0.4)
    outputs(attention, steps[:2], 0.4)
    fault(attention)
    out = attention(0, *steps[2], 0.4, None)
    assert float((out - expected[2]).detach().abs().max()) > 1e-2


def test_the_gradient_of_a_plain_sum_and_of_one_row():
    """An expanded gradient (stride 0), as `.sum()` gives it, and one that is zero almost everywhere."""
    documents = documents_of(DOCUMENTS)
    steps = random_steps(SHAPES["grouped"], 2, len(documents), len(CHOSEN), torch.float32)
    outs, expected = outputs(UnrollAttention(documents, CHOSEN), steps, 0.4), oracle(steps, documents, CHOSEN, 0.4)
    for pick in (lambda out: out.sum(), lambda out: out[0, 3].sum()):
        mine, want = (torch.autograd.grad(pick(one[1]), (*steps[0][1:], *steps[1]), retain_graph=True) for one in (outs, expected))
        for a, b in zip(mine, want):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- the whole unroll against chains run one after another


class ListAttention:
    """Decoding by hand: keys in a growing list, every new row sees all of it up to itself."""

    def __init__(self):
        self.seen: dict[int, list] = {}

    def __call__(self, layer, query, key, value, scaling, softcap):
        seen, out = self.seen.setdefault(layer, []), []
        for row in range(query.shape[2]):
            seen.append((key[:, :, row], value[:, :, row]))
            group = query.shape[1] // key.shape[1]
            keys, values = (torch.stack(one, dim=2).repeat_interleave(group, 1) for one in zip(*seen))  # (1, heads, s, D)
            scores = (keys @ query[:, :, row, :, None])[..., 0] * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            out.append((scores.softmax(-1)[:, :, None] @ values)[:, :, 0])
        return torch.stack(out, dim=1)


def packed(model, rows, mask_from, seed=3, total=None, config=None):
    """Rows of documents of random tokens and states at the taps of a head; each document's tokens from `mask_from` on are supervised."""
    generator, hidden = torch.Generator().manual_seed(seed), model.config.hidden_size
    total = total or max(sum(row) for row in rows)
    shape = (len(rows), total)
    documents, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.long)
    for index, row in enumerate(rows):
        size = sum(row)
        documents[index, :size] = documents_of(row)
        positions[index, :size] = torch.tensor([place for length in row for place in range(length)])
    states = torch.randn(*shape, len(taps_of(config or head_config(), 4)), hidden, generator=generator)
    return Batch(torch.randint(0, 256, shape, generator=generator), positions, documents, (documents >= 0) & (positions >= mask_from), states)


def chains_one_by_one(head, ends, batch, num_steps):
    """{(k, b, t): readout} of every row whose step k predicts a supervised token of its document."""
    out = {}
    for b in range(len(batch.input_ids)):
        for document in batch.document_ids[b].unique().tolist():
            where = (batch.document_ids[b] == document).nonzero().flatten() if document >= 0 else []
            for row in range(len(where)):
                ids, states, attention = batch.input_ids[b, where], batch.hidden_states[b, where], ListAttention()
                features = head.fuse(states[None, : row + 1])
                for k in range(num_steps):
                    if row + k + 2 >= len(where):
                        break
                    first = 0 if k == 0 else row
                    embeds = ends.embed(ids[None, first + k + 1 : row + k + 2])
                    features = head(embeds, features, torch.arange(first + k, row + k + 1)[None], attention)[:, -1:]
                    if batch.loss_mask[b, where[row + k + 2]]:
                        out[k, b, int(where[row])] = head.readout(features)[0, 0]
    return out


CASES = {
    "llama, packed": ("llama", {}, {}),
    "two layers": ("llama", {}, {"num_layers": 2}),
    "eagle1": ("llama", {}, {"kind": "eagle1"}),
    "eagle1, two layers": ("gemma2", {}, {"kind": "eagle1", "num_layers": 2}),
    "eagle3": ("llama", {}, {"kind": "eagle3"}),
    "eagle3, two layers": ("qwen2", {}, {"kind": "eagle3", "num_layers": 2, "norm_before_residual": True}),
    "eagle3.1, qk-norm": ("qwen3", {}, {"kind": "eagle31"}),
    "pre-norm recycled": ("qwen3", {}, {"recycled": "pre", "mask_position_0": True, "concat": "he"}),
    "softcap": ("gemma2", {}, {}),
    "mla, value size unlike": ("deepseek_v2", {"v_head_dim": 12}, {}),
    "experts": ("deepseek_v3", {"v_head_dim": 12}, {"dense_mlp": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_unroll_equals_chains_run_one_by_one_gradients_included(case):
    family, sizes, settings = CASES[case]
    model, config = tiny_target(family, **sizes), head_config(**settings)
    ends = FrozenEnds.from_model(model)
    head = noisy_head(model, ends, config, seed=2)
    batch = packed(model, [[6, 5], [4, 2]], mask_from=3, config=config)
    readouts, expected = unroll(head, ends, batch, 3), chains_one_by_one(head, ends, batch, 3)
    rows = supervised(readouts, batch)
    assert int(rows.valid.sum()) == len(expected) > 10
    weights = torch.randn(readouts.shape, generator=torch.Generator().manual_seed(4))
    for place, want in expected.items():
        assert_same(readouts[place], want)
    totals = [sum((one[place] * weights[place]).sum() for place in expected) for one in (readouts, expected)]
    names, trained = zip(*((name, one) for name, one in head.named_parameters() if one.requires_grad and one is not head.lm_head_weight))
    for name, mine, want in zip(names, *(torch.autograd.grad(total, trained) for total in totals)):
        assert float((mine - want).abs().max()) <= 1e-4 * float(want.abs().max()) + 1e-6, name


@EVERY_KIND
def test_rows_without_a_supervised_chain_are_left_out_and_the_others_do_not_change(name):
    model, config = tiny_target("llama"), named(name)
    ends = FrozenEnds.from_model(model)
    head = noisy_head(model, ends, config).eval()
    batch = packed(model, [[12, 9], [20]], mask_from=0, config=config)
    some = Batch(**{**batch.__dict__, "loss_mask": batch.loss_mask & (torch.rand(batch.loss_mask.shape, generator=torch.Generator().manual_seed(0)) < 0.3)})
    with torch.no_grad():
        whole, part = unroll(head, ends, batch, 3), unroll(head, ends, some, 3)
    rows = chained(some, 3)
    assert 0.2 < float(rows.float().mean()) < 0.8
    assert_same(part[0], whole[0])
    assert_same(part[1:, rows], whole[1:, rows])
    assert not part[1:, ~rows].any()
    mine, all_rows = supervised(part, some), supervised(whole, some)
    assert_same(mine.students[mine.valid], all_rows.students[mine.valid])


def test_chained_rows_of_the_documented_example():
    """a b c d e f, loss_mask on d e f: step 1 has a supervised token at rows 0, 1 and 2, step 2 at rows 0 and 1."""
    batch = Batch(
        torch.arange(6)[None], torch.arange(6)[None], torch.zeros(1, 6, dtype=torch.long), torch.tensor([[False] * 3 + [True] * 3]), torch.zeros(1, 6, 1, 1)
    )
    assert chained(batch, 1).tolist() == [[False] * 6]
    assert chained(batch, 2).tolist() == chained(batch, 3).tolist() == [[True, True, True, False, False, False]]


@EVERY_KIND
def test_padding_is_never_computed(name):
    model, config = tiny_target("llama"), named(name)
    ends = FrozenEnds.from_model(model)
    head = noisy_head(model, ends, config).eval()
    batch = packed(model, [[9, 4], [5]], mask_from=2, config=config)
    padded = packed(model, [[9, 4], [5]], mask_from=2, total=30, config=config)
    states = torch.full_like(padded.hidden_states, torch.nan)
    states[:, :13], ids = batch.hidden_states, torch.zeros_like(padded.input_ids)
    states[1, 5:], ids[:, :13] = torch.nan, batch.input_ids
    padded = Batch(ids, padded.position_ids, padded.document_ids, padded.loss_mask, states)
    readouts = unroll(head, ends, padded, 3)
    assert not readouts[:, padded.document_ids < 0].any()
    real = batch.document_ids >= 0
    assert_same(readouts[:, :, :13][:, real], unroll(head, ends, batch, 3)[:, real])


@pytest.mark.parametrize(
    ("name", "family"), [*(("mtp", family) for family in ("llama", "gemma2", "deepseek_v2")), ("eagle1", "llama"), ("eagle3", "qwen3"), ("eagle3.1", "llama")]
)
def test_a_batch_of_nothing_but_padding_gives_zero_gradients(family, name):
    """A rank may be left with an empty row; its gradients must exist, and be zero."""
    model, config = tiny_target(family), named(name)
    ends = FrozenEnds.from_model(model)
    head = noisy_head(model, ends, config)
    batch = packed(model, [[]], 0, total=6, config=config)
    rows = supervised(unroll(head, ends, batch, 3), batch)
    draft_loss(ends, rows, compose("target.path=x").train.loss, None, head.lm_head_weight)[0].loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize(
    ("name", "family"), [("mtp", "qwen3"), ("mtp", "deepseek_v2"), ("eagle1", "qwen3"), ("eagle3", "qwen3"), ("eagle3.1", "qwen3")],
)  # fmt: skip  # the tiny Llama amplifies rounding: 0.17, with the dense attention too
def test_under_autocast_values_and_gradients_are_those_of_float32_within_bfloat16(family, name):
    """The rotation leaves queries and keys in float32 there, the values are bfloat16."""
    model, config = tiny_target(family), named(name)
    ends = FrozenEnds.from_model(model)
    head = noisy_head(model, ends, config)
    batch, found = packed(model, [[24, 9]], mask_from=5, config=config), []
    projection = head.eh_proj if name == "mtp" else head.fc
    for enabled in (False, True):
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            students = supervised(unroll(head, ends, batch, 3), batch).students
        students.float().square().mean().backward()
        found.append([students.detach().float(), head.block.layers[0].self_attn.o_proj.weight.grad, projection.weight.grad])
    for exact, rounded in zip(*found):
        assert float((rounded - exact).norm() / exact.norm()) < 0.08  # three recurrent steps, each rounded to 8 bits


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_under_autocast_experts_are_chosen_in_float32_and_multiply_in_bfloat16(family):
    """transformers gives the opposite: its router is a product that autocast rounds, and its batched experts are products that autocast does not know."""
    model = tiny_target(family)
    layer, hidden = build_head(head_config(dense_mlp=False), model.config).block.layers[0], torch.randn(1, 200, 64)
    torch.nn.init.normal_(layer.mlp.gate.weight, std=0.02)  # near ties
    chosen, kinds = [], set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "grouped_mm" in str(func):
                kinds.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2].sort(-1).values))
    exact = layer.mlp(hidden)
    with torch.autocast("cpu", torch.bfloat16), Products():
        rounded = layer.mlp(hidden)
    rounded.float().square().mean().backward()
    assert torch.equal(chosen[0], chosen[1])
    assert kinds == {torch.bfloat16}
    assert float(((rounded - exact).norm() / exact.norm()).detach()) < 0.02
    for name, parameter in layer.mlp.named_parameters():
        assert not parameter.requires_grad or (parameter.dtype == torch.float32 and bool(parameter.grad.any())), name


# ---------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The most elements that any tensor made by any operation has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))])
        return out


def step(family, length, num_steps, mask_from=0):
    """One forward and backward pass; (largest tensor in elements, bytes saved for the backward pass)."""
    model = tiny_target(family)
    ends = FrozenEnds.from_model(model)
    head = build_head(head_config(), model.config, start(ends))
    batch, stored = packed(model, [[length]], mask_from), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in [*head.parameters(), *ends.parameters()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            readouts = unroll(head, ends, batch, num_steps)
        readouts.sum().backward()
    return largest.elements, sum(stored.values())


def test_no_tensor_is_quadratic_in_the_row():
    assert step("llama", 1024, 3)[0] < 1024 * 1024 / 2
    assert step("gemma2", 1024, 3)[0] >= 1024 * 1024  # a soft cap takes the dense path: the probe sees such tensors


def test_saved_memory_is_linear_in_steps_and_in_length():
    by_steps = [step("llama", 256, num_steps)[1] for num_steps in (1, 2, 3, 4)]
    growth = [b - a for a, b in itertools.pairwise(by_steps)]
    assert max(growth) < 1.1 * min(growth), growth
    assert step("llama", 512, 3)[1] < 2.05 * by_steps[2]


def test_steps_after_the_first_save_the_supervised_share_alone():
    whole, half = (step("llama", 256, 3, mask_from)[1] - step("llama", 256, 1, mask_from)[1] for mask_from in (0, 128))
    assert half < 0.55 * whole
