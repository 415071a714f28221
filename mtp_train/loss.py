"""The training loss: match the target's logits (`train.loss.kind`) and its states (SmoothL1), on supervised rows only.

Nothing vocabulary-wide outlives its chunk: gradients are computed inside the forward pass, and the target's logits of a chunk serve all
K steps. FLOP for each lm_head weight and row: 2 for each step's draft logits, 2 for each step's gradient (4 where the head trains an lm_head of
its own), 2 for the target's logits, once; nothing is computed twice. Everything is returned as sums and counts; whoever reports divides once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp_train.config import LossConfig
from mtp_train.dist import has_fast_bfloat16
from mtp_train.heads.base import Supervised, supervised_documents
from mtp_train.interfaces import Batch, Ends

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LossSums:
    """Sums over supervised rows, each (K,) by step. `loss` is their weighted total, with a gradient."""

    loss: Tensor  # () weighted sum over rows and steps; divide by `divisor` (of the whole step, all ranks)
    divisor: Tensor  # () rows, or documents with normalise=sequences
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
        """The one division: figures per supervised row, lists by step; the loss per row or per document."""
        count = self.count.clamp(min=1)
        return {
            "loss": float(self.loss / self.divisor.clamp(min=1)),
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


# ---------------------------------------------------------------- loss kinds


@dataclass
class _Rows:
    """A few rows of one step. A loss kind gives their loss (n,), and overwrites `draft_probs` with its gradient by the draft's logits."""

    draft_probs: Tensor  # (n, V)
    target_probs: Tensor  # (n, V); empty where the labels stand for the target
    labels: Tensor  # (n, 1) the data's own token, as an index of V
    nll: Tensor  # (n,) of the labels
    kl: Tensor  # (n,) KL(target || draft)
    entropy: Tensor  # (n,) the target's
    overlap: Tensor  # (n,) sum_v min(target, draft): the probability that a sampled draft is accepted


def _forward_kl(rows: _Rows, _: LossConfig) -> Tensor:
    rows.draft_probs.sub_(rows.target_probs)
    return rows.kl


def _soft_ce(rows: _Rows, config: LossConfig) -> Tensor:
    return _forward_kl(rows, config) + rows.entropy


def _hard_ce(rows: _Rows, _: LossConfig) -> Tensor:
    rows.draft_probs.scatter_add_(1, rows.labels, rows.draft_probs.new_full(rows.labels.shape, -1))
    return rows.nll


def _reverse_kl(rows: _Rows, _: LossConfig) -> Tensor:
    """KL(draft || target): d/dx_v = q_v (log q_v/p_v - loss). p is held above float32's smallest normal number."""
    ratio = rows.target_probs.clamp(min=TINY).reciprocal_().mul_(rows.draft_probs).clamp_(min=TINY).log_()
    loss = (ratio * rows.draft_probs).sum(-1)
    rows.draft_probs.mul_(ratio.sub_(loss[:, None]))
    return loss


def _descend(rows: _Rows, kl_weight: Tensor, overlap_weight: Tensor) -> None:
    """The gradient of kl_weight KL - overlap_weight overlap, weights (n,) held constant: a (q - p) + b q (sum_{q<p} q - [q < p])."""
    lower = torch.where(rows.draft_probs < rows.target_probs, rows.draft_probs, 0)
    rows.draft_probs.mul_((kl_weight + overlap_weight * lower.sum(-1))[:, None])
    rows.draft_probs.addcmul_(lower, overlap_weight[:, None], value=-1).addcmul_(rows.target_probs, kl_weight[:, None], value=-1)


def _tv(rows: _Rows, _: LossConfig) -> Tensor:
    """Total variation, half the L1 distance = the probability of a rejection."""
    _descend(rows, torch.zeros_like(rows.overlap), torch.ones_like(rows.overlap))
    return 1 - rows.overlap


def _lk(rows: _Rows, _: LossConfig) -> Tensor:
    """-log of the acceptance probability (LK^alpha, arXiv 2602.23881): TV whose gradient does not vanish where little is accepted."""
    overlap = rows.overlap.clamp(min=TINY)
    _descend(rows, torch.zeros_like(overlap), 1 / overlap)
    return -overlap.log()


