"""Which engine class serves a head: chosen before training, because it fixes the layout, by ONE table. See docs/serving.md.

    EagleDeepSeekMTPModel   stock vLLM, method "eagle": dense Llama-like targets, and DeepSeek-V2/V3-like ones with their real MLA and MoE fields
    EagleMTPTrainHead       our plugin (mtp_vllm/, an entry point of this package): the other families, and a reduced draft vocabulary

A class of the wrong layout does not crash, it only halves acceptance; so each row says what it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_train.config import HeadConfig
from mtp_train.target.ends import family_of

Config = dict[str, Any]
Tensors = dict[str, Tensor]
LAYER = "block.layers.0."
DENSE = ("llama", "mistral")
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
PLUGIN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite")
"""Families whose decoder layer `mtp_vllm/model.py` takes from vLLM."""
COMMON_KEYS = {  # tensor of the stock class -> tensors of the head, joined by rows
    "fc.weight": ["eh_proj.weight"],
    "enorm.weight": ["enorm.weight"],
    "hnorm.weight": ["hnorm.weight"],
    "norm.weight": ["norm.weight"],
    **{f"layers.0.{name}.weight": [f"{LAYER}{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")},
}
DENSE_MLP = {f"layers.0.mlp.{name}_proj.weight": [f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
QKV = {"layers.0.self_attn.qkv_proj.weight": [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]}
COPIED = (  # fields of the target's config that the stock class reads
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "vocab_size", "bos_token_id", "eos_token_id", "rope_parameters", "rope_theta", "rope_scaling", "initializer_range", "attention_bias", "mlp_bias",
)  # fmt: skip
COPIED_DEEPSEEK = (
    *COPIED, "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "n_group",
    "num_experts_per_tok", "topk_group", "topk_method", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "moe_intermediate_size", "rope_interleave",
)  # fmt: skip
STOCK = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "moe_layer_freq": 1}
PLAIN_ATTENTION = {  # switches the stock class from MLA and experts to the plain kinds
    "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "q_lora_rank": None, "kv_lora_rank": 16, "n_routed_experts": 1, "n_shared_experts": 0,
    "num_experts_per_tok": 1, "first_k_dense_replace": 9999, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class EngineClass:
    """One row of the table."""

    name: str
    needs: str  # what has to be installed where it serves
    refuses: Callable[[HeadConfig, Config, bool], list[str]]  # (head, the target's config, with a draft vocabulary) -> reasons
    config: Callable[[HeadConfig, Config, int | None], Config]  # its config.json
    to_engine: Callable[[Tensors, Config], Tensors]
    from_engine: Callable[[Tensors, dict[str, torch.Size], Config], Tensors]


def _stock_reasons(head: HeadConfig, target: Config, draft_vocab: bool) -> list[str]:
    layout, family = head.layout, target["model_type"]
    head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    found = [
        (family not in DENSE + DEEPSEEK, f"its block is a Llama or DeepSeek layer, the target is {family!r}"),
        (family in DENSE and head_dim * target["num_attention_heads"] != target["hidden_size"], f"it takes head_dim = hidden / heads, here it is {head_dim}"),
        (bool(target.get("attention_bias") or target.get("mlp_bias")), "it has no biases"),
        (target.get("hidden_act", "silu") != "silu", f"it knows silu alone, the target has {target.get('hidden_act')}"),
        (layout.concat != "eh", f"it joins [e; h], the head {layout.concat}"),
        (layout.mask_position_0, "it does not zero the embedding at position 0, the head does"),
        (layout.recycled != "post", f"it recycles the post-norm state, the head the {layout.recycled}-norm one"),
        (head.num_layers != 1, f"it runs one layer, the head has {head.num_layers}"),
    ]
    return [reason for failed, reason in found if failed]


def _stock_config(head: HeadConfig, target: Config, draft_vocab_size: int | None) -> Config:
    deepseek = target["model_type"] in DEEPSEEK
    out = {key: target[key] for key in (COPIED_DEEPSEEK if deepseek else COPIED) if target.get(key) is not None}
    out |= {**STOCK, "tie_word_embeddings": False}
    if not deepseek:
        return out | PLAIN_ATTENTION | {"moe_intermediate_size": out["intermediate_size"]}
    # vLLM numbers the draft's layer after the target's: 0 makes it an expert layer, a large number a dense one.
    return out | {"q_lora_rank": target.get("q_lora_rank"), "first_k_dense_replace": 9999 if head.dense_mlp else 0}


def _stock_table(names: list[str], target: Config) -> dict[str, list[str]]:
    """Engine tensor -> head tensors, joined by rows. Of experts, which transformers keeps in one tensor, see `_split_experts`."""
    if target["model_type"] in DENSE:
        return {**COMMON_KEYS, **QKV, **DENSE_MLP}
    own = [name for name in names if name.startswith(LAYER) and not any(name in joined for joined in COMMON_KEYS.values())]
    return {**COMMON_KEYS, **{"layers.0." + name.removeprefix(LAYER): [name] for name in own}}


def _split_experts(tensors: Tensors) -> Tensors:
    """(experts, 2 x intermediate, hidden) and (experts, hidden, intermediate) -> one gate, up and down of each expert, as the stock class reads them."""
    out = dict(tensors)
    gate_up, down = (out.pop(f"layers.0.mlp.experts.{name}", None) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None:
        return out
    for index in range(len(gate_up)):
        gate, up = gate_up[index].chunk(2)
        for name, part in (("gate", gate), ("up", up), ("down", down[index])):
            out[f"layers.0.mlp.experts.{index}.{name}_proj.weight"] = part.contiguous()
    return out


def _join_experts(tensors: Tensors) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    num = len(tensors.keys() - out.keys()) // 3
    if num:
        experts = [[tensors[f"layers.0.mlp.experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down")] for index in range(num)]
        out["layers.0.mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        out["layers.0.mlp.experts.down_proj"] = torch.stack([down for _, _, down in experts])
    return out


CORRECTION = "layers.0.mlp.gate.e_score_correction_bias"  # DeepSeek-V3's, a buffer that balances experts; a trained head keeps it at zero


def to_stock(tensors: Tensors, target: Config) -> Tensors:
    """Rename and join by the table. Raises ValueError when a tensor of the head has no place, or the table names one it lacks."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != "draft_vocab"}
    table = _stock_table(list(tensors), target)
    used = [name for names in table.values() for name in names]
    missing, left = sorted(set(used) - tensors.keys()), sorted(tensors.keys() - set(used))
    if missing or left:
        raise ValueError(f"EagleDeepSeekMTPModel: the head lacks {missing} and has no place for {left}")
    out = _split_experts({key: torch.cat([tensors[name] for name in names]).contiguous() for key, names in table.items()})
    if target.get("topk_method") == "noaux_tc" and "layers.0.mlp.gate.weight" in out:
        out[CORRECTION] = torch.zeros(len(out["layers.0.mlp.gate.weight"]))
    return out


