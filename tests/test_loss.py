"""The chunked loss against a dense float64 oracle, its memory and work counted, its honest accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loss_memory import chunked_step, counted_peak, dense_step, make_ends, make_rows
from mtp_train.checks import check
from mtp_train.config import LossConfig, compose
from mtp_train.data.dataset import collate
from mtp_train.heads.base import Supervised, supervised
from mtp_train.interfaces import Sample
from mtp_train.loss import KINDS, divisor, draft_loss
from mtp_train.target.ends import FrozenEnds
from tests.tiny import tiny_target

STEPS, ROWS, MIB = 3, 37, 2**20
VOCABS = pytest.mark.parametrize("vocab", [None, torch.arange(0, 256, 3)], ids=["whole", "reduced"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def loss_config(kind="forward_kl", normalise="tokens", chunk_mib=16, feature_weight=0.1):
    return LossConfig(kind, 3.0, normalise, feature_weight, 0.8, chunk_mib)


def rows_of(seed=0, grad=True, steps=STEPS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    students = torch.randn(steps, ROWS, 64, generator=generator).to(dtype).requires_grad_(grad)
    valid = torch.rand(steps, ROWS, generator=generator) > 0.2
    teacher, tokens = torch.randn(ROWS, 64, generator=generator).to(dtype), torch.randint(0, 256, (ROWS,), generator=generator)
    return Supervised(students, teacher, valid, tokens, torch.arange(ROWS) // 10)


def dense_kind(kind, logits, target_logits, labels):
    """Loss (K, N), each kind written down as it is defined; torch differentiates it."""
    log_q, log_p = logits.log_softmax(-1), target_logits.log_softmax(-1).expand_as(logits)
    q, p = log_q.exp(), log_p.exp()
    if kind == "forward_kl":
        return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    if kind == "reverse_kl":
        return F.kl_div(log_p, log_q, log_target=True, reduction="none").sum(-1)
    if kind == "soft_ce":
        return F.cross_entropy(logits.flatten(0, 1), p.flatten(0, 1), reduction="none").view(logits.shape[:2])
    if kind == "hard_ce":
        return F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none").view(logits.shape[:2])
    tv = (p - q).abs().sum(-1) / 2
    if kind == "tv":
        return tv
    accepted = torch.where(p < q, p, q).sum(-1)
    if kind == "lk":
        return -accepted.log()
    share = torch.exp(-3.0 * accepted.detach())
    return share * (p * (log_p - log_q)).sum(-1) + (1 - share) * tv


def own_lm_head(vocab, dtype=torch.float32, seed=7):
    """A head's own, over the draft vocabulary."""
    size = 256 if vocab is None else len(vocab)
    return (0.2 * torch.randn(size, 64, generator=torch.Generator().manual_seed(seed))).to(dtype).requires_grad_()


def dense_logits(ends, states, vocab):
    logits = states @ (ends.head_weight if vocab is None else ends.head_weight[vocab]).double().T
    logits = logits / ends.logit_divisor if ends.logit_divisor else logits
    return torch.tanh(logits / ends.softcap) * ends.softcap if ends.softcap else logits


def dense(ends, rows, config, vocab, own=None):
    """The same loss in float64, all logits at once, by autograd; then the gradients by students and own lm_head."""
    students, teacher = rows.students.detach().double().requires_grad_(), rows.teacher.double()
    inside = torch.ones(ROWS, dtype=torch.bool) if vocab is None else torch.isin(rows.token_ids, vocab)
    labels = rows.token_ids if vocab is None else torch.where(inside, (vocab == rows.token_ids[:, None]).int().argmax(-1), 0)
    weights = (rows.valid & inside) * config.step_decay ** torch.arange(len(students))[:, None].double()
    if config.normalise == "sequences":
        weights = weights / torch.tensor([float((rows.documents == document).sum()) for document in rows.documents])
    wide = [] if own is None else [own.detach().double().requires_grad_()]
    drafted = students @ wide[0].T if wide else dense_logits(ends, students, vocab)
    match = dense_kind(config.kind, drafted, dense_logits(ends, teacher, vocab), labels)
    feature = F.smooth_l1_loss(students, teacher.expand_as(students), reduction="none").mean(-1)
    loss = ((match + config.feature_weight * feature) * weights).sum()
    return loss.detach(), *torch.autograd.grad(loss, [students, *wide])


