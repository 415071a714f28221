"""The RMSNorm-restored MTP head (the norms as DeepSeek-V3, arXiv 2412.19437, eq. 21; recycled post-norm).

x = eh_proj [enorm(e) ; hnorm(h)]   ->   the target's own decoder layer   ->   norm   ->   the target's frozen lm_head
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.config import HeadConfig
from mtp_train.heads.attention import Attention
from mtp_train.heads.base import DraftHead
from mtp_train.heads.block import Block, like_the_block

ReadLayer = Callable[[int], dict[str, Tensor]]
"""The tensors that the target's checkpoint holds of layer N, by their names within the layer; none where it has no such layer."""
NATIVE = {"enorm.weight": "enorm", "hnorm.weight": "hnorm", "shared_head.norm.weight": "norm", "eh_proj.weight": "eh_proj"}
"""DeepSeek-V3's own MTP layer, stored after the last decoder layer: tensor -> our module. The rest is the decoder layer and copies of the ends."""
ENDS = ("embed_tokens.weight", "shared_head.head.weight")


class MTPHead(DraftHead):
    """enorm, hnorm, eh_proj (starts as [0, I]), one decoder layer of the target's kind, and a final norm (starts as the target's)."""

    def __init__(self, config: HeadConfig, target_config: Any, final_norm: Tensor | None = None, read_layer: ReadLayer | None = None):
        """`final_norm` (H,) is the target's own final gain, `read_layer` gives what `config.init` starts from; without them it will be loaded.

        Raises ValueError where the target has no layers that `config.init` could start from.
        """
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
        if read_layer is not None and config.init == "last_layer":
            self._start_from_last_layers(like_the_block(target_config), read_layer)
        elif read_layer is not None and config.init == "native":
            self._start_from_native(target_config.num_hidden_layers, read_layer)

    def _start_from_last_layers(self, usable: list[int], read_layer: ReadLayer) -> None:
        num = self.config.num_layers
        if len(usable) < num:
            raise ValueError(f"head.init=last_layer: the target has {len(usable)} layers of the block's kind, head.num_layers is {num}")
        self.block.load_layers([read_layer(index) for index in usable[-num:]])

    @torch.no_grad()
    def _start_from_native(self, index: int, read_layer: ReadLayer) -> None:
        if self.config.num_layers != 1:
            raise ValueError(f"head.init=native is one layer, head.num_layers is {self.config.num_layers}")
        layer = {name: tensor for name, tensor in read_layer(index).items() if name not in ENDS}
        missing = [f"layers.{index}.{name}" for name in NATIVE if name not in layer]
        if missing:
            raise ValueError(f"head.init=native: the target has no MTP layer of DeepSeek-V3's form; its checkpoint lacks {', '.join(missing)}")
        for name, module in NATIVE.items():
            tensor = layer.pop(name)
            if name == "eh_proj.weight" and self.config.layout.concat == "he":
                tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
            self.get_submodule(module).get_parameter("weight").copy_(tensor)
        self.block.load_layers([layer])

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
