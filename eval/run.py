"""Acceptance, measured by decoding held-out prompts with a real draft/target engine; writes report.json, report.md and report.html.

Every measurement is made by decoding, never by teacher forcing. Greedy output is compared with plain decoding on the same runner; what
drafting is worth in time is measured apart. engine=vllm measures in vLLM, parity=true in both engines, side by side. eval.part=0, eval.part=1, ...
measure one of eval.runs each, in processes of their own; eval.steps=[report] joins them.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval import parts
from eval.card import write_figures
from eval.engine import Decoded, EvalEngine
from eval.engine_hf import EmbeddedEngine
from eval.engine_server import ServerEngine
from eval.engine_vllm import VllmEngine
from eval.heads import comparable, compare_heads, open_others
from eval.parity import EXPLAINED_GAP, WIRING, compare_engines, first_difference
from eval.prompts import evenly, read_prompts
from eval.report import terminal_table, write_report
from eval.summary import loops, name_of, pieces, training_curve, with_speedup
from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.data.chat import open_tokenizer
from mtp_train.data.manifest import Manifest
from mtp_train.dist import dtype_name, pick_device, pick_dtype
from mtp_train.metrics import METRICS, read_metrics
from mtp_train.provenance import atomic_write, config_yaml, provenance, sha256, write_provenance
from mtp_train.published import identity, open_head
from mtp_train.spec_decode.stats import AcceptanceStats, summarise
from mtp_train.target.ends import local_dir, num_positions
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)

ENGINES: dict[str, Callable[..., EvalEngine]] = {"embedded": EmbeddedEngine, "vllm": VllmEngine}
PARTS = ("propose", "extend", "verify", "commit")


class Evaluation:
    """Holds an engine and the prompts, and makes the parts of the report."""

    def __init__(self, config: cfg.Config):
        self.config, self.options = config, config.eval
        if config.eval.prompts is None:
            raise ValueError("eval.prompts is not set: give a JSONL file of held-out conversations")
        if not config.eval.runs:
            raise ValueError("eval.runs is empty: nothing to measure")
        self.device = pick_device(config.target.device)
        self.tokenizer, stops = open_tokenizer(local_dir(config.target.path))
        self.loaded = open_head(config.eval.head, config.target.path)
        self.info = target_info(config.target.path)
        self.loaded.info.target.check(self.info, f"the head {config.eval.head}")
        self.others = open_others(config, self.info)
        self.prompts = read_prompts(config.eval.prompts, self.tokenizer, config.eval.num_prompts, config.data.template_kwargs)
        longest = max(len(prompt.token_ids) for prompt in self.prompts)
        self.arguments = (config, self.loaded, stops, longest)
        self.engine: EvalEngine = (ServerEngine if config.eval.server else ENGINES[config.engine.name])(*self.arguments)
        self.warnings: list[str] = []
        reach = longest + self.options.max_new_tokens
        if reach > self.loaded.info.seq_len:
            self.warnings.append(f"prompts and answers reach {reach} tokens, the head was trained on rows of {self.loaded.info.seq_len}")
        if reach > (limit := num_positions(config.target.path)):
            self.warnings.append(f"prompts and answers reach {reach} tokens, the target was made for {limit} positions")

    def dtype(self, name: str) -> str:
        return dtype_name(pick_dtype(name, self.device))

    def name_of(self, run: cfg.EvalRunConfig | None) -> str:
        return name_of(run, self.engine.draft_vocab(run)) if run else "plain decoding"

    # ------------------------------------------------------------ measuring

    def measure(self, run: cfg.EvalRunConfig | None) -> Decoded:
        """All prompts, one way."""
        return self.engine.decode(run, self.prompts, self.options.batch_size, self.options.max_new_tokens, self.name_of(run))

    def time(self, run: cfg.EvalRunConfig | None) -> list[dict[str, Any]]:
        """Tokens per second of a few prompts, at each batch size, after a warm-up."""
        rows, warm = [], evenly(self.prompts, 1)
        if not self.options.speed_prompts or (run and run.temperature > 0):
            return []
        self.engine.decode(run, warm, 1, 8, "warm-up")
        for batch_size in self.options.speed_batch_sizes:
            mixed = evenly(self.prompts, max(self.options.speed_prompts, batch_size))
            decoded = self.engine.decode(run, mixed, batch_size, self.options.speed_tokens, f"speed at batch {batch_size}, {self.name_of(run)}")
            costs, vocab = decoded.costs, self.engine.draft_vocab(run) if run else None
            rows.append({
                "name": self.name_of(run), "kind": "speculative" if run else "plain", "engine": self.engine.name, "batch_size": batch_size,
                "dtype": self.engine.dtype, "K": run.num_draft_tokens if run else 0, "draft_vocab_size": None if vocab is None else len(vocab),
                "num_prompts": len(mixed), "num_tokens": sum(len(one.token_ids) for one in decoded.completions.values()), "seconds": decoded.seconds,
                "tokens_per_second": decoded.tokens_per_second, "num_steps": costs.num_steps if costs else None,
                "parts": {f"{part}_ms": 1000 * getattr(costs, part) / max(1, costs.num_steps) for part in PARTS} if costs else None,
            })  # fmt: skip
        return rows

    def run_row(self, run: cfg.EvalRunConfig, decoded: Decoded) -> dict[str, Any]:
        """One run's part of the report."""
        by_domain: dict[str, list[AcceptanceStats]] = defaultdict(list)
        calm, vocab = [], self.engine.draft_vocab(run)
        for prompt in self.prompts:
            completion = decoded.completions[prompt.id]
            by_domain[prompt.domain].append(completion.stats)
            if not loops(completion.token_ids):
                calm.append(completion.stats)
        row: dict[str, Any] = {
            "name": self.name_of(run), "engine": self.engine.title, "K": run.num_draft_tokens, "temperature": run.temperature,
            "draft_sampling": run.draft_sampling, "draft_vocab_size": None if vocab is None else len(vocab), "dtype": self.engine.dtype,
            "batch_size": self.options.batch_size, "max_new_tokens": self.options.max_new_tokens, "num_prompts": len(self.prompts),
            "overall": summarise([decoded.completions[prompt.id].stats for prompt in self.prompts]),
            "domains": {domain: summarise(stats) for domain, stats in by_domain.items()},
            "without_loops": summarise(calm) if len(calm) < len(self.prompts) else None, "num_looping_prompts": len(self.prompts) - len(calm),
        }  # fmt: skip
        counters = row["overall"]["counters"]
        if not counters["num_drafts"]:
            self.warnings.append(f"{row['name']}: no draft was made: the answers are one token long")
        elif counters["num_accepted_tokens"] == 0:
            self.warnings.append(f"{row['name']}: nothing at all was accepted, length exactly 1.0: {WIRING}")
        elif counters["num_accepted_tokens"] == counters["num_draft_tokens"]:
            self.warnings.append(f"{row['name']}: every draft was accepted, as by the target itself; or verification is off")
        return row

    # ------------------------------------------------------------ losslessness

    def lossless(self, plain: Decoded, drafted: Decoded) -> dict[str, Any]:
        """Compare greedy outputs; each difference is explained by a near-tie of the target's two best tokens, or is a fault."""
        differences = []
        for prompt in self.prompts:
            a, b = plain.completions[prompt.id].token_ids, drafted.completions[prompt.id].token_ids
            if (at := first_difference(a, b)) is None:
                continue
            gap = self.engine.top2_gap(prompt.token_ids + a[:at])
            differences.append({
                "id": prompt.id, "position": at, "token_plain": a[at] if at < len(a) else None, "token_draft": b[at] if at < len(b) else None,
                "top2_gap": gap, "explained": gap < EXPLAINED_GAP,
            })  # fmt: skip
        unexplained = [one["id"] for one in differences if not one["explained"]]
        if self.engine.dtype == "float32" and (unexplained or len(differences) > 0.02 * len(self.prompts)):
            self.warnings.append(f"greedy output differs from plain decoding on {len(differences)} of {len(self.prompts)} prompts, unexplained: {unexplained}")
        return {
            "checked": True, "dtype": self.engine.dtype, "num_prompts": len(self.prompts), "num_equal": len(self.prompts) - len(differences),
            "differences": differences,
        }  # fmt: skip

    # ------------------------------------------------------------ the report

    def examples(self, decoded: Decoded) -> list[dict[str, Any]]:
        """A few answers with where each token came from, taken evenly from the domains."""
        out = []
        for prompt in evenly(self.prompts, self.options.num_examples):
            one = decoded.completions[prompt.id]
            texts = pieces(self.tokenizer, one.token_ids)
            tokens = [{"text": text, "kind": kind} for text, kind in zip(texts, one.kinds, strict=True)]
            out.append({"id": prompt.id, "domain": prompt.domain, "prompt": prompt.text, "tokens": tokens})
        return out

    def report(self) -> dict[str, Any]:
        """Measure everything. Ways of drafting come one after the other: an engine may have to start for each."""
        ways: list[cfg.EvalRunConfig | None] = [*([None] if self.engine.decodes_plainly else []), *self.options.runs]
        self.engine.load(self.dtype(self.options.dtype))
        checks = self.engine.self_checks(self.prompts[:4]) if self.options.self_checks else []
        self.warnings += [f"self-check failed: {one['name']}: {one['found']}" for one in checks if not one["passed"]]
        once = self.dtype(self.options.speed_dtype) == self.engine.dtype or not self.engine.decodes_plainly
        plain, live, drafted, timed = None, None, [], []
        for way in ways:
            if way is None:
                plain = self.measure(way)
                live = self.engine.live_validation(self.prompts, plain)
            else:
                drafted.append(self.measure(way))
            timed.append(self.time(way) if once else [])
        runs = [self.run_row(run, one) for run, one in zip(self.options.runs, drafted, strict=True)]
        greedy = next((one for run, one in zip(self.options.runs, drafted, strict=True) if run.temperature == 0), None)
        lossless = self.lossless(plain, greedy) if plain and greedy else {"checked": False}
        parity = compare_engines(self, drafted, ENGINES) if self.options.parity else None
        heads = compare_heads(self, drafted) if self.options.heads else []
        if not once:
            self.engine.load(self.dtype(self.options.speed_dtype))
            timed = [self.time(way) for way in ways]
        report = {
            "title": f"Acceptance of an {self.loaded.info.config.kind.upper()} head on {Path(self.config.target.path).name}",
            "created": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "warnings": self.warnings, "target": asdict(self.info),
            "head": self.head_row(), "data": self.data_row(), "runs": runs, "heads": heads, "lossless": lossless, "checks": checks, "parity": parity,
            "speed": with_speedup(timed), "examples": self.examples(drafted[0]), "validation": {"shards": self.recorded_validation(), "live": live},
            "training": training_curve(Path(self.config.run_dir)), "reproduce": reproduce(self.config),
        }  # fmt: skip
        self.engine.close()
        return report

    def head_row(self) -> dict[str, Any]:
        info, vocab = self.loaded.info, self.loaded.draft_vocab
        size = sum(parameter.numel() for parameter in self.loaded.head.parameters())
        return {
            "kind": info.config.kind, "num_parameters": size, "checkpoint": self.options.head, "step": info.step, "layout": info.config.layout,
            "draft_vocab_size": None if vocab is None else len(vocab), "unroll_steps": info.unroll_steps,
        }  # fmt: skip

    def data_row(self) -> dict[str, Any]:
        path = Path(self.config.run_dir) / "shards" / "train" / "manifest.json"
        if not path.exists():
            return {}
        shards = Manifest.read(path).shards
        rows, tokens, marked = (sum(getattr(shard, name) for shard in shards) for name in ("samples", "tokens", "supervised_tokens"))
        return {
            "train_rows": rows, "train_tokens": tokens, "train_supervised_tokens": marked,
            "regenerated": self.config.precompute.regenerate.enabled, "max_length": self.config.data.max_length,
        }  # fmt: skip

    def recorded_validation(self) -> dict[str, Any] | None:
        """The figures of training's validation at the head's step."""
        lines = [line for line in read_metrics(Path(self.config.run_dir) / METRICS) if "val_loss" in line]
        line = next((line for line in lines if line["step"] == self.loaded.info.step), None)
        return line and {"step": line["step"], **{key.removeprefix("val_"): value for key, value in line.items() if key.startswith("val_")}}


