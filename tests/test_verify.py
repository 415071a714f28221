"""Verification is lossless: proved by exact enumeration over small vocabularies, checked by chi-square on many draws, and on its edges.

Every checker is also given mutants, and must reject them.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from mtp_train.interfaces import Proposal, Verdict
from mtp_train.spec_decode.sampling import sample, target_probs
from mtp_train.spec_decode.verify import verify

BELOW_ONE = 1 - 2**-53


# ---------------------------------------------------------------- mutants: what a careless verify would do


def mutant(compare="<", residual="full", count="prefix"):
    """verify, written out again with one fault."""

    def wrong(proposal, target, uniforms):
        drafted, (batch, num_draft) = proposal.token_ids, proposal.token_ids.shape
        p = target[:, :num_draft].gather(-1, drafted[..., None])[..., 0]
        q = proposal.probs.gather(-1, drafted[..., None])[..., 0]
        left = uniforms[:, :num_draft] * (torch.ones_like(q) if compare == "q is 1" else q)
        accepted = left <= p if compare == "<=" else left < p
        num = accepted.long().sum(1) if count == "all matches" else accepted.long().cumprod(1).sum(1)
        rows = torch.arange(batch)
        final = target[rows, num].clone()
        for row in range(batch):
            if num[row] < num_draft:
                place = num[row]
                if residual == "full":
                    left_over = (final[row] - proposal.probs[row, place]).clamp(min=0)
                    final[row] = left_over if left_over.sum() > 0 else final[row]
                elif residual == "rejected token only" and final[row].sum() > final[row, drafted[row, place]]:
                    final[row, drafted[row, place]] = 0
        if residual == "bonus from the last draft":
            final = torch.where((num == num_draft)[:, None], target[:, num_draft - 1], final)
        return Verdict(num, sample(final, uniforms[:, num_draft]), num == num_draft)

    return wrong


# ---------------------------------------------------------------- exact enumeration


class Tables:
    """Conditional distributions of target and draft: p(. | prefix), q(. | prefix) for every prefix of up to K tokens."""

    def __init__(self, vocab, num_draft, kind, seed):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.num_draft = vocab, num_draft
        self.p, self.q = {}, {}
        for length in range(num_draft + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                p, q = (torch.rand(vocab, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
                if "zeros" in kind:  # the target rules one token out, the draft another
                    p[int(torch.randint(vocab, (1,), generator=generator))] = 0
                    q[int(torch.randint(vocab, (1,), generator=generator))] = 0
                p, q = p / p.sum(), q / q.sum()
                p = (p == p.max()).double() if "greedy target" in kind else p
                q = (q == q.max()).double() if "one-hot" in kind else q
                self.p[prefix], self.q[prefix] = p, p if "same" in kind else q

    def drafts(self):
        """Every chain of K drafts with its probability."""
        for chain in itertools.product(range(self.vocab), repeat=self.num_draft):
            probability = 1.0
            for place in range(self.num_draft):
                probability *= float(self.q[chain[:place]][chain[place]])
            if probability > 0:
                yield chain, probability

    def joint(self, tokens, start=0):
        """The target's probability of tokens[start:] after tokens[:start]."""
        probability = 1.0
        for place in range(start, len(tokens)):
            probability *= float(self.p[tuple(tokens[:place])][tokens[place]])
        return probability


def cells(breakpoints):
    """(midpoint, width) of the pieces of [0, 1) between breakpoints."""
    edges = sorted({0.0, 1.0, *(float(x) for x in breakpoints if 0 < x < 1)})
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(edges)]


