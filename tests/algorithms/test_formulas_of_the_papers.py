"""Every loss, estimator, divergence and aggregation of the registries against its paper's formula, written
apart from the package in plain numbers (`tests/support/papers.py`), over random inputs in float64.

Gradients are compared with central differences. An entry of a registry without a formula there fails.
"""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS, ADVANTAGES
from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.batch.credit_assignment import OTB, PROCESS, TURN
from grpo_dist.config import AlgorithmConfig, KLConfig
from grpo_dist.config.base import choices
from tests.support import papers

LOSSES = {name: AlgorithmConfig(loss=name).loss for name in POLICY_LOSSES}
REGISTRIES = {
    "policy loss": (POLICY_LOSSES, papers.POLICY_LOSSES),
    "advantage": (ADVANTAGES, papers.ADVANTAGES),
    "KL estimator": (KL_ESTIMATORS, papers.KL),
    "aggregation": (MODES, papers.AGGREGATIONS),
}
# Settings other than the defaults, for the losses that have settings.
SETTINGS = {
    "clip_low": 0.15, "clip_high": 0.3, "dual_clip": 1.5, "unified_mask": True, "tau_positive": 0.7,
    "tau_negative": 1.4, "ratio_cap": 1.2, "beta": 0.6, "tau": 0.3, "k_positive": 1.3,
    "lambda_positive": 2.1, "k_negative": 2.4, "lambda_negative": 1.1, "cov_kl_coef": 0.4,
}  # fmt: skip
STEP = 1e-6


@pytest.mark.parametrize("what", sorted(REGISTRIES))
def test_every_entry_of_a_registry_has_its_formula(what):
    ours, formulas = REGISTRIES[what]
    assert sorted(set(ours) - set(formulas)) == [], f"write the paper's formula of this {what}"


def test_registries_hold_what_the_configuration_offers():
    assert set(choices(AlgorithmConfig, "advantage")) == set(ADVANTAGES) | {PROCESS, TURN, OTB}
    assert set(choices(AlgorithmConfig, "loss")) == set(POLICY_LOSSES)
    assert set(choices(AlgorithmConfig, "aggregation")) == set(MODES)
    assert set(choices(KLConfig, "estimator")) == set(KL_ESTIMATORS)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_configuration_of_a_loss_has_its_settings_and_their_defaults(name):
    parameters = inspect.signature(POLICY_LOSSES[name]).parameters.values()
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert AlgorithmConfig(loss=name).loss.token_arguments == keywords


# --- policy losses


def sequences(seed, count=4):
    """Return new and old log-probs and advantages of sequences of 1 to 7 tokens; some log-probs moved far."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in rng.integers(1, 8, count):
        old = -rng.uniform(0.05, 3.0, length)
        far = rng.random(length) < 0.4
        new = np.minimum(old + np.where(far, rng.normal(0, 0.8, length), rng.normal(0, 0.05, length)), -0.01)
        advantages = rng.normal(0, 1, length) if seed % 2 else np.full(length, rng.normal(0, 1))
        rows.append((new, old, advantages))
    return rows


def padded(rows, width=9):
    """Return ``rows`` as [B, T], NaN behind their ends, and the mask."""
    out = np.full((len(rows), width), math.nan)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(out), torch.from_numpy(~np.isnan(out))


def loss_of(formula, new, fixed, old, advantages, settings):
    losses = formula(list(new), list(fixed), list(old), list(advantages), **settings)
    return losses if isinstance(losses, list) else [losses]


def slopes(formula, new, old, advantages, settings):
    """Return central differences of a sequence's summed loss; stop-gradient terms stay fixed."""
    result = []
    for t in range(len(new)):
        moved = [math.fsum(loss_of(formula, new + h * np.eye(len(new))[t], new, old, advantages, settings))
                 for h in (STEP, -STEP)]  # fmt: skip
        result.append((moved[0] - moved[1]) / (2 * STEP))
    return result


def cases():
    for name in sorted(POLICY_LOSSES):
        yield pytest.param(name, {}, id=name)
        if settings := {key: SETTINGS[key] for key in LOSSES[name].token_arguments if key in SETTINGS}:
            yield pytest.param(name, settings, id=f"{name}, other settings")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "settings"), cases())
