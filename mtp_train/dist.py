"""What the hardware can do, and the process group."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def pick_device(name: str) -> str:
    """ "auto" is cuda where there is one. Raises ValueError when cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device=cuda, but this machine shows no CUDA device: use device=auto or cpu")
    return ("cuda" if available else "cpu") if name == "auto" else name


def has_fast_bfloat16(device: str) -> bool:
    """Whether bfloat16 matrix products run in hardware: on a GPU, or a CPU with AMX or avx512_bf16."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported()
    capabilities = torch.backends.cpu.get_cpu_capability() if torch.backends.cpu else ""
    return "AMX" in capabilities or torch.cpu._is_avx512_bf16_supported()


def pick_dtype(name: str, device: str) -> torch.dtype:
    """A torch dtype by name; "fast" is bfloat16 where it runs in hardware, else float32."""
    if name == "fast":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return getattr(torch, name)


def make_accelerator(dtype: torch.dtype, device: str) -> Accelerator:
    """The one process group of training, with autocast in `dtype`."""
    return Accelerator(mixed_precision="bf16" if dtype == torch.bfloat16 else "no", cpu=device == "cpu")
