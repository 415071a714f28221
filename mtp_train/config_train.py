"""The sections `head`, `train` and `distributed` of the configuration; `config.py` says how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional


@dataclass
class HeadConfig:
    kind: str
    """which head: mtp, eagle1 or eagle3 (a row of mtp_train/heads/table.py)"""
    layout: dict[str, Any]
    """the head's own conventions of norms, order and taps, shared with the engine and fixed before training: conf/head/ says what each means"""
    num_layers: int
    """decoder layers of the head"""
    dense_mlp: bool
    """of a mixture-of-experts target: take a dense MLP in the head"""
    init: str
    """identity (the projection passes the state, fresh block), last_layer (the target's last full-attention layers) or native (mtp: a DeepSeek-V3's own)"""
    draft_vocab_size: Optional[int]  # noqa: UP045
    """draft only among this many most frequent answer tokens (what lies outside is never drafted, so counts as rejected); null: the whole vocabulary"""


@dataclass
class LossConfig:
    kind: str
    """the logit match: forward_kl, reverse_kl, soft_ce, hard_ce (the data's tokens), tv, lk (-log acceptance) or lk_hybrid (KL, then TV)"""
    hybrid_eta: float
    """lk_hybrid: KL weighs exp(-hybrid_eta * acceptance) for each token, TV the rest"""
    normalise: str
    """tokens: every supervised token weighs the same; sequences: every document does"""
    feature_weight: float
    """weight of the hidden-state match (SmoothL1) beside the logit match"""
    step_decay: float
    """step k of the unroll weighs step_decay ** k"""
    chunk_mib: int
    """MiB of all vocabulary-wide tensors alive at once; sets the rows of a chunk (64 took a third longer on a CPU)"""


@dataclass
class LrScaleConfig:
    norms: float
    """norms and biases"""
    projection: float
    """matrices outside the block: eh_proj, fc, and lm_head where the head has its own"""
    block: float
    """matrices of the decoder layers"""


@dataclass
class OptimConfig:
    name: str
    """adamw, or muon (for matrices, with AdamW for norms, biases, batched experts and an lm_head)"""
    lr: float
    """peak learning rate"""
    lr_scale: LrScaleConfig
    """factors of the learning rate"""
    schedule: str
    """cosine, linear, wsd (stays up, then falls over the last decay_ratio of the steps) or constant"""
    warmup_steps: int
    """linear warm-up"""
    decay_ratio: float
    """wsd: share of num_steps that its decay takes"""
    min_lr_ratio: float
    """the schedule ends at lr times this"""
    weight_decay: float
    """of matrices; norms and biases have none"""
    betas: list[float]
    """of AdamW: decay of the two moments"""
    max_grad_norm: float
    """clip the gradient norm here; 0: do not"""
    ema_decay: float
    """average the weights with this decay a step (0.999: over about the last 1000); the average is what is validated, saved and exported; 0: none"""


@dataclass
class WandbConfig:
    mode: str
    """disabled, offline or online"""
    project: str
    """wandb project"""


@dataclass
class TrainConfig:
    shards: str
    """captured states: the folder that holds train/ and, for validation figures, validation/"""
    num_steps: int
    """optimiser steps"""
    unroll_steps: int
    """drafted steps trained at once (training-time test)"""
    unroll_from: float
    """share of the optimiser steps, at the start, that train the first drafted step alone, which is cheap; 0: unroll from the start"""
    seq_len: int
    """tokens of a packed row"""
    rows_per_batch: int
    """packed rows of one forward pass"""
    window_shards: int
    """shards whose samples are shuffled and packed together; all reads of a stretch of the epoch lie in so many files"""
    accumulation: int
    """forward passes of one optimiser step"""
    dtype: str
    """autocast: float32, bfloat16, or "fast" (as target.dtype)"""
    init_from: Optional[str]  # noqa: UP045
    """a directory whose weights are started from: a checkpoint, an export of format hf, or a published EAGLE or speculators head; null: head.init"""
    feature_noise: float
    """add uniform noise of at most this to what the first drafted step reads of the target's states (EAGLE-1: 0.1); 0: none"""
    loss: LossConfig
    """what is minimised"""
    optim: OptimConfig
    """how"""
    seed: int
    """initialisation and order of the data"""
    log_every: int
    """steps between log lines"""
    validate_every: int
    """steps between validations on held-out shards; 0: only at the end"""
    save_every: int
    """steps between checkpoints"""
    validate_with: Optional[str]  # noqa: UP045
    """embedded or vllm: a second process decodes the validation prompts (64, or eval.num_prompts) with each checkpoint, and its acceptance chooses the best"""
    keep_last: int
    """checkpoints kept; the best one, by measured or else by predicted acceptance length, is always kept"""
    resume: bool
    """go on from the newest complete checkpoint of the run directory; false: begin anew, what is there is set aside in before_N/"""
    wandb: WandbConfig
    """a second sink of the metrics; metrics.jsonl is always written"""


@dataclass
class DistributedConfig:
    mode: str
    """single (one process), ddp, or DeepSpeed's zero1, zero2 or zero3: all but single are started by torchrun, and give the same losses"""
