"""vLLM under evaluation: its own speculative decoding, offline, with its own counters.

Per-prompt counters come from vLLM's request-level metrics, and their sum is held against its engine-wide counters, by difference. One
engine is alive at a time; another K or draft vocabulary starts a new one.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from eval.engine import Decoded, DraftVocab, check_counters
from eval.prompts import Prompt
from mtp_train import config as cfg
from mtp_train.checkpoint import LoadedHead
from mtp_train.engines.row import EngineClass
from mtp_train.export import write_engine
from mtp_train.published import read_engine
from mtp_train.serving import class_of
from mtp_train.spec_decode.engine import Completion, Kind, Request
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import local_dir
from mtp_vllm import launch
from mtp_vllm.plugin import PLAIN_LINEAR

log = logging.getLogger(__name__)

UNWATCHED = ("draft_vocab", "t2d", "embed_tokens.weight")
"""Tensors of a head's directory that change no logits when they are loaded alone."""
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def row_of(folder: str | Path) -> EngineClass:
    """The engine class of a head's directory."""
    return class_of(json.loads((Path(folder) / "config.json").read_text()))


class VllmEngine:
    """A `vllm.LLM` for each way of drafting, started when first needed."""

    name, decodes_plainly = "vllm", True

    def __init__(self, config: cfg.Config, loaded: LoadedHead, stops: frozenset[int], longest: int):
        launch.require_vllm()
        self.config, self.loaded, self.stops, self.longest = config, loaded, stops, longest
        self.title, self.dtype, self.target_dir = f"vLLM {launch.version()}", "", str(local_dir(config.target.path))
        self.folder = tempfile.TemporaryDirectory(prefix="mtp-heads-")
        self.vocab = DraftVocab(config, loaded)
        self.llm: Any = None
        self.key: Any = None
        most = max((run.num_draft_tokens for run in config.eval.runs), default=0)
        self.max_length = longest + max(config.eval.max_new_tokens, config.eval.speed_tokens) + most + 2
        self.num_seqs = max([config.eval.batch_size, *config.eval.speed_batch_sizes])

    def load(self, dtype: str) -> None:
        """The precision of the next engines."""
        self.dtype = dtype

    def head_dir(self, run: cfg.EvalRunConfig) -> str:
        """The exported directory; for another draft vocabulary, one for our plugin that is written for this evaluation alone."""
        if run.draft_vocab_size is None or self.loaded.head.lm_head is not None:
            folder = Path(self.config.eval.vllm_head)
            if not (folder / "config.json").exists():
                raise FileNotFoundError(f"{folder} is no head that vLLM can load: run mtp-export with export.formats=[vllm,hf], or set eval.vllm_head")
            return str(folder)
        folder = Path(self.folder.name) / str(run.draft_vocab_size)
        if not folder.exists():
            folder.mkdir()
            write_engine(folder, replace(self.loaded, draft_vocab=self.draft_vocab(run)), "vllm_plugin")
        return str(folder)

    def draft_vocab(self, run: cfg.EvalRunConfig) -> Tensor | None:
        """The head's own where the exported class keeps it; of another size, as the embedded engine chooses it."""
        if run.draft_vocab_size is None and not row_of(self.head_dir(run)).keeps_draft_vocab:
            return None
        return self.vocab(run.draft_vocab_size)

    def engine(self, run: cfg.EvalRunConfig | None) -> Any:
        """The engine of a way of drafting."""
        key = (self.dtype, run and (run.num_draft_tokens, run.draft_sampling, run.draft_vocab_size))
        if key != self.key:
            self.close()
            more: dict[str, Any] = {}
            if run:
                more["per_request_spec_decode_metrics"] = "detailed"
                more["speculative_config"] = {
                    "method": row_of(self.head_dir(run)).method,
                    "model": self.head_dir(run),
                    "num_speculative_tokens": run.num_draft_tokens,
                    "draft_sample_method": run.draft_sampling,
                }
            self.llm = launch.make_llm(self.target_dir, self.dtype, self.config.engine, self.max_length, self.num_seqs, **more)
            self.key = key
        return self.llm

    def counters(self) -> list[int]:
        """vLLM's engine-wide counters, cumulative: drafts, draft tokens, accepted tokens, accepted at each position."""
        found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in self.llm.get_metrics() if metric.name.startswith("vllm:spec_decode")}
        single = [int(found[name].value) if name in found else 0 for name in COUNTERS[:3]]
        return single + (list(map(int, found[COUNTERS[3]].values)) if COUNTERS[3] in found else [])

    def decode(self, run: cfg.EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str) -> Decoded:
        """Answer prompts, `batch_size` of them at a time."""
        return self._decode(self.engine(run), run, prompts, batch_size, max_new_tokens, what)

    def _decode(self, llm: Any, run: cfg.EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str) -> Decoded:
        heat, seed = (run.temperature if run else 0.0), self.config.eval.seed
        requests = [Request(one.id, one.token_ids, max_new_tokens, self.stops, heat, seed + index) for index, one in enumerate(prompts)]
        before, start = self.counters(), time.perf_counter()
        stream = tqdm(launch.stream(llm, requests, batch_size), total=len(requests), desc=f"{what} (vllm)", unit="prompt", mininterval=5, dynamic_ncols=True)
        done = {output.request_id: completion(output, run.num_draft_tokens if run else 0) for output in stream}
        seconds = time.perf_counter() - start
        if run:
            after = self.counters()
            check_counters(done.values(), [now - then for now, then in zip(after, before if len(before) == len(after) else [0] * len(after), strict=True)])
        return Decoded(done, None, seconds)

    # ------------------------------------------------------------ before a figure is believed

    def self_checks(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """A draft equal to the target is accepted, greedy and sampled; and every tensor of the exported head changes the draft."""
        return [*self.check_perfect_draft(prompts), self.check_tensors(prompts[0])]

    def check_perfect_draft(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Speculate with the target itself."""
        if self.loaded.info.target.model_type == "deepseek_v3":
            log.info("self-check skipped: vLLM takes a draft model of family deepseek_v3 for an MTP layer, so the target cannot draft for itself")
            return []
        self.close()
        draft = {"method": "draft_model", "model": self.target_dir, "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
        more = {"per_request_spec_decode_metrics": "detailed", "speculative_config": draft}
        self.llm = launch.make_llm(self.target_dir, self.dtype, self.config.engine, self.max_length, self.num_seqs, eager=True, **more)
        self.key, rows = "perfect draft", []
        for heat in (0.0, 1.0):
            run = cfg.EvalRunConfig(2, heat, "probabilistic", None)
            decoded = self._decode(self.llm, run, prompts, len(prompts), min(32, self.config.eval.max_new_tokens), f"self-check, draft = target, T={heat:g}")
            total = sum((one.stats for one in decoded.completions.values()), AcceptanceStats())
            found = f"{total.num_accepted_tokens} of {total.num_draft_tokens} drafts accepted"
            passed = total.num_accepted_tokens >= 0.95 * total.num_draft_tokens
            rows.append({"name": f"a draft equal to the target is accepted, T={heat:g}", "passed": passed, "found": found})
        return rows

    def check_tensors(self, prompt: Prompt) -> dict[str, Any]:
        """+1 on each tensor of the exported head, loaded by the engine's own loader, must change the draft's logits."""
        folder, name = self.config.eval.vllm_head, "every tensor of the head is loaded and used"
        read_engine(Path(folder), self.loaded.info, self.loaded.layer_config, self.config.target.path)  # exact keys and shapes, or an error by name
        self.close()
        os.environ[PLAIN_LINEAR] = "1"
        more = {"worker_extension_cls": "mtp_vllm.audit.HeadAudit"}
        draft = {"method": row_of(folder).method, "model": str(folder), "num_speculative_tokens": 1}
        self.llm = launch.make_llm(self.target_dir, self.dtype, self.config.engine, self.max_length, 1, eager=True, speculative_config=draft, **more)
        del os.environ[PLAIN_LINEAR]
        self.llm.collective_rpc("mtp_watch")

        def logits(label: str) -> list[float]:
            list(launch.stream(self.llm, [Request(label, prompt.token_ids, 2, frozenset(), 0.0, 0)], 1))
            return list(self.llm.collective_rpc("mtp_logits")[0])

        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            keys = [key for key in file.keys() if key not in UNWATCHED]  # noqa: SIM118
        before, dead = logits("before"), []
        for key in tqdm(keys, desc="self-check, tensors of the head (vllm)", unit="tensor", mininterval=5):
            self.llm.collective_rpc("mtp_load", args=(str(folder), key, -1.0 if key == "d2t" else 1.0))  # another id, but one that exists
            dead += [key] if logits(key) == before else []
            self.llm.collective_rpc("mtp_load", args=(str(folder), key, 0.0))
        self.close()
        return {"name": name, "passed": not dead, "found": f"no effect: {', '.join(dead)}" if dead else f"{len(keys)} tensors, each changes the draft's logits"}

    def top2_gap(self, token_ids: list[int]) -> float:
        """From the log-probabilities of the two best next tokens: their gap is the logits' own."""
        (output,) = launch.stream(self.llm, [Request("gap", token_ids, 1, frozenset(), 0.0, 0)], 1, lambda _: {"logprobs": 2})
        best = sorted((one.logprob for one in output.outputs[0].logprobs[0].values()), reverse=True)
        return best[0] - best[1]

    def live_validation(self, prompts: Sequence[Prompt], plain: Decoded) -> dict[str, Any] | None:
        """vLLM shows no states while it serves."""
        return None

    def close(self) -> None:
        """Stop the engine that runs."""
        if self.llm is not None:
            launch.stop(self.llm)
            self.llm = self.key = None


def completion(output: Any, num_draft: int) -> Completion:
    """vLLM's output of one request as ours: where each token came from follows from how many drafts each step accepted."""
    (answer,) = output.outputs
    ids = list(answer.token_ids)
    steps = getattr(answer, "spec_decode_metrics", None)
    kinds: list[Kind] = ["first"]
    stats = AcceptanceStats()
    for accepted, drafted in zip(steps.per_step_accepted, steps.per_step_drafted, strict=True) if steps and num_draft else ():
        kept = min(accepted + 1, len(ids) - len(kinds))
        last: Kind = "bonus" if accepted == drafted else "recovered"
        step: list[Kind] = ["accepted"] * accepted + [last]  # type: ignore[assignment]
        kinds += step[:kept]
        one = AcceptanceStats.of(accepted, drafted, num_cut=accepted + 1 - kept)
        padded = one.num_accepted_tokens_per_pos + (0,) * (num_draft - drafted)
        stats += replace(one, num_accepted_tokens_per_pos=padded)
    kinds += ["recovered"] * (len(ids) - len(kinds))
    return Completion(output.request_id, ids, kinds[: len(ids)], stats, "stop" if answer.finish_reason == "stop" else "length")