def largest_error(check, tables):
    """The largest difference between what `check` commits (then continued by the target) and the target's own joint, over all K + 1 tokens.

    The verdict is constant between breakpoints of each uniform, so one midpoint a cell, weighted by the cell's size, integrates exactly.
    """
    got = dict.fromkeys(itertools.product(range(tables.vocab), repeat=tables.num_draft + 1), 0.0)
    for chain, probability in tables.drafts():
        ps = torch.stack([tables.p[chain[:place]] for place in range(tables.num_draft + 1)])  # (K + 1, V)
        qs = torch.stack([tables.q[chain[:place]] for place in range(tables.num_draft)]) if tables.num_draft else ps[:0]
        finals = [ps[-1], *(ps[:-1] - qs).clamp(min=0), *ps]
        # Also where a faulty residual would break, so that mutants are integrated exactly too.
        finals += [ps[place].clone().index_fill_(0, torch.tensor(chain[place]), 0) for place in range(tables.num_draft)]
        next_cells = cells(torch.cat([final.cumsum(0) / final.sum() for final in finals if final.sum() > 0]).tolist())
        accept_cells = [cells([ps[place, token] / qs[place, token], ps[place, token]]) for place, token in enumerate(chain)]
        grid = list(itertools.product(*accept_cells, next_cells))
        uniforms = torch.tensor([[midpoint for midpoint, _ in point] for point in grid], dtype=torch.float64)
        proposal = Proposal(torch.tensor([chain] * len(grid), dtype=torch.long).view(len(grid), -1), qs.expand(len(grid), -1, -1))
        verdict = check(proposal, ps.expand(len(grid), -1, -1), uniforms)
        for point, num, token in zip(grid, verdict.num_accepted.tolist(), verdict.next_token.tolist()):
            weight = probability
            for _, width in point:
                weight *= width
            committed = (*chain[:num], token)
            for rest in itertools.product(range(tables.vocab), repeat=tables.num_draft - num):
                got[committed + rest] += weight * tables.joint(committed + rest, start=num + 1)
    return max(abs(value - tables.joint(tokens)) for tokens, value in got.items())


KINDS = ["true q", "true q, zeros", "one-hot", "one-hot, zeros", "greedy target", "greedy target, one-hot", "same", "same, zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "num_draft"), [(4, 0), (5, 1), (3, 2), (2, 3)])
def test_committed_tokens_have_exactly_the_targets_distribution(kind, vocab, num_draft):
    for seed in range(2):
        assert largest_error(verify, Tables(vocab, num_draft, kind, seed)) < 1e-12


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"residual": "rejected token only"}, "true q"),
        ({"residual": "rejected token only"}, "true q, zeros"),
        ({"residual": "none"}, "true q"),
        ({"residual": "none"}, "one-hot"),
        ({"residual": "bonus from the last draft"}, "true q"),
        ({"compare": "q is 1"}, "true q"),
        ({"count": "all matches"}, "true q"),
        ({"count": "all matches"}, "greedy target"),
    ],
)
def test_the_enumeration_rejects_mutants(fault, kind):
    tables = Tables(3, 2, kind, 0)
    assert largest_error(mutant(), tables) < 1e-12  # without a fault the mutant is right: the fault alone is found
    assert largest_error(mutant(**fault), tables) > 1e-3


def test_for_one_hot_drafts_removing_the_rejected_token_is_the_whole_residual():
    """The fault above hides when drafting is greedy: one mode tested alone would not show it."""
    assert largest_error(mutant(residual="rejected token only"), Tables(3, 2, "one-hot", 0)) < 1e-12


# ---------------------------------------------------------------- many draws


DRAWS = 200_000
LIMIT = 33.7  # chi-square, 7 degrees of freedom: exceeded by chance once in 50,000


