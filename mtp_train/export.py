"""Export a trained head: one key table an engine format.

    hf     <run_dir>/export/hf     head.json, target_config.json, head.safetensors: read back by mtp_train.checkpoint.load_head
    vllm   <run_dir>/export/vllm   what vLLM's EagleDeepSeekMTPModel loads (method "eagle"); dense Llama-like targets only

Every key is audited before writing, and the file is read back and compared with the head: a loader that skips a tensor would silently
serve a broken draft.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.checkpoint import HeadInfo, LoadedHead, choose, head_tensors, load_exactly, load_head, write_head
from mtp_train.heads.table import build_head
from mtp_train.interfaces import TargetInfo
from mtp_train.provenance import atomic_dir, sha256, write_provenance

log = logging.getLogger(__name__)

LAYER = "block.layers.0."
VLLM_KEYS = {  # tensor of the engine -> tensors of the head, joined by rows
    "fc.weight": ["eh_proj.weight"],
    "enorm.weight": ["enorm.weight"],
    "hnorm.weight": ["hnorm.weight"],
    "norm.weight": ["norm.weight"],
    "layers.0.self_attn.qkv_proj.weight": [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"],
    "layers.0.self_attn.o_proj.weight": [f"{LAYER}self_attn.o_proj.weight"],
    "layers.0.mlp.gate_proj.weight": [f"{LAYER}mlp.gate_proj.weight"],
    "layers.0.mlp.up_proj.weight": [f"{LAYER}mlp.up_proj.weight"],
    "layers.0.mlp.down_proj.weight": [f"{LAYER}mlp.down_proj.weight"],
    "layers.0.input_layernorm.weight": [f"{LAYER}input_layernorm.weight"],
    "layers.0.post_attention_layernorm.weight": [f"{LAYER}post_attention_layernorm.weight"],
}
LLAMA_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "vocab_size", "bos_token_id", "eos_token_id", "rope_parameters", "rope_theta", "rope_scaling", "initializer_range", "attention_bias", "mlp_bias",
)  # fmt: skip
VLLM_FIELDS = {  # selects vLLM's class, and switches its attention from MLA to the plain kind
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
    "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "q_lora_rank": None, "kv_lora_rank": 16, "n_routed_experts": 1, "n_shared_experts": 0,
    "num_experts_per_tok": 1, "first_k_dense_replace": 9999, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def check_vllm(loaded: LoadedHead, config: dict[str, Any]) -> None:
    """Raise ValueError with the reason when EagleDeepSeekMTPModel would compute something else than this head."""
    layout, head = loaded.info.config.layout, loaded.info.config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    reasons = [
        (config["model_type"] not in ("llama", "mistral"), f"its block is a plain Llama layer, the target is {config['model_type']!r}"),
        (head_dim * config["num_attention_heads"] != config["hidden_size"], f"it takes head_dim = hidden_size / heads, the target has {head_dim}"),
        (bool(config.get("attention_bias") or config.get("mlp_bias")), "it has no biases"),
        (layout.concat != "eh", f"it joins [e; h], the head was trained with {layout.concat}"),
        (layout.mask_position_0, "it does not zero the embedding at position 0, the head was trained with it zeroed"),
        (layout.recycled != "post", f"it recycles the post-norm state, the head was trained with {layout.recycled}"),
        (head.num_layers != 1, f"it runs one layer, the head has {head.num_layers}"),
    ]
    for failed, reason in reasons:
        if failed:
            raise ValueError(f"export.formats=vllm: vLLM's EagleDeepSeekMTPModel does not fit this head: {reason}")


def to_vllm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and join by the table. Raises ValueError when a tensor of the head has no place, or the table names one it lacks."""
    used = [name for names in VLLM_KEYS.values() for name in names]
    missing, left = sorted(set(used) - tensors.keys()), sorted(tensors.keys() - set(used))
    if missing or left:
        raise ValueError(f"export.formats=vllm: the head lacks {missing} and has no place for {left}")
    return {key: torch.cat([tensors[name] for name in names]).contiguous() for key, names in VLLM_KEYS.items()}


