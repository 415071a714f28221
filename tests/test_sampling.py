"""Distributions and draws, against definitions written out and against exact integration over the uniform number."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mtp_train.spec_decode.sampling import sample, target_probs

BELOW_ONE = 1 - 2**-53


def drawn_mass(draw, probs):
    """The exact probability of every id: the measure of the uniforms that give it. Constant between cumulative sums, so midpoints decide."""
    total = math.fsum(probs)
    edges = sorted({0.0, 1.0, *(math.fsum(probs[: index + 1]) / total for index in range(len(probs)))})
    edges = [edge for edge in edges if edge <= 1]
    mass = [0.0] * len(probs)
    for low, high in itertools.pairwise(edges):
        token = draw(torch.tensor([probs], dtype=torch.float64), torch.tensor([(low + high) / 2], dtype=torch.float64))
        mass[int(token)] += high - low
    return mass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_each_rows_own_temperature(dtype):
    logits = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    heat = [0.0, 1.0, 0.3, 2.0]
    probs = target_probs(logits, torch.tensor(heat))
    assert probs.dtype == dtype
    for row, temperature in enumerate(heat):
        for position in range(3):
            values = logits[row, position].tolist()
            powers = [math.exp(value / temperature) for value in values] if temperature else [float(value == max(values)) for value in values]
            expected = torch.tensor([power / sum(powers) for power in powers], dtype=dtype)
            torch.testing.assert_close(probs[row, position], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_float32_probabilities(dtype):
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    probs = target_probs(logits, torch.tensor([1.0, 0.0]))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))
    torch.testing.assert_close(probs[0], logits[0].float().softmax(-1))


def test_of_equal_logits_the_lowest_id_is_greedy():
    probs = target_probs(torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 0.0, 2.0]]), torch.zeros(2))
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-20, 1e-4])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature):
    logits = torch.tensor([[700.0, -3.0, 699.0], [-5e4, -2e4, -3e4]])
    probs = target_probs(logits, torch.full((2,), temperature, dtype=torch.float64))
    assert probs.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_dividing_the_logits_themselves_would_overflow():
    """The seeded fault that the test above exists for."""
    assert (torch.tensor([700.0, -3.0, 699.0]) / 1e-38).softmax(-1).isnan().any()


def test_temperature_one_and_zero_do_not_change_their_input():
    logits = torch.randn(2, 7)
    kept = logits.clone()
    target_probs(logits, torch.tensor([0.0, 1.0]))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_refused_with_their_rows(bad, temperature):
    logits = torch.zeros(3, 2, 4)
    logits[1, 0, 2] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] of 3"):
        target_probs(logits, torch.full((3,), temperature))
    masked = torch.tensor([[0.0, -math.inf]])
    assert target_probs(masked, torch.tensor([temperature])).tolist() == [[1, 0]]


@pytest.mark.parametrize("probs", [[0.2, 0.3, 0.5], [0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 1.0], [3.0, 1.0], [1e-3, 0.0, 0.999]])
def test_each_id_is_drawn_with_exactly_its_probability(probs):
    expected = [value / sum(probs) for value in probs]
    assert drawn_mass(sample, probs) == pytest.approx(expected, abs=1e-12)

    def shifted(probs, uniforms):  # seeded fault: off by one id
        return (sample(probs, uniforms) + 1) % probs.shape[-1]

    assert drawn_mass(shifted, probs) != pytest.approx(expected, abs=1e-3)


def at_the_edges(draw):
    """Whether an id of probability 0 can be had: first and last uniforms, zeros at both ends and between, sums that rounding misses."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.float64):
        probs = torch.rand(200, 300, generator=generator, dtype=dtype)
        probs[:, :40] = 0
        probs[:, -40:] = 0
        probs[torch.rand(200, 300, generator=generator) < 0.3] = 0
        probs[:100] /= probs[:100].sum(-1, keepdim=True)
        for u in (0.0, 2**-60, 0.5, 1 - 2**-24, BELOW_ONE):
            ids = draw(probs, torch.full((200,), u, dtype=torch.float64))
            if (probs.gather(1, ids.clamp(max=299)[:, None]) == 0).any() or (ids > 299).any():
                return True
    return False


def test_an_id_of_probability_0_is_never_drawn():
    assert not at_the_edges(sample)
    # Seeded faults: the first id whose cumulative mass reaches u; a total taken to be 1.
    assert at_the_edges(lambda probs, u: torch.searchsorted(probs.double().cumsum(-1), u[:, None] * probs.double().sum(-1, keepdim=True))[:, 0])
    assert at_the_edges(lambda probs, u: torch.searchsorted(probs.cumsum(-1).double(), u[:, None], right=True)[:, 0])


def test_a_draw_does_not_depend_on_its_neighbours_and_keeps_leading_shapes():
    generator = torch.Generator().manual_seed(3)
    probs, uniforms = torch.rand(4, 3, 50, generator=generator), torch.rand(4, 3, generator=generator)
    ids = sample(probs, uniforms)
    assert ids.shape == (4, 3) and ids.dtype == torch.long
    assert [[int(sample(probs[a, b], uniforms[a, b])) for b in range(3)] for a in range(4)] == ids.tolist()


@pytest.mark.parametrize("row", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_no_mass_is_refused(row):
    with pytest.raises(ValueError, match="finite positive sum"):
        sample(torch.tensor([[0.5, 0.5], row]), torch.tensor([0.5, 0.5]))