def chunked(ends, rows, config, vocab=None, own=None):
    sums, _ = draft_loss(ends, rows, config, vocab, own)
    sums.loss.backward()
    return sums.loss.detach(), rows.students.grad


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- values and gradients


@pytest.fixture(scope="module")
def ends_of():
    made = {}

    def make(family, dtype=torch.float32, vocab_size=256):
        key = family, dtype, vocab_size
        if key not in made:
            made[key] = FrozenEnds.from_model(tiny_target(family, dtype=dtype, vocab_size=vocab_size))
        return made[key]

    return make


@VOCABS
@pytest.mark.parametrize("steps", [1, 2, 3])
@EVERY_KIND
def test_loss_and_gradient_equal_the_dense_oracle(ends_of, kind, steps, vocab):
    ends, config, rows = ends_of("llama"), loss_config(kind), rows_of(steps=steps)
    expected, gradient = dense(ends, rows, config, vocab)
    loss, found = chunked(ends, rows, config, vocab)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert error(found, gradient) < 1e-5


@VOCABS
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("normalise", ["tokens", "sequences"])
@EVERY_KIND
def test_an_own_lm_head_is_trained_with_the_gradient_of_the_dense_oracle(ends_of, kind, normalise, family, vocab):
    """Chunks of a few rows; the target's logits keep its soft cap, the head's own have none."""
    ends, config, rows, own = ends_of(family), loss_config(kind, normalise, chunk_mib=1), rows_of(), own_lm_head(vocab)
    expected, gradient, own_gradient = dense(ends, rows, config, vocab, own)
    loss, found = chunked(ends, rows, config, vocab, own)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert error(found, gradient) < 1e-5
    assert error(own.grad, own_gradient) < 1e-5


@EVERY_KIND
def test_an_own_lm_head_in_bfloat16_is_as_exact_as_plain_autograd_in_bfloat16(ends_of, kind):
    ends, rows, config, own = ends_of("llama", torch.bfloat16), rows_of(dtype=torch.bfloat16), loss_config(kind, chunk_mib=1), own_lm_head(None)
    rounded = own.detach().bfloat16()
    _, _, own_gradient = dense(ends, rows, config, None, rounded)
    plain = rounded.clone().requires_grad_()
    match = dense_kind(kind, (rows.students.detach() @ plain.T).float(), ends.logits(rows.teacher).float(), rows.token_ids)
    (match * rows.valid * 0.8 ** torch.arange(STEPS)[:, None]).sum().backward()
    chunked(ends, rows, config, None, own)
    assert own.grad.dtype == torch.float32
    assert error(own.grad, own_gradient) < 1.2 * error(plain.grad, own_gradient) < 0.08


@VOCABS
@pytest.mark.parametrize("family", ["gemma2", "granite"])
@EVERY_KIND
def test_softcaps_and_divisors_are_differentiated(ends_of, kind, family, vocab):
    ends, rows = ends_of(family), rows_of()
    ends.softcap = ends.softcap and 2.0  # as strong as it bends these logits
    expected, gradient = dense(ends, rows, loss_config(kind), vocab)
    loss, found = chunked(ends, rows, loss_config(kind), vocab)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert error(found, gradient) < 1e-5


@EVERY_KIND
def test_bfloat16_is_as_exact_as_plain_autograd_in_bfloat16(ends_of, kind):
    """The oracle has the same bf16 weights and states in float64; plain autograd rounds logits and gradients as we do."""
    ends, rows = ends_of("llama", torch.bfloat16), rows_of(dtype=torch.bfloat16)
    config = loss_config(kind)
    expected, gradient = dense(ends, rows, config, None)
    plain = rows.students.detach().requires_grad_()
    match = dense_kind(kind, ends.logits(plain).float(), ends.logits(rows.teacher).float(), rows.token_ids)
    feature = F.smooth_l1_loss(plain.float(), rows.teacher.float().expand(plain.shape), reduction="none").mean(-1)
    ((match + 0.1 * feature) * rows.valid * 0.8 ** torch.arange(STEPS)[:, None]).sum().backward()
    loss, found = chunked(ends, rows, config)
    assert found.dtype == torch.bfloat16
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
    assert error(found, gradient) < 1.2 * error(plain.grad, gradient) < 0.08


