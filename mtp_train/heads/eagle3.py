"""EAGLE-3 (arXiv 2503.01840) and 3.1, as vLLM's Eagle3LlamaForCausalLM computes them.

g = fc [taps]   ->   x = g + attention [input_layernorm(e) ; hidden_norm(g)],  x + mlp(x)   ->   norm   ->   an lm_head of its own

The taps are residuals of a few of the target's layers, and the attention is the target's own, reading twice the width. x goes round before the
norm, and so is the next step's g; in 3.1 after it. The lm_head reads the draft vocabulary and is trained; it starts as the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.checks import one_of
from mtp_train.config import HeadConfig
from mtp_train.heads.attention import Attention
from mtp_train.heads.base import DraftHead, Start
from mtp_train.heads.block import Block

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
"""Of a layer wired as Llama's."""


@dataclass(frozen=True)
class Layout:
    """See conf/head/eagle3.yaml."""

    taps: list[int]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    recycled: str

    def __post_init__(self) -> None:
        one_of("head.layout.recycled", self.recycled, ("post", "pre"))


class WideLayer(nn.Module):
    """A decoder layer of the target's kind whose attention reads [input_layernorm(e) ; hidden_norm(g)]: (B, T, 2H) -> (B, T, H).

    Raises ValueError for a family whose layer is wired otherwise than Llama's.
    """

    def __init__(self, layer: Any, hidden_norm: nn.Module, norm_before_residual: bool, config: Any):
        super().__init__()
        parts = {name for name, _ in layer.named_children()}
        if parts != set(PARTS) or hasattr(layer, "residual_multiplier") or not hasattr(layer.self_attn, "k_proj"):
            raise ValueError(f"an EAGLE-3 head is a layer wired as Llama's (q, k and v_proj; two norms): that of target {config.model_type!r} is not")
        self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm = (getattr(layer, name) for name in PARTS)
        self.hidden_norm, self.norm_before_residual = hidden_norm, norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wide = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
            nn.init.normal_(wide.weight, std=config.initializer_range)
            if old.bias is not None:
                nn.init.zeros_(wide.bias)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, **context: Any) -> Tensor:
        """The layer's own wiring, on the two halves [e ; g]."""
        e, g = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(g)
        residual = normed if self.norm_before_residual else g
        x = residual + self.self_attn(hidden_states=torch.cat([self.input_layernorm(e), normed], dim=-1), **context)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(DraftHead):
    """fc (starts by passing the last tap), a wide layer, a final norm and an lm_head (both start as the target's)."""

    Layout = Layout
    inits = ("identity",)

    def __init__(self, config: HeadConfig, target_config: Any, start: Start | None = None):
        """`config` is resolved; without `start` it will be loaded. Raises ValueError for a target whose layer cannot be made wide."""
        super().__init__(config)
        hidden, taps = target_config.hidden_size, len(self.layout.taps)
        self.block = Block(target_config, config.num_layers, config.dense_mlp)
        layers, norm = self.block.layers, self.block.make_norm
        layers[0] = WideLayer(layers[0], norm(hidden), self.layout.norm_before_residual, self.block.config)
        self.input_norm = norm(taps * hidden) if self.layout.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm(hidden) if self.layout.fc_norm else nn.Identity() for _ in range(taps))
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.norm = norm(hidden)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size or target_config.vocab_size, bias=False)
        if start is not None:
            with torch.no_grad():
                self.fc.weight.copy_(torch.cat([torch.zeros(hidden, (taps - 1) * hidden), torch.eye(hidden)], dim=1))
                self.norm.get_parameter("weight").copy_(start.final_norm)
                self.lm_head.weight.copy_(start.lm_head)

    @classmethod
    def resolve(cls, config: HeadConfig, num_layers: int) -> HeadConfig:
        """With the taps written out. Raises ValueError unless they are ascending layers of the target: engines sort them."""
        taps = config.layout.get("taps")
        if taps is not None and not (isinstance(taps, list) and all(type(tap) is int for tap in taps)):
            raise ValueError(f"head.layout.taps={taps} is not a list of layers, e.g. head.layout.taps=[1,2,3]")
        by_default, taps = taps is None, [2, num_layers // 2, num_layers - 3] if taps is None else taps
        if not taps or taps != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= num_layers:
            what = f"the default for {num_layers} layers" if by_default else f"the target has {num_layers} layers"
            raise ValueError(f"head.layout.taps={taps} are not distinct layers in ascending order ({what}): give others, e.g. head.layout.taps=[1,2,3]")
        return replace(config, layout={**config.layout, "taps": taps})

    def fuse(self, hidden_states: Tensor) -> Tensor:
        taps = self.input_norm(hidden_states[:, :, :-1].flatten(2)).chunk(len(self.fc_norm), dim=-1)
        return self.fc(torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-1))  # (B, T, taps x H) -> (B, T, H)

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.block(torch.cat([token_embeds, features], dim=-1), position_ids, attention)
        return self.norm(x) if self.layout.recycled == "post" else x

    def readout(self, features: Tensor) -> Tensor:
        return features if self.layout.recycled == "post" else self.norm(features)
