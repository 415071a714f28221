"""The RMSNorm-restored MTP head inside vLLM, around vLLM's own decoder layer of the target's family.

For targets that no stock class of vLLM fits (qk-norm, biases, head_dim other than hidden / heads, 1+w norms, scaled embeddings, logit
scale or softcap), and for a reduced draft vocabulary. `config.json` holds the target's own fields and a section `mtp_train` that says what the
head adds; `mtp_train/serving.py` writes it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

LAYERS = {  # family -> vLLM's decoder layer, and whether it takes the whole VllmConfig
    "llama": ("llama", "LlamaDecoderLayer", True),
    "mistral": ("llama", "LlamaDecoderLayer", True),
    "qwen2": ("qwen2", "Qwen2DecoderLayer", False),
    "qwen3": ("qwen3", "Qwen3DecoderLayer", False),
    "gemma2": ("gemma2", "Gemma2DecoderLayer", False),
    "gemma3_text": ("gemma3", "Gemma3DecoderLayer", False),
    "granite": ("granite", "GraniteDecoderLayer", False),
}


def make_layer(vllm_config: VllmConfig, config: Any, prefix: str) -> nn.Module:
    """vLLM's own decoder layer of the target's family, never quantised: a quantised target's head is plain."""
    module, name, whole = LAYERS[config.mtp_train["family"]]
    kind = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    if whole:
        plain = copy.copy(vllm_config)
        plain.quant_config = None
        return kind(plain, prefix=prefix, config=config)
    return kind(config, cache_config=vllm_config.cache_config, quant_config=None, prefix=prefix)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "hidden_states": 0})
class MTPTrainModel(nn.Module):
    """x = eh_proj [enorm(e); hnorm(h)] -> decoder layer -> norm."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str, first_layer: int):
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self.extra = self.config.mtp_train
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        if getattr(self.config, "layer_types", None):  # vLLM numbers draft layers after the target's
            self.config.layer_types = ["full_attention"] * (first_layer + self.config.num_hidden_layers)
        norm = GemmaRMSNorm if self.extra["gain_offset"] else RMSNorm
        self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, hidden, prefix=maybe_prefix(prefix, "embed_tokens"))
        names = [maybe_prefix(prefix, f"layers.{first_layer + index}") for index in range(self.config.num_hidden_layers)]
        self.layers = nn.ModuleList([make_layer(vllm_config, self.config, name) for name in names])
        self.eh_proj = ReplicatedLinear(
            2 * hidden, hidden, bias=False, params_dtype=vllm_config.model_config.dtype, prefix=maybe_prefix(prefix, "eh_proj"), return_bias=False
        )
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps=eps) for _ in range(3))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What lm_head reads, and the feature of the next step."""
        extra = self.extra
        embeds = self.embed_tokens(input_ids)
        if extra["embed_scale"] is not None:
            embeds = embeds * torch.tensor(extra["embed_scale"], dtype=embeds.dtype if extra["rounds_scale"] else torch.float32).to(embeds.dtype)
        if extra["mask_position_0"]:
            embeds = torch.where(positions[:, None] == 0, torch.zeros_like(embeds), embeds)
        parts = [self.enorm(embeds), self.hnorm(hidden_states)]
        x = self.eh_proj(torch.cat(parts if extra["concat"] == "eh" else parts[::-1], dim=-1))
        residual = None
        for layer in self.layers:
            out = layer(positions=positions, hidden_states=x, residual=residual) if extra["family"] != "granite" else layer(positions, x)
            x, residual = out if isinstance(out, tuple) else (out, None)
        x = x if residual is None else x + residual
        readout = self.norm(x)
        return readout, readout if extra["recycled"] == "post" else x

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class MTPTrainHead(nn.Module):
    """The draft model that vLLM's eagle proposer runs. Embedding and lm_head are the target's (vLLM shares them after loading)."""

    has_own_lm_head = False
    has_own_embed_tokens = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        first_layer = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        self.model = MTPTrainModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), first_layer=first_layer)
        vocab_size, extra = self.config.vocab_size, self.config.mtp_train
        self.lm_head = ParallelLMHead(vocab_size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        self.logits_processor = LogitsProcessor(vocab_size, scale=1 / (extra["logit_divisor"] or 1), soft_cap=extra["softcap"])
        self.draft_vocab = nn.Parameter(torch.zeros(extra["draft_vocab_size"] or 0, dtype=torch.long), requires_grad=False)
        self._rows: torch.Tensor | None = None  # lm_head's rows of the draft vocabulary

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs_embeds is not None:
            raise NotImplementedError("the mtp-train head drafts from token ids, not from multimodal embeddings")
        return self.model(input_ids, positions, hidden_states)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """(n, H) -> (n, V); what lies outside the draft vocabulary is never drafted."""
        if not len(self.draft_vocab):
            return self.logits_processor(self.lm_head, hidden_states)
        if get_tensor_model_parallel_world_size() > 1:  # lm_head is spread over ranks: compute all of it, then mask
            logits = self.logits_processor(self.lm_head, hidden_states)
            inside = None if logits is None else logits[:, self.draft_vocab]
        else:
            if self._rows is None:
                self._rows = self.lm_head.weight[self.draft_vocab]
            inside = torch.nn.functional.linear(hidden_states, self._rows) * self.logits_processor.scale
            if (cap := self.logits_processor.soft_cap) is not None:
                inside = torch.tanh(inside / cap) * cap
        if inside is None:
            return None
        return inside.new_full((len(inside), self.config.vocab_size), -math.inf).index_copy_(1, self.draft_vocab, inside)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Names are those of our own head.safetensors; a tensor without a place raises by name."""

        def rename(name: str) -> str:
            return name if name == "draft_vocab" else "model." + name.removeprefix("block.")

        AutoWeightsLoader(self).load_weights((rename(name), tensor) for name, tensor in weights)
