"""The sections `cluster` and `submit` of the configuration: what `mtp-submit` needs to know of a SLURM cluster, and what it is to submit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

SUBMIT_STAGES = ("corpus", "regenerate", "capture", "merge", "train", "export", "eval", "report")
"""The chain of jobs, in order."""


@dataclass
class ClusterConfig:
    account: Optional[str]  # noqa: UP045 (omegaconf reads Optional)
    """charged for the jobs; null here and below: the line is left out, and the cluster's own default holds"""
    partition: Optional[str]  # noqa: UP045
    """the queue that jobs wait in"""
    qos: Optional[str]  # noqa: UP045
    """quality of service"""
    constraint: Optional[str]  # noqa: UP045
    """features that the nodes must have"""
    flags: list[str]
    """more #SBATCH lines of every job, as they are: ['--reservation=mtp', '--exclude=node7']"""
    stage_flags: dict[str, list[str]]
    """and of single stages, which come last and so win: {merge: ['--partition=cpu']}"""
    nodes: int
    """of training"""
    gpus_per_node: int
    """GPUs that training takes of each node; 0: no GPU anywhere, and gloo instead of NCCL"""
    gpu_type: Optional[str]  # noqa: UP045
    """in --gres=gpu:TYPE:N"""
    processes_per_node: Optional[int]  # noqa: UP045
    """training processes of a node; null: one for each GPU, or one"""
    cpus_per_process: int
    """CPUs of each training process, of each GPU of another job, and of a job without a GPU"""
    mem_per_cpu: Optional[str]  # noqa: UP045
    """memory, as --mem-per-cpu has it: 8G"""
    time: dict[str, str]
    """limit of a job of each stage, as --time has it, in quotes ("24:00:00"); shorter than the work is normal: the job saves, and is queued again"""
    max_parallel: Optional[int]  # noqa: UP045
    """tasks of an array that run at once; null: as many as the cluster gives"""
    setup: list[str]
    """shell lines at the beginning of every job: module load, conda activate"""
    prefix: str
    """put in front of the interpreter: apptainer exec --nv image.sif"""
    python: Optional[str]  # noqa: UP045
    """the interpreter in the jobs; null: the one that submits"""
    env: dict[str, str]
    """environment of every job"""
    scratch: Optional[str]  # noqa: UP045
    """folder on the disk of the node that training copies its shards to, such as $TMPDIR; null: it reads them where they are"""
    signal_lead_s: int
    """seconds before the limit at which a job is told to save: one optimiser step, validation and a checkpoint must fit"""
    max_requeues: int
    """times that a job may be queued again, for whatever reason"""
    retries: int
    """times that a job (or a task of an array) that failed tries again before the chain stops"""


@dataclass
class SubmitConfig:
    dry_run: bool
    """print what would be submitted, and stop"""
    stages: list[str]
    """which stages of the chain; mtp-submit takes stages=train,eval as well"""
    sweep: Optional[str]  # noqa: UP045
    """overrides with several values each, split by spaces; every combination is a point: mtp-submit sweep='train.optim.lr=1e-3,2e-3'"""
