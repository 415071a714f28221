"""The head in this process: alone, as one of several equal copies (DDP), or as a shard (DeepSpeed ZeRO).

All give the same losses and gradients: a micro-batch adds its loss over the supervised tokens of the WHOLE optimiser step, of all ranks and
micro-batches. Only the head is handed to accelerate; the target's frozen ends are nobody's parameters, so they are never broadcast, sharded,
optimised or saved. Weights and moments are float32 everywhere, and a checkpoint always holds them whole, by parameter name.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mtp_train import dist
from mtp_train.checkpoint import load_optimizer
from mtp_train.config import TrainConfig
from mtp_train.heads.base import DraftHead, supervised, unroll
from mtp_train.interfaces import Batch, Ends
from mtp_train.loss import LossSums, draft_loss


class Objective(nn.Module):
    """A whole micro-batch as one forward. The head runs once for every drafted step, but DDP and DeepSpeed allow one forward a backward."""

    def __init__(self, head: DraftHead, ends: Ends, options: TrainConfig, draft_vocab: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.head, self.options, self.dtype = head, options, dtype
        self.frozen = (ends, draft_vocab)  # in a tuple, so that they are no part of this module

    def forward(self, batch: Batch, num_steps: int) -> tuple[Tensor, ...]:
        """The fields of `LossSums`, and the drafted tokens (K, N)."""
        ends, vocab = self.frozen
        noise = None
        if self.training and self.options.feature_noise:
            noise = uniform_noise(batch, ends.hidden_size, self.options.feature_noise, self.options.seed)
        with torch.autocast(batch.input_ids.device.type, self.dtype, enabled=self.dtype != torch.float32):
            rows = supervised(unroll(self.head, ends, batch, num_steps, noise), batch)
            sums, drafted = draft_loss(ends, rows, self.options.loss, vocab, self.head.lm_head_weight)
        return *vars(sums).values(), drafted


def uniform_noise(batch: Batch, hidden_size: int, size: float, seed: int) -> Tensor:
    """(B, T, H) in [-size, size], of each row by its own tokens: the same on any rank, in any micro-batch, and after a resume."""
    device, num_tokens = batch.input_ids.device, batch.input_ids.shape[1]
    places = torch.arange(1, num_tokens + 1, device=device)
    keys = ((batch.input_ids + 1) * (batch.document_ids + 2) * places * 2654435761 % 2147483647).sum(1) + seed
    rows = [torch.rand(num_tokens, hidden_size, generator=torch.Generator(device).manual_seed(key), device=device) for key in keys.tolist()]
    return (2 * size) * (torch.stack(rows) - 0.5)


class Replica:
    """One process, or a copy under DDP."""

    def __init__(self, module: nn.Module, head: DraftHead, optimizer: Optimizer, max_grad_norm: float):
        self.module, self.head, self.optimizer, self.max_grad_norm = module, head, optimizer, max_grad_norm

    def __call__(self, batch: Batch, num_steps: int) -> tuple[LossSums, Tensor]:
        """The loss of a micro-batch as sums, and the drafted tokens (K, N)."""
        *sums, drafted = self.module(batch, num_steps)
        return LossSums(*sums), drafted

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward: gradients are exchanged with the `last` of an optimiser step."""
        return nullcontext() if last or not isinstance(self.module, DistributedDataParallel) else self.module.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, this rank's share of the step's loss."""
        (loss * dist.world_size()).backward()  # DDP takes the mean over ranks

    def step(self) -> Tensor:
        """Clip and step; returns the gradient norm. Nothing is changed where it is not finite."""
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.max_grad_norm or math.inf)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def whole(self, parameter: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A parameter and its optimiser state."""
        return parameter.detach(), self.optimizer.state.get(parameter, {})

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights by name and optimiser state by "name/entry", whole, on rank 0's CPU. All ranks must call; the others get nothing."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        for name, parameter in self.head.named_parameters():
            weight, state = self.whole(parameter)
            if dist.is_first():
                weights[name] = weight.cpu().contiguous()
                moments.update({f"{name}/{entry}": value.cpu().contiguous() for entry, value in state.items()})
        return weights, moments

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Take in what `gather` gave, at any number of ranks. The weights were loaded into the head before it was wrapped."""
        load_optimizer(self.head, self.optimizer, moments)


class ShardedReplica(Replica):
    """DeepSpeed ZeRO 1 to 3: the optimiser's state, then also gradients, then also weights are split over the ranks, as flat pieces."""

    module: Any  # DeepSpeed's engine

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss * dist.world_size(), scale_wrt_gas=False)  # a mean over ranks; not over micro-batches as well

    def step(self) -> Tensor:
        self.module.step()  # clips by itself
        return torch.as_tensor(self.module.get_global_grad_norm())

    @property
    def is_stage_3(self) -> bool:
        """Whether weights are sharded too."""
        return self.module.zero_optimization_stage() == 3

    @property
    def pieces(self) -> list[Tensor]:
        """The flat pieces of this rank: what DeepSpeed hands to the optimiser in place of the parameters."""
        zero = self.module.optimizer
        return zero.fp32_partitioned_groups_flat if self.is_stage_3 else zero.single_partition_of_fp32_groups

    def link(self) -> None:
        """Let DeepSpeed find the state of every parameter: it looks once, after the first group's first step, when other groups have none."""
        if not self.is_stage_3:
            self.module.optimizer._hp_optimizer_states_linked = False
            self.module.optimizer._lazy_init_hp_params_optimizer_state()

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.link()
        return super().gather()

    def whole(self, parameter: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not parameter.requires_grad:  # DeepSpeed's optimiser does not know it
            return parameter.detach(), {}
        entries = self.optimizer.state[self.pieces[0]]
        state = {entry: value.clone() if value.dim() == 0 else safe_get_full_optimizer_state(parameter, entry) for entry, value in entries.items()}
        return safe_get_full_fp32_param(parameter), state

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        parameters: dict[str, Any] = dict(self.head.named_parameters())
        entries = {key.rsplit("/", 1)[1]: value for key, value in moments.items()}
        for piece in self.pieces:  # DeepSpeed makes these at its first step
            self.optimizer.state[piece] = {
                e: value.to(piece.device, copy=True) if value.dim() == 0 else torch.zeros_like(piece) for e, value in entries.items()
            }
        self.link()
        for key, value in moments.items():
            name, entry = key.rsplit("/", 1)
            parameter = parameters[name]
            if value.dim() == 0:
                continue
            if self.is_stage_3:  # its setter of whole tensors cannot split what the ranks do not divide
                size = parameter.ds_tensor.numel()
                flat = F.pad(value.flatten(), (0, size * dist.world_size() - value.numel()))
                safe_set_local_optimizer_state(parameter, flat[size * dist.rank() :][:size], entry)
            else:
                safe_set_full_optimizer_state(parameter, value, entry)


def make_replica(mode: str, objective: Objective, optimizer: Optimizer, options: TrainConfig, device: torch.device) -> Replica:
    """Hand head and optimiser to what `mode` names. Raises ValueError where something else than asked for would run."""
    head, limit = objective.head, options.optim.max_grad_norm
    if mode == "single":
        return Replica(objective, head, optimizer, limit)
    if mode == "ddp":
        # Parameters without a gradient (experts without a token) must not be waited for.
        handler = DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True)
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no", kwargs_handlers=[handler])
        replica = Replica(accelerator.prepare(objective), head, optimizer, limit)
    else:
        accelerator, module = _shard(int(mode[-1]), objective, optimizer, options, device)
        replica = ShardedReplica(module, head, optimizer, limit)
    check_running(mode, accelerator, replica.module, device)
    return replica


