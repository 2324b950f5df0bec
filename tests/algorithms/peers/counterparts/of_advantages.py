"""Why some advantages, KL values and masks of peers differ, and the one change that gives their numbers."""

import math

import numpy as np
import torch

from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.normalise import whiten
from grpo_dist.algorithms.ratios import segment_mean, sequence_mean
from grpo_dist.algorithms.token_advantages import discounted_to_go
from tests.algorithms.peers import ours
from tests.algorithms.peers.compute import run
from tests.algorithms.peers.counterparts.of_losses import differing


def _alone(x):
    return torch.tensor([int((x["groups"] == group).sum()) == 1 for group in x["groups"]])


def _spread(values, mask):
    return torch.where(mask, values[:, None], 0.0)


def group_of_one(case, setup, *, scale=1.0):
    """``scale``: factor of the reward that a sample without siblings has as its advantage."""

    def whitens():
        return setup.section["advantage"] == "reinforce_pp_baseline"

    def peers():
        x = case.tensors()
        centred = ours.estimate(x, setup.section["advantage"], **setup.how.get("estimate", {}))
        values = _spread(torch.where(_alone(x), x["rewards"] * scale, centred), x["mask"])
        return {"advantages": whiten(values, x["mask"]) if whitens() else values}

    def mine():
        x = case.tensors()
        if whitens():
            return {"advantages": whiten(_spread(_centred(x), x["mask"]), x["mask"])}
        values = case.numbers()["advantages"]
        return {"advantages": torch.where(_alone(x)[:, None], 0.0, values)}

    return differing(setup, "a sample without siblings has its reward as advantage, here 0", peers, mine)


def _centred(x):
    """Return r - mean of the group, by hand."""
    means = [x["rewards"][x["groups"] == group].mean() for group in x["groups"]]
    return x["rewards"] - torch.stack(means)


def float32_statistics(case, setup):
    def peers():
        x, values = case.tensors(), []
        for group in x["groups"].unique():
            rewards = x["rewards"][x["groups"] == group].numpy()
            mean, std = np.float32(rewards.mean()), np.float32(rewards.std(ddof=1))
            values.append((rewards - mean.item()) / (std.item() + 1e-6))
        return {"advantages": _spread(torch.from_numpy(np.concatenate(values)), x["mask"])}

    def mine():
        x = case.tensors()
        same = torch.tensor([len(set(x["rewards"][x["groups"] == g].tolist())) == 1 for g in x["groups"]])
        return {"advantages": torch.where(same[:, None], 0.0, case.numbers()["advantages"])}

    return differing(
        setup, "rounds the group's mean to float32, which gives equal rewards an advantage", peers, mine
    )


def counts_nonzero(case, setup):
    def scaled(count):
        x = case.tensors()
        centred = ours.estimate(x, "dr_grpo")
        if count == "nonzero":
            centred = torch.where(_alone(x), x["rewards"], centred)
        trained = (x["rewards"] != 0).sum() if count == "nonzero" else (_centred(x).abs() > 1e-9).any()
        if count != "nonzero":
            groups = x["groups"].tolist()
            spread = [
                len({float(x["rewards"][j]) for j, h in enumerate(groups) if h == g}) > 1 for g in groups
            ]
            trained = sum(spread)
        return {"advantages": _spread(centred * len(centred) / trained, x["mask"])}

    return differing(
        setup, "divides by the samples whose reward is not 0, ours by those in groups with a spread",
        lambda: scaled("nonzero"), lambda: scaled("spread"),
    )  # fmt: skip


def clamped_kl(case, setup, *, low=None):
    """``low``: lower bound, for peers that clamp every estimator on both sides."""
    name = setup.section["kl"]["estimator"]

    def exact(x):
        d = x["now"] - x["reference"]
        values = {"k1": d, "k2": d * d / 2}
        slopes = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp(), "k3+": d}
        return values.get(name, (-d).exp() - 1 + d), slopes[name]

    def peers():
        result, x = run(case, setup.section, setup.how), case.tensors()
        inside = (result["value"] <= 10) & (result["value"] >= (-math.inf if low is None else low))
        if name == "k3+":
            inside = torch.ones_like(inside)
        elif low is None or name == "k3":
            inside &= (x["now"] - x["reference"]).abs() < 20
        grad = torch.where(inside, result["grad"], 0.0)
        return {"value": result["value"].clamp(low, 10), "grad": grad}

    def mine():
        value, slope = exact(case.tensors())
        return {"value": value, "grad": slope}

    return differing(setup, "clamps the KL of a token at 10", peers, mine)


