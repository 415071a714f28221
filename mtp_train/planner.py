"""What a run needs, by arithmetic: parameters, FLOP, memory, bytes, hours, and the tokens that fit the time. No weights are read.

`mtp-train plan=true` (or `mtp-precompute plan=true`) prints it. Sizes are those of the real modules, built on the meta device from the target's
config. FLOP are those of matrix products, 2 for a multiply and add; tests/test_planner.py holds them against torch's own counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_train.config import Config, HeadConfig, TargetConfig
from mtp_train.data.manifest import MANIFEST, Manifest
from mtp_train.heads.table import build_head, taps_of
from mtp_train.node import NodeConfig


@dataclass(frozen=True)
class Figure:
    """One line of a table: the value in its base unit, and what it assumes."""

    value: float
    unit: str
    assumes: str = ""


Table = dict[str, Figure]


@dataclass(frozen=True)
class Sizes:
    """What the formulas need to know of a head and its target."""

    parts: dict[str, int]  # trained parameters by part
    multiplied: int  # weights of the block that one token is multiplied with: of E experts only those it is routed to
    around: tuple[int, int]  # training FLOP of a row outside block and lm_head: of step 0 with `fuse`, of a later step
    own_lm_head: bool  # the head trains its own
    taps: int  # states of a token that it reads
    kept: int  # entries that one token leaves for the backward pass
    attention: int  # heads x (size of a key + size of a value), all layers of the head
    hidden: int
    vocab: int
    tied: bool  # embeddings and lm_head are one tensor
    target: int  # parameters
    target_active: int  # those of one token


def state_bytes(num_tokens: int, num_taps: int, hidden_size: int, dtype: str) -> int:
    """Bytes of the stored states (tokens x taps x hidden x dtype), with ids (8) and mask (1) of each token."""
    itemsize: int = getattr(torch, dtype).itemsize
    return num_tokens * (num_taps * hidden_size * itemsize + 9)


def stored_states(config: Config, sizes: Sizes) -> tuple[int, int]:
    """States stored of each token, and its bytes."""
    layers = config.precompute.tap_layers
    taps = sizes.taps if layers is None else len(layers) + 1
    return taps, state_bytes(1, taps, sizes.hidden, config.precompute.state_dtype)


def read_target(target: TargetConfig) -> Any:
    """The target's transformers config: `target.arch` where given, else its config.json."""
    if target.arch:
        facts = dict(target.arch)
        return AutoConfig.for_model(facts.pop("model_type"), **facts)
    return AutoConfig.from_pretrained(target.path).get_text_config()