def from_stock(tensors: Tensors, shapes: dict[str, torch.Size], target: Config) -> Tensors:
    """The inverse of `to_stock`, given the shapes of the head's tensors. Raises ValueError naming missing and unknown tensors."""
    table = _stock_table(list(shapes), target)
    found = _join_experts({name: tensor for name, tensor in tensors.items() if name != CORRECTION})
    if found.keys() != table.keys():
        raise ValueError(f"EagleDeepSeekMTPModel: missing {sorted(table.keys() - found.keys())}, unknown {sorted(found.keys() - table.keys())}")
    out = {}
    for key, names in table.items():
        for name, part in zip(names, found[key].split([shapes[name][0] for name in names]), strict=True):
            out[name] = part
    return out


def _plugin_reasons(head: HeadConfig, target: Config, draft_vocab: bool) -> list[str]:
    return [] if target["model_type"] in PLUGIN else [f"it has no layer for target family {target['model_type']!r} (it has {', '.join(PLUGIN)})"]


def _plugin_config(head: HeadConfig, target: Config, draft_vocab_size: int | None) -> Config:
    from transformers import AutoConfig

    known = AutoConfig.for_model(**target)
    family = family_of(known)
    extra = {
        "family": target["model_type"], "concat": head.layout.concat, "mask_position_0": head.layout.mask_position_0, "recycled": head.layout.recycled,
        "gain_offset": family.gain_offset, "embed_scale": family.embed_scale(known) if family.embed_scale else None, "rounds_scale": family.rounds_scale,
        "logit_divisor": family.logit_divisor(known) if family.logit_divisor else None, "softcap": family.softcap(known) if family.softcap else None,
        "draft_vocab_size": draft_vocab_size,
    }  # fmt: skip
    kept = {key: value for key, value in target.items() if key not in ("quantization_config", "layer_types")}
    more = {"num_hidden_layers": head.num_layers, "tie_word_embeddings": False, "mtp_train": extra, "architectures": ["EagleMTPTrainHead"]}
    return kept | more | ({"layer_types": ["full_attention"] * head.num_layers} if target.get("layer_types") else {})


def _same(tensors: Tensors, *_: Any) -> Tensors:
    return dict(tensors)


CLASSES = {
    "stock": EngineClass("EagleDeepSeekMTPModel", "vLLM", _stock_reasons, _stock_config, to_stock, from_stock),
    "plugin": EngineClass("EagleMTPTrainHead", "vLLM and this package (pip install mtp-train)", _plugin_reasons, _plugin_config, _same, _same),
}


def choose_class(head: HeadConfig, target: Config, draft_vocab: bool, wanted: str = "auto") -> tuple[EngineClass, str]:
    """The engine class for a head, and why.

    Args:
        target: the target's config.json.
        wanted: auto (stock where it fits, else the plugin), stock or plugin.

    Raises:
        ValueError: no class computes this head; with every reason.
    """
    refused: list[str] = []
    for name in ("stock", "plugin") if wanted == "auto" else (wanted,):
        kind = CLASSES[name]
        reasons = kind.refuses(head, target, draft_vocab)
        if not reasons:
            limit = "; it drafts from the whole vocabulary: format vllm_plugin keeps the reduced one" if name == "stock" and draft_vocab else ""
            return kind, f"{kind.name} ({kind.needs})" + (f", because {refused[0]}" if refused else "") + limit
        refused.append(f"{kind.name} does not fit: {'; '.join(reasons)}")
    raise ValueError("no vLLM class serves this head: " + ". ".join(refused))
