"""Optimisers against torch's own and a float64 oracle, schedules against closed forms, and that no state is forgotten by a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mtp_train.checkpoint import choose, head_tensors, load_exactly, load_optimizer
from mtp_train.config import LrScaleConfig, OptimConfig, compose
from mtp_train.optim import averaged, lr_at, make_optimizer, take_up, update_average
from mtp_train.parallel import Replica
from tests.test_train import losses, run_training

CONFIG = OptimConfig(
    name="adamw", lr=0.1, lr_scale=LrScaleConfig(1.0, 1.0, 1.0), schedule="cosine", warmup_steps=4, decay_ratio=0.25, min_lr_ratio=0.1,
    weight_decay=0.01, betas=[0.9, 0.95], max_grad_norm=1.0, ema_decay=0.0,
)  # fmt: skip
MUON = replace(CONFIG, name="muon")


def optimizer_tensors(head, optimizer):
    return Replica(head, head, optimizer, 1.0).gather()[1]


class Toy(nn.Module):
    """Parameters of every kind, by the names of a head."""

    def __init__(self, seed=0):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.block = nn.ParameterDict({name: torch.randn(*shape, generator=rng) for name, shape in self.SHAPES.items()})
        self.norm = nn.Parameter(torch.randn(6, generator=rng))
        self.eh_proj = nn.Parameter(torch.randn(6, 12, generator=rng))
        self.lm_head = nn.ParameterDict({"weight": torch.randn(8, 6, generator=rng)})

    SHAPES = {"wide": (6, 9), "tall": (9, 6), "experts": (2, 4, 6), "bias": (9,)}


def steps(head, optimizer, numbers, decay=0.0):
    """Optimiser steps on gradients that depend on the step's number alone."""
    for number in numbers:
        rng = torch.Generator().manual_seed(100 + number)
        for parameter in head.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.lr / number * group["lr_scale"]
        optimizer.step()
        update_average(optimizer, decay, number)


def weights(head):
    return {name: parameter.detach().clone() for name, parameter in head.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("decayed_norms", [False, True])  # the second is the seeded fault
def test_adamw_is_torchs_own_without_decay_of_norms(decayed_norms):
    head = Toy()
    steps(head, make_optimizer(head, CONFIG), range(1, 6))
    for fused in (True, False):
        other = Toy()
        matrices, vectors = ([p for p in other.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.01 * decayed_norms}]
        steps(other, torch.optim.AdamW([{**group, "lr_scale": 1.0} for group in groups], betas=(0.9, 0.95), fused=fused), range(1, 6))
        mine, theirs = weights(head), weights(other)
        assert same(mine, theirs) or not fused or decayed_norms
        assert all(torch.allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-6) for name in mine) is not decayed_norms


