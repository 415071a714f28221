"""A running `vllm serve` under evaluation, over HTTP. The server decides head and K; its counters are read at /metrics, by difference.

Start it with `--per-request-spec-decode-metrics detailed`, so that each answer says how many drafts each of its steps accepted.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from tqdm import tqdm

from eval.engine import Decoded, check_counters
from eval.engine_vllm import completion
from eval.prompts import Prompt
from mtp_train import config as cfg
from mtp_train.checkpoint import LoadedHead
from mtp_train.spec_decode.engine import Completion

FLAG = "--per-request-spec-decode-metrics detailed"
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What a request leaves out, the server takes from the target's generation_config.json; offline we sample without."""


class ServerEngine:
    """Asks a server that speculates. Plain decoding is another server's business."""

    name, decodes_plainly = "vllm", False

    def __init__(self, config: cfg.Config, loaded: LoadedHead, stops: frozenset[int], longest: int):
        assert config.eval.server is not None
        self.options, self.stops, self.url, self.dtype = config.eval, stops, config.eval.server.rstrip("/"), "as served"
        self.timeout_s = config.engine.timeout_s
        self.model = json.loads(self.call("/v1/models"))["data"][0]["id"]
        self.title = f"vLLM {json.loads(self.call('/version'))['version']} at {self.url}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> str:
        """GET, or POST of JSON. Raises ValueError with the server's own words."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.url}{path}: {error.code} {error.read().decode()[:300]}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise ValueError(f"eval.server: nothing answers at {self.url}{path} ({error})") from error

    def counters(self) -> list[int]:
        """Drafts, draft tokens, accepted tokens, accepted at each position; cumulative, over all engines behind the server."""
        totals: dict[str, float] = {}
        for name, labels, value in re.findall(r"^vllm:spec_decode_(\w+?)_total\{(.*?)\} (\S+)$", self.call("/metrics"), re.M):
            position = re.search(r'position="(\d+)"', labels)
            key = f"at {position[1]}" if position else name
            totals[key] = totals.get(key, 0) + float(value)
        if "num_drafts" not in totals:
            raise ValueError(f"{self.url}/metrics has no vllm:spec_decode counters: was the server started with --speculative-config?")
        positions = sorted(int(key[3:]) for key in totals if key.startswith("at "))
        return [int(totals[key]) for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", *(f"at {index}" for index in positions))]

    def load(self, dtype: str) -> None:
        """The server was started in a precision of its own."""

    def self_checks(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """None: a server cannot be restarted from here."""
        return []

    def draft_vocab(self, run: cfg.EvalRunConfig) -> Tensor | None:
        """The served head's own, which the server does not tell."""
        return None

    def decode(self, run: cfg.EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str) -> Decoded:
        """Answer prompts, `batch_size` of them at a time."""
        assert run is not None, "a server that speculates does not decode plainly"
        self.ask(prompts[0], run, 4, 0)  # a fresh server shows no counters
        before, start = self.counters(), time.perf_counter()
        if len(before) - 3 != run.num_draft_tokens:
            raise ValueError(f"eval.runs asks for K={run.num_draft_tokens}, the server at {self.url} drafts {len(before) - 3} tokens")
        with ThreadPoolExecutor(batch_size) as pool:
            answers = pool.map(lambda pair: self.ask(pair[1], run, max_new_tokens, self.options.seed + pair[0]), enumerate(prompts))
            done = {one.id: one for one in tqdm(answers, total=len(prompts), desc=f"{what} (server)", unit="prompt", mininterval=5, dynamic_ncols=True)}
        seconds = time.perf_counter() - start
        check_counters(done.values(), [now - then for now, then in zip(self.counters(), before, strict=True)])
        return Decoded(done, None, seconds)

    def ask(self, prompt: Prompt, run: cfg.EvalRunConfig, max_new_tokens: int, seed: int) -> Completion:
        """One request. Raises ValueError when the server does not tell what its drafts were worth."""
        body = {"model": self.model, "prompt": prompt.token_ids, "max_tokens": max_new_tokens, "temperature": run.temperature, "seed": seed}
        answer = json.loads(self.call("/v1/completions", {**body, **NEUTRAL, "stop_token_ids": sorted(self.stops), "return_token_ids": True}))
        found = (answer.get("metrics") or {}).get("speculative_decoding")
        choice = answer["choices"][0]
        if len(choice["token_ids"]) > 1 and (not found or (found.get("per_step_accepted") is None and found["num_spec_steps"])):
            raise ValueError(f"the server at {self.url} does not say what each request's drafts were worth: start it with {FLAG}")
        metrics = SimpleNamespace(per_step_accepted=(found or {}).get("per_step_accepted") or [], per_step_drafted=(found or {}).get("per_step_drafted") or [])
        output = SimpleNamespace(token_ids=choice["token_ids"], spec_decode_metrics=metrics, finish_reason=choice["finish_reason"])
        return completion(SimpleNamespace(request_id=prompt.id, outputs=[output]), run.num_draft_tokens)

    def top2_gap(self, token_ids: list[int]) -> float:
        """Not needed: nothing is compared with plain decoding."""
        raise NotImplementedError

    def live_validation(self, prompts: Sequence[Prompt], plain: Decoded) -> dict[str, Any] | None:
        """A server shows no states."""
        return None

    def close(self) -> None:
        """The server goes on."""