@EVERY_KIND
def test_the_chunk_changes_nothing(ends_of, kind):
    ends = ends_of("llama", vocab_size=4096)
    results = [(chunked(ends, rows_of(), loss_config(kind, chunk_mib=mib))) for mib in (1, 2, 256)]  # chunks of 5 and 11 rows in ragged blocks; all at once
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-5, atol=0)
        assert error(gradient, results[0][1].double()) < 1e-5


@EVERY_KIND
def test_rows_of_no_weight_have_no_gradient_however_wild_they_are(ends_of, kind):
    ends, rows = ends_of("llama"), rows_of()
    calm = chunked(ends, rows, loss_config(kind))
    wild = rows_of()
    with torch.no_grad():
        wild.students[~wild.valid] *= 1000
    loss, gradient = chunked(ends, wild, loss_config(kind))
    assert float(gradient[~rows.valid].abs().max()) == 0
    torch.testing.assert_close(loss, calm[0])
    torch.testing.assert_close(gradient[rows.valid], calm[1][rows.valid])


@EVERY_KIND
def test_the_gradient_is_the_slope_of_the_loss(ends_of, kind):
    """Central differences of the chunked loss itself, in float32, along its own gradient."""
    ends, rows = ends_of("llama"), rows_of()
    _, gradient = chunked(ends, rows, loss_config(kind))
    direction, ends_at = gradient / gradient.norm(), []
    for sign in (1, -1):
        moved = replace(rows, students=(rows.students.detach() + sign * 0.02 * direction).requires_grad_())
        ends_at.append(float(draft_loss(ends, moved, loss_config(kind))[0].loss.detach()))
    if kind != "lk_hybrid":  # its weights are constants, so the loss is not its gradient's potential
        assert (ends_at[0] - ends_at[1]) / 0.04 == pytest.approx(float(gradient.norm()), rel=5e-3)
    else:
        assert ends_at[0] > ends_at[1]


@EVERY_KIND
def test_distributions_far_apart_stay_finite(ends_of, kind):
    ends, rows = ends_of("llama"), rows_of()
    with torch.no_grad():
        rows.students.mul_(500)
    loss, gradient = chunked(ends, rows, loss_config(kind))
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_documents_weigh_the_same_however_long(ends_of):
    ends, config, rows = ends_of("llama"), loss_config(normalise="sequences"), rows_of()
    expected, gradient = dense(ends, rows, config, None)
    sums, _ = draft_loss(ends, rows, config)
    sums.loss.backward()
    sums = sums.detached()
    assert float(sums.loss) == pytest.approx(float(expected), rel=1e-5)
    assert error(rows.students.grad, gradient) < 1e-5
    assert float(sums.divisor) == 4  # 37 rows in documents of 10
    assert sums.averages()["loss"] == pytest.approx(float(expected) / 4, rel=1e-5)
    assert sums.averages()["num_supervised"] == int(rows.valid[0].sum())


@pytest.mark.parametrize(("normalise", "expected"), [("tokens", 1 + 3 + 2), ("sequences", 3)])
def test_the_divisor_counts_what_the_loss_sums(normalise, expected):
    """Documents of 3, 5, 4 and 2 tokens in two rows: 1, 3, 2 and 0 tokens that two states precede."""
    samples = [Sample("x", "x", torch.arange(size), torch.ones(size, dtype=torch.bool), torch.zeros(size, 1, 8)) for size in (3, 5, 4, 2)]
    batch = collate([samples[:2], samples[2:]], 8)
    assert divisor(batch, normalise) == expected
    rows = supervised(torch.zeros(1, 2, 8, 8), batch)
    assert len(rows.documents) == 6
    assert sorted(rows.documents.unique(return_counts=True)[1].tolist()) == [1, 2, 3]


def test_a_batch_without_supervised_tokens_has_a_gradient_of_nothing(ends_of):
    rows = rows_of()
    none = Supervised(rows.students[:, :0].detach().requires_grad_(), rows.teacher[:0], rows.valid[:, :0], rows.token_ids[:0], rows.documents[:0])
    loss, gradient = chunked(ends_of("llama"), none, loss_config())
    assert float(loss) == 0
    assert gradient.shape == (STEPS, 0, 64)


