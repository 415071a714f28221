"""Several heads on the same prompts: how many more tokens each gets than the first one, and what it costs in drafting, storage and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from eval.engine import Decoded
from eval.engine_hf import EmbeddedEngine
from mtp_train.checkpoint import LoadedHead
from mtp_train.config import Config, EvalRunConfig
from mtp_train.interfaces import TargetInfo
from mtp_train.published import open_head
from mtp_train.spec_decode.stats import AcceptanceStats, acceptance_length, paired_bootstrap, summarise

if TYPE_CHECKING:
    from eval.run import Evaluation


def comparable(run: EvalRunConfig) -> bool:
    """Whether heads are compared in this run: each drafts from its own vocabulary."""
    return run.draft_vocab_size is None


def open_others(config: Config, target: TargetInfo) -> dict[str, LoadedHead]:
    """eval.heads. Raises FileNotFoundError and ValueError where one cannot be read, or is of another target."""
    found = {folder: open_head(folder, config.target.path) for folder in config.eval.heads}
    for folder, loaded in found.items():
        loaded.info.target.check(target, f"the head {folder}")
    return found


def compare_heads(evaluation: Evaluation, drafted: Sequence[Decoded]) -> list[dict[str, Any]]:
    """Rows of the report, of the evaluated head and of each of eval.heads, for every run that is `comparable`.

    Args:
        drafted: what the evaluated head did, by run.
    """
    options, (config, first, stops, longest) = evaluation.options, evaluation.arguments
    runs = [run for run in options.runs if comparable(run)]
    mine = [one for run, one in zip(options.runs, drafted, strict=True) if run in runs]
    done = [(options.head, first, mine)]
    for folder, loaded in evaluation.others.items():
        engine = EmbeddedEngine(replace(config, eval=replace(options, head=folder, runs=runs)), loaded, stops, longest)
        engine.load(evaluation.engine.dtype)
        said = f"{loaded.info.config.kind}, K={{}}"
        decoded = [engine.decode(run, evaluation.prompts, options.batch_size, options.max_new_tokens, said.format(run.num_draft_tokens)) for run in runs]
        done.append((folder, loaded, decoded))
    prompts = [prompt.id for prompt in evaluation.prompts]
    rows = []
    for index, run in enumerate(runs):
        stats = [[decoded[index].completions[id].stats for id in prompts] for _, _, decoded in done]
        for (folder, loaded, decoded), own in zip(done, stats, strict=True):
            row = _row(folder, loaded, decoded[index], own, stats[0], config.precompute.state_dtype)
            rows.append({**row, "K": run.num_draft_tokens, "batch_size": options.batch_size})
    return rows


def _row(folder: str, loaded: LoadedHead, decoded: Decoded, stats: list[AcceptanceStats], reference: list[AcceptanceStats], dtype: str) -> dict[str, Any]:
    costs, info, summary = decoded.costs, loaded.info, summarise(stats)
    assert costs is not None, "the embedded engine times its parts"
    low, high = paired_bootstrap(reference, stats, acceptance_length)
    value = float(acceptance_length(sum(stats, AcceptanceStats()).sums) - acceptance_length(sum(reference, AcceptanceStats()).sums))
    return {
        "name": folder, "kind": info.config.kind, "acceptance_length": summary["acceptance_length"], "difference": {"value": value, "low": low, "high": high},
        "acceptance_rate_at": summary["acceptance_rate_at"], "propose_ms": 1000 * costs.propose / max(1, costs.num_steps),
        "state_bytes": len(info.taps) * info.target.hidden_size * getattr(torch, dtype).itemsize,
        "num_parameters": sum(parameter.numel() for parameter in loaded.head.parameters()), "training_flop": info.training_flop,
    }  # fmt: skip