def reproduce(config: cfg.Config) -> dict[str, Any]:
    """Command, configuration and versions."""
    return {"command": shlex.join(["mtp-eval", *sys.argv[1:]]), "config": config_yaml(asdict(config)), "provenance": provenance()}


def what_is_read(config: cfg.Config) -> dict[str, Any]:
    """The content behind the paths: what they name may be another head, target or file of prompts than before."""
    options, target = config.eval, config.target.path
    heads = [options.head, *options.heads, *([options.vllm_head] if config.engine.name == "vllm" or options.parity else [])]
    prompts = options.prompts and Path(options.prompts).is_file() and sha256(options.prompts)
    return {"target": target, "weights": target_info(target).weights_hash, "files": {head: identity(head) for head in heads}, "sha256 of the prompts": prompts}


def mark_of(config: cfg.Config, read: dict[str, Any]) -> dict[str, Any]:
    """What a report is a report of, as JSON has it: settings, and what is read (`what_is_read`)."""
    options = {key: value for key, value in asdict(config.eval).items() if key not in ("steps", "part")}
    mark = options | asdict(config.engine) | {"target_dtype": config.target.dtype, "template_kwargs": config.data.template_kwargs} | read
    return json.loads(json.dumps(mark))


def alone(config: cfg.Config, part: int) -> cfg.Config:
    """The configuration of one run."""
    run = config.eval.runs[part]
    heads = config.eval.heads if comparable(run) else []
    return replace(config, eval=replace(config.eval, runs=[run], heads=heads, part=None))


