"""EAGLE-1 (arXiv 2401.15077), as vLLM's EagleLlamaForCausalLM computes it: the MTP head without its norms.

x = fc [e ; h]   ->   the target's own decoder layer, its first one without input norm   ->   the target's frozen lm_head

h is the target's state after its final norm, and x, which learns to resemble it, goes round as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.config import HeadConfig
from mtp_train.heads.attention import Attention
from mtp_train.heads.base import DraftHead, Start
from mtp_train.heads.block import Block


@dataclass(frozen=True)
class Layout:
    """Nothing to choose."""


class Eagle1Head(DraftHead):
    """fc (starts as [0, I]) and one decoder layer of the target's kind."""

    Layout = Layout

    def __init__(self, config: HeadConfig, target_config: Any, start: Start | None = None):
        """Without `start` it will be loaded. Raises ValueError where the target has no layers that `config.init` could start from."""
        super().__init__(config)
        hidden = target_config.hidden_size
        self.block = Block(target_config, config.num_layers, config.dense_mlp)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        if start is not None:
            with torch.no_grad():
                self.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1))
            if config.init == "last_layer":
                self.block.start_from_last_layers(target_config, start.read_layer)
        self.block.layers[0].input_layernorm = nn.Identity()

    def fuse(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, -1]

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.fc(torch.cat([token_embeds, features], dim=-1))  # (B, T, 2H) -> (B, T, H)
        return self.block(x, position_ids, attention)

    def readout(self, features: Tensor) -> Tensor:
        return features