def _shard(stage: int, objective: Objective, optimizer: Optimizer, options: TrainConfig, device: torch.device) -> tuple[Accelerator, Any]:
    """DeepSpeed's engine around the objective."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.ops

        vars(deepspeed.ops)["__compatible_ops__"] = defaultdict(bool)  # else it compiles a kernel of its inference: a minute, and g++
    vectors = [parameter.numel() for parameter in objective.head.parameters() if parameter.dim() < 2]
    settings = {
        "train_micro_batch_size_per_gpu": options.rows_per_batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.optim.max_grad_norm,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": max(vectors)},  # norms stay whole
    }
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False),
        gradient_accumulation_steps=options.accumulation,
        mixed_precision="no",  # ours is autocast; else the environment's, which would also turn the weights
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo" if device.type == "cpu" else "nccl")],
    )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return accelerator, accelerator.prepare(objective, optimizer)[0]


def check_running(mode: str, accelerator: Accelerator, module: Any, device: torch.device) -> None:
    """Raise ValueError unless the mode asked for is the mode running: accelerate falls back without a word."""
    engine = "DistributedDataParallel" if mode == "ddp" else "DeepSpeedEngine"
    asked = (engine, None if mode == "ddp" else int(mode[-1]), dist.world_size(), device.type)
    stage = module.zero_optimization_stage() if hasattr(module, "zero_optimization_stage") else None
    running = (type(module).__name__, stage, accelerator.num_processes, accelerator.device.type)
    if asked != running:
        raise ValueError(f"distributed.mode={mode}: asked for (engine, ZeRO stage, processes, device) {asked}, but {running} is running; see ACCELERATE_*")