def measure_part(config: cfg.Config, part: int, report_dir: Path, read: dict[str, Any]) -> None:
    """Measure one run, unless that was done."""
    one = alone(config, part)
    mark = mark_of(one, read)
    if parts.is_there(report_dir, part, mark):
        log.info("part %d is complete: %s", part, parts.path_of(report_dir, part))
        return
    parts.write(report_dir, part, mark, Evaluation(one).report())


def joined(config: cfg.Config, report_dir: Path, read: dict[str, Any]) -> dict[str, Any]:
    """The report of all parts; it names the machine that measured."""
    found = [parts.read(report_dir, part, mark_of(alone(config, part), read)) for part in range(len(config.eval.runs))]
    report = parts.join(found)
    return report | {"reproduce": reproduce(config) | {"provenance": report["reproduce"]["provenance"]}}


def stage(config: cfg.Config) -> None:
    """The command mtp-eval: does nothing when the report of these very files and settings is there."""
    if config.eval.heads and not any(comparable(run) for run in config.eval.runs):
        raise ValueError("eval.heads: none of eval.runs has draft_vocab_size=null, and heads are compared on their own vocabularies")
    report_dir = cfg.report_dir(config.run_dir, config.engine.name)
    read = what_is_read(config)
    if config.eval.part is not None:
        measure_part(config, config.eval.part, report_dir, read)
        return
    mark, stamp = mark_of(config, read), report_dir / "done.json"
    if stamp.exists() and json.loads(stamp.read_text()) == mark:
        log.info("the report is complete: %s", report_dir / "report.html")
        report = json.loads((report_dir / "report.json").read_text())
    else:
        stamp.unlink(missing_ok=True)
        report = Evaluation(config).report() if "measure" in config.eval.steps else joined(config, report_dir, read)
        write_report(report, report_dir)
        write_provenance(report_dir, asdict(config))
        for card in write_figures(Path(config.eval.head), report, report_dir):
            log.info("figures added to %s", card)
        atomic_write(stamp, json.dumps(mark))
    sys.stdout.write(terminal_table(report) + f"\nreport: {report_dir / 'report.html'}\n")


def main() -> None:
    """Console script mtp-eval."""
    cli.main(__doc__, stage)


if __name__ == "__main__":
    main()
