"""Which engine class serves a head: chosen before training, because it fixes the layout, by ONE table. See docs/serving.md.

    EagleDeepSeekMTPModel        stock vLLM, method "eagle": dense Llama-like targets, and DeepSeek-V2/V3-like ones with their real MLA and MoE fields
    EagleMTPTrainHead            our plugin (mtp_vllm/, an entry point of this package): the other families, quantised targets, a reduced draft vocabulary
    DeepseekV3ForCausalLMNextN   SGLang, algorithm "EAGLE": DeepSeek-V2/V3-like targets
    MiMoMTP                      SGLang: dense Llama- and Qwen2-like targets, for heads that were trained in its layout

A class of the wrong layout does not crash, it only halves acceptance; so each row says what it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from mtp_train.config import HeadConfig
from mtp_train.target.ends import family_of

Config = dict[str, Any]
Tensors = dict[str, Tensor]
LAYER = "block.layers.0."
DENSE = ("llama", "mistral")
DENSE_LAYER = (
    "input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
DEEPSEEK = ("deepseek_v2", "deepseek_v3")
PLUGIN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite")
"""Families whose decoder layer `mtp_vllm/model.py` takes from vLLM."""
MIMO = ("llama", "qwen2")
COPIED = (  # fields of the target's config that the stock class reads
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "vocab_size", "bos_token_id", "eos_token_id", "rope_parameters", "rope_theta", "rope_scaling", "initializer_range", "attention_bias", "mlp_bias",
)  # fmt: skip
COPIED_DEEPSEEK = (
    *COPIED, "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "n_group",
    "num_experts_per_tok", "topk_group", "topk_method", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "moe_intermediate_size", "rope_interleave",
)  # fmt: skip
ONE_LAYER = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
PLAIN_ATTENTION = {  # switches the stock class from MLA and experts to the plain kinds
    "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "q_lora_rank": None, "kv_lora_rank": 16, "n_routed_experts": 1, "n_shared_experts": 0,
    "num_experts_per_tok": 1, "first_k_dense_replace": 9999, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class EngineClass:
    """One row of the table."""

    name: str
    head: str  # the kind it serves
    architecture: str  # in its config.json
    needs: str  # what has to be installed where it serves
    command: str  # that serves it
    refuses: Callable[[HeadConfig, Config], list[str]]  # (head, the target's config) -> reasons
    config: Callable[[HeadConfig, Config, int | None], Config]  # its config.json, with a draft vocabulary's size
    table: Callable[[list[str], Config], dict[str, list[str]]] | None = None  # engine tensor -> head tensors, joined by rows; None: the head's own names
    layer: str = ""  # the engine's name for the decoder layer
    zeros: Callable[[Tensors, Config], Tensors] = lambda _tensors, _target: {}  # what the engine wants beside, as zeros

    @property
    def keeps_draft_vocab(self) -> bool:
        """Whether a reduced draft vocabulary survives; else the head drafts from the whole one."""
        return self.table is None

    def to_engine(self, tensors: Tensors, target: Config) -> Tensors:
        """Rename and join by the table. Raises ValueError when a tensor of the head has no place, or the table names one it lacks."""
        if self.table is None:
            return dict(tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if name != "draft_vocab"}
        table = self.table(list(tensors), target)
        used = [name for names in table.values() for name in names]
        missing, left = sorted(set(used) - tensors.keys()), sorted(tensors.keys() - set(used))
        if missing or left:
            raise ValueError(f"{self.name}: the head lacks {missing} and has no place for {left}")
        out = _split_experts({key: torch.cat([tensors[name] for name in names]).contiguous() for key, names in table.items()}, self.layer)
        return out | self.zeros(out, target)

    def from_engine(self, tensors: Tensors, shapes: dict[str, torch.Size], target: Config) -> Tensors:
        """The inverse of `to_engine`, given the shapes of the head's tensors. Raises ValueError naming missing and unknown tensors."""
        if self.table is None:
            return dict(tensors)
        table, zeros = self.table(list(shapes), target), self.zeros(tensors, target)
        found = _join_experts({name: tensor for name, tensor in tensors.items() if name not in zeros}, self.layer)
        missing, unknown = sorted(table.keys() - found.keys() | zeros.keys() - tensors.keys()), sorted(found.keys() - table.keys())
        if missing or unknown:
            raise ValueError(f"{self.name}: missing {missing}, unknown {unknown}")
        out = {}
        for key, names in table.items():
            for name, part in zip(names, found[key].split([shapes[name][0] for name in names]), strict=True):
                out[name] = part
        return out


def _reasons(*found: tuple[bool, str]) -> list[str]:
    return [reason for failed, reason in found if failed]