def drawn(check, mode, seed=0):
    """Run K = 2 on V = 8 with fixed p and q; returns (p (3, V), q (2, V), drafts, verdict)."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(3, 8, generator=generator).softmax(-1), torch.randn(2, 8, generator=generator).softmax(-1)
    if mode == "one-hot":
        q = target_probs(q.log(), torch.zeros(2))
    u = torch.rand(DRAWS, 5, generator=generator, dtype=torch.float64)
    drafts = torch.stack([sample(q[place].expand(DRAWS, -1), u[:, place]) for place in range(2)], dim=1)
    verdict = check(Proposal(drafts, q.expand(DRAWS, -1, -1)), p.expand(DRAWS, -1, -1), u[:, 2:])
    return p, q, drafts, verdict


def chi_squares(check, mode):
    """Of the first, second and third committed token, each against the target's own distribution."""
    p, _, drafts, verdict = drawn(check, mode)
    committed = torch.cat([drafts, drafts[:, :1]], dim=1)
    committed[torch.arange(DRAWS), verdict.num_accepted] = verdict.next_token
    out = []
    for place in range(3):
        tokens = committed[verdict.num_accepted >= place, place]
        expected = p[place].double() * len(tokens)
        assert expected.min() > 5
        out.append(float(((tokens.bincount(minlength=8) - expected) ** 2 / expected).sum()))
    return out


@pytest.mark.parametrize("mode", ["true q", "one-hot"])
def test_chi_square_of_200k_draws(mode):
    assert max(chi_squares(verify, mode)) < LIMIT


def test_chi_square_rejects_mutants():
    def half(proposal, target, uniforms):  # seeded fault: accepts too readily
        return verify(Proposal(proposal.token_ids, proposal.probs * 0.9), target, uniforms)

    def no_residual(proposal, target, uniforms):
        verdict = verify(proposal, target, uniforms)
        again = sample(target[torch.arange(DRAWS), verdict.num_accepted], uniforms[:, -1])
        return Verdict(verdict.num_accepted, again, verdict.is_bonus)

    assert max(chi_squares(half, "true q")) > 10 * LIMIT
    assert max(chi_squares(no_residual, "one-hot")) > 10 * LIMIT


@pytest.mark.parametrize("mode", ["true q", "one-hot"])
def test_acceptance_is_the_sum_of_min_p_q_or_p_of_the_draft(mode):
    p, q, drafts, verdict = drawn(verify, mode)
    expected = torch.minimum(p[0], q[0]).sum()
    if mode == "one-hot":
        assert expected == p[0, drafts[0, 0]]
    assert abs((verdict.num_accepted >= 1).double().mean() - expected) < 4 * (0.25 / DRAWS) ** 0.5


# ---------------------------------------------------------------- edges


def one_hot(ids, vocab=8):
    return torch.nn.functional.one_hot(torch.tensor(ids), vocab).float()


def accepts_what_the_target_rules_out(check):
    """u = 0 against p = 0, greedy and sampled."""
    drafts = torch.tensor([[2], [2]])
    target = torch.stack([one_hot([5, 1]), torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0, 0, 0]])])
    draft = torch.stack([one_hot([2]), torch.full((1, 8), 0.125)])
    verdict = check(Proposal(drafts, draft), target, torch.zeros(2, 2))
    return bool(verdict.num_accepted.any()) or not bool((target[:, 0].gather(1, verdict.next_token[:, None]) > 0).all())


def test_u_0_does_not_accept_a_token_of_probability_0():
    assert not accepts_what_the_target_rules_out(verify)
    assert accepts_what_the_target_rules_out(mutant(compare="<="))


def matches_101(check):
    """What greedy verification counts when the first and third of three drafts match."""
    target = one_hot([[3, 4, 5, 6]])
    drafts = [[3, 0, 5]]
    verdict = check(Proposal(torch.tensor(drafts), one_hot(drafts)), target, torch.full((1, 4), 0.5))
    return verdict.num_accepted.tolist(), verdict.next_token.tolist(), verdict.is_bonus.tolist()


def test_matches_1_0_1_count_one_and_give_the_targets_token():
    assert matches_101(verify) == ([1], [4], [False])
    assert matches_101(mutant(count="all matches")) != ([1], [4], [False])


