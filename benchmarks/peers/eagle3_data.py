"""The random data of an EAGLE-3 arm, for every peer: states, ends, and the maps of a draft vocabulary of half the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NUM_TAPS = 3


@dataclass
class Data:
    """One row of T tokens."""

    input_ids: Tensor  # (1, T)
    loss_mask: Tensor  # (1, T) bool: the supervised tokens, at the end
    taps: Tensor  # (1, T, 3H)
    last: Tensor  # (1, T, H), what the target's lm_head reads
    embed: Tensor  # (V, H)
    lm_head: Tensor  # (V, H)
    t2d: Tensor  # (V,) bool: is it drafted
    d2t: Tensor  # (D,) token id - draft id


def make(arm: dict[str, Any]) -> Data:
    """Seeded."""
    torch.manual_seed(0)
    num_tokens, hidden, vocab = arm["tokens"], arm["sizes"]["hidden_size"], arm["sizes"]["vocab_size"]
    size = vocab // 2
    drafted = torch.randperm(vocab)[:size].sort().values
    embed, lm_head = (torch.randn(vocab, hidden) * 0.02 for _ in range(2))
    return Data(
        input_ids=torch.randint(0, vocab, (1, num_tokens)),
        loss_mask=torch.arange(num_tokens)[None] >= num_tokens - round(num_tokens * arm["share"]),
        taps=torch.randn(1, num_tokens, NUM_TAPS * hidden),
        last=torch.randn(1, num_tokens, hidden),
        embed=embed,
        lm_head=lm_head,
        t2d=torch.zeros(vocab, dtype=torch.bool).index_fill_(0, drafted, True),
        d2t=drafted - torch.arange(size),
    )
