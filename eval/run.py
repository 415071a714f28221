"""Acceptance, measured by decoding held-out prompts with the real draft/target engine; writes report.json, report.md and report.html.

Every measurement is made by decoding, never by teacher forcing. Greedy output is compared with plain decoding on the same runner; what
drafting is worth in time is measured apart, one prompt at a time.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

from eval.prompts import Prompt, read_prompts
from eval.report import terminal_table, write_report
from eval.summary import evenly, figures, loops, name_of, pieces, training_curve
from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.checkpoint import LoadedHead, load_head
from mtp_train.data.chat import stop_ids
from mtp_train.data.dataset import collate
from mtp_train.data.manifest import Manifest
from mtp_train.dist import pick_device, pick_dtype
from mtp_train.heads.base import supervised, unroll
from mtp_train.interfaces import Drafter, Sample
from mtp_train.loss import LossSums, draft_loss
from mtp_train.metrics import read_metrics
from mtp_train.provenance import provenance, write_provenance
from mtp_train.spec_decode.drafters import HeadDrafter, NoDrafter
from mtp_train.spec_decode.engine import Completion, Costs, Engine, Request
from mtp_train.spec_decode.predict import walk
from mtp_train.spec_decode.stats import AcceptanceStats, summarise
from mtp_train.target.ends import local_dir
from mtp_train.target.hf import Target
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)

EXPLAINED_GAP = 1e-3  # top-2 logit gap below which two float32 evaluations may disagree
SPEED_TOKENS = 64  # budget of a timed answer


@dataclass
class Decoded:
    """What one pass over the prompts gave."""

    completions: dict[str, Completion]
    costs: Costs
    seconds: float


class Evaluation:
    """Holds the target and the head, and makes the parts of the report."""

    def __init__(self, config: cfg.Config):
        self.config, self.options = config, config.eval
        if config.eval.prompts is None:
            raise ValueError("eval.prompts is not set: give a JSONL file of held-out conversations")
        if not config.eval.runs:
            raise ValueError("eval.runs is empty: nothing to measure")
        self.device = pick_device(config.target.device)
        folder = local_dir(config.target.path)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None
        self.stops = stop_ids(self.tokenizer, generation)
        self.loaded = load_head(config.eval.head)
        self.info = target_info(config.target.path)
        self.loaded.info.target.check(self.info, f"the head {config.eval.head}")
        self.prompts = read_prompts(config.eval.prompts, self.tokenizer, config.eval.num_prompts, config.data.template_kwargs)
        self.longest = max(len(prompt.token_ids) for prompt in self.prompts)
        self.warnings: list[str] = []
        if self.longest + self.options.max_new_tokens > self.loaded.info.seq_len:
            self.warnings.append(
                f"prompts and answers reach {self.longest + self.options.max_new_tokens} tokens, the head was trained on rows of {self.loaded.info.seq_len}"
            )

    def load(self, dtype: str) -> None:
        """(Re)load target and head in a precision."""
        self.dtype = pick_dtype(dtype, self.device)
        self.target = Target.load(local_dir(self.config.target.path), self.dtype, 1, 1, self.loaded.info.taps, self.device)
        self.loaded = LoadedHead(self.loaded.head.to(self.device, self.dtype), self.loaded.info, self.loaded.draft_vocab)

    # ------------------------------------------------------------ decoding

    def vocab(self, run: cfg.EvalRunConfig) -> torch.Tensor | None:
        """The run's draft vocabulary: the one the head was trained with, or the most frequent answer tokens of the training shards."""
        if run.draft_vocab_size is None:
            return self.loaded.draft_vocab
        if run.draft_vocab_size >= self.info.vocab_size:
            return None
        from mtp_train.data.shards import ShardReader

        counts = ShardReader(Path(self.config.run_dir) / "shards" / "train").token_counts(self.info.vocab_size)
        return counts.argsort(descending=True, stable=True)[: run.draft_vocab_size].sort().values.to(self.device)

    def decode(self, run: cfg.EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str) -> Decoded:
        """Answer prompts with a run's drafting, or plainly."""
        num_draft = run.num_draft_tokens if run else 0
        slots, size = min(batch_size, len(prompts)), self.longest + max_new_tokens + num_draft + 2
        self.target.resize(slots, size)
        drafter: Drafter = NoDrafter(self.info.vocab_size)
        if run:
            probabilistic = run.draft_sampling == "probabilistic"
            drafter = HeadDrafter(self.loaded.head, self.target.ends, num_draft, slots, size, probabilistic=probabilistic, vocab=self.vocab(run))
        temperature = run.temperature if run else 0.0
        requests = [Request(one.id, one.token_ids, max_new_tokens, self.stops, temperature, self.options.seed + index) for index, one in enumerate(prompts)]
        engine, start = Engine(self.target, drafter), time.perf_counter()
        done = {one.id: one for one in tqdm(engine.generate(requests), total=len(requests), desc=what, unit="prompt", mininterval=5, dynamic_ncols=True)}
        return Decoded(done, engine.costs, time.perf_counter() - start)

    def run_row(self, run: cfg.EvalRunConfig, decoded: Decoded) -> dict[str, Any]:
        """One run's part of the report."""
        by_domain: dict[str, list[AcceptanceStats]] = defaultdict(list)
        calm = []
        for prompt in self.prompts:
            completion = decoded.completions[prompt.id]
            by_domain[prompt.domain].append(completion.stats)
            if not loops(completion.token_ids):
                calm.append(completion.stats)
        return {
            "name": name_of(run, self.vocab(run)),
            "engine": "embedded",
            "K": run.num_draft_tokens,
            "temperature": run.temperature,
            "draft_sampling": run.draft_sampling,
            "draft_vocab_size": None if (vocab := self.vocab(run)) is None else len(vocab),
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch_size": self.options.batch_size,
            "max_new_tokens": self.options.max_new_tokens,
            "num_prompts": len(self.prompts),
            "overall": summarise([decoded.completions[prompt.id].stats for prompt in self.prompts]),
            "domains": {domain: summarise(stats) for domain, stats in by_domain.items()},
            "without_loops": summarise(calm) if len(calm) < len(self.prompts) else None,
            "num_looping_prompts": len(self.prompts) - len(calm),
        }

    # ------------------------------------------------------------ losslessness

    def lossless(self, plain: Decoded, drafted: Decoded) -> dict[str, Any]:
        """Compare greedy outputs; each difference is explained by a near-tie of the target's two best tokens, or is a fault."""
        differences = []
        for prompt in self.prompts:
            a, b = plain.completions[prompt.id].token_ids, drafted.completions[prompt.id].token_ids
            if a == b:
                continue
            at = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            gap = self.top2_gap(prompt.token_ids + a[:at])
            differences.append({
                "id": prompt.id, "position": at, "token_plain": a[at] if at < len(a) else None, "token_draft": b[at] if at < len(b) else None,
                "top2_gap": gap, "explained": gap < EXPLAINED_GAP,
            })  # fmt: skip
        equal = len(self.prompts) - len(differences)
        unexplained = [one["id"] for one in differences if not one["explained"]]
        if self.dtype == torch.float32 and (unexplained or len(differences) > 0.02 * len(self.prompts)):
            self.warnings.append(f"greedy output differs from plain decoding on {len(differences)} of {len(self.prompts)} prompts, unexplained: {unexplained}")
        return {
            "checked": True,
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_prompts": len(self.prompts),
            "num_equal": equal,
            "differences": differences,
        }

    def top2_gap(self, token_ids: list[int]) -> float:
        """The target's gap between its two best next tokens."""
        self.target.resize(1, len(token_ids))
        logits = self.target.prefill(torch.tensor([token_ids], device=self.device), torch.tensor([len(token_ids)], device=self.device)).logits
        assert logits is not None
        best = logits[0].float().topk(2).values
        return float(best[0] - best[1])

    # ------------------------------------------------------------ time

    def speed(self) -> list[dict[str, Any]]:
        """Tokens per second, one prompt at a time, plain and with each greedy run; the plain passes stand around the others."""
        if not self.options.speed_prompts:
            return []
        mixed = evenly(self.prompts, self.options.speed_prompts)
        runs = [run for run in self.options.runs if run.temperature == 0]
        self.decode(runs[0] if runs else None, mixed[:1], 1, 8, "warm-up")
        rows, plain_rate = [], 1.0
        for run in [None, *runs]:
            decoded = self.decode(run, mixed, 1, SPEED_TOKENS, f"speed, {name_of(run, self.vocab(run)) if run else 'plain'}")
            costs, tokens = decoded.costs, decoded.costs.num_tokens
            parts = {f"{part}_ms": 1000 * getattr(costs, part) / max(1, costs.num_steps) for part in ("propose", "extend", "verify", "commit")}
            seconds = decoded.seconds - costs.prefill
            rate = (tokens - len(mixed)) / seconds  # each answer's first token belongs to its prefill
            rows.append({
                "name": name_of(run, self.vocab(run)) if run else "plain decoding", "kind": "speculative" if run else "plain", "batch_size": 1,
                "dtype": str(self.dtype).removeprefix("torch."), "K": run.num_draft_tokens if run else 0,
                "draft_vocab_size": run.draft_vocab_size if run else None, "num_prompts": len(mixed), "num_tokens": tokens, "seconds": seconds,
                "tokens_per_second": rate, "speedup": rate / plain_rate if run else 1.0, "parts": parts, "num_steps": costs.num_steps,
            })  # fmt: skip
            plain_rate = plain_rate if run else rate
        return rows

    # ------------------------------------------------------------ examples and validation

    def examples(self, decoded: Decoded) -> list[dict[str, Any]]:
        """A few answers with where each token came from, taken evenly from the domains."""
        out = []
        for prompt in evenly(self.prompts, self.options.num_examples):
            one = decoded.completions[prompt.id]
            texts = pieces(self.tokenizer, one.token_ids)
            tokens = [{"text": text, "kind": kind} for text, kind in zip(texts, one.kinds, strict=True)]
            out.append({"id": prompt.id, "domain": prompt.domain, "prompt": prompt.text, "tokens": tokens})
        return out

    @torch.no_grad()
    def live_validation(self, plain: Decoded) -> dict[str, Any]:
        """Loss parts of the live head against the live target, on the answers that plain decoding just gave."""
        steps, total, walked = self.loaded.info.unroll_steps, None, AcceptanceStats()
        vocab = self.loaded.draft_vocab
        for prompt in self.prompts:
            answer = plain.completions[prompt.id].token_ids
            ids = torch.tensor(prompt.token_ids + answer)
            mask = torch.arange(len(ids)) >= len(prompt.token_ids)
            self.target.resize(1, len(ids))
            states = self.target.prefill(ids[None].to(self.device), torch.tensor([len(ids)], device=self.device), "none").hidden_states[0]
            batch = collate([[Sample(prompt.id, prompt.domain, ids, mask, states.cpu())]], len(ids)).to(self.device)
            rows = supervised(unroll(self.loaded.head, self.target.ends, batch, steps), batch)
            sums, drafted = draft_loss(self.target.ends, rows, self.config.train.loss, vocab)
            total = sums if total is None else total + sums
            walked = sum(walk(drafted, batch), walked)
        assert isinstance(total, LossSums)
        return figures(total, walked)

    def write(self, report_dir: Path) -> dict[str, Any]:
        """Measure everything and write the report."""
        self.load(self.options.dtype)
        greedy = [run for run in self.options.runs if run.temperature == 0]
        plain = self.decode(None, self.prompts, self.options.batch_size, self.options.max_new_tokens, "plain decoding")
        decoded = [
            self.decode(run, self.prompts, self.options.batch_size, self.options.max_new_tokens, name_of(run, self.vocab(run))) for run in self.options.runs
        ]
        runs = [self.run_row(run, one) for run, one in zip(self.options.runs, decoded, strict=True)]
        first_greedy = next((one for run, one in zip(self.options.runs, decoded, strict=True) if run.temperature == 0), None)
        lossless = self.lossless(plain, first_greedy) if greedy and first_greedy else {"checked": False}
        live = self.live_validation(plain)
        examples = self.examples(decoded[0])
        for row in runs:
            if row["overall"]["counters"]["num_accepted_tokens"] == 0:
                self.warnings.append(f"{row['name']}: nothing at all was accepted; check that the head belongs to this target and its layout to this engine")
        if pick_dtype(self.options.speed_dtype, self.device) != self.dtype:
            self.load(self.options.speed_dtype)
        speed = self.speed()
        report = {
            "title": f"Acceptance of an {self.loaded.info.config.kind.upper()} head on {Path(self.config.target.path).name}",
            "created": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "warnings": self.warnings, "target": asdict(self.info),
            "head": self.head_row(), "data": self.data_row(), "runs": runs, "lossless": lossless, "speed": speed, "examples": examples,
            "validation": {"shards": self.recorded_validation(), "live": live}, "training": training_curve(Path(self.config.run_dir)),
            "reproduce": reproduce(self.config),
        }  # fmt: skip
        write_report(report, report_dir)
        write_provenance(report_dir, asdict(self.config))
        return report

    def head_row(self) -> dict[str, Any]:
        info, vocab = self.loaded.info, self.loaded.draft_vocab
        size = sum(parameter.numel() for parameter in self.loaded.head.parameters())
        return {
            "kind": info.config.kind, "num_parameters": size, "checkpoint": self.options.head, "step": info.step, "layout": asdict(info.config.layout),
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
        lines = [line for line in read_metrics(Path(self.config.run_dir) / "metrics.jsonl") if "val_loss" in line]
        line = next((line for line in lines if line["step"] == self.loaded.info.step), None)
        return line and {"step": line["step"], **{key.removeprefix("val_"): value for key, value in line.items() if key.startswith("val_")}}


def reproduce(config: cfg.Config) -> dict[str, Any]:
    """Command, configuration and versions."""
    return {"command": shlex.join(["mtp-eval", *sys.argv[1:]]), "config": yaml.safe_dump(asdict(config), sort_keys=False), "provenance": provenance()}


def stage(config: cfg.Config) -> None:
    """The command mtp-eval: does nothing when the report of this very head and configuration is there."""
    report_dir = Path(config.run_dir) / "eval"
    mark = asdict(config.eval) | {"head_step": load_head(config.eval.head).info.step, "target": config.target.path}
    stamp = report_dir / "done.json"
    if stamp.exists() and json.loads(stamp.read_text()) == json.loads(json.dumps(mark)):
        log.info("the report is complete: %s", report_dir / "report.html")
        report = json.loads((report_dir / "report.json").read_text())
    else:
        stamp.unlink(missing_ok=True)
        report = Evaluation(config).write(report_dir)
        stamp.write_text(json.dumps(mark))
    sys.stdout.write(terminal_table(report) + f"\nreport: {report_dir / 'report.html'}\n")


def main() -> None:
    """Console script mtp-eval."""
    cli.main(__doc__, stage)


if __name__ == "__main__":
    main()
