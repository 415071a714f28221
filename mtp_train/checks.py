"""The checks of a configuration that types do not make: allowed values, and fields that must fit each other."""

from __future__ import annotations

import re
from typing import Any

from mtp_train.config_cluster import SUBMIT_STAGES

LIMIT = re.compile(r"\d+(:\d+){1,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.I)
"""What sbatch takes for --time, but for a number alone: there it means minutes, and YAML reads 24:00:00 without quotes as 86400."""


def one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(allowed)}")


def positive(**values: float) -> None:
    """Raise ValueError naming the first value that is not above 0. Dots are written as two underscores."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name.replace('__', '.')}={value} must be above 0")


def check(config: Any) -> None:
    """Raise ValueError, with the values, for a `config.Config` that cannot work."""
    one_of("target.dtype", config.target.dtype, ("auto", "fast", "float32", "bfloat16", "float16"))
    one_of("target.device", config.target.device, ("auto", "cpu", "cuda"))
    one_of("engine.name", config.engine.name, ("embedded", "vllm"))
    positive(engine__tensor_parallel_size=config.engine.tensor_parallel_size, engine__timeout_s=config.engine.timeout_s)
    if config.eval.server and config.engine.name != "vllm":
        raise ValueError(f"eval.server={config.eval.server} is a vLLM server, but engine.name={config.engine.name}: add engine=vllm")
    if config.eval.heads and config.engine.name != "embedded":
        raise ValueError(f"eval.heads are measured by the embedded engine, but engine.name={config.engine.name}: measure them one by one")
    one_of("data.turns", config.data.turns, ("all", "last"))
    one_of("precompute.state_dtype", config.precompute.state_dtype, ("float32", "bfloat16", "float16"))
    one_of("distributed.mode", config.distributed.mode, ("single", "ddp", "zero1", "zero2", "zero3"))
    one_of("train.dtype", config.train.dtype, ("fast", "float32", "bfloat16"))
    if config.train.validate_with is not None:
        one_of("train.validate_with", config.train.validate_with, ("embedded", "vllm"))
    kinds = ("forward_kl", "reverse_kl", "soft_ce", "hard_ce", "tv", "lk", "lk_hybrid")
    one_of("train.loss.kind", config.train.loss.kind, kinds)
    one_of("train.loss.normalise", config.train.loss.normalise, ("tokens", "sequences"))
    one_of("train.wandb.mode", config.train.wandb.mode, ("disabled", "offline", "online"))
    for name in ("dtype", "speed_dtype"):
        one_of(f"eval.{name}", getattr(config.eval, name), ("fast", "float32", "bfloat16", "float16"))
    for step in config.precompute.steps:
        one_of("precompute.steps", step, ("demo", "corpus", "rows", "capture", "merge", "verify"))
    for stage in config.stages:
        one_of("stages", stage, ("precompute", "train", "export", "eval"))
    for name in config.export.formats:
        one_of("export.formats", name, ("vllm", "vllm_plugin", "speculators", "sglang", "hf"))
    for run in config.eval.runs:
        one_of("eval.runs.draft_sampling", run.draft_sampling, ("greedy", "probabilistic"))
        positive(eval__runs__num_draft_tokens=run.num_draft_tokens)
    for source in config.data.train + config.data.validation:
        one_of("data.form", source.form, ("auto", "messages", "sharegpt", "text"))
    positive(data__max_length=config.data.max_length, precompute__num_parts=config.precompute.num_parts, head__num_layers=config.head.num_layers)
    positive(precompute__batch_tokens=config.precompute.batch_tokens, precompute__shard_tokens=config.precompute.shard_tokens)
    positive(eval__batch_size=config.eval.batch_size, eval__max_new_tokens=config.eval.max_new_tokens)
    if config.precompute.part is not None and not 0 <= config.precompute.part < config.precompute.num_parts:
        raise ValueError(f"precompute.part={config.precompute.part} is not below precompute.num_parts={config.precompute.num_parts}")
    train = config.train
    check_train(train)
    if config.distributed.mode.startswith("zero") and (train.optim.name != "adamw" or train.optim.ema_decay):
        found = f"train.optim.name={train.optim.name}, ema_decay={train.optim.ema_decay}"
        raise ValueError(f"distributed.mode={config.distributed.mode} cuts matrices into flat pieces, {found} need them whole: use ddp")
    check_node(config.node, config.target.arch)
    check_cluster(config.cluster)
    for stage in config.submit.stages:
        one_of("submit.stages", stage, SUBMIT_STAGES)
    for step in config.eval.steps:
        one_of("eval.steps", step, ("measure", "report"))
    if not config.eval.steps:
        raise ValueError("eval.steps is empty: it names measure, report or both")
    if config.eval.part is not None and not 0 <= config.eval.part < len(config.eval.runs):
        raise ValueError(f"eval.part={config.eval.part} is not below {len(config.eval.runs)}, the number of eval.runs")


def check_train(train: Any) -> None:
    """Raise ValueError for a training that cannot run."""
    positive(train__num_steps=train.num_steps, train__unroll_steps=train.unroll_steps, train__seq_len=train.seq_len, train__optim__lr=train.optim.lr)
    positive(train__rows_per_batch=train.rows_per_batch, train__accumulation=train.accumulation, train__save_every=train.save_every)
    positive(train__window_shards=train.window_shards)
    if not 0 <= train.unroll_from < 1:
        raise ValueError(f"train.unroll_from={train.unroll_from} is not a share from 0 and below 1")
    positive(train__loss__chunk_mib=train.loss.chunk_mib, train__log_every=train.log_every, train__keep_last=train.keep_last)
    if train.feature_noise < 0:
        raise ValueError(f"train.feature_noise={train.feature_noise} is the largest size of a noise: 0 or above")
    check_optim(train.optim, train.num_steps)


def check_cluster(cluster: Any) -> None:
    """Raise ValueError for what no job can be made of."""
    positive(cluster__nodes=cluster.nodes, cluster__cpus_per_process=cluster.cpus_per_process, cluster__signal_lead_s=cluster.signal_lead_s)
    for name in ("gpus_per_node", "max_requeues", "retries"):
        if getattr(cluster, name) < 0:
            raise ValueError(f"cluster.{name}={getattr(cluster, name)} must not be below 0")
    stages = (*SUBMIT_STAGES, "sweep", "compare")
    if missing := [stage for stage in stages if stage not in cluster.time]:
        raise ValueError(f"cluster.time has no limit for {', '.join(missing)}; it names {', '.join(cluster.time)}")
    for name in (*cluster.time, *cluster.stage_flags):
        one_of("cluster.time or cluster.stage_flags", name, stages)
    for name, limit in cluster.time.items():
        if not LIMIT.fullmatch(limit):
            raise ValueError(f'cluster.time.{name}={limit} is none of HH:MM:SS, MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, UNLIMITED: write it in quotes, "24:00:00"')
    for key, value in cluster.env.items():
        if not key.isidentifier():
            raise ValueError(f"cluster.env: {key!r}={value!r} is no name of a variable")
    for flag in (*cluster.flags, *(flag for flags in cluster.stage_flags.values() for flag in flags)):
        if not flag.startswith("-") or "\n" in flag:
            raise ValueError(f"cluster.flags: {flag!r} is not one flag of sbatch, such as --exclude=node7")


def check_node(node: Any, arch: Any) -> None:
    """Raise ValueError for what the planner cannot count with."""
    positive(**{f"node__{name}": getattr(node, name) for name in ("num_devices", "peak_tflops", "disk_tb", "disk_read_gb_s", "hours", "epochs")})
    for name in ("train_efficiency", "capture_efficiency", "decode_efficiency", "supervised_share"):
        if not 0 < getattr(node, name) <= 1:
            raise ValueError(f"node.{name}={getattr(node, name)} is not a share above 0 and up to 1")
    if arch and "model_type" not in arch:
        raise ValueError(f"target.arch names no model_type, only {', '.join(arch)}")


def check_optim(optim: Any, num_steps: int) -> None:
    """Raise ValueError for settings of the optimiser and its schedule that cannot work."""
    one_of("train.optim.name", optim.name, ("adamw", "muon"))
    one_of("train.optim.schedule", optim.schedule, ("cosine", "linear", "wsd", "constant"))
    positive(**{f"train__optim__lr_scale__{part}": scale for part, scale in vars(optim.lr_scale).items()})
    if not (0 <= optim.ema_decay < 1 and 0 <= optim.min_lr_ratio <= 1 and 0 < optim.decay_ratio <= 1):
        found = f"ema_decay={optim.ema_decay}, min_lr_ratio={optim.min_lr_ratio}, decay_ratio={optim.decay_ratio}"
        raise ValueError(f"train.optim: {found} must lie in [0, 1), [0, 1] and (0, 1]")
    if optim.max_grad_norm < 0 or len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ValueError(f"train.optim: max_grad_norm={optim.max_grad_norm} must be 0 (none) or above, betas={optim.betas} two numbers from 0 and below 1")
    if optim.warmup_steps >= num_steps:
        raise ValueError(f"train.optim.warmup_steps={optim.warmup_steps} leaves nothing of train.num_steps={num_steps}")
    if optim.schedule == "wsd" and optim.warmup_steps > num_steps - round(optim.decay_ratio * num_steps):
        raise ValueError(f"train.optim: warmup_steps={optim.warmup_steps} and decay_ratio={optim.decay_ratio} overlap in train.num_steps={num_steps}")
