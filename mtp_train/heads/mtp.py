"""The RMSNorm-restored MTP head (the norms as DeepSeek-V3, arXiv 2412.19437, eq. 21; recycled post-norm).

x = eh_proj [enorm(e) ; hnorm(h)]   ->   the target's own decoder layer   ->   norm   ->   the target's frozen lm_head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.checks import one_of
from mtp_train.config import HeadConfig
from mtp_train.heads.attention import Attention
from mtp_train.heads.base import DraftHead, ReadLayer, Start
from mtp_train.heads.block import Block

NATIVE = {"enorm.weight": "enorm", "hnorm.weight": "hnorm", "shared_head.norm.weight": "norm", "eh_proj.weight": "eh_proj"}
"""DeepSeek-V3's own MTP layer, stored after the last decoder layer: tensor -> our module. The rest is the decoder layer and copies of the ends."""
ENDS = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class Layout:
    """See conf/head/mtp.yaml."""

    concat: str
    mask_position_0: bool
    recycled: str

    def __post_init__(self) -> None:
        one_of("head.layout.concat", self.concat, ("eh", "he"))
        one_of("head.layout.recycled", self.recycled, ("post", "pre"))


class MTPHead(DraftHead):
    """enorm, hnorm, eh_proj (starts as [0, I]), one decoder layer of the target's kind, and a final norm (starts as the target's)."""

    Layout = Layout
    inits = ("identity", "last_layer", "native")

    def __init__(self, config: HeadConfig, target_config: Any, start: Start | None = None):
        """Without `start` it will be loaded. Raises ValueError where the target has no layers that `config.init` could start from."""
        super().__init__(config)
        hidden = target_config.hidden_size
        self.block = Block(target_config, config.num_layers, config.dense_mlp)
        self.enorm = self.block.make_norm(hidden)
        self.hnorm = self.block.make_norm(hidden)
        self.norm = self.block.make_norm(hidden)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        if start is not None:
            self._start(start, target_config)

    @torch.no_grad()
    def _start(self, start: Start, target_config: Any) -> None:
        hidden = target_config.hidden_size
        zero, identity = torch.zeros(hidden, hidden), torch.eye(hidden)
        self.eh_proj.weight.copy_(torch.cat([zero, identity] if self.layout.concat == "eh" else [identity, zero], dim=1))
        self.norm.get_parameter("weight").copy_(start.final_norm)
        if self.config.init == "last_layer":
            self.block.start_from_last_layers(target_config, start.read_layer)
        elif self.config.init == "native":
            self._start_from_native(target_config.num_hidden_layers, start.read_layer)

    def _start_from_native(self, index: int, read_layer: ReadLayer) -> None:
        if self.config.num_layers != 1:
            raise ValueError(f"head.init=native is one layer, head.num_layers is {self.config.num_layers}")
        layer = {name: tensor for name, tensor in read_layer(index).items() if name not in ENDS}
        missing = [f"layers.{index}.{name}" for name in NATIVE if name not in layer]
        if missing:
            raise ValueError(f"head.init=native: the target has no MTP layer of DeepSeek-V3's form; its checkpoint lacks {', '.join(missing)}")
        for name, module in NATIVE.items():
            tensor = layer.pop(name)
            if name == "eh_proj.weight" and self.layout.concat == "he":
                tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
            self.get_submodule(module).get_parameter("weight").copy_(tensor)
        self.block.load_layers([layer])

    def fuse(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, -1]

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        if self.layout.mask_position_0:
            token_embeds = token_embeds * (position_ids != 0)[..., None].to(token_embeds.dtype)
        e, h = self.enorm(token_embeds), self.hnorm(features)
        x = self.eh_proj(torch.cat([e, h] if self.layout.concat == "eh" else [h, e], dim=-1))  # (B, T, 2H) -> (B, T, H)
        x = self.block(x, position_ids, attention)
        return self.norm(x) if self.layout.recycled == "post" else x

    def readout(self, features: Tensor) -> Tensor:
        return features if self.layout.recycled == "post" else self.norm(features)
