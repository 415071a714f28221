"""How a head's queries meet keys. Training unrolls every chain at once, and sees exactly what decoding sees, without a T x T tensor.

Row t of step k asks the step-0 keys of its document's rows <= t and its own keys of steps 1..k. A softmax over two sets of keys is the two
softmaxes, weighted by their shares of the whole sum of exponentials: so a causal pass of a flash kernel, document by document, and the own
keys are merged by their log-sum-exps, and the kernel's backward pass is exact when it is given the MERGED output and log-sum-exp.

Rows lie flat, (1, N, …): the documents of all packed rows one after another, without padding. Steps k >= 1 have only the rows that
a supervised token hangs on. With documents of 4 and 3 rows, of which rows 2, 3 and 5 go on:

    step 0      rows 0 1 2 3 | 4 5 6                          Span(0, 0, 4, 0), Span(4, 4, 7, 4)
    step k      rows     2 3 |   5     lying at 0 1 | 2       Span(0, 2, 4, 0), Span(4, 5, 6, 2)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

aten = torch.ops.aten


class Attention(Protocol):
    """How a block's queries meet keys: training unrolls, drafting keeps a cache. The block does not know which."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """(B, heads, T, D), (B, kv heads, T, D), (B, kv heads, T, Dv) -> (B, T, heads, Dv)."""


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]], scaling: float, softcap: float | None) -> Tensor:
    """Attention over shared keys (masked) and, beside them, one own key a row for each earlier step of the unroll; with a T x S tensor.

    Args:
        query: (B, heads, T, D); keys, values: (B, kv heads, S, D or Dv); mask: (B, 1, T, S) bool.
        own: keys and values (B, kv heads, T, D or Dv): row t sees only its own entry t of each.

    Returns:
        (B, T, heads, Dv).
    """
    if not own and softcap is None:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1])
        return out.transpose(1, 2)
    batch, heads, rows, _ = query.shape
    grouped = query.unflatten(1, (keys.shape[1], heads // keys.shape[1])) * scaling  # (B, kv, group, T, D)
    scores = [grouped @ keys[:, :, None].transpose(-1, -2)]  # (B, kv, group, T, S)
    scores += [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]  # (B, kv, group, T, 1)
    if softcap is not None:
        scores = [torch.tanh(score / softcap) * softcap for score in scores]
    scores[0] = scores[0].masked_fill(~mask[:, :, None], -math.inf)
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    out = weights[..., : keys.shape[2]] @ values[:, :, None]
    for step, (_, value) in enumerate(own):
        out = out + weights[..., keys.shape[2] + step, None] * value[:, :, None]
    return out.reshape(batch, heads, rows, -1).transpose(1, 2)


class Span(NamedTuple):
    """Consecutive rows start..stop of a document that ask; `first` is the document's first row, `at` where their queries lie."""

    first: int
    start: int
    stop: int
    at: int

    @property
    def queries(self) -> slice:
        """Their places among the step's queries."""
        return slice(self.at, self.at + self.stop - self.start)

    def pieces(self) -> list[tuple[slice, bool]]:
        """What they see of step 0: their own rows causally, and all rows before them."""
        own, before = (slice(self.start, self.stop), True), (slice(self.first, self.start), False)
        return [own, before] if self.start > self.first else [own]

    def mask(self, device: torch.device) -> Tensor:
        """The same as (1, 1, rows, keys) bool."""
        return torch.ones(1, 1, self.stop - self.start, self.stop - self.first, dtype=torch.bool, device=device).tril(self.start - self.first)


def make_spans(documents: Tensor, rows: Tensor) -> list[Span]:
    """The spans of `rows` (M,), sorted flat row numbers; `documents` (N,) says which document each flat row belongs to."""
    places = torch.arange(len(documents), device=rows.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[1:] = documents[1:] != documents[:-1]
    first = torch.where(begins, places, 0).cummax(0).values[rows]  # (M,)
    broken = torch.ones_like(rows, dtype=torch.bool)
    broken[1:] = (rows[1:] != rows[:-1] + 1) | (first[1:] != first[:-1])
    at = broken.nonzero().flatten()
    sizes = torch.diff(at, append=at.new_tensor([len(rows)]))
    columns = (first[at], rows[at], rows[at] + sizes, at)
    return [Span(*one) for one in torch.stack(columns, dim=1).tolist()]


class UnrollAttention:
    """Training: remembers each layer's keys of every step; see the module's docstring for who sees what."""

    def __init__(self, documents: Tensor, chained: Tensor):
        """`documents` (N,) of the flat rows of step 0; `chained` (M,) those rows, sorted, that steps k >= 1 have."""
        self.first, self.later = make_spans(documents, torch.arange(len(documents), device=documents.device)), make_spans(documents, chained)
        self.steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast the rotation gives float32
        steps = self.steps.setdefault(layer, [])
        steps.append((key, value))
        spans = self.later if len(steps) > 1 else self.first
        (keys, values), *own = steps
        if softcap is None and has_kernel(query):
            return MergedAttention.apply(spans, scaling, query, keys, values, *(tensor for pair in own for tensor in pair))
        out = []
        for span in spans:
            seen, rows = slice(span.first, span.stop), span.queries
            beside = [(k[:, :, rows], v[:, :, rows]) for k, v in own]
            out.append(attend(query[:, :, rows], keys[:, :, seen], values[:, :, seen], span.mask(query.device), beside, scaling, softcap))
        return torch.cat(out, dim=1)


def has_kernel(query: Tensor) -> bool:
    """Whether a flash kernel that returns the log-sum-exp serves this device and type."""
    if query.device.type == "cuda":  # FlashAttention: Ampere or newer
        return query.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return query.device.type == "cpu"


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(1, heads, n or s, D) -> output and its log-sum-exp (1, heads, n)."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, as far as they come from these keys; `out` and `lse` are of ALL keys."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    unused = torch.zeros(2, dtype=torch.int64, device=query.device)  # the random state of a dropout that there is not
    sizes = (query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward(grad, query, key, value, out, lse, None, None, *sizes, 0.0, causal, unused, unused, scale=scale)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a further set of keys into `out` (1, heads, n, Dv) and `lse` (1, heads, n), in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(part * (part_lse - both).exp_()[..., None])
    lse.copy_(both)


class MergedAttention(torch.autograd.Function):
    """Attention of flat rows over step-0 keys, span by span, and own keys. Saves its arguments, its output and a log-sum-exp a row."""

    @staticmethod
    def forward(ctx: Any, spans: list[Span], scale: float, query: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
        """(1, heads, M, D), (1, kv heads, N, D or Dv), own: key, value, key, value … (1, kv heads, M, D or Dv) -> (1, M, heads, Dv)."""
        wide = torch.promote_types(query.dtype, torch.float32)
        fit = _Fit(query, keys, values)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=wide)
        out = query.new_zeros(1, query.shape[2], query.shape[1], values.shape[3], dtype=wide).transpose(1, 2)
        for span in spans:
            rows, asking = span.queries, fit.padded(query[:, :, span.queries])
            for seen, causal in span.pieces():
                part, part_lse = _flash(asking, fit.shared(keys[:, :, seen]), fit.shared(values[:, :, seen]), causal, scale)
                _merge(out[:, :, rows], lse[:, :, rows], part[..., : values.shape[3]], part_lse)
        for key, value in zip(own[::2], own[1::2]):
            _merge(out, lse, fit.repeat(value), _scores(query, fit.repeat(key), scale))
        out = out.to(query.dtype)
        ctx.spans, ctx.scale = spans, scale
        ctx.save_for_backward(query, keys, values, out, lse, *own)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, out, lse, *own = ctx.saved_tensors
        grad, scale, fit = grad.transpose(1, 2), ctx.scale, _Fit(query, keys, values)
        d_query, d_keys, d_values = (torch.zeros_like(tensor) for tensor in (query, keys, values))
        for span in ctx.spans:
            rows = span.queries
            d_out, asking, merged = (fit.padded(tensor[:, :, rows]) for tensor in (grad, query, out))
            for seen, causal in span.pieces():
                key, value = fit.shared(keys[:, :, seen]), fit.shared(values[:, :, seen])
                parts = _flash_backward(d_out, asking, key, value, merged, lse[:, :, rows].contiguous(), causal, scale)
                d_query[:, :, rows] += parts[0][..., : query.shape[3]]
                d_keys[:, :, seen] += fit.reduce(parts[1])[..., : keys.shape[3]]
                d_values[:, :, seen] += fit.reduce(parts[2])[..., : values.shape[3]]
        delta = _rowsum(grad, out)
        d_own = []
        for key, value in zip(own[::2], own[1::2]):
            key, value = fit.repeat(key), fit.repeat(value)
            weight = (_scores(query, key, scale) - lse).exp_()  # (1, heads, M)
            d_score = (weight * (_rowsum(grad, value) - delta) * scale)[..., None].to(query.dtype)
            d_query += d_score * key
            d_own += [fit.reduce(d_score * query), fit.reduce(weight[..., None].to(query.dtype) * grad)]
        return None, None, d_query, d_keys, d_values, *d_own


def _rowsum(a: Tensor, b: Tensor) -> Tensor:
    """(…, D), (…, D) -> their products' sum over D, in float32 or wider."""
    return (a.to(torch.promote_types(a.dtype, torch.float32)) * b).sum(-1)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return _rowsum(query, key) * scale


class _Fit:
    """Brings tensors into the form that the kernels take: as many kv heads as query heads, and one head size, a multiple of 8."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor):
        self.group = query.shape[1] // keys.shape[1]
        self.size = -(-max(query.shape[3], values.shape[3]) // 8) * 8

    def padded(self, tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, self.size - tensor.shape[3])) if tensor.shape[3] < self.size else tensor

    def repeat(self, tensor: Tensor) -> Tensor:
        """(1, kv heads, …) -> (1, heads, …)."""
        return tensor[:, :, None].expand(-1, -1, self.group, -1, -1).flatten(1, 2)

    def reduce(self, tensor: Tensor) -> Tensor:
        """The gradient of `repeat`: (1, heads, …) -> (1, kv heads, …)."""
        return tensor.unflatten(1, (-1, self.group)).sum(2)

    def shared(self, tensor: Tensor) -> Tensor:
        return self.padded(self.repeat(tensor))