def test_a_policy_loss_and_its_gradient_are_those_of_the_paper(name, settings, seed):
    rows, formula = sequences(seed), papers.POLICY_LOSSES[name]
    new, mask = padded([r[0] for r in rows])
    old, advantages = (padded([r[i] for r in rows])[0] for i in (1, 2))
    new.requires_grad_()
    chosen = mask & (torch.arange(mask.shape[1]) % papers.SELECTED_EVERY == 0)
    selection = (chosen,) if LOSSES[name].selection else ()
    losses, _ = POLICY_LOSSES[name](new, old, advantages, mask, *selection, **settings)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert losses.dtype == torch.float64 and not losses[~mask].any() and not gradient[~mask].any()
    for row, (logprobs, old_logprobs, row_advantages) in enumerate(rows):
        expected = loss_of(formula, logprobs, logprobs, old_logprobs, row_advantages, settings)
        actual = losses[row][mask[row]].tolist()
        if len(expected) != len(actual):  # one loss for the sequence
            actual = [math.fsum(actual)]
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
        by_differences = slopes(formula, logprobs, old_logprobs, row_advantages, settings)
        assert gradient[row][mask[row]].tolist() == pytest.approx(by_differences, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_gmpo_without_removed_tokens_is_the_paper_s_formula_of_the_others(seed):
    """A removed token is a constant: the values and gradients of the others do not depend on it."""
    rows, rng = sequences(seed), np.random.default_rng(seed)
    stays = [rng.random(len(values[0])) < 0.7 for values in rows]
    new, mask = padded([r[0] for r in rows])
    old, advantages = (padded([r[i] for r in rows])[0] for i in (1, 2))
    kept = torch.zeros_like(mask)
    kept[mask] = torch.from_numpy(np.concatenate(stays))
    new.requires_grad_()
    losses, _ = POLICY_LOSSES["gmpo"](new, old, advantages, mask, kept)
    (gradient,) = torch.autograd.grad((losses * kept).sum(), new)
    assert not gradient[~kept].any()
    for row, (values, keep) in enumerate(zip(rows, stays, strict=True)):
        if keep.any():
            left = [v[keep] for v in values]
            expected = loss_of(papers.gmpo, left[0], left[0], left[1], left[2], {})
            assert losses[row][kept[row]].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
            by_differences = slopes(papers.gmpo, *left, {})
            assert gradient[row][kept[row]].tolist() == pytest.approx(by_differences, rel=1e-5, abs=1e-7)


def test_the_settings_are_those_that_the_formulas_know():
    """A setting that the formula lacks would only be compared at its default."""
    for name, formula in papers.POLICY_LOSSES.items():
        call = inspect.getclosurevars(formula).nonlocals.get("each", formula)
        keywords = {p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert keywords >= set(LOSSES[name].token_arguments), name


# --- advantages


def drawn(seed, name):
    """Return the rewards of groups, masks of the unscored samples, and the generator."""
    rng = np.random.default_rng(seed)
    sizes = [5, 4, 6, 1, 5]
    values = {"maxrl": 2, "pass_at_k": 3}  # rewards 0 and 1; rewards 0, 1 and 2, many equal
    rewards = [
        rng.integers(0, values[name], n).astype(float) if name in values else rng.normal(1, 2, n)
        for n in sizes
    ]
    rewards[4][:] = 1.0  # zero variance
    unscored = [rng.random(n) < 0.15 if i < 3 else np.zeros(n, bool) for i, n in enumerate(sizes)]
    return rewards, unscored, rng


def inputs(name, rewards, rng):
    """Return keyword arguments of estimator ``name``; per-sample values as [groups][samples]."""
    parts = [[rng.normal(0, 1, len(group)) for group in rewards] for _ in range(2)]
    values = {
        "std": "group", "eps": 1e-6, "k": 3, "weights": [1.0, 0.5], "parts": parts,
        "lengths": [rng.integers(1, 50, len(group)) for group in rewards],
        "baselines": [np.full(len(group), rng.normal()) for group in rewards],
    }  # fmt: skip
    return {key: values[key] for key in ADVANTAGE_INPUTS.get(name, ())}


def flat(value):
    """Return the input as our estimators take it: groups end to end."""
    if isinstance(value, list) and isinstance(value[0], np.ndarray):
        return torch.from_numpy(np.concatenate(value))
    if isinstance(value, list) and isinstance(value[0], list):
        return torch.stack([flat(part) for part in value])
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


def scored(value, kept):
    """Return the input as the papers have it: the scored samples of each group."""
    if isinstance(value, list) and isinstance(value[0], np.ndarray):
        return [group[mask].tolist() for group, mask in zip(value, kept, strict=True)]
    if isinstance(value, list) and isinstance(value[0], list):
        return [scored(part, kept) for part in value]
    return value


VARIANTS = {
    "grpo": [{"std": std} for std in ("group", "batch", "batch_raw", "none")],
    "pass_at_k": [{"k": k} for k in (1, 2, 3, 4)],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_are_those_of_the_paper(name, seed):
    rewards, unscored, rng = drawn(seed, name)
    arguments = inputs(name, rewards, rng)
    for variant in VARIANTS.get(name, [{}]):
        arguments |= variant
        kept = [~lost for lost in unscored]
        expected = papers.ADVANTAGES[name](
            scored(rewards, kept), **{key: scored(value, kept) for key, value in arguments.items()}
        )
        values = np.concatenate(rewards)
        values[np.concatenate(unscored)] = math.nan
        ids = np.repeat([7, 3, 11, 5, 2], [len(r) for r in rewards])
        order = rng.permutation(len(values))  # samples of a group need not be neighbours
        reordered = {
            key: flat(value)[..., order] if key in ("parts", "lengths", "baselines") else flat(value)
            for key, value in arguments.items()
        }
        actual = ADVANTAGES[name](torch.from_numpy(values[order]), torch.from_numpy(ids[order]), **reordered)
        actual = actual.numpy()[np.argsort(order)]
        assert not actual[np.concatenate(unscored)].any()
        np.testing.assert_allclose(
            actual[~np.concatenate(unscored)], np.concatenate(expected), rtol=1e-9, atol=1e-9
        )


# --- divergences, aggregations, corrections


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_divergences_and_their_slopes_are_those_of_the_paper(name):
    rng = np.random.default_rng(1)
    reference = torch.from_numpy(-rng.uniform(0, 5, (3, 50)))
    policy = (reference + torch.from_numpy(rng.normal(0, 1.5, (3, 50)))).requires_grad_()
    values = KL_ESTIMATORS[name](policy, reference)
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    expected = [papers.KL[name](d) for d in (policy - reference).flatten().tolist()]
    assert values.flatten().tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=1e-12)
    assert gradient.flatten().tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_aggregations_are_those_of_the_paper(mode, seed):
    """Sequences in one or more rows, one of them without tokens; masked losses are NaN."""
    rng = np.random.default_rng(seed)
    rows_of = [1, 3, 1, 2, 1]  # rows of each sequence
    rows = [rng.normal(0, 1, rng.integers(1, 6)) for _ in range(sum(rows_of))]
    rows[0] = rows[0][:0]
    owner = np.repeat(np.arange(len(rows_of)), rows_of)
    whole = [np.concatenate([r for r, s in zip(rows, owner, strict=True) if s == i]) for i in range(5)]
    losses, mask = padded(rows)
    tokens = torch.tensor([len(whole[s]) for s in owner])
    prompt_of = {s: prompt for prompt in papers.PROMPTS for s in prompt}
    actual = aggregate(
        losses, mask, mode, num_tokens=float(mask.sum()), num_sequences=4.0, max_tokens=9,
        sequence_tokens=tokens, num_prompts=3.0,
        prompt_tokens=torch.tensor([sum(len(whole[i]) for i in prompt_of[s]) for s in owner]),
    )  # fmt: skip
    assert float(actual) == pytest.approx(papers.AGGREGATIONS[mode]([w.tolist() for w in whole], 9), rel=1e-9)


@pytest.mark.parametrize("veto", [0.0, 0.3])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["tis", "mis", "icepop"])
def test_corrections_are_those_of_their_definition(kind, level, veto):
    rows = [row for seed in range(6) for row in sequences(seed)]
    how = {"kind": kind, "level": level, "low": 0.6, "high": 1.7, "veto": veto}
    (train, mask), (rollout, _) = (padded([row[i] for row in rows]) for i in (0, 1))
    weights, _ = correction(train, rollout, mask, **how)
    for i, (new, old, _) in enumerate(rows):
        expected = papers.correction(new.tolist(), old.tolist(), **how)
        assert weights[i][mask[i]].tolist() == pytest.approx(expected, rel=1e-9)
    assert not weights[~mask].any()
