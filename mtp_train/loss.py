"""The training loss: match the target's logits (KL) and its states (SmoothL1), on supervised rows only.

Nothing vocabulary-wide outlives its chunk: gradients are computed inside the forward pass, and the teacher's logits of a chunk serve
all K steps. Everything is returned as sums and counts; whoever reports divides once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp_train.config import LossConfig
from mtp_train.heads.base import Supervised
from mtp_train.interfaces import Ends


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised rows, each (K,) by step. `loss` is their weighted total, with a gradient."""

    loss: Tensor  # () weighted sum over rows and steps; divide by `count[0]` (of the whole step, all ranks)
    kl: Tensor  # sum of KL(target || draft), nats
    feature: Tensor  # sum of SmoothL1 to the target's state, mean over H
    accept: Tensor  # sum over rows of sum_v min(p, q): expected acceptance, teacher-forced
    top1: Tensor  # rows whose most likely tokens agree: greedy acceptance, teacher-forced
    count: Tensor  # rows

    def detached(self) -> LossSums:
        """Without graph, for adding up."""
        return LossSums(**{name: getattr(self, name).detach() for name in self.__dataclass_fields__})

    def __add__(self, other: LossSums) -> LossSums:
        """Totals; where one side unrolled fewer steps, its missing steps have no rows."""
        return LossSums(**{name: _add(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__})

    def averages(self) -> dict[str, Any]:
        """The one division: figures per supervised row, lists by step."""
        count = self.count.clamp(min=1)
        return {
            "loss": float(self.loss / count[0]),
            "kl": float(self.kl[0] / count[0]),
            "feature": float(self.feature[0] / count[0]),
            "kl_at": (self.kl / count).tolist(),
            "proxy_acceptance_at": (self.accept / count).tolist(),
            "top1_match_at": (self.top1 / count).tolist(),
            "num_supervised": int(self.count[0]),
        }


def _add(a: Tensor, b: Tensor) -> Tensor:
    if a.shape == b.shape:
        return a + b
    size = max(len(a), len(b))
    return F.pad(a, (0, size - len(a))) + F.pad(b, (0, size - len(b)))


class _ChunkedKL(torch.autograd.Function):
    """sum_k sum_n weights[k, n] KL(softmax(teacher_n) || softmax(student_kn)), with its gradient made chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, students: Tensor, teacher: Tensor, weights: Tensor, ends: Ends, vocab: Tensor | None, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = students.requires_grad
        grad = torch.zeros_like(students) if needs_grad else None
        per_row = torch.zeros(3, *weights.shape, device=students.device)  # kl, accept, top1
        drafted = torch.zeros(weights.shape, dtype=torch.long, device=students.device)
        for start in range(0, students.shape[1], chunk):
            part = slice(start, start + chunk)
            target = _Target(ends, teacher[part], vocab, exact=not needs_grad)
            for k in range(len(students)):
                with torch.set_grad_enabled(needs_grad):
                    student = students[k, part].detach().requires_grad_(needs_grad)
                    logits = ends.logits(student, vocab)  # (n, V)
                per_row[:, k, part], drafted[k, part], draft_probs = target.compare(logits.detach().float())
                if grad is not None:
                    d_logits = draft_probs.sub_(target.probs).mul_(weights[k, part, None]).to(logits.dtype)
                    grad[k, part] = torch.autograd.grad(logits, student, d_logits)[0]
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(per_row, drafted)
        return (per_row[0] * weights).sum(), per_row, drafted

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * d_total, None, None, None, None, None


class _Target:
    """The target's distribution of one chunk of rows, against which every step is compared."""

    def __init__(self, ends: Ends, states: Tensor, vocab: Tensor | None, exact: bool):
        """`exact`: acceptance over the whole vocabulary, though drafts come from `vocab` alone (costs the whole lm_head)."""
        whole = ends.logits(states).float() if exact or vocab is None else None
        logits = whole if vocab is None else ends.logits(states, vocab).float() if whole is None else whole[:, vocab]
        assert logits is not None
        self.vocab, self.best = vocab, logits.argmax(-1)
        self.mass = torch.ones(len(states), device=states.device)  # of the target inside `vocab`
        log_sum = logits.logsumexp(-1)
        if vocab is not None and whole is not None:
            self.mass = (log_sum - whole.logsumexp(-1)).exp()
            self.best = torch.where(vocab[self.best] == whole.argmax(-1), self.best, -1)
        self.probs = (logits - log_sum[:, None]).exp_()  # (n, V) renormalised over `vocab`
        self.negative_entropy = (self.probs * logits).sum(-1) - log_sum

    def compare(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draft logits (n, V), overwritten -> (kl, accept, top1) (3, n), drafted token ids (n,), draft probabilities (n, V)."""
        log_sum, best = logits.logsumexp(-1), logits.argmax(-1)
        kl = self.negative_entropy - torch.linalg.vecdot(self.probs, logits) + log_sum
        draft_probs = logits.sub_(log_sum[:, None]).exp_()
        target_probs = self.probs if self.vocab is None else self.probs * self.mass[:, None]
        accept = torch.minimum(draft_probs, target_probs).sum(-1)
        drafted = best if self.vocab is None else self.vocab[best]
        return torch.stack([kl, accept, (best == self.best).float()]), drafted, draft_probs


def draft_loss(ends: Ends, rows: Supervised, config: LossConfig, vocab: Tensor | None = None) -> tuple[LossSums, Tensor]:
    """The loss of one batch as sums, and the greedily drafted tokens (K, N).

    Args:
        rows: K students and one teacher for each of N supervised tokens.
        vocab: (D,) sorted ids of the draft vocabulary; None: all. The target's distribution is then renormalised over it, and rows
            whose token lies outside have no gradient: they stay in the counts as misses.
    """
    num_steps = len(rows.students)
    inside = torch.ones_like(rows.token_ids, dtype=torch.bool) if vocab is None else torch.isin(rows.token_ids, vocab)
    decay = config.step_decay ** torch.arange(num_steps, device=rows.students.device, dtype=torch.float32)
    trained = rows.valid & inside
    weights = trained * decay[:, None]  # (K, N)
    chunk = max(1, config.chunk_mib * 2**20 // (4 * (ends.vocab_size if vocab is None else len(vocab))))
    kl_total, per_row, drafted = _ChunkedKL.apply(rows.students, rows.teacher, weights, ends, vocab, chunk)
    teacher = rows.teacher.float().expand(rows.students.shape)
    feature = F.smooth_l1_loss(rows.students.float(), teacher, reduction="none").mean(-1)  # (K, N)
    counted = trained if rows.students.requires_grad else rows.valid  # in training, acceptance is renormalised over `vocab`
    return LossSums(
        loss=kl_total + config.feature_weight * (feature * weights).sum(),
        kl=(per_row[0] * trained).sum(1),
        feature=(feature.detach() * trained).sum(1),
        accept=(per_row[1] * counted).sum(1),
        top1=(per_row[2] * counted).sum(1),
        count=rows.valid.sum(1).float(),
    ), drafted
