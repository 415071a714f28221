"""The plan against torch's FLOP counter, published sizes, saved tensors, and a stage-by-stage count of hours."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtp_train import pipeline
from mtp_train.config import compose
from mtp_train.heads.base import chained, supervised, unroll
from mtp_train.heads.table import build_head, taps_of
from mtp_train.interfaces import Batch
from mtp_train.loss import draft_loss
from mtp_train.planner import Meter, Sizes, measure, peak_flops, plan, read_target, report, run_hours, stage_seconds, train_flop, training_flop
from mtp_train.target.ends import FrozenEnds
from mtp_train.train import stage as train
from precompute.run import stage as precompute
from tests.conftest import source
from tests.tiny import tiny_config

RECIPES = ["llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b", "deepseek-v2-lite"]
DENSE = ("head.draft_vocab_size=null", "train.unroll_steps=1", "train.seq_len=2048", "node.supervised_share=1", "precompute.regenerate.enabled=false")
composed = cache(compose)
DOCS = Path(__file__).parent.parent / "docs" / "planning.md"


def measured(recipe):
    """The sizes of a recipe's head and target."""
    config = composed(recipe)
    return measure(config.head, read_target(config.target))


# ---------------------------------------------------------------- counted FLOP


def _cpu_attention(query, key, value, dropout_p=0.0, is_causal=False, **_):
    """2 products over the square, or half of it where the kernel skips what is masked."""
    batch, heads, rows, size = query
    return 2 * batch * heads * rows * key[2] * (size + value[3]) // (2 if is_causal else 1)


def _cpu_attention_backward(grad, query, key, value, out, lse, dropout_p=0.0, is_causal=False, **_):
    """5 products: the scores are made again."""
    batch, heads, rows, size = query
    return 2 * batch * heads * rows * key[2] * (3 * size + 2 * value[3]) // (2 if is_causal else 1)


