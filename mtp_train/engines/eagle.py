"""EAGLE-1 and EAGLE-3 heads in the engines: what each class refuses, its config.json and its names of tensors, and what published ones say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtp_train.checkpoint import HeadInfo
from mtp_train.config import HeadConfig
from mtp_train.engines.row import COPIED_EAGLE, DENSE, LAYER, Config, Tensors, reasons_of

LLAMA_LIKE = (*DENSE, "qwen2")
"""Families whose layer the engines' Llama layer computes."""
TAPS = "eagle_aux_hidden_state_layer_ids"


def reasons(*families: str, biases: bool = True) -> Callable[[HeadConfig, Config], list[str]]:
    """Of a class with a layer of these families."""

    def refuse(head: HeadConfig, target: Config) -> list[str]:
        family, biased = target["model_type"], bool(target.get("attention_bias") or target.get("mlp_bias"))
        return reasons_of(
            (family not in families, f"its layer is that of {', '.join(families)}, the target is {family!r}"),
            (target.get("hidden_act", "silu") != "silu", f"it knows silu alone, the target has {target.get('hidden_act')}"),
            (biased and (family == "qwen3" or not biases), "it has no biases"),
        )

    return refuse


def speculators_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why vLLM or speculators do not compute a head in the format of speculators."""
    layout = head.layout
    return reasons(*LLAMA_LIKE, "qwen3")(head, target) + reasons_of(
        (len(layout["taps"]) != 3, f"vLLM takes three tapped layers of this format, the head has {len(layout['taps'])}"),
        (layout["norm_before_fc"] and layout["fc_norm"], "it has head.layout.norm_before_fc or fc_norm, not both"),
    )


def sglang_reasons(head: HeadConfig, target: Config) -> list[str]:
    """Why not every SGLang computes an EAGLE-3 head."""
    layout, taps = head.layout, head.layout["taps"]
    extra = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm") if layout[name]] + ["recycled"] * (layout["recycled"] == "post")
    return reasons(*DENSE, biases=False)(head, target) + reasons_of(
        (head.num_layers != 1, f"it runs one layer, the head has {head.num_layers}"),
        (bool(extra), f"not every version of it knows head.layout.{', '.join(extra)}"),
        # Until 2026-05 ids were one less than the residual's, since then where the first is 1 (sglang pull request 25454): both read [1, ...] alike.
        (len(taps) != 3 or taps[0] != 2 or taps[-1] >= target["num_hidden_layers"], f"its versions agree on three taps that begin with 2, the head has {taps}"),
    )


def table(first: str) -> Callable[[list[str], Config], dict[str, list[str]]]:
    """The first layer under `first`, more of them as layers.1 and so on; all else as the head has it."""

    def rename(names: list[str], target: Config) -> dict[str, list[str]]:
        return {name.replace(LAYER, first).removeprefix("block."): [name] for name in names}

    return rename


def bias_zeros(*more: str) -> Callable[[Tensors, Config], Tensors]:
    """A Qwen2 layer has biases of q, k and v, the engines' Llama layer of o_proj too; and what else a class has and no head."""

    def zeros(tensors: Tensors, target: Config) -> Tensors:
        biased = [name for name in tensors if name.endswith("o_proj.weight")] if target["model_type"] == "qwen2" else []
        names = [*biased, *(name for name in more if name in tensors)]
        return {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in names}

    return zeros


def config_1(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """Of EAGLE-1: that of the head's layers."""
    family, kept = target["model_type"], {key: target[key] for key in COPIED_EAGLE if target.get(key) is not None}
    biases = {"attention_bias": True} if family == "qwen2" else {}
    kind = "qwen3" if family == "qwen3" else "llama"
    return kept | biases | {"model_type": kind, "num_hidden_layers": info.config.num_layers, "tie_word_embeddings": False}


def _own_3(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """What EAGLE-3 adds to the config of its layer."""
    layout = dict(info.config.layout)
    taps, recycled = layout.pop("taps"), layout.pop("recycled")
    return {"draft_vocab_size": draft_vocab_size or target["vocab_size"], TAPS: taps, "norm_output": recycled == "post", **layout}


def config_3(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """Of EAGLE-3, taps in vLLM's numbering, which is ours."""
    own = _own_3(info, target, draft_vocab_size)
    return config_1(info, target, draft_vocab_size) | own | {"num_aux_hidden_states": len(own[TAPS]), "target_hidden_size": target["hidden_size"]}


def sglang_config(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """As vLLM's, and the taps once more where SGLang reads them, in its numbering."""
    numbered = {TAPS: [layer - 1 for layer in info.config.layout["taps"]], "use_aux_hidden_state": True}
    return config_3(info, target, draft_vocab_size) | {"eagle_config": numbered}


def speculators_config(info: HeadInfo, target: Config, draft_vocab_size: int | None) -> Config:
    """As `Eagle3SpeculatorConfig` of speculators 0.9 is saved."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": info.unroll_steps, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": info.target.name, "architectures": target.get("architectures") or []}
    algorithm = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy], "verifier": verifier}
    layer = config_1(info, target, draft_vocab_size)
    own = {"speculators_model_type": "eagle3", "speculators_config": algorithm, "transformer_layer_config": layer, "embed_requires_grad": False}
    return own | _own_3(info, target, draft_vocab_size)


def layout_3(config: Config) -> dict[str, Any]:
    """Of a published config.json. Raises ValueError where engines read it in different ways."""
    nested = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError("the head reads no tapped layers (use_aux_hidden_state: false): not an EAGLE-3 head as mtp-train has it")
    taps = config.get(TAPS)
    if not taps and (taps := nested.get(TAPS)) and taps[0] == 1:
        raise ValueError(
            f"{TAPS} {taps} within eagle_config: SGLang reads the residuals after layers {[layer + 1 for layer in taps]}, vLLM after {taps}. "
            f"Say which were meant: add {TAPS} beside eagle_config, in vLLM's numbering"
        )
    if "speculators_model_type" in config and "norm_before_residual" not in config:
        raise ValueError("config.json lacks norm_before_residual, which vLLM takes for true and speculators for false: add it")
    flags = {name: bool(config.get(name, False)) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    flags["norm_before_fc"] = bool(nested.get("norm_before_fc", flags["norm_before_fc"]))
    return {"taps": taps, **flags, "recycled": "post" if config.get("norm_output") else "pre"}