def _population(x, values):
    n = int(x["mask"].sum())
    return values * math.sqrt(n / (n - 1))


def _by_hand(case, setup, *, every_place=False, max_kl=None, clip_after=None, clip_before=None, centres=None):
    """Return token advantages: the reward-to-go with the reward on the last token.

    ``every_place``: observed tokens are steps of time, too. ``max_kl``: bound of a token's KL.
    ``clip_before``, ``clip_after``: reward clip before or after the estimator. ``centres``: how tokens are
    whitened; None: as our section says.
    """
    x, section = case.tensors(), setup.section
    mask, rewards = x["mask"], x["rewards"]
    if clip_before is not None:
        x["rewards"] = rewards.clamp(-clip_before, clip_before)
    of_samples = ours.estimate(x, section["advantage"], eps=section.get("eps", 1e-6))
    if clip_after is not None:
        of_samples = of_samples.clamp(-clip_after, clip_after)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1)
    at_end = torch.zeros_like(x["now"])
    at_end[torch.arange(len(mask)), last] = of_samples
    if "kl" in section:
        kl = KL_ESTIMATORS[section["kl"]["estimator"]](x["engine"], x["reference"])
        kl = kl.clamp(max=math.inf if max_kl is None else max_kl)
        at_end = at_end - section["kl"]["coef"] * torch.where(mask, kl, 0.0)
    steps = torch.ones_like(mask) if every_place else mask
    returns = torch.where(mask, discounted_to_go(at_end, steps, section.get("gamma", 1.0)), 0.0)
    kept = returns[mask]
    centred = torch.where(mask, returns - kept.mean(), 0.0)
    if centres is None:
        centres = "sample" if ours.configured(section).advantage.whiten else "not"
    by = {"sample": kept.std(), "population": kept.std(correction=0), "mean": 1.0}
    return {"advantages": returns if centres == "not" else centred / by[centres]}


def by_hand(case, setup, reason, **change):
    """``change``: what the peer does; our clip is before the estimator, our whitening as in the section."""
    same = {"clip_before": change["clip_after"]} if "clip_after" in change else {}
    return differing(
        setup, reason, lambda: _by_hand(case, setup, **change), lambda: _by_hand(case, setup, **same)
    )


def _token_baseline(case, setup, *, every_place):
    """Return r - sum(r W) / sum(W) per token. ``every_place``: observed tokens are steps of time, too."""
    x = case.tensors()
    out, mask = torch.zeros_like(x["now"]), x["mask"].tolist()
    for group in x["groups"].unique():
        steps_of = {}  # row: {step of time: (W, position)}
        for i in (x["groups"] == group).nonzero()[:, 0].tolist():
            places, energy, steps = [t for t, kept in enumerate(mask[i]) if kept], 0.0, {}
            for number, t in enumerate(places):
                p = math.exp(x["old"][i, t])
                energy += 1 - 2 * p + p * p
                steps[t if every_place else number] = (energy, t)
            steps_of[i] = steps
        *_, second, longest = sorted(len(steps) for steps in steps_of.values())
        for i, steps in steps_of.items():
            for step, (_, t) in steps.items():
                there = [(float(x["rewards"][j]), s[step][0]) for j, s in steps_of.items() if step in s]
                mean = sum(r * w for r, w in there) / sum(w for _, w in there)
                has_none = len(steps) == longest > second and step >= second
                out[i, t] = x["rewards"][i] - (0.0 if has_none else mean)
    return {"advantages": out}


def token_baseline_by_place(case, setup):
    return differing(
        setup, "counts observed tokens as steps of time",
        lambda: _token_baseline(case, setup, every_place=True),
        lambda: _token_baseline(case, setup, every_place=False),
    )  # fmt: skip


def signed_differences(case, setup):
    (rule,) = setup.section["correction"]["reject"]
    scope, limit = rule["rule"].removesuffix("_tv"), rule["high"]

    def over(values, mask):
        values = torch.where(mask, values, 0.0)
        if scope == "segment_mean":
            return segment_mean(values, mask)
        return sequence_mean(values, mask) if scope == "seq_mean" else values.sum(dim=1, keepdim=True)

    def within(magnitude):
        x = case.tensors()
        moved = x["old"].exp() - x["engine"].exp()
        return {"kept": x["mask"] & (over(moved.abs() if magnitude else moved, x["mask"]).abs() <= limit)}

    return differing(
        setup, "adds up signed differences of probabilities, which cancel; ours are total variations",
        lambda: within(False), lambda: within(True),
    )  # fmt: skip