def test_every_kind_and_normalisation_can_be_configured():
    config = compose("target.path=x")
    for name, allowed in (("kind", tuple(KINDS)), ("normalise", ("tokens", "sequences"))):
        for value in (*allowed, "other", allowed[0]):
            setattr(config.train.loss, name, value)
            if value in allowed:
                check(config)
            else:
                with pytest.raises(ValueError, match=f"train.loss.{name}='other' is not one of {', '.join(allowed)}"):
                    check(config)


# ---------------------------------------------------------------- memory and work, counted


def peak_of(step, ends, rows, config):
    return counted_peak(lambda: step(ends, rows, config))


@pytest.mark.parametrize(
    ("family", "dtype", "steps", "kind"),
    [("llama", torch.bfloat16, 3, kind) for kind in KINDS]
    + [("llama", torch.float32, 1, kind) for kind in KINDS]
    + [(family, dtype, steps, "forward_kl") for family in ("gemma2", "granite") for dtype, steps in ((torch.bfloat16, 1), (torch.float32, 3))],
)
def test_everything_alive_in_a_chunk_fits_the_budget(ends_of, family, dtype, steps, kind):
    ends, rows = ends_of(family, dtype, 4096), make_rows(steps, 192, 64, 4096, dtype)
    gradient = rows.students.numel() * rows.students.element_size()
    workspace = peak_of(chunked_step, ends, rows, loss_config(kind, chunk_mib=2)) - gradient
    assert 0.38 * 2 * MIB < workspace < 2 * MIB + 100 * steps * 192  # 100 bytes of figures for each row
    assert 192 * steps * 4096 * 4 > 2 * MIB  # one float32 [rows, vocabulary] tensor alone would not fit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_gradient_of_an_own_lm_head_is_made_within_the_budget(ends_of, dtype):
    ends, rows = ends_of("llama", dtype, 16384), make_rows(3, 96, 64, 16384, dtype)
    own = ends.head_weight.detach().float().requires_grad_()
    copies = own.numel() * (4 + (2 if dtype == torch.bfloat16 else 0))  # its gradient, and its copy for the products
    peak = counted_peak(lambda: draft_loss(ends, rows, loss_config(chunk_mib=2), None, own))
    assert peak - copies - rows.students.numel() * rows.students.element_size() < 2 * MIB + 100 * 3 * 96
    assert own.numel() * 2 >= 2 * MIB, "a product of all its rows would not fit"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [None, 1024, 4096])
def test_validation_fits_the_budget_too(ends_of, size, dtype):
    ends, rows, vocab = ends_of("llama", dtype, 4096), make_rows(3, 192, 64, 4096, dtype), None if size is None else torch.arange(size)
    if vocab is not None:
        ends.logits(rows.teacher[:1], vocab)  # its rows of lm_head are copied once
    rows = replace(rows, students=rows.students.detach())
    workspace = counted_peak(lambda: draft_loss(ends, rows, loss_config(chunk_mib=2), vocab))
    assert 0.3 * 2 * MIB < workspace < 2 * MIB + 100 * 3 * 192


def test_the_budget_sees_two_more_tensors_of_the_vocabulary(ends_of):
    """Seeded fault: a loss kind that needs two float32 tensors more than are counted."""

    def wasteful(rows, config):
        one, two = rows.target_probs.log(), rows.draft_probs.log()
        ratio = two - one
        rows.draft_probs.mul_(ratio + rows.kl[:, None])
        return rows.kl

    ends, rows = ends_of("llama", torch.bfloat16, 3840), make_rows(1, 192, 64, 3840, torch.bfloat16)  # 98 rows fit, 96 are taken
    KINDS["wasteful"] = wasteful
    try:
        workspace = peak_of(chunked_step, ends, rows, loss_config("wasteful", chunk_mib=2)) - rows.students.numel() * 2
    finally:
        del KINDS["wasteful"]
    assert workspace > 2 * MIB + 100 * 192


