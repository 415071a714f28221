"""Which engine class serves a head: chosen before training, because it fixes the layout, by ONE table. See docs/serving.md.

    EagleDeepSeekMTPModel        stock vLLM: MTP for dense Llama-like targets, and for DeepSeek-V2/V3-like ones with their real MLA and MoE fields
    EagleMTPTrainHead            our plugin (mtp_vllm/, an entry point of this package): MTP for the other families, quantised targets, a draft vocabulary
    EagleLlamaForCausalLM        stock vLLM: EAGLE-1 with a Llama layer
    Eagle3LlamaForCausalLM       stock vLLM: EAGLE-3 and 3.1 with a Llama layer; Eagle3Qwen3ForCausalLM with a Qwen3 layer
    Eagle3DraftModel             the same EAGLE-3 heads in the format of the speculators library, which vLLM reads too
    DeepseekV3ForCausalLMNextN   SGLang: MTP for DeepSeek-V2/V3-like targets
    MiMoMTP                      SGLang: MTP for dense Llama- and Qwen2-like targets, for heads that were trained in its layout
    LlamaForCausalLMEagle(3)     SGLang: EAGLE-1 and EAGLE-3 with a Llama layer

A class of the wrong layout does not crash, it only halves acceptance; so each row says what it cannot do. `engines/row.py` says what a row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_train.config import HeadConfig
from mtp_train.engines import eagle, mtp
from mtp_train.engines.row import DENSE, Config, EngineClass

VLLM = """vllm serve {target} --speculative-config '{{"method": "{method}", "model": "<this directory>", "num_speculative_tokens": {steps}}}'"""
SGLANG = (
    "python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} --speculative-draft-model-path <this directory> "
    "--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafted}"
)
STOCK = EngineClass(
    "EagleDeepSeekMTPModel", "mtp", "DeepseekV3ForCausalLM", "vLLM", VLLM, "eagle", mtp.stock_reasons, mtp.stock_config, mtp.stock_table, layer="layers.0.",
)  # fmt: skip
OURS = EngineClass(
    "EagleMTPTrainHead", "mtp", "EagleMTPTrainHead", "vLLM and this package (pip install mtp-train)", VLLM, "eagle", mtp.plugin_reasons, mtp.plugin_config,
    mtp.own_table, vocab="draft_vocab",
)  # fmt: skip
EAGLE1 = EngineClass(
    "EagleLlamaForCausalLM", "eagle1", "LlamaForCausalLM", "vLLM", VLLM, "eagle", eagle.reasons(*eagle.LLAMA_LIKE), eagle.config_1,
    eagle.table("layers.0."), zeros=eagle.bias_zeros(), also=("EagleLlamaForCausalLM",), layout=lambda config: {}, block="llama",
)  # fmt: skip
EAGLE3 = EngineClass(
    "Eagle3LlamaForCausalLM", "eagle3", "LlamaForCausalLMEagle3", "vLLM", VLLM, "eagle3", eagle.reasons(*eagle.LLAMA_LIKE), eagle.config_3,
    eagle.table("midlayer."), zeros=eagle.bias_zeros(), vocab="d2t", also=("Eagle3LlamaForCausalLM",), layout=eagle.layout_3, block="llama",
)  # fmt: skip
EAGLE3_QWEN3 = replace(
    EAGLE3, name="Eagle3Qwen3ForCausalLM", architecture="Eagle3Qwen3ForCausalLM", refuses=eagle.reasons("qwen3"), also=(), block="qwen3",
)  # fmt: skip
SPECULATORS = EngineClass(
    "Eagle3DraftModel", "eagle3", "Eagle3DraftModel", "vLLM, or the speculators library", VLLM, "eagle3", eagle.speculators_reasons, eagle.speculators_config,
    eagle.table("layers.0."), zeros=eagle.bias_zeros(), vocab="d2t", also=("Eagle3Speculator",), layout=eagle.layout_3,
)  # fmt: skip
NEXTN = EngineClass(
    "DeepseekV3ForCausalLMNextN", "mtp", "DeepseekV3ForCausalLMNextN", "SGLang", SGLANG, "EAGLE", mtp.nextn_reasons, mtp.sglang_config(first_k_dense_replace=0),
    mtp.nextn_table, layer="model.layers.0.",
)  # fmt: skip
MIMO_MTP = EngineClass(
    "MiMoMTP", "mtp", "MiMoForCausalLM", "SGLang", SGLANG, "EAGLE", mtp.mimo_reasons, mtp.sglang_config(model_type="qwen2"), mtp.mimo_table,
    zeros=mtp.mimo_zeros,
)  # fmt: skip
SGLANG_EAGLE1 = replace(
    EAGLE1, name="LlamaForCausalLMEagle", architecture="LlamaForCausalLMEagle", needs="SGLang", command=SGLANG, method="EAGLE",
    refuses=eagle.reasons(*DENSE, biases=False), zeros=eagle.bias_zeros("fc.weight"), also=(),
)  # fmt: skip
SGLANG_EAGLE3 = replace(  # of the architecture of EAGLE3, and of its tensors: vLLM loads it as well
    EAGLE3, name="LlamaForCausalLMEagle3", needs="SGLang", command=SGLANG, method="EAGLE3", refuses=eagle.sglang_reasons,
    config=eagle.sglang_config, also=(),
)  # fmt: skip
CLASSES = {
    "vllm": (STOCK, OURS, EAGLE1, EAGLE3, EAGLE3_QWEN3), "vllm_plugin": (OURS,), "speculators": (SPECULATORS,),
    "sglang": (NEXTN, MIMO_MTP, SGLANG_EAGLE1, SGLANG_EAGLE3),
}  # fmt: skip
"""Export format -> its classes, the preferred one first."""


def choose_class(head: HeadConfig, target: Config, draft_vocab: bool, engine_format: str = "vllm") -> tuple[EngineClass, str]:
    """The engine class for a head, and why.

    Args:
        target: the target's config.json.
        draft_vocab: whether the head has a reduced draft vocabulary.
        engine_format: vllm (stock where it fits, else the plugin), vllm_plugin, speculators or sglang.

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
            kept = "; format vllm_plugin keeps the reduced one" if any(other.head == head.kind for other in CLASSES["vllm_plugin"]) else ""
            limit = f"; it drafts from the whole vocabulary{kept}" if lost else ""
            return kind, f"{kind.name} ({kind.needs})" + (f", because {refused[0]}" if refused else "") + limit
        refused.append(f"{kind.name} does not fit: {'; '.join(reasons)}")
    raise ValueError(f"no class of format {engine_format} serves this head: " + ". ".join(refused))


