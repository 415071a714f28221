"""The chunked loss against a dense float64 oracle, its honest accounting, and the learning-rate curve."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from mtp_train.config import LossConfig, OptimConfig
from mtp_train.heads.base import Supervised
from mtp_train.loss import draft_loss
from mtp_train.optim import lr_at
from mtp_train.target.ends import FrozenEnds
from tests.tiny import tiny_target

STEPS, ROWS = 3, 37


def rows_of(seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    students = torch.randn(STEPS, ROWS, 64, generator=generator, requires_grad=grad)
    valid = torch.rand(STEPS, ROWS, generator=generator) > 0.2
    return Supervised(students, torch.randn(ROWS, 64, generator=generator), valid, torch.randint(0, 256, (ROWS,), generator=generator))


def dense(ends, rows, config, vocab):
    """The same loss in float64, all logits at once, by autograd."""
    students = rows.students.detach().double().requires_grad_()
    weight = ends.head_weight.double() if vocab is None else ends.head_weight[vocab].double()
    scale = lambda logits: logits if ends.softcap is None else torch.tanh(logits / ends.softcap) * ends.softcap  # noqa: E731
    scale_all = (lambda logits: scale(logits) / ends.logit_divisor) if ends.logit_divisor else scale
    q = scale_all(students @ weight.T).log_softmax(-1)
    p = scale_all(rows.teacher.double() @ weight.T).softmax(-1)
    inside = torch.ones(ROWS, dtype=torch.bool) if vocab is None else torch.isin(rows.token_ids, vocab)
    weights = (rows.valid & inside) * config.step_decay ** torch.arange(STEPS)[:, None].double()
    kl = (p * (p.log() - q)).sum(-1)
    feature = F.smooth_l1_loss(students, rows.teacher.double().expand_as(students), reduction="none").mean(-1)
    loss = ((kl + config.feature_weight * feature) * weights).sum()
    return loss, torch.autograd.grad(loss, students)[0]


@pytest.mark.parametrize("vocab", [None, torch.arange(0, 256, 3)], ids=["whole", "reduced"])
@pytest.mark.parametrize("chunk_mib", [1, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_loss_and_gradient_equal_the_dense_oracle(family, chunk_mib, vocab):
    ends = FrozenEnds.from_model(tiny_target(family, vocab_size=40000 if chunk_mib == 1 else 256))
    config, rows = LossConfig(0.1, 0.8, chunk_mib), rows_of()
    expected, gradient = dense(ends, rows, config, vocab)
    sums, _ = draft_loss(ends, rows, config, vocab)
    sums.loss.backward()
    assert float(sums.loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    error = (rows.students.grad.double() - gradient).norm() / gradient.norm()
    assert float(error) < 1e-5


def test_rows_outside_the_draft_vocabulary_have_no_gradient_and_count_as_misses():
    ends, vocab = FrozenEnds.from_model(tiny_target("llama")), torch.arange(0, 256, 2)
    rows = rows_of()
    sums, _ = draft_loss(ends, rows, LossConfig(0.1, 0.8, 16), vocab)
    sums.loss.backward()
    outside = ~torch.isin(rows.token_ids, vocab)
    assert float(rows.students.grad[:, outside].abs().max()) == 0
    assert float(rows.students.grad[:, ~outside].abs().max()) > 0
    assert torch.equal(sums.count, rows.valid.sum(1).float())


def test_validation_counts_acceptance_over_the_whole_vocabulary():
    """sum_v min(p, q) with q zero outside the draft vocabulary, by hand."""
    ends, vocab = FrozenEnds.from_model(tiny_target("llama")), torch.arange(0, 256, 2)
    rows = rows_of(grad=False)
    sums, drafted = draft_loss(ends, rows, LossConfig(0.1, 0.8, 16), vocab)
    p = ends.logits(rows.teacher).softmax(-1)
    q = torch.zeros(STEPS, ROWS, 256)
    q[..., vocab] = ends.logits(rows.students)[..., vocab].softmax(-1)
    torch.testing.assert_close(sums.accept, (torch.minimum(p, q).sum(-1) * rows.valid).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums.top1, ((q.argmax(-1) == p.argmax(-1)) & rows.valid).sum(1).float())
    assert torch.equal(drafted, q.argmax(-1))


def test_a_perfect_student_has_no_loss_and_full_acceptance():
    ends, rows = FrozenEnds.from_model(tiny_target("llama")), rows_of(grad=False)
    same = Supervised(rows.teacher.expand(STEPS, -1, -1), rows.teacher, torch.ones_like(rows.valid), rows.token_ids)
    sums, _ = draft_loss(ends, same, LossConfig(0.1, 0.8, 16))
    assert float(sums.loss) == pytest.approx(0, abs=1e-3)
    torch.testing.assert_close(sums.accept / sums.count, torch.ones(STEPS))
    assert torch.equal(sums.top1, sums.count)


def test_learning_rate_is_a_function_of_the_step():
    config = OptimConfig(1.0, 4, 0.1, 0.0, [0.9, 0.95], 1.0)
    curve = [lr_at(step, 20, config) for step in range(20)]
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]
    assert curve[4] == 1.0
    assert all(a > b for a, b in pairwise(curve[4:]))
    assert lr_at(20, 20, config) == pytest.approx(0.1)
