"""The same prompts, head and K in two engines: counters side by side, and the first difference explained.

A difference is numerics when the target's or the draft's two best logits are nearly tied there. Else it is a fault of wiring, and faults of
wiring have a signature: each known one is simulated in the embedded engine, and the one that reproduces what the other engine accepted, step
by step, is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.engine import Decoded
from eval.faults import faults_of, spoiled
from eval.prompts import Prompt
from eval.report_page import number
from mtp_train import config as cfg
from mtp_train.checkpoint import vocab_fingerprint
from mtp_train.published import read_engine
from mtp_train.spec_decode.engine import Completion
from mtp_train.spec_decode.stats import AcceptanceStats

log = logging.getLogger(__name__)

EXPLAINED_GAP = 1e-3  # top-2 logit gap below which two float32 evaluations may disagree
SIMULATED = 12  # prompts that differ, and as many that do not, on which faults are simulated
WIRING = (
    "check that the head belongs to this target, which states its feature is made of, the order of what its projection joins, "
    "the position of the first row, and that the engine shares embedding and lm_head; parity=true names the fault"
)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference of two sequences (one may be longer); None: equal."""
    if list(a) == list(b):
        return None
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def accepted_by_step(completion: Completion) -> list[int]:
    """How many drafts each step committed, from where the tokens came. A last step that was cut counts what was kept."""
    steps, run = [], 0
    for kind in completion.kinds[1:]:
        if kind == "accepted":
            run += 1
        else:
            steps.append(run)
            run = 0
    return steps + [run] * (run > 0)


# ---------------------------------------------------------------- comparing


def differences(prompts: Sequence[Prompt], embedded: Decoded, other: Decoded, reference: Any, run: cfg.EvalRunConfig) -> list[dict[str, Any]]:
    """Each prompt whose answer or whose steps differ, at its first difference, with the top-2 gap that explains it or not."""
    out = []
    for prompt in prompts:
        mine, theirs = embedded.completions[prompt.id], other.completions[prompt.id]
        steps = accepted_by_step(mine), accepted_by_step(theirs)
        token, step = first_difference(mine.token_ids, theirs.token_ids), first_difference(*steps)
        if token is None and step is None:
            continue
        at = None if step is None else 1 + sum(one + 1 for one in steps[0][:step])  # tokens committed before the step that differs
        if token is not None and (at is None or token < at):
            gap, what, where = reference.top2_gap(prompt.token_ids + mine.token_ids[:token]), "the target's choice", token
        else:
            assert at is not None and step is not None
            known = prompt.token_ids + mine.token_ids[:at]
            position = min(row[step] if step < len(row) else 0 for row in steps)
            gap, what, where = reference.draft_gap(known, run, position), f"draft {position + 1}", at
        out.append({"id": prompt.id, "position": where, "what": what, "top2_gap": gap, "explained": gap < EXPLAINED_GAP})
        log.info("parity: %s differs at token %d (%s), top-2 logit gap %.2e", prompt.id, where, what, gap)
    return out


def audited(reference: Any) -> str | None:
    """What is wrong with the exported directory, by its names, shapes and config.json; None: nothing, or there is none."""
    folder = Path(reference.config.eval.vllm_head)
    if not (folder / "config.json").exists():
        return None
    try:
        read_engine(folder, reference.loaded.info, reference.loaded.layer_config, reference.config.target.path)
    except ValueError as error:
        return f"what vLLM loaded is not this head: {error}"
    return None


def diagnose(prompts: Sequence[Prompt], found: Sequence[dict[str, Any]], other: Decoded, reference: Any, run: cfg.EvalRunConfig) -> str:
    """What the audit of the exported head finds; else the simulated fault that reproduces most of the other engine's steps, with how many, on some prompts
    that differ and some that do not.
    """
    if found_in_files := audited(reference):
        return found_in_files
    differing = {one["id"] for one in found if not one["explained"]}
    if len(differing) <= max(1, 0.02 * len(prompts)):
        return "A fault of wiring touches more prompts than that: suspect numerics beyond a near-tie, batching or the cache"
    prompts = [one for one in prompts if one.id in differing][:SIMULATED] + [one for one in prompts if one.id not in differing][:SIMULATED]
    wanted = {prompt.id: accepted_by_step(other.completions[prompt.id]) for prompt in prompts}
    head, gain = reference.loaded.head, reference.target.ends.norm_weight.float() + reference.target.ends.family.gain_offset
    scores = {}
    for name, fault in faults_of(head).items():
        spoilt = reference.decode(run, prompts, len(prompts), max(len(one.token_ids) for one in other.completions.values()), name, spoiled(head, fault, gain))
        scores[name] = sum(accepted_by_step(spoilt.completions[prompt.id]) == wanted[prompt.id] for prompt in prompts)
    most = max(scores.values())
    best = ", or ".join(name for name in scores if scores[name] == most)  # greedy steps are blind to a scale, so some look alike
    if most < 0.75 * len(prompts):
        return f"none of the known faults of wiring reproduces it (nearest: {best}, {most} of {len(prompts)} prompts): suspect the cache or the loader"
    return f"{best}: simulated, this reproduces the steps of {most} of {len(prompts)} prompts"