def _lk_hybrid(rows: _Rows, config: LossConfig) -> Tensor:
    """l KL + (1 - l) TV, l = exp(-eta overlap) a constant of each token (LK^lambda, arXiv 2602.23881; eta = 3 there): KL first, acceptance later."""
    share = (-config.hybrid_eta * rows.overlap).exp()
    _descend(rows, share, 1 - share)
    return share * rows.kl + (1 - share) * (1 - rows.overlap)


KINDS: dict[str, Callable[[_Rows, LossConfig], Tensor]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "soft_ce": _soft_ce,
    "hard_ce": _hard_ce,
    "tv": _tv,
    "lk": _lk,
    "lk_hybrid": _lk_hybrid,
}


# ---------------------------------------------------------------- chunks

BLOCK_SHARE = 4  # a block's float32 tensors take one part in four of the memory budget, the chunk's logits the rest
ROWS_STEP = 16
BLOCK_BYTES = 16  # of each logit: the target's probabilities, the draft's, and two temporaries


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, V) -> probabilities, the most likely entries (n,), and the log of the sum of exponentials (n,)."""
    probs, (top, best) = logits.softmax(-1), logits.max(-1)
    return probs, best, top - probs.gather(1, best[:, None])[:, 0].log()


class _Target:
    """The target's distribution of one block of rows, against which every step is compared."""

    def __init__(self, logits: Tensor, vocab: Tensor | None):
        """Logits over the whole vocabulary, though drafts come from `vocab` alone: acceptance is then exact. With vocab=None they are over what is drafted."""
        whole = logits.float()
        inside = whole if vocab is None else whole[:, vocab]
        self.probs, self.best, log_sum = _softmax(inside)  # (n, V), renormalised over `vocab`
        self.entropy = log_sum - (self.probs * inside).sum(-1)
        self.share = None
        if vocab is not None:
            self.best = torch.where(vocab[self.best] == whole.argmax(-1), self.best, -1)
            self.share = (log_sum - whole.logsumexp(-1)).exp()[:, None]  # of the target that lies inside `vocab`

    def accept(self, rows: _Rows) -> Tensor:
        """sum_v min(p, q), the target not renormalised."""
        return rows.overlap if self.share is None else torch.minimum(self.probs * self.share, rows.draft_probs).sum(-1)


def _compare(logits: Tensor, labels: Tensor, target: _Target | None) -> tuple[_Rows, Tensor]:
    """Draft logits (n, V) and labels (n, 1) -> the rows, and the draft's most likely entries (n,). Without target the labels stand for it."""
    logits = logits.float()
    draft_probs, best, log_sum = _softmax(logits)
    nll = log_sum - logits.gather(1, labels)[:, 0]
    if target is None:
        return _Rows(draft_probs, nll.new_empty(0), labels, nll, nll, torch.zeros_like(nll), (-nll).exp()), best
    kl = log_sum - (target.probs * logits).sum(-1) - target.entropy
    overlap = torch.minimum(target.probs, draft_probs).sum(-1)
    return _Rows(draft_probs, target.probs, labels, nll, kl, target.entropy, overlap), best