def _plain_layer(head: HeadConfig, target: Config, concat: str, mask: bool) -> list[str]:
    """What every class refuses whose layer and layout are given."""
    concat_there, mask_there, recycled = (head.layout[name] for name in ("concat", "mask_position_0", "recycled"))
    return _reasons(
        (target.get("hidden_act", "silu") != "silu", f"it knows silu alone, the target has {target.get('hidden_act')}"),
        (concat_there != concat, f"it joins [{'; '.join(concat)}] (head.layout.concat={concat}), the head {concat_there}"),
        (mask_there != mask, f"it {'zeroes' if mask else 'does not zero'} the embedding at position 0 (head.layout.mask_position_0)"),
        (recycled != "post", f"it recycles the post-norm state, the head the {recycled}-norm one"),
        (head.num_layers != 1, f"it runs one layer, the head has {head.num_layers}"),
    )


def _without_quantisation(target: Config) -> Config:
    return {key: value for key, value in target.items() if key != "quantization_config"}  # the head itself is not quantised


# ---------------------------------------------------------------- vLLM, stock


def _stock_reasons(head: HeadConfig, target: Config) -> list[str]:
    family = target["model_type"]
    head_dim = target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"]
    return _reasons(
        (family not in DENSE + DEEPSEEK, f"its block is a Llama or DeepSeek layer, the target is {family!r}"),
        (family in DENSE and head_dim * target["num_attention_heads"] != target["hidden_size"], f"it takes head_dim = hidden / heads, here it is {head_dim}"),
        (bool(target.get("attention_bias") or target.get("mlp_bias")), "it has no biases"),
        (bool(target.get("quantization_config")), "it would read the head in the target's quantisation"),
    ) + _plain_layer(head, target, "eh", mask=False)


def _stock_config(head: HeadConfig, target: Config, draft_vocab_size: int | None) -> Config:
    deepseek = target["model_type"] in DEEPSEEK
    out = {key: target[key] for key in (COPIED_DEEPSEEK if deepseek else COPIED) if target.get(key) is not None}
    out |= {"model_type": "deepseek_v3", "moe_layer_freq": 1, **ONE_LAYER}
    if not deepseek:
        return out | PLAIN_ATTENTION | {"moe_intermediate_size": out["intermediate_size"]}
    # vLLM numbers the draft's layer after the target's: 0 makes it an expert layer, a large number a dense one.
    return out | {"q_lora_rank": target.get("q_lora_rank"), "first_k_dense_replace": 9999 if head.dense_mlp else 0}


def _around(names: list[str], target: Config, layer: str, **outer: str) -> dict[str, list[str]]:
    """The head's outer tensors under the engine's names, and its layer's own under `layer`."""
    own = [f"{LAYER}{name}.weight" for name in DENSE_LAYER] if target["model_type"] in DENSE else [name for name in names if name.startswith(LAYER)]
    return {f"{key}.weight": [f"{name}.weight"] for name, key in outer.items()} | {layer + name.removeprefix(LAYER): [name] for name in own}


def _stock_table(names: list[str], target: Config) -> dict[str, list[str]]:
    table = _around(names, target, "layers.0.", eh_proj="fc", enorm="enorm", hnorm="hnorm", norm="norm")
    if target["model_type"] in DENSE:
        table["layers.0.self_attn.qkv_proj.weight"] = [table.pop(f"layers.0.self_attn.{name}_proj.weight")[0] for name in "qkv"]
    return table