def test_memory_hardly_grows_with_the_rows():
    """At most 1 % of what plain autograd takes for each row and vocabulary entry, the gradient included."""
    ends = make_ends(8192, 64, torch.float32)

    def slope(step):
        few, many = (peak_of(step, ends, make_rows(1, size, 64, 8192, torch.float32), loss_config(chunk_mib=2)) for size in (64, 128))
        return (many - few) / 64 / 8192

    plain = slope(dense_step)
    assert plain > 12  # three float32 tensors at least
    assert slope(chunked_step) < 0.01 * plain


@VOCABS
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@EVERY_KIND
def test_lm_head_is_passed_once_forward_and_once_back_for_a_step_and_once_for_the_target(ends_of, kind, steps, trained, vocab):
    """An own one is passed once more for a step: its gradient."""
    ends, rows = ends_of("llama"), rows_of(steps=steps)
    with FlopCounterMode(display=False) as counter:
        chunked(ends, rows, loss_config(kind), vocab, own_lm_head(vocab) if trained else None)
    passes = (3 if trained else 2) * steps + (kind != "hard_ce")
    assert counter.get_total_flops() == passes * 2 * ROWS * 64 * (256 if vocab is None else len(vocab))


# ---------------------------------------------------------------- accounting


def test_rows_outside_the_draft_vocabulary_have_no_gradient_and_count_as_misses(ends_of):
    ends, vocab, rows = ends_of("llama"), torch.arange(0, 256, 2), rows_of()
    sums, _ = draft_loss(ends, rows, loss_config(), vocab)
    sums.loss.backward()
    outside = ~torch.isin(rows.token_ids, vocab)
    assert float(rows.students.grad[:, outside].abs().max()) == 0
    assert float(rows.students.grad[:, ~outside].abs().max()) > 0
    assert torch.equal(sums.count, rows.valid.sum(1).float())


@pytest.mark.parametrize("trained", [False, True])
@EVERY_KIND
def test_validation_counts_acceptance_over_the_whole_vocabulary(ends_of, kind, trained):
    """sum_v min(p, q) with q zero outside the draft vocabulary, by hand."""
    ends, vocab, rows = ends_of("llama"), torch.arange(0, 256, 2), rows_of(grad=False)
    own = own_lm_head(vocab).detach() if trained else None
    sums, drafted = draft_loss(ends, rows, loss_config(kind), vocab, own)
    p = ends.logits(rows.teacher).softmax(-1)
    q = torch.zeros(STEPS, ROWS, 256)
    q[..., vocab] = (rows.students @ own.T if trained else ends.logits(rows.students)[..., vocab]).softmax(-1)
    torch.testing.assert_close(sums.accept, (torch.minimum(p, q).sum(-1) * rows.valid).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.top1, ((q.argmax(-1) == p.argmax(-1)) & rows.valid).sum(1).float())
    assert torch.equal(drafted, q.argmax(-1))
    assert float(sums.loss) == pytest.approx(float(dense(ends, rows, loss_config(kind), vocab, own)[0]), rel=1e-5)


def test_figures_of_hard_labels_are_those_against_the_token(ends_of):
    ends, rows = ends_of("llama"), rows_of()
    sums, drafted = draft_loss(ends, rows, loss_config("hard_ce"))
    log_q = ends.logits(rows.students.detach()).log_softmax(-1).gather(-1, rows.token_ids.expand(STEPS, -1)[..., None])[..., 0]
    torch.testing.assert_close(sums.kl, (-log_q * rows.valid).sum(1))
    torch.testing.assert_close(sums.accept, (log_q.exp() * rows.valid).sum(1))
    assert torch.equal(sums.top1, ((drafted == rows.token_ids) & rows.valid).sum(1).float())


def test_a_perfect_student_has_no_loss_and_full_acceptance(ends_of):
    ends, rows = ends_of("llama"), rows_of(grad=False)
    same = replace(rows, students=rows.teacher.expand(STEPS, -1, -1), valid=torch.ones_like(rows.valid))
    for kind in KINDS.keys() - {"soft_ce", "hard_ce"}:
        sums, _ = draft_loss(ends, same, loss_config(kind))
        assert float(sums.loss) == pytest.approx(0, abs=1e-3), kind
        torch.testing.assert_close(sums.accept / sums.count, torch.ones(STEPS))
        assert torch.equal(sums.top1, sums.count)
