"""MTP heads in the engines: what each class computes and refuses, its config.json and its names of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from mtp_train.checkpoint import HeadInfo
from mtp_train.config import HeadConfig
from mtp_train.engines.row import COPIED, DENSE, LAYER, Config, Tensors, reasons_of
from mtp_train.target.ends import family_of

DENSE_LAYER = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
PLUGIN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite")
"""Families whose decoder layer `mtp_vllm/model.py` takes from vLLM."""
MIMO = ("llama", "qwen2")
COPIED_DEEPSEEK = (
    *COPIED, "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "n_group",
    "num_experts_per_tok", "topk_group", "topk_method", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "moe_intermediate_size", "rope_interleave",
)  # fmt: skip
ONE_LAYER = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
PLAIN_ATTENTION = {  # switches the stock class from MLA and experts to the plain kinds
    "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "q_lora_rank": None, "kv_lora_rank": 16, "n_routed_experts": 1, "n_shared_experts": 0,
    "num_experts_per_tok": 1, "first_k_dense_replace": 9999, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


def _plain_layer(head: HeadConfig, target: Config, concat: str, mask: bool) -> list[str]:
    """What every class refuses whose layer and layout are given."""
    concat_there, mask_there, recycled = (head.layout[name] for name in ("concat", "mask_position_0", "recycled"))
    return reasons_of(
        (target.get("hidden_act", "silu") != "silu", f"it knows silu alone, the target has {target.get('hidden_act')}"),
        (concat_there != concat, f"it joins [{'; '.join(concat)}] (head.layout.concat={concat}), the head {concat_there}"),
        (mask_there != mask, f"it {'zeroes' if mask else 'does not zero'} the embedding at position 0 (head.layout.mask_position_0)"),
        (recycled != "post", f"it recycles the post-norm state, the head the {recycled}-norm one"),
        (head.num_layers != 1, f"it runs one layer, the head has {head.num_layers}"),
    )


def _without_quantisation(target: Config) -> Config:
    return {key: value for key, value in target.items() if key != "quantization_config"}  # the head itself is not quantised


# ---------------------------------------------------------------- vLLM, stock


def stock_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why EagleDeepSeekMTPModel does not compute a head."""
    family = target["model_type"]
    head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    return reasons_of(
        (family not in DENSE + DEEPSEEK, f"its block is a Llama or DeepSeek layer, the target is {family!r}"),
        (family in DENSE and head_dim * target["num_attention_heads"] != target["hidden_size"], f"it takes head_dim = hidden / heads, here it is {head_dim}"),
        (bool(target.get("attention_bias") or target.get("mlp_bias")), "it has no biases"),
        (bool(target.get("quantization_config")), "it would read the head in the target's quantisation"),
    ) + _plain_layer(head, target, "eh", mask=False)


