"""What an evaluation reads, asks of a server, and computes of its timings."""

from __future__ import annotations

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from eval.engine import Decoded
from eval.engine_server import ServerEngine
from eval.prompts import Prompt, evenly, read_prompts
from eval.summary import with_speedup
from mtp_train.config import EvalRunConfig, compose
from mtp_train.spec_decode.engine import Completion, Costs
from mtp_train.spec_decode.stats import AcceptanceStats
from tests.toy import toy_tokenizer

SIZES = {"chat": 5, "code": 1, "maths": 3}


@pytest.mark.parametrize(
    ("num", "expected"), [(None, SIZES), (2, {"chat": 1, "code": 1}), (3, dict.fromkeys(SIZES, 1)), (7, {"chat": 3, "code": 1, "maths": 3})]
)
def test_prompts_are_taken_evenly_while_a_domain_has_more(tmp_path, num, expected):
    path = tmp_path / "heldout.jsonl"
    rows = [{"id": f"{domain}{n}", "domain": domain, "messages": [{"role": "user", "content": "hi"}]} for domain, size in SIZES.items() for n in range(size)]
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    found = read_prompts(str(path), toy_tokenizer(), num, {})
    assert Counter(one.domain for one in found) == expected
    assert [one.domain for one in found] == sorted(one.domain for one in found)


def test_a_small_domain_does_not_end_the_others():
    prompts = [Prompt(f"{domain}{n}", domain, "", []) for domain, size in SIZES.items() for n in range(size)]
    assert [one.id for one in evenly(prompts, 8)] == ["chat0", "code0", "maths0", "chat1", "maths1", "chat2", "maths2", "chat3"]


def decoded(num_tokens, costs):
    return Decoded({"a": Completion("a", [1] * num_tokens, ["first"] * num_tokens, AcceptanceStats(), "length")}, costs, 3.0)


@pytest.mark.parametrize(
    ("num_tokens", "costs", "speed"), [(5, Costs(prefill=1.0), 2.0), (1, Costs(prefill=1.0), None), (6, None, 2.0), (1, Costs(prefill=3.0), None)]
)
def test_one_token_answers_have_no_speed_after_the_first(num_tokens, costs, speed):
    assert decoded(num_tokens, costs).tokens_per_second == speed


@pytest.mark.parametrize(("plain", "drafted", "speedup"), [(10.0, 15.0, 1.5), (None, 15.0, None), (10.0, None, None), (0.0, 15.0, None)])
def test_a_speedup_needs_two_speeds(plain, drafted, speedup):
    rows = [[{"kind": kind, "batch_size": 1, "tokens_per_second": speed}] for kind, speed in (("plain", plain), ("speculative", drafted))]
    assert with_speedup(rows)[1]["speedup"] == speedup


class Server(BaseHTTPRequestHandler):
    """As `vllm serve`: what a request leaves out is the generation_config's."""

    generation_config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.3, "presence_penalty": 1.0}
    sampled: list[dict] = []

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        self.answer({"data": [{"id": "target"}], "version": "0"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sampled.append({key: body.get(key, value) for key, value in self.generation_config.items()})
        self.answer({"choices": [{"token_ids": [7], "finish_reason": "length"}]})

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Server) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_samples_as_we_do_whatever_the_target_recommends(server):
    config = compose("target.path=somewhere", "engine=vllm", f"eval.server={server}")
    engine = ServerEngine(config, None, frozenset({3}), 1)
    assert engine.ask(Prompt("a", "chat", "", [1, 2]), EvalRunConfig(3, 1.0, "probabilistic", None), 4, 0).token_ids == [7]
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert Server.sampled == [neutral]
