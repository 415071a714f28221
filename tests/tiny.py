"""Random tiny targets of every family: 4 layers, hidden 64, norms away from 1 so that a forgotten one shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from tests.toy import toy_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ROPE3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama_rope3": (LlamaConfig, {"rope_parameters": ROPE3}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "phi3": (Phi3Config, {}),
    "smollm3": (SmolLM3Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "head_dim": 16}),
    "qwen3_next": (Qwen3NextConfig, {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32, "head_dim": 16}),
    "gemma": (GemmaConfig, {"head_dim": 16}),
    "gemma2": (Gemma2Config, GEMMA),
    "gemma3": (Gemma3TextConfig, {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "granite": (GraniteConfig, {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "deepseek_v2": (DeepseekV2Config, MLA),
    "deepseek_v3": (DeepseekV3Config, {**MLA, "q_lora_rank": 24}),
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The config of a family's tiny model; "multimodal" is Gemma 3 with eyes, its language model one level down."""
    if family == "multimodal":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
        return Gemma3Config(text_config=tiny_config("gemma3", **overrides).to_dict(), vision_config=vision, mm_tokens_per_image=4)
    kind, extra = FAMILIES[family]
    return kind(**{**SIZES, **extra, **overrides})


def tiny_target(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model, in eval mode."""
    torch.manual_seed(seed)
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if family == "gemma2" else "sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model.to(dtype)


def save_tiny(model: Any, folder: Path, shard: bool = False, template: str = "chatml") -> Path:
    """Save with a toy tokenizer, in one file or several."""
    model.save_pretrained(folder, max_shard_size="100KB" if shard else "5GB")
    toy_tokenizer(template).save_pretrained(folder)
    return folder