def from_vllm(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The inverse of `to_vllm`, given the shapes of the head's tensors."""
    if tensors.keys() != VLLM_KEYS.keys():
        raise ValueError(f"vLLM directory: missing {sorted(VLLM_KEYS.keys() - tensors.keys())}, unknown {sorted(tensors.keys() - VLLM_KEYS.keys())}")
    out = {}
    for key, names in VLLM_KEYS.items():
        for name, part in zip(names, tensors[key].split([shapes[name][0] for name in names]), strict=True):
            out[name] = part
    return out


def read_vllm(folder: Path, info: HeadInfo, target_config: dict[str, Any]) -> LoadedHead:
    """The head of a vLLM directory, strictly: the directory carries tensors and engine config, `info` says what they are."""
    head = build_head(info.config, AutoConfig.for_model(**target_config))
    shapes = {name: parameter.shape for name, parameter in head.named_parameters()}
    load_exactly(head, from_vllm(load_file(folder / "model.safetensors"), shapes), str(folder))
    return LoadedHead(head.eval().requires_grad_(False), info, None)


def write_hf(folder: Path, loaded: LoadedHead, target_config: dict[str, Any]) -> None:
    """The neutral format."""
    write_head(folder, loaded.head, loaded.info, loaded.draft_vocab, target_config)


def write_vllm(folder: Path, loaded: LoadedHead, target_config: dict[str, Any]) -> None:
    """The first vLLM class: weights, its config.json, and the command that serves it."""
    check_vllm(loaded, target_config)
    if loaded.draft_vocab is not None:
        log.info("vllm: this class has no draft vocabulary; the head drafts from the whole one there")
    save_file(to_vllm(head_tensors(loaded.head, None)), folder / "model.safetensors", metadata={"format": "pt"})
    config = {**{key: target_config[key] for key in LLAMA_KEYS if target_config.get(key) is not None}, **VLLM_FIELDS}
    config.update(moe_intermediate_size=config["intermediate_size"], torch_dtype=loaded.info.target.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(serving_note(loaded.info.target, loaded.info.unroll_steps))


def serving_note(target: TargetInfo, num_draft_tokens: int) -> str:
    """How vLLM serves the directory."""
    speculative = json.dumps({"method": "eagle", "model": "<this directory>", "num_speculative_tokens": num_draft_tokens})
    return f"# MTP draft head for {target.name}\n\nServe it with vLLM:\n\n    vllm serve <target> --speculative-config '{speculative}'\n"


WRITERS = {"hf": write_hf, "vllm": write_vllm}


def check_written(folder: Path, name: str, loaded: LoadedHead, target_config: dict[str, Any]) -> None:
    """Read the directory back and compare every tensor."""
    again = load_head(folder) if name == "hf" else read_vllm(folder, loaded.info, target_config)
    for key, tensor in head_tensors(loaded.head, None).items():
        assert torch.equal(head_tensors(again.head, None)[key], tensor), f"{folder}: {key} was not written as it is"


def export(config: cfg.Config) -> None:
    """Write the configured formats from a checkpoint; a format that is there already, made from the same head, is left alone."""
    run_dir = Path(config.run_dir)
    source = choose(run_dir / "checkpoints", config.export.checkpoint)
    mark = sha256(source / "head.safetensors")
    loaded = load_head(source)
    target_config = json.loads((source / "target_config.json").read_text())
    for name in config.export.formats:
        folder = run_dir / "export" / name
        stamp = folder / "provenance.json"
        if stamp.exists() and (folder / "source.sha256").read_text() == mark:
            log.info("export %s is complete: %s", name, folder)
            continue
        if folder.exists():
            shutil.rmtree(folder)
        with atomic_dir(folder) as temporary:
            WRITERS[name](temporary, loaded, target_config)
            check_written(temporary, name, loaded, target_config)
            write_provenance(temporary, asdict(config))
            (temporary / "source.sha256").write_text(mark)
        log.info("exported step %d as %s: %s", loaded.info.step, name, folder)


def main() -> None:
    """Console script mtp-export."""
    cli.main(__doc__, export)


if __name__ == "__main__":
    main()