def orthogonal(matrix):
    """Five quintic Newton-Schulz steps act on each singular value alone: s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def muon_error(scale=0.2, momentum=0.95, nesterov=True):
    """Largest relative difference of the four last updates of matrices from a float64 oracle, in which a fault may be seeded."""
    head = Toy()
    optimizer = make_optimizer(head, MUON)
    worst, buffers = 0.0, {}
    for number in range(1, 5):
        before = weights(head)
        steps(head, optimizer, [number])
        for name, parameter in head.named_parameters():
            if parameter.dim() != 2 or name == "lm_head.weight":
                continue
            grad = parameter.grad.double()
            buffers[name] = momentum * buffers.get(name, torch.zeros_like(grad)) + (1 - momentum) * grad
            update = (1 - momentum) * grad + momentum * buffers[name] if nesterov else buffers[name]
            lr = CONFIG.lr / number
            expected = -lr * 0.01 * before[name].double() - lr * scale * math.sqrt(max(grad.shape)) * orthogonal(update)
            found = parameter.detach().double() - before[name].double()
            worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst


def test_muon_equals_a_float64_oracle():
    assert muon_error() < 0.05  # torch iterates in bfloat16
    assert muon_error(scale=0.25) > 0.1
    assert muon_error(momentum=0.9) > 0.08
    assert muon_error(nesterov=False) > 0.1


def test_muon_leaves_norms_biases_and_experts_to_adamw():
    head, other = Toy(), Toy()
    steps(head, make_optimizer(head, MUON), range(1, 6))
    steps(other, make_optimizer(other, CONFIG), range(1, 6))
    mine, theirs = weights(head), weights(other)
    assert {name for name in mine if torch.equal(mine[name], theirs[name])} == {"norm", "block.bias", "block.experts", "lm_head.weight"}


@pytest.mark.parametrize("config", [CONFIG, MUON])
def test_every_parameter_is_in_one_group_with_its_scale(config):
    head = Toy()
    head.block["wide"].requires_grad_(False)
    names = {parameter: name for name, parameter in head.named_parameters()}
    optimizer = make_optimizer(head, replace(config, lr_scale=LrScaleConfig(norms=3.0, projection=5.0, block=7.0)))
    found = [(names[parameter], group["lr_scale"]) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(found) == [("block.bias", 3.0), ("block.experts", 7.0), ("block.tall", 7.0), ("eh_proj", 5.0), ("lm_head.weight", 5.0), ("norm", 3.0)]


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {4: 1.0, 12: 0.1 + 0.9 * 0.5, 8: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 20: 0.1}),
        ("linear", {4: 1.0, 12: 0.55, 16: 0.325, 20: 0.1}),
        ("wsd", {4: 1.0, 14: 1.0, 15: 1.0, 16: 0.82, 19: 0.28, 20: 0.1}),
        ("constant", {4: 1.0, 12: 1.0, 20: 1.0}),
    ],
)
def test_schedules_at_chosen_points(schedule, points):
    config = replace(CONFIG, lr=1.0, schedule=schedule)
    curve = [lr_at(step, 20, config) for step in range(21)]
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]
    assert {step: curve[step] for step in points} == pytest.approx(points)
    assert all(a >= b for a, b in pairwise(curve[4:]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("name=sgd",), "'sgd'"),
        (("schedule=step",), "'step'"),
        (("ema_decay=1.0",), "ema_decay=1.0"),
        (("decay_ratio=0.0",), "decay_ratio=0.0"),
        (("min_lr_ratio=1.5",), "min_lr_ratio=1.5"),
        (("lr_scale.block=0.0",), "lr_scale.block=0.0"),
        (("max_grad_norm=-1.0",), "max_grad_norm=-1.0 must be 0 \\(none\\) or above"),
        (("betas=[0.9]",), "betas=\\[0.9\\] two numbers"),
        (("betas=[0.9,1.0]",), "betas=\\[0.9, 1.0\\]"),
        (("warmup_steps=12",), "warmup_steps=12 leaves nothing of train.num_steps=12"),
        (("schedule=wsd", "decay_ratio=0.9"), "warmup_steps=2 and decay_ratio=0.9 overlap"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        compose("experiment=tiny", "target.path=x", *(f"train.optim.{change}" for change in changes))


# ---------------------------------------------------------------- the average


def test_the_average_is_a_plain_weighted_mean():
    head, seen = Toy(), []
    optimizer = make_optimizer(head, MUON)
    for number in range(1, 8):
        steps(head, optimizer, [number], decay=0.8)
        seen.append(weights(head))
    factors = [0.8 ** (7 - number) for number in range(1, 8)]
    now = weights(head)
    with averaged(optimizer):
        for name, parameter in head.named_parameters():
            expected = sum(factor * past[name].double() for factor, past in zip(factors, seen)) / sum(factors)
            torch.testing.assert_close(parameter.double(), expected, rtol=1e-6, atol=1e-6)
            assert not torch.allclose(parameter, now[name])
    assert same(weights(head), now)


def test_without_an_average_nothing_is_swapped():
    head = Toy()
    optimizer = make_optimizer(head, CONFIG)
    steps(head, optimizer, [1, 2])
    now = weights(head)
    with averaged(optimizer):
        assert same(weights(head), now)


# ---------------------------------------------------------------- checkpoints


def through_a_file(head, optimizer, config, path, forget=""):
    """What a checkpoint does to both; `forget` seeds a fault: this entry is not saved."""
    with averaged(optimizer):
        save_file(head_tensors(head, None), path / "head.safetensors")
        kept = {key: value for key, value in optimizer_tensors(head, optimizer).items() if key.rsplit("/", 1)[1] != forget}
        save_file(kept, path / "optimizer.safetensors")
    fresh = Toy(seed=1)
    again = make_optimizer(fresh, config)
    load_exactly(fresh, load_file(path / "head.safetensors"), "here")
    load_optimizer(fresh, again, load_file(path / "optimizer.safetensors"))
    take_up(again, config, "here")
    return fresh, again


ENTRIES = {"adamw": ["step", "exp_avg", "exp_avg_sq", "ema"], "muon": ["momentum_buffer", "step", "exp_avg", "exp_avg_sq", "ema"]}


@pytest.mark.parametrize(("name", "forget"), [(name, entry) for name, entries in ENTRIES.items() for entry in ["", *entries]])
def test_no_state_is_forgotten(tmp_path, name, forget):
    config = replace(CONFIG, name=name, ema_decay=0.9)
    head = Toy()
    optimizer = make_optimizer(head, config)
    steps(head, optimizer, [1, 2, 3], decay=0.9)
    if not forget:
        fresh, again = through_a_file(head, optimizer, config, tmp_path)
        assert same(optimizer_tensors(head, optimizer), optimizer_tensors(fresh, again))
        for one, its in ((head, optimizer), (fresh, again)):
            steps(one, its, [4, 5, 6], decay=0.9)
        assert same(weights(head), weights(fresh))
        assert same(optimizer_tensors(head, optimizer), optimizer_tensors(fresh, again))
        return
    try:
        fresh, again = through_a_file(head, optimizer, config, tmp_path, forget)
        for one, its in ((head, optimizer), (fresh, again)):
            steps(one, its, [4], decay=0.9)
    except (KeyError, ValueError):
        return  # refused
    assert not same(weights(head), weights(fresh))


def test_another_optimiser_or_an_average_no_longer_wanted(tmp_path):
    head = Toy()
    optimizer = make_optimizer(head, CONFIG)
    steps(head, optimizer, [1, 2], decay=0.9)
    with pytest.raises(ValueError, match=r"exp_avg.*train.optim.name=muon needs momentum_buffer"):
        through_a_file(head, optimizer, MUON, tmp_path)
    fresh, again = through_a_file(head, optimizer, CONFIG, tmp_path)
    assert same(weights(fresh), weights(head)), "training goes on from the weights, not from their average"
    assert not any("ema" in key for key in optimizer_tensors(fresh, again))


def test_a_state_dict_reaches_both_parts_of_muon():
    """What accelerate does to an optimiser that it wraps."""
    head, other = Toy(), Toy()
    mine, theirs = make_optimizer(head, MUON), make_optimizer(other, MUON)
    steps(head, mine, [1, 2])
    steps(other, theirs, [1, 2])
    mine.load_state_dict(mine.state_dict())
    steps(head, mine, [3])
    steps(other, theirs, [3])
    assert same(weights(head), weights(other))


# ---------------------------------------------------------------- in training


def test_the_average_is_what_is_saved_and_training_does_not_notice_it(captured, tmp_path):
    plain, log = run_training(captured, tmp_path / "plain", "train.num_steps=6")
    mean, log_mean = run_training(captured, tmp_path / "mean", "train.num_steps=6", "train.optim.ema_decay=0.8")
    state = load_file(choose(tmp_path / "mean" / "checkpoints", "last") / "optimizer.safetensors")
    assert all(torch.equal(plain[name], state[f"{name}/ema"]) for name in plain)
    assert not any(torch.equal(plain[name], mean[name]) for name in plain)
    assert losses(log) == losses(log_mean)
    assert [line["val_loss"] for line in log if "val_loss" in line] != [line["val_loss"] for line in log_mean if "val_loss" in line]


def test_resuming_muon_with_an_average_is_exact(captured, tmp_path):
    extra = ("train.optim.name=muon", "train.optim.ema_decay=0.8", "train.optim.schedule=constant", "train.save_every=4", "train.validate_every=0")
    whole, log = run_training(captured, tmp_path / "whole", *extra)
    run_training(captured, tmp_path / "cut", *extra, "train.num_steps=4")
    again, log_again = run_training(captured, tmp_path / "cut", *extra)
    assert same(whole, again)
    assert losses(log) == losses(log_again)


def test_a_group_learns_at_its_own_rate(captured, tmp_path):
    extra = ("train.num_steps=2", "train.optim.warmup_steps=1")
    start, _ = run_training(captured, tmp_path / "start", *extra, "train.optim.lr=1.0e-30")
    slow, _ = run_training(captured, tmp_path / "slow", *extra, "train.optim.lr_scale.block=1.0e-30")
    still = {name for name in start if torch.equal(start[name], slow[name])}
    assert still == {name for name in start if name.startswith("block.") and start[name].dim() > 1}
