"""Typed configuration. Values live in `conf/`; here are the fields, their meaning and the checks across them.

Hydra composes one `Config` for every stage; each stage reads its own sections, so any override is valid for any command. Fields have no
defaults here: a value stands once, in YAML. The string under a field is what `--help` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import hydra
import omegaconf
from omegaconf import DictConfig, OmegaConf

from mtp_train.checks import check
from mtp_train.config_cluster import ClusterConfig as ClusterConfig
from mtp_train.config_cluster import SubmitConfig as SubmitConfig
from mtp_train.config_train import DistributedConfig as DistributedConfig
from mtp_train.config_train import HeadConfig as HeadConfig
from mtp_train.config_train import LossConfig as LossConfig
from mtp_train.config_train import LrScaleConfig as LrScaleConfig
from mtp_train.config_train import OptimConfig as OptimConfig
from mtp_train.config_train import TrainConfig as TrainConfig
from mtp_train.config_train import WandbConfig as WandbConfig
from mtp_train.node import NodeConfig

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"


@dataclass
class TargetConfig:
    path: str
    """directory or hub id of the target, in transformers layout"""
    dtype: str
    """auto (as saved), bfloat16, float16 or float32: what the target computes in. "fast" = bfloat16 where the CPU or GPU has it in hardware, else float32"""
    device: str
    """auto, cpu or cuda"""
    arch: dict[str, Any]
    """what config.json says of the target's sizes, so that plan=true needs no file of it; {}: read config.json at target.path"""


@dataclass
class EngineConfig:
    name: str
    """embedded (no extra install) or vllm: what captures, regenerates and measures"""
    tensor_parallel_size: int
    """vllm: GPUs that share the target"""
    gpu_memory_utilization: float
    """vllm: share of a GPU's memory it may take"""
    cpu_cache_gib: int
    """vllm on CPU: GiB of KV cache"""
    enforce_eager: bool
    """vllm: no CUDA graphs and no compilation; slower, and starts at once"""
    in_process: bool
    """vllm: run inside our process instead of its own ones; starts in seconds, for tiny targets and tests"""
    timeout_s: float
    """vllm: how long to wait for the states of a row before giving up"""
    cpu_sampling_fix: bool
    """vllm on CPU: mend speculative sampling at temperature > 0 (version 0.32 is wrong there; the report says when this is on)"""


@dataclass
class SourceConfig:
    path: str
    """.jsonl, .json or .parquet file (or a folder of them), or a `datasets` id"""
    form: str
    """auto, messages, sharegpt or text"""
    domain: Optional[str]  # noqa: UP045 (omegaconf reads Optional)
    """label of rows that carry none of their own; null: the file's name"""
    split: str
    """split of a `datasets` id"""
    limit: Optional[int]  # noqa: UP045
    """read at most this many rows"""


@dataclass
class DataConfig:
    train: list[SourceConfig]
    """conversations to train on"""
    validation: list[SourceConfig]
    """conversations kept out of training, for the validation figures"""
    max_length: int
    """tokens; what is longer is cut, ids, mask and states together"""
    turns: str
    """all or last: which assistant turns are training targets"""
    template_kwargs: dict[str, Any]
    """passed to the chat template, e.g. {enable_thinking: false}"""


@dataclass
class RegenerateConfig:
    enabled: bool
    """replace the assistant turns by the target's own answers (on-policy data: the largest known lever)"""
    max_new_tokens: int
    """tokens of an answer at most"""
    temperature: float
    """0 = greedy"""
    batch_size: int
    """conversations decoded at once"""
    seed: int
    """of the sampled answers; an answer depends on it and on the row, not on the batch"""


@dataclass
class PrecomputeConfig:
    steps: list[str]
    """which of demo, corpus, rows, capture, merge, verify to run, in this order"""
    regenerate: RegenerateConfig
    """the target's own answers"""
    tap_layers: Optional[list[int]]  # noqa: UP045
    """residuals stored beside the teacher state: k = after k decoder layers, before any norm (0 = embeddings). null: those the head reads; more do no harm"""
    batch_tokens: int
    """tokens of one capture pass, padding included"""
    shard_tokens: int
    """tokens of one shard file; a kill loses at most one unfinished shard"""
    state_dtype: str
    """float32, bfloat16 or float16: how states are stored"""
    num_parts: int
    """ranges the corpus is split into, so that many workers can share it"""
    part: Optional[int]  # noqa: UP045
    """the range this process writes; null: all of them, one after another"""
    dry_run: bool
    """print what would be written (bytes, rows, ranges) and stop"""


@dataclass
class DemoConfig:
    cache_dir: str
    """where the demo's converted target is kept between runs"""
    num_train: int
    """prompts to train on"""
    num_validation: int
    """prompts of the validation rows"""
    num_heldout_per_domain: int
    """prompts of each domain for the acceptance report"""
    seed: int
    """of the choice of prompts"""


