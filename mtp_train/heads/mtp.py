"""The RMSNorm-restored MTP head (the norms as DeepSeek-V3, arXiv 2412.19437, eq. 21; recycled post-norm).

x = eh_proj [enorm(e) ; hnorm(h)]   ->   the target's own decoder layer   ->   norm   ->   the target's frozen lm_head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.config import HeadConfig
from mtp_train.heads.base import Attention, DraftHead
from mtp_train.heads.block import Block


class MTPHead(DraftHead):
    """enorm, hnorm, eh_proj (starts as [0, I]), one decoder layer of the target's kind, and a final norm (starts as the target's)."""

    def __init__(self, config: HeadConfig, target_config: Any, final_norm: Tensor | None = None):
        """`final_norm` (H,) is the target's own final gain; without it the norm starts as an identity gain (it will be loaded)."""
        super().__init__(config)
        hidden = target_config.hidden_size
        self.block = Block(target_config, config.num_layers, config.dense_mlp)
        self.enorm = self.block.make_norm(hidden)
        self.hnorm = self.block.make_norm(hidden)
        self.norm = self.block.make_norm(hidden)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        with torch.no_grad():
            zero, identity = torch.zeros(hidden, hidden), torch.eye(hidden)
            self.eh_proj.weight.copy_(torch.cat([zero, identity] if config.layout.concat == "eh" else [identity, zero], dim=1))
            if final_norm is not None:
                self.norm.get_parameter("weight").copy_(final_norm)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, -1]

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        layout = self.config.layout
        if layout.mask_position_0:
            token_embeds = token_embeds * (position_ids != 0)[..., None].to(token_embeds.dtype)
        e, h = self.enorm(token_embeds), self.hnorm(features)
        x = self.eh_proj(torch.cat([e, h] if layout.concat == "eh" else [h, e], dim=-1))  # (B, T, 2H) -> (B, T, H)
        x = self.block(x, position_ids, attention)
        return self.norm(x) if layout.recycled == "post" else x

    def readout(self, features: Tensor) -> Tensor:
        return features if self.config.layout.recycled == "post" else self.norm(features)