ATTENTION = {  # what torch's counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


@dataclass
class Counted:
    """Of one real training step, per token."""

    matrices: float
    attention: float
    share: float
    going_on: float
    sizes: Sizes


def head_of(kind="mtp", **changes):
    """As conf/head/ has it; the tiny targets are too shallow for the default taps."""
    shallow = ["head.layout.taps=[1,2,3]"] if kind.startswith("eagle3") else []
    return replace(composed("target.path=x", f"head={kind}", *shallow).head, **changes)


def num_taps(config):
    return len(taps_of(config, 4))


def count(target, num_steps, share, vocab_size=None, seq_len=32, num_rows=2, **head):
    """Run forward, loss and backward under the counter."""
    torch.manual_seed(0)
    config = head_of(**head, draft_vocab_size=vocab_size)
    ends = FrozenEnds(
        target, torch.randn(target.vocab_size, target.hidden_size), torch.ones(target.hidden_size), torch.randn(target.vocab_size, target.hidden_size)
    )
    mask = torch.zeros(num_rows, seq_len, dtype=torch.bool)
    mask[:, seq_len - round(seq_len * share) :] = True
    batch = Batch(
        input_ids=torch.randint(0, target.vocab_size, mask.shape), position_ids=torch.arange(seq_len).expand(mask.shape),
        document_ids=torch.zeros(mask.shape, dtype=torch.int64), loss_mask=mask, hidden_states=torch.randn(*mask.shape, num_taps(config), target.hidden_size),
    )  # fmt: skip
    vocab = None if vocab_size is None else torch.arange(vocab_size)
    model = build_head(config, target)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        rows = supervised(unroll(model, ends, batch, num_steps), batch)
        sums, _ = draft_loss(ends, rows, composed("target.path=x").train.loss, vocab, model.lm_head_weight)
        sums.loss.backward()
    by_op = {str(op): flop for op, flop in counter.get_flop_counts()["Global"].items()}
    matrices = sum(flop for op, flop in by_op.items() if op in ("aten.mm", "aten.addmm"))
    shares = (rows.teacher.shape[0] / mask.numel(), int(chained(batch, num_steps).sum()) / mask.numel())
    return Counted(matrices / mask.numel(), (sum(by_op.values()) - matrices) / mask.numel(), *shares, measure(config, target))


WIDE = {"hidden_size": 128, "intermediate_size": 448, "vocab_size": 640}
TARGETS = {
    "llama": (tiny_config("llama", **WIDE), {}),
    "deepseek_v2 experts": (tiny_config("deepseek_v2", **WIDE, experts_implementation="eager"), {"dense_mlp": False}),
    "deepseek_v2 dense": (tiny_config("deepseek_v2", **WIDE), {}),
    "eagle1": (tiny_config("llama", **WIDE), {"kind": "eagle1"}),
    "eagle3": (tiny_config("qwen3", **WIDE), {"kind": "eagle3"}),
    "eagle3, two layers": (tiny_config("llama", **WIDE), {"kind": "eagle3", "num_layers": 2}),
    "eagle3.1": (tiny_config("llama", **WIDE), {"kind": "eagle31"}),
}


@pytest.mark.parametrize("vocab", [None, 128], ids=["whole", "reduced"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", TARGETS)
def test_flop_are_those_counted(name, num_steps, share, vocab):
    target, head = TARGETS[name]
    counted = count(target, num_steps, share, vocab, **head)
    expected = train_flop(counted.sizes, 32, num_steps, counted.share, vocab or target.vocab_size, counted.going_on)
    attention = expected.pop("attention")
    assert counted.matrices == pytest.approx(sum(expected.values()), rel=0.01)
    # The formula is the causal half: 3 products' worth. Over the whole square it is 6, and 7 where the backward pass makes the scores again.
    assert 0.9 <= counted.attention / attention <= 2.5


def test_a_wrong_formula_is_seen():
    counted = count(TARGETS["llama"][0], 3, 0.5)
    parts = train_flop(counted.sizes, 32, 3, counted.share, 640, counted.going_on)
    right = sum(parts.values()) - parts["attention"]
    assert counted.matrices == pytest.approx(right, rel=0.01)
    teacher, student = parts["lm_head of the target"], parts["lm_head of the draft"]
    for wrong in (right + 2 * teacher, right - student / 2, right + student, right + 12 * counted.sizes.multiplied * (1 - counted.going_on)):
        # a teacher each step; no gradient; every row in lm_head; every row in every step
        assert counted.matrices != pytest.approx(wrong, rel=0.03)


def test_a_step_at_8b_shapes_costs_what_the_bounds_say():
    """Llama-3.1-8B with all sizes and T divided by 16: every product is 1/256 of the real one, so the counts are those of 8B."""
    dense = train_flop(measured("experiment=llama-3.1-8b"), 2048, 1, 1.0, 128256)
    known = sum(dense.values())
    assert known == pytest.approx(4.71e9, rel=0.01)
    small = tiny_config("llama", hidden_size=256, intermediate_size=896, num_attention_heads=4, num_key_value_heads=1, vocab_size=8016)
    # Two tokens more: the first two of a document are no targets, and their cost is put on the others.
    one = [count(small, 1, 1.0, seq_len=length // 16 + 2, num_rows=1) for length in (1024, 2048)]
    three = [count(small, 3, 0.5, seq_len=length // 16, num_rows=1) for length in (1024, 2048)]
    assert [each.share for each in three] == [0.5, 0.5]
    assert all(256 * (each.matrices + each.attention) / each.share <= 1.03 * known for each in one)
    assert 256 * (three[0].matrices + three[0].attention) <= 1.8 * known
    assert 256 * three[1].matrices + 3 * dense["attention"] <= 1.8 * known  # at T=2048 with causal attention, as the known figure has it


@pytest.mark.parametrize(("head", "states", "own"), [("mtp", 1, ()), ("eagle1", 1, ()), ("eagle3", 4, ("lm_head",)), ("eagle31", 4, ("lm_head",))])
def test_the_storage_of_a_head_is_that_of_its_taps_and_its_own_lm_head_is_trained(head, states, own):
    config = composed("experiment=llama-3.1-8b", f"head={head}")
    tables = plan(config)
    assert tables["storage"]["one token"].value == states * 8192 + 9
    assert [name for name in tables["parameters"] if name.startswith("lm_head (")] == [f"{name} (its own)" for name in own]
    assert plan(composed("experiment=llama-3.1-8b", f"head={head}", "precompute.tap_layers=[2,16,29]"))["storage"]["one token"].value == 4 * 8192 + 9


def test_flop_of_a_training_are_those_of_its_steps():
    config = composed("experiment=llama-3.1-8b", "train.unroll_from=0.33", "train.num_steps=30", "train.optim.warmup_steps=2")
    sizes, options = measure(config.head, read_target(config.target)), config.train
    one, three = (sum(train_flop(sizes, options.seq_len, k, config.node.supervised_share, 32768).values()) for k in (1, 3))
    tokens = options.seq_len * options.rows_per_batch * options.accumulation
    assert training_flop(config, sizes, 4) == pytest.approx(4 * one * tokens)
    assert training_flop(config, sizes, 30) == pytest.approx((10 * one + 20 * three) * tokens)
    planned = plan(replace(config, train=replace(config.train, unroll_from=0.25)))["training FLOP per token of a packed row"]["all"].value
    assert planned == pytest.approx(0.25 * one + 0.75 * three)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("recipe", "block", "lm_head", "flop", "speed", "state"),
    [
        ("llama-3.2-1b", 69e6, 263e6, 2.02e9, 196e3, 4096),
        ("llama-3.1-8b", 252e6, 525e6, 4.71e9, 84e3, 8192),
        ("llama-3.3-70b", 990e6, 1051e6, 12.34e9, 32e3, 16384),
    ],
)
def test_the_known_table(recipe, block, lm_head, flop, speed, state):
    tables = plan(composed(f"experiment={recipe}", *DENSE))
    found = {title: {name: figure.value for name, figure in table.items()} for title, table in tables.items()}
    assert found["parameters"]["trained, all"] == pytest.approx(block, rel=0.01)
    assert found["parameters"]["lm_head"] == pytest.approx(lm_head, rel=0.01)
    assert found["training FLOP per token of a packed row"]["all"] == pytest.approx(flop, rel=0.01)
    assert found["training speed"]["of one device"] == pytest.approx(speed, rel=0.01)
    assert found["storage"]["one token"] == state + 9


def test_the_hours_of_70b():
    """1.43G tokens: 142 GPU-hours of capture, 12 of training, 23.4 TB."""
    config = compose("experiment=llama-3.3-70b", *DENSE, "node.disk_read_gb_s=1000")
    sizes = measure(config.head, read_target(config.target))
    rate = plan(config)["training speed"]["of 8xH100"].value
    seconds = stage_seconds(config, sizes, rate, 16384, 1.0)
    assert 8 * seconds["capture"] * 1.43e9 / 3600 == pytest.approx(142, rel=0.01)
    assert 8 * seconds["training"] * 1.43e9 / 3600 == pytest.approx(12.4, rel=0.01)
    assert seconds["regeneration"] == 0


@pytest.mark.parametrize(
    ("recipe", "published"),
    zip(RECIPES, [1_235_814_400, 8_030_261_248, 70_553_706_496, 15_706_484_224]),
)
def test_targets_have_their_published_size(recipe, published):
    sizes = measured(f"experiment={recipe}")
    assert sizes.target == published
    assert (sizes.target_active == published) == (recipe != "deepseek-v2-lite")
    if recipe == "deepseek-v2-lite":
        assert sizes.target_active == pytest.approx(2.66e9, rel=0.03)  # 2.4 billion and the embeddings


def saved_bytes(target, num_steps, **head):
    """Bytes that the head keeps for its backward pass under autocast, per row and step; weights not counted."""
    config = head_of(**head)
    model = build_head(config, target)
    seq_len = 16
    ends = FrozenEnds(
        target, *(torch.randn(*shape) for shape in ((target.vocab_size, target.hidden_size), (target.hidden_size,), (target.vocab_size, target.hidden_size)))
    )
    ids = torch.zeros(1, seq_len, dtype=torch.int64)
    batch = Batch(
        ids,
        torch.arange(seq_len)[None],
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        torch.randn(1, seq_len, num_taps(config), target.hidden_size).bfloat16(),
    )
    seen = {parameter.untyped_storage().data_ptr(): 0 for parameter in [*model.parameters(), *ends.parameters()]}

    def pack(tensor):
        if not (tensor.dim() == 2 and min(tensor.shape) > seq_len):  # autocast's copies of weights
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        readouts = unroll(model, ends.bfloat16(), batch, num_steps)
    assert readouts.requires_grad
    return sum(seen.values()) / (seq_len + (num_steps - 1) * int(chained(batch, num_steps).sum()))


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", ["llama", "deepseek_v2 dense", "eagle1", "eagle3", "eagle3.1"])
def test_activations_are_estimated_to_a_quarter(name, num_steps):
    target, head = TARGETS[name]
    sizes = measure(head_of(**head), target)
    assert 2 * sizes.kept == pytest.approx(saved_bytes(target, num_steps, **head), rel=0.25)


# ---------------------------------------------------------------- the budget


CHANGES = [("precompute.regenerate.enabled=false",), ("node.epochs=3",), ("node.disk_tb=1",), ("node.disk_read_gb_s=1",)]


@pytest.mark.parametrize(("recipe", "extra"), [*((recipe, ()) for recipe in RECIPES), *(("llama-3.1-8b", extra) for extra in CHANGES)])
def test_the_budget_takes_the_hours_or_the_disk_and_no_token_less(recipe, extra):
    """Counted stage by stage from the tables, not from the solver's own sums."""
    config = composed(f"experiment={recipe}", *extra)
    node, tables = config.node, plan(config)
    time, speed, storage = tables[f"time on {node.name}"], tables["training speed"], tables["storage"]
    tokens, share, state = time["tokens that fit"].value, node.supervised_share, storage["one token"].value
    work = 2 * tokens * measured(f"experiment={recipe}").target_active
    peak = node.num_devices * node.peak_tflops * 1e12
    total = work / (peak * node.capture_efficiency)
    if config.precompute.regenerate.enabled:
        total += work * (1 - share) / (peak * node.capture_efficiency) + work * share / (peak * node.decode_efficiency)
    total += node.epochs * tokens / min(speed["of 8xH100"].value, node.disk_read_gb_s * 1e9 / state)
    assert time["all"].value == pytest.approx(total / 3600)
    assert max(total / 3600 / node.hours, tokens * state / (node.disk_tb * 1e12)) == pytest.approx(1)
    assert ("not included" in time["regeneration"].assumes) == (time["regeneration"].value == 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fit_their_node(recipe):
    config = composed(f"experiment={recipe}")
    tables = plan(config)
    time = tables["time on 8xH100"]
    assert tables["memory of one device in training"]["all"].value < 0.9 * config.node.memory_gb * 1e9
    assert config.train.num_steps <= time["optimiser steps"].value
    assert time["this run"].value <= config.node.hours
    assert 0.9e9 < tables["storage"]["one shard"].value < 1.2e9


def test_mfu_is_the_planned_speed_turned_round():
    config = composed("experiment=llama-3.1-8b", "train.unroll_from=0")
    speed, share = plan(config)["training speed"]["of one device"].value, config.node.supervised_share
    meter = Meter(config, measure(config.head, read_target(config.target)), config.node.peak_tflops * 1e12)
    assert meter.mfu(config.train.unroll_steps, share, speed) == pytest.approx(config.node.train_efficiency)
    assert meter.mfu(1, share, speed) < config.node.train_efficiency
    assert peak_flops(torch.device("cpu")) is None


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("command", [train, precompute, lambda config: pipeline.run(config, [])], ids=["train", "precompute", "pipeline"])
def test_plan_prints_and_stops(command, tmp_path, capsys):
    config = compose("experiment=llama-3.1-8b", "plan=true", f'run_dir="{tmp_path / "run"}"')
    command(config)
    assert capsys.readouterr().out == report(config)
    assert not (tmp_path / "run").exists()


def test_a_target_is_planned_from_its_own_config_and_a_run_from_its_own_shards(target_dir, corpus, tmp_path):
    lines = [
        "experiment=tiny",
        f'target.path="{target_dir}"',
        f'run_dir="{tmp_path}"',
        f"data.train=[{source(corpus / 'train.jsonl')}]",
        "node.supervised_share=0.99",
    ]
    assert plan(compose(*lines))["training FLOP per token of a packed row"]["supervised share"].value == 0.99
    precompute(compose(*lines, "precompute.regenerate.enabled=false"))
    tables = plan(compose(*lines))
    share = tables["training FLOP per token of a packed row"]["supervised share"]
    assert 0.1 < share.value < 0.9
    assert "counted" in share.assumes
    elsewhere = plan(compose(*lines, f'run_dir="{tmp_path / "other"}"', f'train.shards="{tmp_path / "shards"}"'))
    assert elsewhere["training FLOP per token of a packed row"]["supervised share"] == share
    assert tables["parameters"]["embeddings"].value == 256 * 64
    assert tables["time on 2 CPU cores"]["captured tokens"].value > 0


def test_facts_without_a_family_and_shares_above_one_are_refused():
    with pytest.raises(ValueError, match="names no model_type, only hidden_size"):
        compose("target.path=x", "+target.arch.hidden_size=8")
    with pytest.raises(ValueError, match=r"node.train_efficiency=40.0 is not a share"):
        compose("target.path=x", "node.train_efficiency=40")


@pytest.mark.parametrize("recipe", RECIPES)
def test_hours_of_a_run_are_the_tables_by_stage(recipe):
    config = composed(f"experiment={recipe}")
    table = plan(config)[f"time on {config.node.name}"]
    hours = run_hours(config)
    assert sum(hours.values()) == pytest.approx(table["this run"].value)
    for stage, value in hours.items():  # the same shares as of the budget
        assert value / sum(hours.values()) == pytest.approx(table[stage].value / table["all"].value)


def test_golden_tables_of_the_docs():
    """docs/planning.md shows what the commands print; `make golden` writes it anew."""
    text, found = DOCS.read_text(), []

    def printed(match):
        found.append(match[2])
        return match[1] + report(composed(f"experiment={match[2]}", "plan=true")) + "```"

    expected = re.sub(r"(    mtp-train experiment=(\S+) plan=true\n\n```text\n).*?```", printed, text, flags=re.DOTALL)
    assert found == RECIPES
    if os.environ.get("MTP_GOLDEN") == "write":
        DOCS.write_text(expected)
    assert DOCS.read_text() == expected
