"""The target's own decoder layer, built from its transformers class and config, and called with our attention.

Rope scaling, qk-norm, biases, MLA, (1+w) norms and residual multipliers match the target by construction: no layer is copied.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtp_train.heads.attention import Attention
from mtp_train.heads.base import ReadLayer

ATTENTION_NAME = "mtp_head"
FULL = "full_attention"


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Attention,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; the layer hands `attention_mask` through untouched, so it carries our Attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_mask(module.layer_idx, query, key, value, scale, softcap), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _dispatch)


def block_config(target_config: Any, num_layers: int, dense_mlp: bool) -> Any:
    """The target's config, cut to the head's layers: full attention, and a dense or a mixture-of-experts MLP."""
    config = copy.deepcopy(target_config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = num_layers, 2, None
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the head's own weights are trained, so plain
    if getattr(config, "layer_types", None):
        if FULL not in config.layer_types:
            raise ValueError(f"target {config.model_type!r} has no {FULL} layer; its kinds are {sorted(set(config.layer_types))}")
        config.layer_types = [FULL] * num_layers
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = ["dense" if dense_mlp else "sparse"] * num_layers
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = num_layers if dense_mlp else 0
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = list(range(num_layers)) if dense_mlp else [], 1
    return config


def like_the_block(target_config: Any) -> list[int]:
    """The target's layers of the kind that the block has: full attention, rotated."""
    num = target_config.num_hidden_layers
    kinds, rotated = (getattr(target_config, name, None) or [default] * num for name, default in (("layer_types", FULL), ("no_rope_layers", 1)))
    return [index for index in range(num) if kinds[index] == FULL and rotated[index]]


def _keep_buffers(layer: nn.Module) -> None:
    """Make a layer's saved buffers (DeepSeek-V3's balance of experts) frozen parameters: they are saved, loaded and exported as all others are."""
    for module in layer.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _exactly(forward: Any, hidden_states: Tensor, *args: Any) -> Any:
    """Without autocast: which experts a token meets must not differ between training and a target that decides it in float32."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        return forward(hidden_states.float(), *args)


def _autocast(module: nn.Module, forward: Any, hidden_states: Tensor, *args: Any) -> Any:
    """With the weights cast, as autocast casts those of a Linear: it does not know the products of batched experts."""
    device = hidden_states.device.type
    if not torch.is_autocast_enabled(device):
        return forward(hidden_states, *args)
    dtype, own = torch.get_autocast_dtype(device), module._parameters
    module._parameters = {name: None if parameter is None else parameter.to(dtype) for name, parameter in own.items()}  # type: ignore[misc]
    try:
        return forward(hidden_states.to(dtype), *args)
    finally:
        module._parameters = own


def _heed_autocast(layer: nn.Module) -> None:
    """Mixtures of experts under autocast: the router in float32, the experts in the type of all other products."""
    for module in layer.modules():
        if type(module).__name__.endswith("Router"):
            module.forward = partial(_exactly, module.forward)
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            module.forward = partial(_autocast, module, module.forward)


class Block(nn.Module):
    """`num_layers` decoder layers of the target's kind, (B, T, H) -> (B, T, H), freshly initialised as the family does."""

    def __init__(self, target_config: Any, num_layers: int, dense_mlp: bool):
        super().__init__()
        config = block_config(target_config, num_layers, dense_mlp)
        decoder = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager")
        self.layers: nn.ModuleList = decoder.layers
        if dense_mlp and any("experts" in name for name, _ in self.layers.named_modules()):
            raise ValueError(f"target {config.model_type!r} has no dense MLP that head.dense_mlp=true could take: set it to false")
        for layer in self.layers:
            _keep_buffers(layer)
            _heed_autocast(layer)
        self.rotary = decoder.rotary_emb
        self.rotary_args = (FULL,) if "layer_type" in inspect.signature(type(self.rotary).forward).parameters else ()
        decoder.config._attn_implementation = ATTENTION_NAME  # the layers hold this same config
        self.norm_class, self.norm_eps = type(decoder.norm), decoder.config.rms_norm_eps
        self.decoder_class, self.config = type(decoder), decoder.config

    def start_from_last_layers(self, target_config: Any, read_layer: ReadLayer) -> None:
        """Start from the target's last layers of the block's kind. Raises ValueError where it has too few."""
        usable, num = like_the_block(target_config), len(self.layers)
        if len(usable) < num:
            raise ValueError(f"head.init=last_layer: the target has {len(usable)} layers of the block's kind, head.num_layers is {num}")
        self.load_layers([read_layer(index) for index in usable[-num:]])

    def load_layers(self, layers: list[dict[str, Tensor]]) -> None:
        """Start from layers of the target as its checkpoint stores them, by the names within a layer; transformers converts what it keeps otherwise.

        Raises ValueError naming the tensors that are missing, unknown or misshapen.
        """
        kind, config = self.decoder_class, copy.deepcopy(self.config)
        tensors = {f"layers.{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in layer.items()}
        tensors |= {"embed_tokens.weight": torch.zeros(2, config.hidden_size), "norm.weight": torch.zeros(config.hidden_size)}  # of a whole decoder, unused
        loaded, report = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, ignore_mismatched_sizes=True
        )
        faults = {name: sorted(map(str, report[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}
        if any(faults.values()):
            found = "; ".join(f"{name}: {', '.join(keys[:4])}" for name, keys in faults.items() if keys)
            raise ValueError(f"the target's layer does not fit the head's block ({found}): see head.dense_mlp")
        for layer in loaded.layers:
            _keep_buffers(layer)
        self.layers.load_state_dict(loaded.layers.state_dict())

    def forward(self, hidden_states: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        """Run the layers at `position_ids` (B, T)."""
        rotation = self.rotary(hidden_states, position_ids, *self.rotary_args)
        for layer in self.layers:
            out = layer(hidden_states, attention_mask=attention, position_ids=position_ids, position_embeddings=rotation)
            hidden_states = out[0] if isinstance(out, tuple) else out
        return hidden_states

    def make_norm(self, size: int) -> nn.Module:
        """An RMSNorm of the target's own class (gain w or 1+w), with the target's eps, as an identity gain."""
        return self.norm_class(size, eps=self.norm_eps)