def measure(head_config: HeadConfig, target: Any) -> Sizes:
    """The sizes of a head for a target's transformers config; nothing is allocated."""
    with torch.device("meta"):
        head: Any = build_head(head_config, target)
        model = AutoModelForCausalLM.from_config(target)
    top_k = getattr(target, "num_experts_per_tok", None) or 0

    def active(parameters: Iterable[nn.Parameter]) -> int:  # experts are one tensor (E, out, in)
        return sum(one.numel() if one.dim() < 3 else one.numel() // len(one) * top_k for one in parameters)

    parts: dict[str, int] = {}
    for name, parameter in head.named_parameters():
        part = name.split(".")[0] if parameter.dim() > 1 else "norms and biases"
        parts[part] = parts.get(part, 0) + parameter.numel()
    matrices = [parameter for name, parameter in head.named_parameters() if parameter.dim() > 1 and not name.startswith("lm_head.")]
    taps = len(taps_of(head_config, target.num_hidden_layers))
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    key, value = (target.qk_nope_head_dim + target.qk_rope_head_dim, target.v_head_dim) if hasattr(target, "qk_nope_head_dim") else (head_dim, head_dim)
    return Sizes(
        parts=parts,
        multiplied=active(parameter for parameter in head.block.parameters() if parameter.dim() > 1),
        around=_around(head, taps, target.hidden_size),
        own_lm_head=head.lm_head is not None,
        taps=taps,
        # What every product takes in and gives out; a norm keeps its input in float32, and its output.
        kept=sum(sum(one.shape[-2:]) * (top_k if one.dim() > 2 else 1) for one in matrices) + 3 * parts["norms and biases"],
        attention=head_config.num_layers * target.num_attention_heads * (key + value),
        hidden=target.hidden_size,
        vocab=target.vocab_size,
        tied=bool(target.tie_word_embeddings),
        target=sum(one.numel() for one in model.parameters()),
        target_active=active(model.parameters()),
    )


def _around(head: Any, taps: int, hidden: int) -> tuple[int, int]:
    """FLOP of a row, forward and backward, of what stands around the block: counted, for what needs no gradient differs by head and step."""
    head.block.forward = lambda x, *_: x[..., :hidden]  # of a head on the meta device, which is thrown away
    states, positions = torch.empty(1, 1, taps, hidden, device="meta"), torch.zeros(1, 1, dtype=torch.long, device="meta")
    found = []
    for step in range(2):
        with FlopCounterMode(display=False) as counter:
            features = head.fuse(states) if step == 0 else states[:, :, -1].clone().requires_grad_()
            head.readout(head(states[:, :, -1], features, positions, None)).sum().backward()
        found.append(counter.get_total_flops())
    return found[0], found[1]


def train_flop(sizes: Sizes, seq_len: int, num_steps: int, share: float, vocab: int, going_on: float | None = None) -> dict[str, float]:
    """FLOP of training by part, per token of a packed row.

    Args:
        num_steps: K of the unroll.
        share: of the tokens that are supervised: only they reach lm_head, and the target's logits serve all K steps.
        vocab: entries of lm_head that are used.
        going_on: share of the rows that steps k >= 1 compute (`heads.base.chained`); None: that of the supervised tokens, of which it is hardly more.
    """
    going_on = share if going_on is None else going_on
    later = (num_steps - 1) * going_on  # rows of steps k >= 1, for each row of step 0
    return {
        "block": 6.0 * sizes.multiplied * (1 + later),  # forward, gradient of the input, gradient of the weight
        "projection": sizes.around[0] + sizes.around[1] * later,
        # Causal: half of the square, forward and twice that backward. At most, the rows that go on are a document's last ones, which see most.
        "attention": 3.0 * sizes.attention * seq_len * (1 + later * (2 - going_on)),
        # Frozen: forward and gradient of the input; the head's own: that of the weight as well.
        "lm_head of the draft": (6.0 if sizes.own_lm_head else 4.0) * vocab * sizes.hidden * share * num_steps,
        "lm_head of the target": 2.0 * vocab * sizes.hidden * share,
    }


def average_flop(config: Config, sizes: Sizes, share: float) -> dict[str, float]:
    """As `train_flop`, averaged over the steps of the configured training."""
    options, vocab = config.train, config.head.draft_vocab_size or sizes.vocab
    alone, chain = (train_flop(sizes, options.seq_len, num_steps, share, vocab) for num_steps in (1, options.unroll_steps))
    return {part: options.unroll_from * alone[part] + (1 - options.unroll_from) * chain[part] for part in chain}


def training_flop(config: Config, sizes: Sizes, num_steps: int) -> float:
    """FLOP of a training's first optimiser steps, of one process; the first ones (train.unroll_from) draft one token."""
    options, share = config.train, supervised_share(config)[0].value
    short, vocab = min(num_steps, math.ceil(options.unroll_from * options.num_steps)), config.head.draft_vocab_size or sizes.vocab
    parts = [(short, 1), (num_steps - short, options.unroll_steps)]
    each = [number * sum(train_flop(sizes, options.seq_len, unrolled, share, vocab).values()) for number, unrolled in parts]
    return sum(each) * options.seq_len * options.rows_per_batch * options.accumulation


PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""FLOP/s of bfloat16 products, dense, by a part of the device's name, the first that fits (their data sheets)."""


def peak_flops(device: torch.device) -> float | None:
    """What the device could do at most; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class Meter:
    """Model FLOP utilisation (MFU): the FLOP that training needs, by `train_flop`, as a share of what the devices could do in that time."""

    def __init__(self, config: Config, sizes: Sizes, peak: float):
        """`peak`: FLOP/s of all devices together."""
        self.sizes, self.seq_len, self.peak = sizes, config.train.seq_len, peak
        self.vocab = config.head.draft_vocab_size or self.sizes.vocab

    def mfu(self, num_steps: int, share: float, tokens_per_second: float) -> float:
        """Of an unroll over `num_steps`, with this share of supervised tokens."""
        return tokens_per_second * sum(train_flop(self.sizes, self.seq_len, num_steps, share, self.vocab).values()) / self.peak


def plan(config: Config) -> dict[str, Table]:
    """Every table of a configuration, by title."""
    sizes = measure(config.head, read_target(config.target))
    node, options = config.node, config.train
    share, captured = supervised_share(config)
    vocab = config.head.draft_vocab_size or sizes.vocab
    flop = average_flop(config, sizes, share.value)
    taps, stored, dtype = *stored_states(config, sizes), config.precompute.state_dtype
    rate = node.peak_tflops * 1e12 * node.train_efficiency / sum(flop.values())
    steps = f"K = {options.unroll_steps}" + (f", 1 in the first {options.unroll_from:.0%} of the steps" if options.unroll_from else "")
    passes = "forward, both gradients: its own" if sizes.own_lm_head else "forward, gradient of the input"
    return {
        "parameters": {
            **{"lm_head (its own)" if part == "lm_head" else part: Figure(size, "", "trained") for part, size in sizes.parts.items()},
            "trained, all": Figure(sum(sizes.parts.values()), "", f"a token meets {si(sizes.multiplied)} in matrices of the block"),
            "lm_head": Figure(sizes.vocab * sizes.hidden, "", f"frozen; {vocab} of {sizes.vocab} rows are used (head.draft_vocab_size)"),
            "embeddings": Figure(sizes.vocab * sizes.hidden, "", "frozen; " + ("the same tensor as lm_head" if sizes.tied else "not tied to lm_head")),
            "target": Figure(sizes.target, "", f"{si(sizes.target_active)} active for one token"),
        },
        "training FLOP per token of a packed row": {
            "block": Figure(flop["block"], "FLOP", f"6 per weight (forward 2, backward 4), {steps}; steps after the first: supervised share of the rows"),
            "projection": Figure(flop["projection"], "FLOP", f"what stands around the block, counted; {steps}"),
            "attention": Figure(flop["attention"], "FLOP", f"causal over {options.seq_len} tokens (an upper bound: documents are shorter), {steps}"),
            "lm_head of the draft": Figure(
                flop["lm_head of the draft"], "FLOP", f"{6 if sizes.own_lm_head else 4} per weight ({passes}), supervised rows, {steps}"
            ),
            "lm_head of the target": Figure(flop["lm_head of the target"], "FLOP", "2 per weight, once per supervised token, for all steps"),
            "all": Figure(sum(flop.values()), "FLOP"),
            "supervised share": share,
        },
        "training speed": {
            "of one device": Figure(rate, "tok/s", f"{node.train_efficiency:.0%} of {node.peak_tflops:g} TFLOP/s (assumed: node.train_efficiency)"),
            f"of {node.name}": Figure(rate * node.num_devices, "tok/s", f"{node.num_devices} devices, no cost of communication"),
            "states read": Figure(rate * node.num_devices * stored, "B/s", f"the disk gives {node.disk_read_gb_s:g} GB/s (node.disk_read_gb_s)"),
        },
        "memory of one device in training": memory(config, sizes, vocab, share.value),
        "storage": {
            "one token": Figure(stored, "B", f"{taps} x {sizes.hidden} x {dtype}, id and mask"),
            "one shard": Figure(stored * config.precompute.shard_tokens, "B", f"precompute.shard_tokens={config.precompute.shard_tokens}"),
        },
        f"time on {node.name}": hours(config, sizes, rate * node.num_devices, stored, share.value, captured),
    }


def supervised_share(config: Config) -> tuple[Figure, int]:
    """The share of supervised tokens, and how many tokens are captured: counted in the run's shards where there are some, else assumed and 0."""
    path = Path(config.train.shards) / "train" / MANIFEST
    if not path.exists():
        return Figure(config.node.supervised_share, "", "assumed: node.supervised_share"), 0
    shards = Manifest.read(path).shards
    tokens = sum(one.tokens for one in shards)
    return Figure(sum(one.supervised_tokens for one in shards) / max(1, tokens), "", f"counted in {path.parent}"), tokens


def memory(config: Config, sizes: Sizes, vocab: int, share: float) -> Table:
    """Bytes of one device in training, every device holding the whole head."""
    options = config.train
    trained, tokens = sum(sizes.parts.values()), options.rows_per_batch * options.seq_len
    ends = sizes.vocab * sizes.hidden * (1 if sizes.tied else 2) + (vocab * sizes.hidden if vocab < sizes.vocab else 0)
    width, dtype = (4, "float32") if options.dtype == "float32" else (2, "bfloat16")
    lines = {
        "weights": Figure((4 if width == 4 else 6) * trained, "B", "float32" + ("" if width == 4 else ", and the bfloat16 copies of autocast")),
        "gradients": Figure(4 * trained, "B", "float32, on every device (ZeRO-2 divides them by the devices)"),
        "moments of AdamW": Figure(8 * trained, "B", "two in float32 (ZeRO-1 and 2 divide them)"),
        "frozen ends": Figure(width * ends, "B", f"embeddings, lm_head and the rows of a draft vocabulary, {dtype}"),
        "activations": Figure(
            width * sizes.kept * tokens * (1 + (options.unroll_steps - 1) * share),
            "B",
            f"estimated: inputs and outputs of the products and norms, {tokens} tokens, {options.unroll_steps} steps",
        ),
        "chunk of the loss": Figure(options.loss.chunk_mib * 2**20, "B", f"train.loss.chunk_mib={options.loss.chunk_mib}"),
    }
    total = sum(line.value for line in lines.values())
    fits = "fits" if total < config.node.memory_gb * 1e9 else "DOES NOT FIT"
    return {**lines, "all": Figure(total, "B", f"{fits} in {config.node.memory_gb:g} GB (node.memory_gb)")}


def run_tokens(config: Config) -> tuple[int, float]:
    """Tokens of an optimiser step of the whole node, and the corpus tokens that `train.num_steps` read `node.epochs` times."""
    options = config.train
    step = options.rows_per_batch * options.seq_len * options.accumulation * config.node.num_devices
    return step, options.num_steps * step / config.node.epochs


def stage_seconds(config: Config, sizes: Sizes, rate: float, stored: int, share: float) -> dict[str, float]:
    """Seconds that each stage spends on one corpus token, on the whole node; training reads it `node.epochs` times."""
    node, forward = config.node, 2 * sizes.target_active / (config.node.peak_tflops * 1e12 * config.node.num_devices)
    answers = (1 - share) * forward / node.capture_efficiency + share * forward / node.decode_efficiency
    return {
        "regeneration": answers if config.precompute.regenerate.enabled else 0.0,
        "capture": forward / node.capture_efficiency,
        "training": node.epochs * max(1 / rate, stored / (node.disk_read_gb_s * 1e9)),
    }


def hours(config: Config, sizes: Sizes, rate: float, stored: int, share: float, captured: int) -> Table:
    """The largest number of corpus tokens that `node.hours` and the disk allow, and what each stage then takes."""
    node, options = config.node, config.train
    seconds = stage_seconds(config, sizes, rate, stored, share)
    by_time, by_disk = node.hours * 3600 / sum(seconds.values()), node.disk_tb * 1e12 / stored
    budget = min(by_time, by_disk)
    step_tokens, tokens = run_tokens(config)
    assumes = {
        "regeneration": f"prompts at the efficiency of capture, answers decoded at {node.decode_efficiency:.0%} of the peak (assumed: node.decode_efficiency)"
        if config.precompute.regenerate.enabled
        else "not included (precompute.regenerate.enabled=false)",
        "capture": f"2 FLOP per active parameter, lm_head and embeddings included, at {node.capture_efficiency:.0%} (assumed: node.capture_efficiency)",
        "training": f"{node.epochs:g} x every token (node.epochs), "
        + ("the disk is the limit" if seconds["training"] > 1.001 * node.epochs / rate else "compute is the limit"),
    }
    lines = {"tokens that fit": Figure(budget, "tok", _binding(node, by_time, by_disk))}
    lines |= {stage: Figure(each * budget / 3600, "h", assumes[stage]) for stage, each in seconds.items()}
    lines |= {
        "all": Figure(sum(seconds.values()) * budget / 3600, "h", "compute alone: no start-up, download, validation or evaluation"),
        "states on disk": Figure(stored * budget, "B", f"node.disk_tb={node.disk_tb:g}; included in the budget"),
        "optimiser steps": Figure(budget * node.epochs / step_tokens, "", f"of {step_tokens} tokens"),
        "this run": Figure(
            sum(seconds.values()) * tokens / 3600, "h", f"train.num_steps={options.num_steps}: {si(tokens)}tok, {si(tokens * stored)}B of states"
        ),
    }
    if captured:
        lines["captured tokens"] = Figure(captured * seconds["training"] / 3600, "h", f"training on {captured} tokens that are there")
    return lines


def run_hours(config: Config) -> dict[str, float]:
    """Hours of regeneration, capture and training on the whole node, for the tokens that `train.num_steps` read `node.epochs` times."""
    sizes = measure(config.head, read_target(config.target))
    node, share = config.node, supervised_share(config)[0].value
    flop = average_flop(config, sizes, share)
    rate = node.num_devices * node.peak_tflops * 1e12 * node.train_efficiency / sum(flop.values())
    stored, (_, tokens) = stored_states(config, sizes)[1], run_tokens(config)
    return {stage: seconds * tokens / 3600 for stage, seconds in stage_seconds(config, sizes, rate, stored, share).items()}


def _binding(node: NodeConfig, by_time: float, by_disk: float) -> str:
    limit = f"node.hours={node.hours:g}" if by_time <= by_disk else f"node.disk_tb={node.disk_tb:g}"
    return f"the limit is {limit}; time alone {si(by_time)}tok, disk alone {si(by_disk)}tok"


def si(value: float) -> str:
    """Four digits with a decimal prefix: 251.7 M."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {letter}"
    return f"{value:.4g} "


def render(tables: dict[str, Table], title: str) -> str:
    """The tables as text: name, value, assumption."""
    lines = [title]
    for name, table in tables.items():
        lines += ["", name]
        lines += [f"  {key:<24}{si(line.value) + line.unit:>18}   {line.assumes}".rstrip() for key, line in table.items()]
    return "\n".join(lines) + "\n"


def report(config: Config) -> str:
    """What `plan=true` prints."""
    return render(plan(config), f"{config.head.kind} head for {config.target.path}, {config.node.num_devices} devices ({config.node.name})")
