"""The real vLLM, on tiny targets that learnt a Markov text: capture, export and acceptance equal the embedded engine's, to the last counter.

These run vLLM inside the test process (it starts in seconds there), so they have a pytest run of their own: see `make test-all`. One test
starts it as users do, in processes of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eval.checkpoints import measure_all
from eval.run import stage as evaluate
from mtp_train.config import compose
from mtp_train.data.shards import ShardReader
from mtp_train.engines.mtp import PLUGIN
from mtp_train.target.ends import FrozenEnds
from mtp_train.train import train
from precompute.run import stage as precompute
from tests.conftest import source
from tests.markov import markov_target, quantised, run_overrides, trained_run
from tests.tiny import save_tiny, tiny_target

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]

MLA = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
TARGETS = {  # head sizes that vLLM's attention on CPU takes: multiples of 32
    "llama_rope3": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {},
    "deepseek_v2": MLA,
    "deepseek_v3": {**MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # as its config.json says, and transformers takes for granted
}
TAPS = "head.layout.taps=[1,2,3]"
HEADS = {  # case -> target, its head, the format that vLLM loads
    **{family: (family, (), "vllm") for family in TARGETS},
    "eagle1": ("llama_rope3", ("head=eagle1",), "vllm"),
    "eagle3": ("llama_rope3", ("head=eagle3", TAPS, "head.layout.norm_before_residual=true", "head.layout.norm_before_fc=true"), "speculators"),
    "eagle3, draft vocabulary": ("llama_rope3", ("head=eagle3", TAPS, "head.draft_vocab_size=40"), "vllm"),
    "eagle3.1": ("qwen3", ("head=eagle31", TAPS, "head.draft_vocab_size=60", "train.num_steps=30"), "vllm"),  # more accepts nearly all
}
TAPPED = {name: f"precompute.tap_layers={[1, 2, 3] if name in [family for family, head, _ in HEADS.values() if head] else []}" for name in TARGETS}
ENGINE = ("engine=vllm", "engine.in_process=true", "engine.timeout_s=60")


def runs(*ways):
    """eval.runs as an override: (K, temperature, draft sampling, draft vocabulary)."""
    rows = [f"{{num_draft_tokens: {k}, temperature: {t}, draft_sampling: {how}, draft_vocab_size: {vocab}}}" for k, t, how, vocab in ways]
    return f"eval.runs=[{','.join(rows)}]"


def report_of(overrides, *extra):
    config = compose(*overrides, *extra)
    (Path(config.run_dir) / "eval-vllm" / "done.json").unlink(missing_ok=True)  # a finished report would be left as it is
    evaluate(config)
    return json.loads((Path(config.run_dir) / "eval-vllm" / "report.json").read_text())


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """family -> a target that learnt the text, and the run that captured its states with vLLM, with taps for every head."""

    @cache
    def capture(family):
        folder = tmp_path_factory.mktemp(family)
        target = markov_target(family, folder / "target", **TARGETS[family])
        precompute(compose(*run_overrides(folder, target, *ENGINE, TAPPED[family])))
        return target, folder / "run"

    return capture


@pytest.fixture(scope="module")
def trained(captured, tmp_path_factory):
    """case of HEADS -> overrides of a run that trained on what vLLM captured, and exported."""

    @cache
    def train_case(case):
        family, head, engine_format = HEADS[case]
        (target, states), folder = captured(family), tmp_path_factory.mktemp("head")
        where = f'eval.vllm_head="{folder / "run" / "export" / engine_format}"'
        more = (*ENGINE, *head, f"export.formats=[{engine_format},hf]", where, TAPPED[family])
        return trained_run(folder, target, *more, captured=states)

    return train_case


@pytest.fixture
def llama(trained):
    """Of the MTP head of the first target: enough where neither target nor head matters."""
    return trained("llama_rope3")


@pytest.mark.parametrize("family", TARGETS)
def test_captured_states_equal_the_embedded_engines(trained, tmp_path, family):
    overrides = trained(family)
    mine = ShardReader(Path(compose(*overrides).run_dir) / "shards" / "train")
    assert mine.manifest.engine["name"] == "vllm"
    other = compose(*overrides, "engine=embedded", f'run_dir="{tmp_path}"')
    precompute(other)
    theirs = ShardReader(tmp_path / "shards" / "train")
    index = {id: place for place, id in enumerate(theirs.ids)}
    for place, id in enumerate(mine.ids):
        a, b = mine[place], theirs[index[id]]
        assert torch.equal(a.input_ids, b.input_ids), "regeneration is greedy, so both engines give the same answers"
        torch.testing.assert_close(a.hidden_states, b.hidden_states, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("engine", [(), ENGINE], ids=["embedded", "vllm"])
def test_a_tap_is_the_residual_after_so_many_blocks(corpus, tmp_path, engine):
    """Block k adds 2^k to every entry of the residual, and nothing else: the bias of its attention's output. Rows take all positions of the target."""
    model = tiny_target("llama", attention_bias=True, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=48)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.o_proj.bias.fill_(2**index)
    target = save_tiny(model, tmp_path / "target")
    folder = tmp_path / "run"
    lines = ["experiment=tiny", f'run_dir="{folder}"', f'target.path="{target}"', f"data.train=[{source(corpus / 'train.jsonl')}]", "data.validation=[]"]
    extra = ("data.max_length=48", "precompute.tap_layers=[0,1,2,3,4]", "engine.enforce_eager=true", *engine)
    precompute(compose(*lines, "precompute.regenerate.enabled=false", *extra))
    ends, reader = FrozenEnds.from_pretrained(target), ShardReader(folder / "shards" / "train")
    assert max(len(reader[index].input_ids) for index in range(len(reader))) == 48
    for sample in (reader[index] for index in range(len(reader))):
        embedded = ends.embed(sample.input_ids)
        for place, added in enumerate((0, 1, 3, 7, 15)):
            torch.testing.assert_close(sample.hidden_states[:, place], embedded + added, rtol=0, atol=1e-4)
        torch.testing.assert_close(sample.hidden_states[:, 5], ends.final_norm(embedded + 15), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", HEADS)
def test_acceptance_equals_the_embedded_engines_to_the_last_counter(trained, case):
    overrides = trained(case)
    ways, is_mtp = [(k, 0.0, "greedy", "null") for k in (3, 1, 5)], case in TARGETS
    speed = ("eval.speed_prompts=2", "eval.speed_batch_sizes=[1,4]") if is_mtp else ()
    report = report_of(overrides, runs(*ways), "eval.parity=true", *speed)
    num_checks = 1 if case == "deepseek_v3" else 3  # vLLM cannot draft with this target itself
    assert [one["passed"] for one in report["checks"]] == [True] * num_checks, report["checks"]
    assert (report["lossless"]["num_equal"], report["lossless"]["num_prompts"]) == (24, 24)
    assert [one["K"] for one in report["runs"]] == [3, 1, 5]
    for one in report["parity"]:
        assert one["equal"] and not one["differences"], one
        assert one["vllm"] == one["embedded"]
    first = report["parity"][0]["vllm"]
    assert first["num_drafts"] >= 200
    assert 0.15 <= first["acceptance_rate_at"][0] <= 0.95
    assert {(row["kind"], row["batch_size"]) for row in report["speed"]} == (
        {(kind, size) for kind in ("plain", "speculative") for size in (1, 4)} if is_mtp else set()
    )
    assert [one["draft_vocab_size"] for one in report["runs"]] == [{"eagle3, draft vocabulary": 40, "eagle3.1": 60}.get(case)] * 3


def test_sampled_acceptance_is_within_the_interval(llama):
    ways = runs((3, 1.0, "probabilistic", "null"), (3, 1.0, "greedy", "null"))
    found = report_of(llama, ways, "eval.self_checks=false")
    config = compose(*llama, ways, "engine=embedded")
    evaluate(config)
    expected = json.loads((Path(config.run_dir) / "eval" / "report.json").read_text())
    for one, other in zip(found["runs"], expected["runs"], strict=True):
        a, b = one["overall"]["acceptance_length"], other["overall"]["acceptance_length"]
        assert max(a["low"], b["low"]) <= min(a["high"], b["high"]), (a, b)


class NoEmbedding(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size

    def forward(self, token_ids):
        return torch.zeros(len(token_ids), self.hidden_size)


def faulty_class(fault, gain):
    """Our plugin's head, wrongly wired inside vLLM. Prompts are decoded one by one, so a pass over one row is a step of the chain."""
    from mtp_vllm.model import MTPTrainHead

    class Faulty(MTPTrainHead):
        def load_weights(self, weights):
            super().load_weights(weights)
            if fault == "the final norm of the head is missing":
                self.model.norm = torch.nn.Identity()

        def forward(self, input_ids, positions, hidden_states, inputs_embeds=None):
            chain = len(input_ids) == 1
            if fault == "the feature is taken before the target's final norm" and not chain:
                hidden_states = hidden_states / gain
            if fault == "positions of the chain are off by one" and chain:
                positions = positions - 1
            if fault == "the embedding is not the target's":
                self.model.embed_tokens = NoEmbedding(len(gain))
            return super().forward(input_ids, positions, hidden_states, inputs_embeds)

    return Faulty


@contextlib.contextmanager
def serving(kind):
    """vLLM with another class in the place of our plugin's."""
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import utils

    def put(there):
        ModelRegistry.register_model("EagleMTPTrainHead", there)
        utils._MODEL_ARCH_BY_HASH.clear()  # what it looked up before

    put(kind)
    try:
        yield
    finally:
        put("mtp_vllm.model:MTPTrainHead")


@pytest.mark.parametrize(
    "fault",
    [
        "the final norm of the head is missing",
        "the feature is taken before the target's final norm",
        "positions of the chain are off by one",
        "the embedding is not the target's",
    ],
)
def test_a_wiring_fault_in_the_engines_own_code_is_named(llama, fault):
    gain = FrozenEnds.from_pretrained(compose(*llama).target.path, torch.float32).norm_weight
    whole = 10**9  # by our plugin, from the whole vocabulary
    with serving(faulty_class(fault, gain)):
        report = report_of(llama, runs((3, 0.0, "greedy", whole)), "eval.parity=true", "eval.self_checks=false", "eval.batch_size=1")
    (row,) = report["parity"]
    assert not row["equal"]
    assert fault in row["verdict"], row["verdict"]


def spoil(folder, change):
    """Rewrite an exported directory's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def swap_halves(tensors):
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1).contiguous()


def no_gain(tensors):
    for name in ("enorm.weight", "hnorm.weight"):
        tensors[name] = torch.ones_like(tensors[name])


def no_final_gain(tensors):
    tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])


def transpose(tensors):
    tensors["fc.weight"] = torch.cat([half.T for half in tensors["fc.weight"].chunk(2, dim=1)], dim=1).contiguous()


def swap_taps(tensors):
    first, second, third = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([second, first, third], dim=1).contiguous()


def no_hidden_norm(tensors):
    del tensors["midlayer.hidden_norm.weight"]


FILE_FAULTS = {  # the case, what is spoiled, and what names it
    "halves": ("llama_rope3", swap_halves, "halves of eh_proj are swapped"),
    "transposed": ("llama_rope3", transpose, "transposed"),
    "gains": ("llama_rope3", no_gain, "enorm and hnorm"),
    "final gain": ("llama_rope3", no_final_gain, "final norm"),
    "eagle1, halves": ("eagle1", swap_halves, "halves of fc are swapped"),
    "eagle3, taps": ("eagle3, draft vocabulary", swap_taps, "the tapped layers [1, 2, 3] are read as [2, 1, 3]"),
    "eagle3, hidden_norm": ("eagle3, draft vocabulary", no_hidden_norm, "missing ['midlayer.hidden_norm.weight']"),
    "eagle3, taps off by one": ("eagle3, draft vocabulary", None, "'taps': [0, 1, 2]"),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_wiring_fault_in_the_file_is_named(trained, tmp_path, fault):
    case, change, cause = FILE_FAULTS[fault]
    overrides = trained(case)
    bad = tmp_path / "bad"
    shutil.copytree(Path(compose(*overrides).run_dir) / "export" / "vllm", bad)
    if change:
        spoil(bad, change)
    else:  # the ids as SGLang numbers them
        config = json.loads((bad / "config.json").read_text())
        (bad / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    report = report_of(overrides, runs((3, 0.0, "greedy", "null")), "eval.parity=true", "eval.self_checks=false", f'eval.vllm_head="{bad}"')
    (row,) = report["parity"]
    assert not row["equal"]
    assert cause in row["verdict"], row["verdict"]
    assert any("parity" in one for one in report["warnings"])


class Fake8(torch.nn.Linear):
    """W8A8 by definition: weights int8 by channel, inputs int8 by token."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return torch.nn.functional.linear((x / scale).round() * scale, self.weight)


def fake_int8(model, folder):
    """The target that `folder` quantised, computed in float32 by transformers with rounded inputs and weights."""
    stored = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight_scale" in stored:
            module.__class__ = Fake8
            module.weight.data = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    return model


@pytest.mark.parametrize("family", ["llama_rope3", "qwen3"])
def test_checkpoints_are_measured_by_vllm_as_by_the_embedded_engine(trained, tmp_path, family):
    found = {}
    for engine in ("vllm", "embedded"):
        run = tmp_path / engine
        shutil.copytree(Path(compose(*trained(family)).run_dir), run, ignore=shutil.ignore_patterns("export", "eval*"))
        assert measure_all(run, engine, watch=False) == 2
        found[engine] = {row["step"]: row["counters"] for row in map(json.loads, (run / "acceptance.jsonl").read_text().splitlines())}
    assert found["vllm"] == found["embedded"]


def test_a_quantised_target_is_captured_trained_for_and_served(llama, tmp_path):
    plain = Path(compose(*llama).target.path)
    target = quantised(plain, tmp_path / "int8")
    mine = trained_run(tmp_path, target, *ENGINE)
    reader = ShardReader(Path(compose(*mine).run_dir) / "shards" / "train")
    assert reader.manifest.target.quantisation == "compressed-tensors"
    model = fake_int8(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), target)
    for index in range(4):
        sample = reader[index]
        expected = model(sample.input_ids[None], output_hidden_states=True).hidden_states[-1][0]
        error = (sample.hidden_states[:, -1] - expected).norm() / expected.norm()
        assert error < 2e-3, "the two round alike, but for near-halves"
    report = report_of(mine, runs((3, 0.0, "greedy", "null")), "eval.self_checks=false")
    assert json.loads((Path(compose(*mine).eval.vllm_head) / "config.json").read_text())["architectures"] == ["EagleMTPTrainHead"]
    assert report["lossless"]["num_equal"] >= 23, report["lossless"]
    assert 0.15 <= report["runs"][0]["overall"]["acceptance_rate_at"][0]["value"] <= 0.95
    with pytest.raises(ValueError, match=r"quantisation: 'compressed-tensors' there, 'none' here"):
        train(compose(*mine, f'target.path="{plain}"', "train.resume=false"))


@pytest.mark.parametrize(("case", "name"), [*((family, "hnorm.weight") for family in TARGETS), ("eagle3, draft vocabulary", "midlayer.hidden_norm.weight")])
def test_a_dropped_tensor_fails_by_name(trained, tmp_path, case, name):
    """Before vLLM decodes. tests/test_published.py drops each tensor of each class."""
    overrides = trained(case)
    bad = tmp_path / "bad"
    shutil.copytree(compose(*overrides).eval.vllm_head, bad)
    spoil(bad, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=re.escape(name)):
        report_of(overrides, runs((3, 0.0, "greedy", "null")), f'eval.vllm_head="{bad}"')


@pytest.mark.parametrize("family", ["llama_rope3", "qwen3"])
def test_the_plugin_keeps_a_reduced_draft_vocabulary(trained, family):
    report = report_of(trained(family), runs((3, 0.0, "greedy", 40)), "eval.parity=true", "eval.self_checks=false")
    (row,) = report["parity"]
    assert row["equal"] and row["vllm"] == row["embedded"], row
    assert report["runs"][0]["draft_vocab_size"] == 40


def test_capture_in_processes_of_its_own_resumes(llama, tmp_path):
    """As users run it. What is captured is not captured again."""
    target = compose(*llama).target.path
    fresh = run_overrides(tmp_path, target, "engine=vllm", "engine.timeout_s=120", "precompute.regenerate.enabled=false", "data.validation=[]")
    precompute(compose(*fresh))
    folder = tmp_path / "run" / "shards" / "train"
    first = ShardReader(folder)
    states = {id: first[index].hidden_states for index, id in enumerate(first.ids)}
    assert len(states) == 60
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    precompute(compose(*fresh))
    again = ShardReader(folder)
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    for index, id in enumerate(again.ids):
        torch.testing.assert_close(again[index].hidden_states, states[id], rtol=1e-5, atol=1e-4)
    assert set(again.ids) == set(states)


@pytest.fixture
def server(llama):
    """A `vllm serve` of the trained head, K=3; its URL."""
    config = compose(*llama)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    draft = {"method": "eagle", "model": config.eval.vllm_head, "num_speculative_tokens": 3}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.target.path, "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256",
        "--speculative-config", json.dumps(draft), "--per-request-spec-decode-metrics", "detailed", "--no-enable-prefix-caching",
    ]  # fmt: skip
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert process.poll() is None, "vllm serve ended"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            time.sleep(1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_running_server_is_measured_over_http(llama, server):
    report = report_of(llama, runs((3, 0.0, "greedy", "null")), f"eval.server={server}", "eval.speed_prompts=2")
    config = compose(*llama, runs((3, 0.0, "greedy", "null")), "engine=embedded")
    evaluate(config)
    expected = json.loads((Path(config.run_dir) / "eval" / "report.json").read_text())
    assert report["runs"][0]["overall"] == expected["runs"][0]["overall"]
    assert server in report["runs"][0]["engine"]
    assert report["lossless"] == {"checked": False}
    assert report["speed"][0]["speedup"] is None
    with pytest.raises(ValueError, match=r"K=5, the server .* drafts 3"):
        report_of(llama, runs((5, 0.0, "greedy", "null")), f"eval.server={server}")


def test_no_server_is_one_clear_line(llama):
    with pytest.raises(ValueError, match="nothing answers at http"):
        report_of(llama, runs((3, 0.0, "greedy", "null")), "eval.server=http://127.0.0.1:9")


def test_the_plugins_families_are_those_of_the_table():
    from mtp_vllm.model import LAYERS

    assert tuple(LAYERS) == PLUGIN
