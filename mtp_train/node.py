"""The machine that `plan=true` is about: the section `node` of the configuration, read by `planner.py` alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class NodeConfig:
    name: str
    """of the machine that plan=true is about"""
    num_devices: int
    """GPUs (or 1, the CPU) that share the work"""
    peak_tflops: float
    """TFLOP/s of one device in the training dtype, dense"""
    memory_gb: float
    """GB of one device"""
    disk_tb: float
    """TB that captured states may fill"""
    disk_read_gb_s: float
    """GB/s that the disk gives to all devices together"""
    train_efficiency: float
    """share of the peak that training reaches"""
    capture_efficiency: float
    """share of the peak that the target's prefill reaches"""
    decode_efficiency: float
    """share of the peak that the target's decoding in large batches reaches"""
    hours: float
    """what regeneration, capture and training may take together"""
    epochs: float
    """times that training reads every token"""
    supervised_share: float
    """share of tokens that are training targets, where no shards are there to be counted"""