def _split_experts(tensors: Tensors, layer: str) -> Tensors:
    """(experts, 2 x intermediate, hidden) and (experts, hidden, intermediate) -> one gate, up and down of each expert, as the engines read them."""
    out = dict(tensors)
    gate_up, down = (out.pop(f"{layer}mlp.experts.{name}", None) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None:
        return out
    for index in range(len(gate_up)):
        gate, up = gate_up[index].chunk(2)
        for name, part in (("gate", gate), ("up", up), ("down", down[index])):
            out[f"{layer}mlp.experts.{index}.{name}_proj.weight"] = part.contiguous()
    return out


def _join_experts(tensors: Tensors, layer: str) -> Tensors:
    out = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    num = len(tensors.keys() - out.keys()) // 3
    if num:
        experts = [[tensors[f"{layer}mlp.experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down")] for index in range(num)]
        out[f"{layer}mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        out[f"{layer}mlp.experts.down_proj"] = torch.stack([down for _, _, down in experts])
    return out


# ---------------------------------------------------------------- vLLM, our plugin


def _plugin_reasons(head: HeadConfig, target: Config) -> list[str]:
    return [] if target["model_type"] in PLUGIN else [f"it has no layer for target family {target['model_type']!r} (it has {', '.join(PLUGIN)})"]


def _plugin_config(head: HeadConfig, target: Config, draft_vocab_size: int | None) -> Config:
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


def _nextn_reasons(head: HeadConfig, target: Config) -> list[str]:
    family = target["model_type"]
    return _reasons(
        (family not in DEEPSEEK, f"its block is a DeepSeek layer, the target is {family!r}"),
        (family in DEEPSEEK and head.dense_mlp, "its MLP has experts, the head a dense one (head.dense_mlp)"),
    ) + _plain_layer(head, target, "eh", mask=False)


def _nextn_table(names: list[str], target: Config) -> dict[str, list[str]]:
    layer = "model.layers.0."
    return _around(names, target, layer, eh_proj=f"{layer}eh_proj", enorm=f"{layer}enorm", hnorm=f"{layer}hnorm", norm=f"{layer}shared_head.norm")


def _mimo_reasons(head: HeadConfig, target: Config) -> list[str]:
    return _reasons(
        (target["model_type"] not in MIMO, f"its block is a Qwen2 layer (serves {', '.join(MIMO)}), the target is {target['model_type']!r}"),
        (bool(target.get("attention_bias") or target.get("mlp_bias")), "it has no biases of o_proj and MLP"),
    ) + _plain_layer(head, target, "he", mask=True)


def _mimo_table(names: list[str], target: Config) -> dict[str, list[str]]:
    layer = "model.mtp_layers.0."
    names_there = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "norm": "final_layernorm"}
    return _around(names, target, layer, **{name: layer + key for name, key in names_there.items()})


def _mimo_zeros(tensors: Tensors, target: Config) -> Tensors:
    """A Qwen2 layer has biases of q, k and v; a Llama head none."""
    if target["model_type"] == "qwen2":
        return {}
    weights = [f"model.mtp_layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    return {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in weights if name in tensors}


def _sglang_config(**fixed: Any) -> Callable[[HeadConfig, Config, int | None], Config]:
    return lambda head, target, draft_vocab_size: _without_quantisation(target) | ONE_LAYER | fixed


VLLM = """vllm serve {target} --speculative-config '{{"method": "eagle", "model": "<this directory>", "num_speculative_tokens": {steps}}}'"""
SGLANG = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE --speculative-draft-model-path <this directory> "
    "--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted}"
)
STOCK = EngineClass("EagleDeepSeekMTPModel", "mtp", "DeepseekV3ForCausalLM", "vLLM", VLLM, _stock_reasons, _stock_config, _stock_table, "layers.0.")
OURS = EngineClass("EagleMTPTrainHead", "mtp", "EagleMTPTrainHead", "vLLM and this package (pip install mtp-train)", VLLM, _plugin_reasons, _plugin_config)
NEXTN = EngineClass(
    "DeepseekV3ForCausalLMNextN", "mtp", "DeepseekV3ForCausalLMNextN", "SGLang", SGLANG, _nextn_reasons, _sglang_config(first_k_dense_replace=0), _nextn_table,
    "model.layers.0.",
)  # fmt: skip
MIMO_MTP = EngineClass("MiMoMTP", "mtp", "MiMoForCausalLM", "SGLang", SGLANG, _mimo_reasons, _sglang_config(model_type="qwen2"), _mimo_table, "", _mimo_zeros)
CLASSES = {"vllm": (STOCK, OURS), "vllm_plugin": (OURS,), "sglang": (NEXTN, MIMO_MTP)}
"""Export format -> its classes, the preferred one first."""


def choose_class(head: HeadConfig, target: Config, draft_vocab: bool, engine_format: str = "vllm") -> tuple[EngineClass, str]:
    """The engine class for a head, and why.

    Args:
        target: the target's config.json.
        draft_vocab: whether the head has a reduced draft vocabulary.
        engine_format: vllm (stock where it fits, else the plugin), vllm_plugin or sglang.

    Raises:
        ValueError: no class computes this head; with every reason.
    """
    refused: list[str] = []
    classes = [kind for kind in CLASSES[engine_format] if kind.head == head.kind]
    if not classes:
        raise ValueError(f"format {engine_format} has no class for a head of kind {head.kind}")
    for kind in classes:
        reasons = kind.refuses(head, target)
        if not reasons:
            lost = draft_vocab and not kind.keeps_draft_vocab
            limit = "; it drafts from the whole vocabulary: format vllm_plugin keeps the reduced one" if lost else ""
            return kind, f"{kind.name} ({kind.needs})" + (f", because {refused[0]}" if refused else "") + limit
        refused.append(f"{kind.name} does not fit: {'; '.join(reasons)}")
    raise ValueError(f"no class of format {engine_format} serves this head: " + ". ".join(refused))


def class_of(config: Config) -> EngineClass:
    """The row of a written config.json. Raises ValueError for another architecture."""
    wanted = (config.get("architectures") or ["none"])[0]
    found = {kind.architecture: kind for kinds in CLASSES.values() for kind in kinds}
    if wanted not in found:
        raise ValueError(f"architecture {wanted} is none that mtp-export writes ({', '.join(found)})")
    return found[wanted]