class _Chunks:
    """One batch: figures and drafted tokens of every row and, in training, the gradients by the students and by the head's own lm_head, chunk by chunk."""

    def __init__(self, ends: Ends, rows: Supervised, weights: Tensor, config: LossConfig, vocab: Tensor | None, own: Tensor | None):
        self.ends, self.rows, self.weights, self.config, self.vocab = ends, rows, weights, config, vocab
        self.training = rows.students.requires_grad
        self.kind = KINDS[config.kind]
        self.hard = self.training and config.kind == "hard_ce"  # the labels stand for the target
        self.grad = torch.empty_like(rows.students) if self.training else None
        self.own = None if own is None else own.detach().to(ends.dtype)
        self.own_grad = None if own is None or not self.training else torch.zeros_like(own)
        self.loss, self.feature, self.kl, self.accept, self.top1 = torch.zeros(5, *weights.shape, device=weights.device)
        self.drafted = torch.zeros(weights.shape, dtype=torch.long, device=weights.device)
        width = ends.vocab_size if vocab is None else len(vocab)
        index = rows.token_ids if vocab is None else torch.searchsorted(vocab, rows.token_ids).clamp(max=width - 1)
        self.labels = index[:, None]
        # Without bfloat16 in hardware torch takes 25 times as long for this product where the gradient lies row by row.
        self.by_columns = self.training and ends.dtype == torch.bfloat16 and not has_fast_bfloat16(weights.device.type)
        self.chunk, self.block = self._sizes(width, 0 if self.hard else width if self.training else ends.vocab_size)

    def _sizes(self, width: int, target_width: int) -> tuple[int, int]:
        """Rows of a chunk and of a block, so that all that is alive at once for them fits `chunk_mib` (or is one row's)."""
        num_steps, hidden, budget = len(self.weights), self.ends.hidden_size, self.config.chunk_mib * 2**20
        block_row = BLOCK_BYTES * max(width, target_width)
        block = max(1, budget // BLOCK_SHARE // block_row)
        logits = num_steps * width + max(target_width, num_steps * width if self.by_columns else 0)
        row = self.ends.bytes_per_logit * logits + 16 * num_steps * hidden
        chunk = max(1, (budget - block * block_row) // row)
        if chunk > ROWS_STEP:  # products of 63 rows take up to 1.8 times those of 64
            chunk -= chunk % ROWS_STEP
        return chunk, min(block, chunk)

    def run(self) -> None:
        for start in range(0, len(self.labels), self.chunk):
            part = slice(start, start + self.chunk)
            self._match_logits(part)
            self._match_features(part)

    def _match_logits(self, part: slice) -> None:
        teacher = None
        if not self.hard:
            teacher = self.ends.logits(self.rows.teacher[part], self.vocab if self.training else None)  # (n, V)
        with torch.set_grad_enabled(self.training):
            students = self.rows.students[:, part].detach().requires_grad_(self.training)
            graph = self.ends.logits(students, self.vocab, self.own)  # (K, n, V)
        logits = graph.detach()
        for start in range(0, logits.shape[1], self.block):
            block = slice(start, min(start + self.block, logits.shape[1]))
            target = None if teacher is None else _Target(teacher[block], None if self.training else self.vocab)
            for k in range(len(logits)):
                self._block(logits[k, block], target, (k, slice(part.start + block.start, part.start + block.stop)))
        del teacher
        if self.grad is not None:
            self.grad[:, part] = torch.autograd.grad(graph, students, self._laid_out(logits))[0].mul_(self.weights[:, part, None])
        if self.own_grad is not None:
            self._add_own_grad(logits.flatten(0, 1), (students.detach() * self.weights[:, part, None]).flatten(0, 1))

    def _laid_out(self, d_logits: Tensor) -> Tensor:
        """(K, n, V), as the product with lm_head takes it fastest."""
        return d_logits.flatten(0, 1).t().contiguous().t().unflatten(0, d_logits.shape[:2]) if self.by_columns else d_logits

    def _add_own_grad(self, d_logits: Tensor, students: Tensor) -> None:
        """Gradients (n, D) by the logits and weighted students (n, H), of a chunk."""
        assert self.own_grad is not None
        students = students.to(d_logits.dtype)
        if d_logits.dtype == self.own_grad.dtype:
            torch.addmm(self.own_grad, d_logits.t(), students, out=self.own_grad)
            return
        row = students.shape[1] * (students.element_size() + 4)  # of the product, and of it in float32
        size = max(1, self.config.chunk_mib * 2**20 // BLOCK_SHARE // row)
        for start in range(0, len(self.own_grad), size):
            self.own_grad[start : start + size] += d_logits[:, start : start + size].t() @ students

    def _block(self, logits: Tensor, target: _Target | None, at: tuple[int, slice]) -> None:
        """Figures of one step's rows; their logits (n, V) are overwritten with the gradient."""
        rows, best = _compare(logits, self.labels[at[1]], target)
        self.drafted[at] = best if self.vocab is None else self.vocab[best]
        self.kl[at] = rows.kl
        self.accept[at] = rows.overlap if target is None else target.accept(rows)
        self.top1[at] = (best == (rows.labels[:, 0] if target is None else target.best)).float()
        self.loss[at] = self.kind(rows, self.config)
        if self.training:
            logits.copy_(rows.draft_probs)

    def _match_features(self, part: slice) -> None:
        """SmoothL1, mean over H: with slope s = clamp(difference, -1, 1) it is s (difference - s / 2), and its gradient is s."""
        for k, students in enumerate(self.rows.students.detach()[:, part]):
            difference = students.float() - self.rows.teacher[part]
            slope = difference.clamp(-1, 1)
            self.feature[k, part] = (slope * difference.sub_(slope, alpha=0.5)).mean(-1)
            if self.grad is not None:
                self.grad[k, part].add_(slope.mul_(self.weights[k, part, None] * (self.config.feature_weight / slope.shape[-1])))


class _InForward(torch.autograd.Function):
    """The weighted total of `chunks`, whose gradient is ready when it is."""

    @staticmethod
    def forward(ctx: Any, students: Tensor, own: Tensor | None, chunks: _Chunks) -> Tensor:
        with torch.autocast(students.device.type, enabled=False):
            chunks.run()
        ctx.grads = chunks.grad, chunks.own_grad
        chunks.grad = chunks.own_grad = None
        return ((chunks.loss + chunks.config.feature_weight * chunks.feature) * chunks.weights).sum()

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad, own_grad), ctx.grads = ctx.grads, (None, None)
        assert grad is not None, "the gradient was handed over, scaled in place, in the first backward pass"
        return grad.mul_(d_total), None if own_grad is None else own_grad.mul_(d_total), None


def draft_loss(ends: Ends, rows: Supervised, config: LossConfig, vocab: Tensor | None = None, own: Tensor | None = None) -> tuple[LossSums, Tensor]:
    """The loss of one batch as sums, and the greedily drafted tokens (K, N).

    Args:
        rows: K students and one teacher for each of N supervised tokens. Students that require a gradient mean training.
        vocab: (D,) sorted ids of the draft vocabulary; None: all. The target's distribution is then renormalised over it, and rows
            whose token lies outside have no gradient: they stay in the counts as misses. In training acceptance too is renormalised over
            it (its rows of lm_head are all that is computed); in validation it is exact.
        own: (D, H) the head's own lm_head, which is trained with the students; None: drafts are read by the target's.

    With kind hard_ce, training computes no target logits (4 FLOP instead of 6): its figures are those against the one-hot data token
    (kl = the token's negative log-likelihood, accept = its probability, top1 = drafted); in validation they are against the target.
    """
    num_steps = len(rows.students)
    inside = torch.ones_like(rows.token_ids, dtype=torch.bool) if vocab is None else torch.isin(rows.token_ids, vocab)
    decay = config.step_decay ** torch.arange(num_steps, device=rows.students.device, dtype=torch.float32)
    trained = rows.valid & inside
    weights, num_units = trained * decay[:, None], len(rows.token_ids)
    if config.normalise == "sequences":
        _, document, sizes = rows.documents.unique(return_inverse=True, return_counts=True)
        weights, num_units = weights / sizes[document], len(sizes)
    chunks = _Chunks(ends, rows, weights, config, vocab, own)
    counted = trained if chunks.training else rows.valid
    return LossSums(
        loss=_InForward.apply(rows.students, own, chunks),
        divisor=torch.tensor(float(num_units), device=trained.device),
        kl=(chunks.kl * trained).sum(1),
        feature=(chunks.feature * trained).sum(1),
        accept=(chunks.accept * counted).sum(1),
        top1=(chunks.top1 * counted).sum(1),
        count=rows.valid.sum(1).float(),
    ), chunks.drafted


def divisor(batch: Batch, normalise: str) -> int:
    """What the summed loss of a batch is divided by, added up over the step's batches: supervised tokens, or the documents that have any."""
    documents = supervised_documents(batch)
    return len(documents) if normalise == "tokens" else len(documents.unique())