def needed(formats: Sequence[str], head: HeadConfig) -> list[str]:
    """Without vllm_plugin where a head has no use for it: format vllm keeps the draft vocabulary of an EAGLE-3 head, and EAGLE-1 has stock classes alone."""
    return [name for name in formats if name != "vllm_plugin" or head.kind == OURS.head]


def check_formats(formats: Sequence[str], head: HeadConfig, target: Config, draft_vocab: bool) -> None:
    """Raise ValueError, before training, for a format of export.formats that could not be written after it."""
    for name in needed(formats, head):
        if name == "hf":
            continue
        try:
            choose_class(head, target, draft_vocab, name)
        except ValueError as error:
            raise ValueError(f"{error}. Leave {name} out of export.formats ({', '.join(formats)}): the embedded engine needs hf alone") from error


def format_that_keeps(head: HeadConfig, target: Config, draft_vocab: bool) -> str:
    """vllm, or vllm_plugin where that alone keeps a reduced draft vocabulary. Raises ValueError as `choose_class`."""
    kind, _ = choose_class(head, target, draft_vocab)
    return "vllm_plugin" if draft_vocab and not kind.keeps_draft_vocab and head.kind == OURS.head else "vllm"


def class_of(config: Config) -> EngineClass:
    """The row of a config.json, written by us or published. Raises ValueError for another architecture."""
    wanted = (config.get("architectures") or ["none"])[0]
    found = {name: kind for kinds in reversed(CLASSES.values()) for kind in reversed(kinds) for name in (kind.architecture, *kind.also)}  # vLLM's come first
    if wanted not in found:
        raise ValueError(f"architecture {wanted} is none that is known here ({', '.join(found)})")
    return found[wanted]