@dataclass
class ExportConfig:
    formats: list[str]
    """hf, vllm (stock class where one fits, else our plugin), vllm_plugin (keeps a reduced draft vocabulary) and/or sglang"""
    checkpoint: str
    """best, last or a checkpoint directory"""


@dataclass
class EvalRunConfig:
    num_draft_tokens: int
    """K, tokens drafted a step"""
    temperature: float
    """0 = greedy"""
    draft_sampling: str
    """greedy or probabilistic"""
    draft_vocab_size: Optional[int]  # noqa: UP045
    """as head.draft_vocab_size, for this measurement alone"""


@dataclass
class EvalConfig:
    steps: list[str]
    """which of measure, report to run; report joins what was measured part by part"""
    part: Optional[int]  # noqa: UP045
    """measure this one of `runs` alone and leave the report to a later call; null: all of them, one after another"""
    prompts: Optional[str]  # noqa: UP045
    """JSONL of held-out conversations; each is answered from its last user turn"""
    head: str
    """an exported directory (format hf) or a checkpoint"""
    heads: list[str]
    """further heads (as `head`) for the embedded engine, measured on the same prompts: their differences to `head`, and what each costs"""
    vllm_head: str
    """the exported directory that vLLM serves"""
    server: Optional[str]  # noqa: UP045
    """URL of a running `vllm serve` to measure instead of starting an engine"""
    self_checks: bool
    """vllm: first make sure that a draft equal to the target is accepted, and that every tensor of the head is used"""
    parity: bool
    """run the embedded engine and vLLM on the same prompts and explain the first difference"""
    num_prompts: Optional[int]  # noqa: UP045
    """use at most this many, taken evenly from the domains"""
    max_new_tokens: int
    """budget of an answer"""
    batch_size: int
    """prompts decoded at once"""
    dtype: str
    """of the acceptance runs; float32 proves losslessness"""
    runs: list[EvalRunConfig]
    """what to measure; the first one is the headline"""
    speed_prompts: int
    """prompts timed with and without drafting; 0: no timing"""
    speed_batch_sizes: list[int]
    """prompts decoded at once in the timed runs"""
    speed_tokens: int
    """budget of a timed answer"""
    speed_dtype: str
    """of the timed runs"""
    num_examples: int
    """prompts shown in the report"""
    seed: int
    """of sampled runs"""


@dataclass
class Config:
    run_dir: str
    """where everything of this run is written: data/ shards/ checkpoints/ export/ eval/ metrics.jsonl"""
    plan: bool
    """mtp-precompute, mtp-train, mtp-pipeline and mtp-submit: print parameters, FLOP, memory, bytes, hours and the tokens that fit the node's time, and stop"""
    stages: list[str]
    """what mtp-pipeline runs, of precompute, train, export, eval"""
    target: TargetConfig
    """the model that is served"""
    engine: EngineConfig
    """what runs it"""
    data: DataConfig
    """conversations"""
    precompute: PrecomputeConfig
    """from conversations to captured hidden states"""
    demo: DemoConfig
    """the material of `make demo`"""
    head: HeadConfig
    """what is trained"""
    train: TrainConfig
    """how it is trained"""
    distributed: DistributedConfig
    """the processes that train together"""
    export: ExportConfig
    """for the engine"""
    eval: EvalConfig
    """acceptance in decoding"""
    node: NodeConfig
    """the machine of plan=true, and what is assumed of it"""
    cluster: ClusterConfig
    """the SLURM cluster of mtp-submit"""
    submit: SubmitConfig
    """what mtp-submit submits"""


def report_dir(run_dir: str | Path, engine: str) -> Path:
    """Where mtp-eval writes: a place for each engine."""
    return Path(run_dir) / ("eval" if engine == "embedded" else f"eval-{engine}")


def load(composed: DictConfig) -> Config:
    """The typed configuration, checked. Raises ValueError naming a wrong key or type."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        config = OmegaConf.to_object(merged)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ValueError(f"configuration: {str(error).splitlines()[0]} (at {error.full_key})") from error
    assert isinstance(config, Config)
    check(config)
    return config


def read(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a finished or running stage, from the `config.yaml` that it left; `overrides` are single fields, key=value.

    Raises ValueError, as `load` does: with the file, which a version with other settings may have written.
    """
    composed = OmegaConf.merge(OmegaConf.create(path.read_text(encoding="utf-8")), OmegaConf.from_dotlist(list(overrides)))
    try:
        return load(composed)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{path}, as this version of mtp-train reads it: {error}") from error


def compose(*overrides: str) -> Config:
    """The configuration that a command line of `overrides` gives, without running anything."""
    with hydra.initialize_config_dir(str(CONF_DIR), version_base=None):
        return load(hydra.compose("pipeline", overrides=list(overrides)))