def stock_config(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """Of EagleDeepSeekMTPModel: with the target's real MLA and MoE fields, or switched to the plain kinds."""
    deepseek = target["model_type"] in DEEPSEEK
    out = {key: target[key] for key in (COPIED_DEEPSEEK if deepseek else COPIED) if target.get(key) is not None}
    out |= {"model_type": "deepseek_v3", "moe_layer_freq": 1, **ONE_LAYER}
    if not deepseek:
        return out | PLAIN_ATTENTION | {"moe_intermediate_size": out["intermediate_size"]}
    # vLLM numbers the draft's layer after the target's: 0 makes it an expert layer, a large number a dense one.
    return out | {"q_lora_rank": target.get("q_lora_rank"), "first_k_dense_replace": 9999 if info.config.dense_mlp else 0}


def _around(names: list[str], target: Config, layer: str, **outer: str) -> dict[str, list[str]]:
    """The head's outer tensors under the engine's names, and its layer's own under `layer`."""
    own = [f"{LAYER}{name}.weight" for name in DENSE_LAYER] if target["model_type"] in DENSE else [name for name in names if name.startswith(LAYER)]
    return {f"{key}.weight": [f"{name}.weight"] for name, key in outer.items()} | {layer + name.removeprefix(LAYER): [name] for name in own}


def stock_table(names: list[str], target: Config) -> dict[str, list[str]]:
    """Of EagleDeepSeekMTPModel: q, k and v are one tensor there."""
    table = _around(names, target, "layers.0.", eh_proj="fc", enorm="enorm", hnorm="hnorm", norm="norm")
    if target["model_type"] in DENSE:
        table["layers.0.self_attn.qkv_proj.weight"] = [table.pop(f"layers.0.self_attn.{name}_proj.weight")[0] for name in "qkv"]
    return table


# ---------------------------------------------------------------- vLLM, our plugin


def own_table(names: list[str], target: Config) -> dict[str, list[str]]:
    """Of our plugin: the head's own names."""
    return {name: [name] for name in names}


def plugin_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why our plugin does not compute a head."""
    return [] if target["model_type"] in PLUGIN else [f"it has no layer for target family {target['model_type']!r} (it has {', '.join(PLUGIN)})"]


def plugin_config(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """Of our plugin: the target's config, and a section of what its family and the head's layout add."""
    head = info.config
    known = AutoConfig.for_model(**target)
    family = family_of(known)
    extra = {
        "family": target["model_type"], **head.layout,
        "gain_offset": family.gain_offset, "embed_scale": family.embed_scale(known) if family.embed_scale else None, "rounds_scale": family.rounds_scale,
        "logit_divisor": family.logit_divisor(known) if family.logit_divisor else None, "softcap": family.softcap(known) if family.softcap else None,
        "draft_vocab_size": draft_vocab_size,
    }  # fmt: skip
    kept = {key: value for key, value in _without_quantisation(target).items() if key != "layer_types"}
    more = {"num_hidden_layers": head.num_layers, "tie_word_embeddings": False, "mtp_train": extra}
    return kept | more | ({"layer_types": ["full_attention"] * head.num_layers} if target.get("layer_types") else {})


# ---------------------------------------------------------------- SGLang


def nextn_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why SGLang's DeepseekV3ForCausalLMNextN does not compute a head."""
    family = target["model_type"]
    return reasons_of(
        (family not in DEEPSEEK, f"its block is a DeepSeek layer, the target is {family!r}"),
        (family in DEEPSEEK and head.dense_mlp, "its MLP has experts, the head a dense one (head.dense_mlp)"),
    ) + _plain_layer(head, target, "eh", mask=False)


def nextn_table(names: list[str], target: Config) -> dict[str, list[str]]:
    """Of SGLang's DeepseekV3ForCausalLMNextN."""
    layer = "model.layers.0."
    return _around(names, target, layer, eh_proj=f"{layer}eh_proj", enorm=f"{layer}enorm", hnorm=f"{layer}hnorm", norm=f"{layer}shared_head.norm")


def mimo_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why SGLang's MiMoMTP does not compute a head."""
    return reasons_of(
        (target["model_type"] not in MIMO, f"its block is a Qwen2 layer (serves {', '.join(MIMO)}), the target is {target['model_type']!r}"),
        (bool(target.get("attention_bias") or target.get("mlp_bias")), "it has no biases of o_proj and MLP"),
    ) + _plain_layer(head, target, "he", mask=True)


def mimo_table(names: list[str], target: Config) -> dict[str, list[str]]:
    """Of SGLang's MiMoMTP."""
    layer = "model.mtp_layers.0."
    names_there = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "norm": "final_layernorm"}
    return _around(names, target, layer, **{name: layer + key for name, key in names_there.items()})


def mimo_zeros(tensors: Tensors, target: Config) -> Tensors:
    """A Qwen2 layer has biases of q, k and v; a Llama head none."""
    if target["model_type"] == "qwen2":
        return {}
    weights = [f"model.mtp_layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    return {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in weights if name in tensors}


def sglang_config(**fixed: Any) -> Callable[[HeadInfo, Config, int | None], Config]:
    """The target's config with one layer, and what a class fixes."""
    return lambda info, target, draft_vocab_size: _without_quantisation(target) | ONE_LAYER | fixed