def verdict(found: list[dict[str, Any]], num_prompts: int, num_drafts: int, rate: float | None) -> tuple[bool, str]:
    """Whether two runs agree as DESIGN says, and in words. `rate` of the first draft; None: nothing was drafted."""
    faults = [one for one in found if not one["explained"]]
    if faults:
        one = faults[0]
        return False, f"{len(faults)} of {num_prompts} prompts differ without a near-tie, first {one['id']} at token {one['position']} ({one['what']})"
    if len(found) > max(1, 0.02 * num_prompts):
        return False, f"{len(found)} of {num_prompts} prompts differ; each is a near-tie, but these are more than 2 %"
    weak = num_drafts < 200 or rate is None or not 0.15 <= rate <= 0.9
    note = f"; weak evidence, with {num_drafts} drafts and a first-draft rate of {number(rate)} (200 drafts and .15 to .9 say more)" if weak else ""
    return True, ("equal to the last counter" if not found else f"{len(found)} near-ties, else equal") + note


def compare_engines(evaluation: Any, drafted: list[Decoded], engines: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """One row for each greedy run: counters of both engines and of the prediction from shards, and the verdict."""
    mine = evaluation.engine
    (other,) = (kind(*evaluation.arguments) for name, kind in engines.items() if name != mine.name)
    other.load(mine.dtype)
    recorded, rows = evaluation.recorded_validation(), []
    for run, here in zip(evaluation.options.runs, drafted, strict=True):
        if run.temperature > 0:
            continue
        drafted_from, same = mine.draft_vocab(run), run
        if vocab_fingerprint(drafted_from) != vocab_fingerprint(other.draft_vocab(run)):  # some classes lose the head's own
            same = replace(run, draft_vocab_size=evaluation.info.vocab_size if drafted_from is None else len(drafted_from))
        if vocab_fingerprint(drafted_from) != vocab_fingerprint(other.draft_vocab(same)):
            evaluation.warnings.append(f"parity, {evaluation.name_of(run)}: the engines draft from different vocabularies; not compared")
            continue
        there = other.decode(same, evaluation.prompts, evaluation.options.batch_size, evaluation.options.max_new_tokens, f"parity, {evaluation.name_of(run)}")
        found = {mine.name: here, other.name: there}
        reference = mine if mine.name == "embedded" else other
        rows.append(compare(evaluation.prompts, evaluation.name_of(run), found["embedded"], found["vllm"], reference, same, recorded))
        if not rows[-1]["equal"]:
            evaluation.warnings.append(f"parity, {rows[-1]['name']}: {rows[-1]['verdict']}")
    other.close()
    return rows


def compare(
    prompts: Sequence[Prompt], name: str, embedded: Decoded, other: Decoded, reference: Any, run: cfg.EvalRunConfig, recorded: dict[str, Any] | None
) -> dict[str, Any]:
    """One row. `reference` is the embedded engine, which computes gaps and simulates faults."""
    found = differences(prompts, embedded, other, reference, run)
    total = {key: sum((one.stats for one in each.completions.values()), AcceptanceStats()) for key, each in (("embedded", embedded), ("vllm", other))}
    equal, words = verdict(found, len(prompts), total["embedded"].num_drafts, next(iter(total["embedded"].acceptance_rate_at), None))
    if equal and not found and total["embedded"] != total["vllm"]:
        equal, words = False, "answers and steps are equal, the counters are not: the engines count otherwise"
    if any(not one["explained"] for one in found):
        words += f". {diagnose(prompts, found, other, reference, run)}"
    columns = {
        key: {**one.counters(), "acceptance_length": one.acceptance_length, "acceptance_rate_at": list(one.acceptance_rate_at)} for key, one in total.items()
    }
    predicted = recorded and {"acceptance_length": recorded["predicted_acceptance_length"], "acceptance_rate_at": recorded["predicted_acceptance_rate_at"]}
    return {"name": name, "equal": equal, "verdict": words, "predicted": predicted, **columns, "num_prompts": len(prompts), "differences": found}