@pytest.mark.parametrize("num_draft", [1, 2, 5])
def test_greedy_is_the_longest_common_prefix_and_the_targets_next_token(num_draft):
    generator = torch.Generator().manual_seed(1)
    best = torch.randint(0, 3, (200, num_draft + 1), generator=generator)
    drafts = torch.randint(0, 3, (200, num_draft), generator=generator)
    uniforms = torch.rand(200, num_draft + 1, generator=generator)
    verdict = verify(Proposal(drafts, one_hot(drafts.tolist())), one_hot(best.tolist()), uniforms)
    for row in range(200):
        num = next((k for k in range(num_draft) if drafts[row, k] != best[row, k]), num_draft)
        assert (int(verdict.num_accepted[row]), int(verdict.next_token[row]), bool(verdict.is_bonus[row])) == (num, int(best[row, num]), num == num_draft)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("u", [0.0, 0.5, BELOW_ONE, 1 - 2**-24])
def test_a_draft_equal_to_the_target_is_always_accepted(temperature, u):
    logits = torch.randn(64, 4, 50, generator=torch.Generator().manual_seed(2)) * 4
    probs = target_probs(logits, torch.full((64,), temperature))
    drafts = sample(probs[:, :3], torch.rand(64, 3, generator=torch.Generator().manual_seed(3)))
    for dtype in (torch.float32, torch.float64):
        verdict = verify(Proposal(drafts, probs[:, :3]), probs, torch.full((64, 4), u, dtype=torch.float64).clamp(max=1 - 2**-24).to(dtype))
        assert verdict.num_accepted.tolist() == [3] * 64 and verdict.is_bonus.all()


def test_a_residual_without_mass_falls_back_to_the_target():
    """Sums that differ by rounding: p < q everywhere, so nothing is left; the draw is then the target's."""
    q = torch.tensor([[[0.25, 0.25, 0.5]]])
    target = torch.cat([q * (1 - 1e-6), q], dim=1)
    verdict = verify(Proposal(torch.tensor([[0]]), q), target, torch.tensor([[BELOW_ONE, 0.9]], dtype=torch.float64))
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist(), verdict.is_bonus.tolist()) == ([0], [2], [False])


def test_k_0_is_plain_decoding():
    target = torch.tensor([[[0.0, 0.5, 0.5]], [[0.0, 0.0, 1.0]]])
    verdict = verify(Proposal(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, 3)), target, torch.tensor([[0.4], [0.0]]))
    assert verdict.num_accepted.tolist() == [0, 0] and verdict.next_token.tolist() == [1, 2] and verdict.is_bonus.tolist() == [True, True]


def test_rows_do_not_depend_on_their_neighbours_and_inputs_are_left_alone():
    generator = torch.Generator().manual_seed(4)
    probs = torch.randn(6, 4, 9, generator=generator).softmax(-1)
    draft = torch.randn(6, 3, 9, generator=generator).softmax(-1)
    uniforms = torch.rand(6, 4, generator=generator)
    proposal = Proposal(sample(draft, torch.rand(6, 3, generator=generator)), draft)
    kept = [x.clone() for x in (probs, draft, uniforms, proposal.token_ids)]
    whole = verify(proposal, probs, uniforms)
    assert all(torch.equal(a, b) for a, b in zip(kept, (probs, draft, uniforms, proposal.token_ids)))
    for row in range(6):
        one = slice(row, row + 1)
        alone = verify(Proposal(proposal.token_ids[one], draft[one]), probs[one], uniforms[one])
        assert (alone.num_accepted, alone.next_token, alone.is_bonus) == (whole.num_accepted[one], whole.next_token[one], whole.is_bonus[one])


@pytest.mark.parametrize(
    ("draft", "target", "uniforms", "message"),
    [
        ((2, 3, 9), (2, 3, 9), (2, 4), "target_probs of shape"),
        ((2, 3, 8), (2, 4, 9), (2, 4), "proposal.probs of shape"),
        ((2, 3, 9), (2, 4, 9), (2, 3), "uniforms of shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(draft, target, uniforms, message):
    with pytest.raises(ValueError, match=message):
        verify(Proposal(torch.zeros(2, 3, dtype=torch.long), torch.ones(draft)), torch.ones(target), torch.zeros(uniforms))
