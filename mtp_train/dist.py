"""What the hardware can do, and the processes that train together.

torchrun starts one process a device and says so in the environment; `start` joins them. Everything here works in a single process too.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as group
from torch import Tensor

T = TypeVar("T")

MODES = ("single", "ddp", "zero1", "zero2", "zero3")
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def pick_device(name: str) -> str:
    """ "auto" is cuda where there is one. Raises ValueError when cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device=cuda, but this machine shows no CUDA device: use device=auto or cpu")
    return ("cuda" if available else "cpu") if name == "auto" else name


def has_fast_bfloat16(device: str) -> bool:
    """Whether bfloat16 matrix products run in hardware: on a GPU, or a CPU with AMX or avx512_bf16."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.backends.cpu.get_cpu_capability() if torch.backends.cpu else ""
    return "AMX" in capabilities or torch.cpu._is_avx512_bf16_supported()


def pick_dtype(name: str, device: str) -> torch.dtype:
    """A torch dtype by name; "fast" is bfloat16 where it runs in hardware, else float32."""
    if name == "fast":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32: as configurations, manifests and engines write it."""
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- the processes of a training


def start(mode: str, device: str) -> torch.device:
    """Join the processes that the environment names; returns this one's device. Raises ValueError where launch and mode do not fit."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if mode == "single":
        if size > 1:
            raise ValueError(f"distributed.mode=single, but WORLD_SIZE={size} processes were started: add distributed=ddp (or {', '.join(MODES[2:])})")
        return torch.device(device)
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing:
        raise ValueError(
            f"distributed.mode={mode} is started by torchrun (torchrun --nproc_per_node=N -m mtp_train.train ...), but {', '.join(missing)} are not set"
        )
    here = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    if not group.is_initialized():
        # Keys of an attempt that died must not be met by the next one (torchrun --max-restarts).
        store, rank, size = next(group.rendezvous("env://"))
        attempt = group.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        group.init_process_group("nccl" if device == "cuda" else "gloo", store=attempt, rank=rank, world_size=size)
    if not is_first():
        logging.disable(logging.INFO)  # rank 0 speaks for all
    return here


def unlaunched() -> dict[str, str]:
    """The environment without what a launcher says in it to the ranks: for a process that is none of them, and may start ranks of its own."""
    said = (*LAUNCHED, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
    return {name: value for name, value in os.environ.items() if name not in said and not name.startswith("TORCHELASTIC_")}


def rank() -> int:
    """Which of the processes this is; 0 reads, writes and speaks for all."""
    return group.get_rank() if group.is_initialized() else 0


def world_size() -> int:
    """How many processes train together."""
    return group.get_world_size() if group.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def total(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum over all ranks of each of some tensors of one type, in one message."""
    if not group.is_initialized():
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    group.all_reduce(flat)
    return [part.view_as(tensor) for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)]


def from_first(value: T) -> T:
    """Rank 0's value, on every rank: the others wait for it."""
    box = [value]
    if group.is_initialized():
        group.broadcast_object_list(box)
    return box[0]


def from_all(value: T) -> list[T]:
    """Every rank's value, in their order."""
    if not group.is_initialized():
        return [value]
    box: list[Any] = [None] * world_size()
    group.all_gather_object(box, value)
    return box


def finish() -> None:
    """Leave the group, at the good end of a training: after an error there is nobody left to wait for.

    gloo's ends with the process: freed earlier, it joins a thread that may wait for the lock of Python, which is held meanwhile (torch 2.13).
    """
    if group.is_initialized() and group.get_backend() == "nccl":
        group.destroy_process_group()


class StopSignals:
    """Within, SIGTERM and SIGUSR1 end nothing at once: `received` says that one came."""

    def __enter__(self) -> StopSignals:
        self.received = False
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGUSR1)}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)  # a launcher may have held back what came before (slurm.launch)
        return self

    def _receive(self, *_: Any) -> None:
        self.received = True

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
