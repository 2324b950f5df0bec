"""Why some losses of peers differ from ours, and the one change that gives the peer's numbers."""

import math
from dataclasses import replace
from itertools import pairwise

import torch

from grpo_dist.algorithms.aggregation import aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.offpolicy import accepted, correction
from grpo_dist.algorithms.ratios import sequence_mean
from grpo_dist.algorithms.selection import random_keys, token_covariances
from tests.algorithms.peers import ours
from tests.algorithms.peers.compute import run
from tests.algorithms.peers.counterparts.base import Difference


def differing(setup, reason, peers, ours):
    """Return the counterpart ``setup`` with a difference."""
    return replace(setup, differs=Difference(reason, peers, ours))


def value_of_logprob(case, setup):
    def peers():
        section = {k: v for k, v in setup.section.items() if not k.startswith("clip")}
        return run(case, section | {"loss": "dro", "beta": 1e-30}, setup.how)

    def mine():
        grad = case.numbers()["grad"]
        return {"grad": grad, "loss": grad.sum()}

    return differing(setup, "reports -A log pi, ours -A, with one gradient", peers, mine)


def counts_empty_rows(case, setup):
    rows = len(case.tensors()["mask"])
    filled = int(case.tensors()["mask"].any(dim=1).sum())

    def peers():
        return run(case, setup.section, setup.how | {"num_sequences": rows})

    def mine():
        return {key: value * rows / filled for key, value in case.numbers().items()}

    return differing(setup, "counts rows without a token as sequences", peers, mine)


def random_choice(case, setup):
    def eligible(x):
        mask, a, now = x["mask"], x["advantages"], x["now"]
        products = token_covariances(
            now, a, mask, mean_logprob=float(now[mask].mean()), mean_advantage=float(a[mask].mean())
        )
        ratio, s = (now - x["old"]).exp(), setup.section
        clipped = ((a > 0) & (ratio > 1 + s["clip_high"])) | ((a < 0) & (ratio < 1 - s["clip_low"]))
        return mask & (products > s["cov_low"]) & (products < s["cov_high"]) & ~clipped

    def peers():
        x = case.tensors()
        chosen = eligible(x) & (case.numbers()["grad"] == 0)
        assert int(chosen.sum()) == int(setup.section["cov_share"] * x["mask"].sum())
        return run(case, setup.section, setup.how | {"selected": chosen})

    def mine():
        x = case.tensors()
        among = eligible(x)
        rows, columns = x["mask"].shape
        keys = random_keys(torch.arange(rows)[:, None] * (1 << 20) + torch.arange(columns), 0)
        count = int(setup.section["cov_share"] * x["mask"].sum())
        last = keys[among].sort().values[count - 1]
        return run(case, setup.section, setup.how | {"selected": among & (keys <= last)})

    return differing(
        setup, "holds tokens at random; ours are drawn by a seed, the same on any ranks", peers, mine
    )


def geometric_weights(case, setup):
    def weighted(over):
        def change(x):
            weights, _ = correction(
                x["old"], x["engine"], x["mask"], kind="tis", level="token", low=0.0, high=2.0
            )
            return {"advantages": x["advantages"] * over(weights, x["mask"])}

        return run(case, {k: v for k, v in setup.section.items() if k != "correction"}, setup.how, change)

    def mean(weights, mask):
        return sequence_mean(torch.where(mask, (weights + 1e-10).log(), 0.0), mask).exp()

    return differing(
        setup, "weighs a sequence by the geometric mean of its tokens' weights",
        lambda: weighted(mean),
        lambda: weighted(lambda weights, mask: weights),
    )  # fmt: skip


def _sequence_gradient(case, setup):
    """Return the gradient of -min(s A_t, clip(s) A_t), each token through its log-prob only, by hand."""
    x = case.tensors()
    if setup.how.get("first"):
        x["advantages"] = x["advantages"][:, :1].expand_as(x["now"])
    old = x["engine"] if "bypass" in str(setup.section.get("correction")) else x["old"]
    mask, low, high = x["mask"], 1 - setup.section["clip_low"], 1 + setup.section["clip_high"]
    out = torch.zeros_like(x["now"])
    rows = int(mask.any(dim=1).sum())
    for i, kept in enumerate(mask):
        for part in _parts(setup, kept):
            s = math.exp((x["now"] - old)[i][part].mean())
            for t in part:
                a = float(x["advantages"][i, t])
                if (a > 0 and s <= high) or (a < 0 and s >= low):
                    by = mask.sum() if setup.section["aggregation"] == "token-mean" else rows * kept.sum()
                    out[i, t] = -s * a / by
    return out


def _parts(setup, kept):
    """Return the positions of a row that share a ratio: all kept ones, or each run of them."""
    places = kept.nonzero()[:, 0].tolist()
    if setup.section["loss"] == "gspo":
        return [places]
    starts = [i for i, t in enumerate(places) if i == 0 or t > places[i - 1] + 1]
    return [places[a:b] for a, b in pairwise([*starts, len(places)])]


def _mean_of_parts(setup, grad, mask):
    out = torch.zeros_like(grad)
    for i, kept in enumerate(mask):
        for part in _parts(setup, kept):
            out[i, part] = grad[i, part].mean()
    return out


def sequence_gradient(case, setup):
    def peers():
        result = run(case, setup.section, setup.how)
        return result | {"grad": _mean_of_parts(setup, result["grad"], case.tensors()["mask"])}

    def mine():
        weights = 1.0
        if isinstance(setup.section.get("correction"), dict):
            x = case.tensors()
            weights, _ = correction(
                x["old"], x["engine"], x["mask"], level="token", low=0.0, kind="tis",
                high=setup.section["correction"]["high"],
            )  # fmt: skip
        return {"grad": _sequence_gradient(case, setup) * weights}

    reason = "differentiates the sequence's ratio, so that a token's gradient is the mean of its sequence's"
    return differing(setup, reason, peers, mine)


def _terms(case, setup, *, modes, ratio=None, largest=None, everywhere=False):
    """Add the KL and entropy terms by hand to our policy term.

    ``modes``: aggregation of both. ``ratio``: multiply the KL by the ratio to these log-probs. ``largest``:
    bound of a token's KL. ``everywhere``: the policy and entropy terms include masked tokens.
    """
    section, x = setup.section, case.tensors()
    bare = {k: v for k, v in section.items() if k not in ("kl", "entropy")}
    mask = x["mask"]
    every = torch.ones_like(mask) if everywhere else mask
    how = setup.how | ({"num_tokens": float(mask.sum())} if everywhere else {})
    policy = run(case, bare, how, lambda x: {"mask": every})
    now = x["now"].requires_grad_()
    kl = KL_ESTIMATORS[section.get("kl", {}).get("estimator", "k3")](now, x["reference"])
    if ratio is not None:
        kl = kl * (now - x[ratio]).exp()
    counts = {
        "num_tokens": float(mask.sum()), "num_sequences": float(mask.any(dim=1).sum()),
        "max_tokens": mask.shape[1],
    }  # fmt: skip
    kl = aggregate(kl.clamp(max=math.inf if largest is None else largest), mask, modes, **counts)
    entropy = aggregate(x["entropy"], every, modes, **counts)
    kl_coef, entropy_coef = (section.get(key, {}).get("coef", 0.0) for key in ("kl", "entropy"))
    terms = kl_coef * kl - entropy_coef * entropy
    (grad,) = torch.autograd.grad(terms, now) if terms.requires_grad else (0.0,)
    return {"loss": policy["loss"] + terms.detach(), "grad": policy["grad"] + grad}


def terms_over_tokens(case, setup):
    return differing(
        setup, "takes KL and entropy as means over tokens where the policy term is one over sequences",
        lambda: _terms(case, setup, modes="token-mean"),
        lambda: _terms(case, setup, modes=setup.section["aggregation"]),
    )  # fmt: skip


def bias_from_old(case, setup):
    return differing(
        setup, "multiplies the KL by the ratio to the trainer's old log-probs, not to what sampled",
        lambda: _terms(case, setup, modes="token-mean", ratio="old"),
        lambda: _terms(case, setup, modes="token-mean", ratio="engine"),
    )  # fmt: skip


def clamped_kl_term(case, setup):
    return differing(
        setup, "clamps the KL of a token at 10",
        lambda: _terms(case, setup, modes=setup.section["aggregation"], largest=10.0),
        lambda: _terms(case, setup, modes=setup.section["aggregation"]),
    )  # fmt: skip


def forgets_mask(case, setup):
    def peers():
        if case.kind == "loss":
            return _terms(case, setup, modes="token-mean", everywhere=True)
        how = {"num_tokens": float(case.tensors()["mask"].sum())}
        return run(case, setup.section, how, lambda x: {"mask": torch.ones_like(x["mask"])})

    def mine():
        return {"grad": torch.where(case.tensors()["mask"], case.numbers()["grad"], 0.0)}

    return differing(setup, "token-mean forgets the mask", peers, mine)


def no_mean_of_rows(case, setup):
    rows = int(case.tensors()["mask"].any(dim=1).sum())
    return differing(
        setup, "seq-mean-token-sum-norm takes no mean over sequences",
        lambda: {k: v * rows for k, v in run(case, setup.section, setup.how).items()},
        lambda: {k: v / rows for k, v in case.numbers().items()},
    )  # fmt: skip


def kept_only(case, setup):
    """Rejected tokens leave the denominators."""

    def mask(x):
        bypassed = "bypass" in str(setup.section.get("correction"))  # the old log-probs are the engine's
        policy, engine = (x["now"], x["old"]) if bypassed else (x["old"], x["engine"])
        return accepted(policy, engine, x["mask"], ours.rules(setup.section))

    def peers():
        bypassed = "bypass" in str(setup.section.get("correction"))
        section = setup.section | {"correction": "bypass" if bypassed else "none"}
        rows = float(case.tensors()["mask"].any(dim=1).sum())
        how = setup.how | ({} if section["aggregation"] == "token-mean" else {"num_sequences": rows})
        return run(case, section, how, lambda x: {"mask": mask(x)})

    def mine():
        x, by_token = case.tensors(), setup.section["aggregation"] == "token-mean"
        kept = mask(x)
        share = kept.sum() / x["mask"].sum() if by_token else sequence_mean(kept.double(), x["mask"])
        return {"grad": case.numbers()["grad"] * share}

    return differing(setup, "counts rejected tokens in no denominator", peers, mine)


def quantile_share(case, setup):
    def peers():
        tokens = int(case.tensors()["mask"].sum())
        share = setup.section["top_entropy_share"]
        count = tokens - math.ceil((tokens - 1) * (1 - share))
        return run(case, setup.section | {"top_entropy_share": count / tokens}, setup.how)

    def mine():
        x = case.tensors()
        count = round(setup.section["top_entropy_share"] * int(x["mask"].sum()))
        least = x["entropy"][x["mask"]].sort(descending=True).values[count - 1]
        return {"grad": torch.where(x["entropy"] >= least, case.numbers()["grad"], 0.0)}

    return differing(
        setup, "takes tokens above an interpolated quantile, one more than the share", peers, mine
    )


def micro_batch_means(case, setup):
    def select(x, rows):
        return {k: v[rows] for k, v in x.items() if k != "parts"}

    def halves(share):
        parts = []
        for rows in (slice(0, 4), slice(4, 8)):
            part = run(case, setup.section, setup.how, lambda x, rows=rows: select(x, rows))
            weight = share(case.tensors()["mask"], rows)
            parts.append({k: v * weight for k, v in part.items()})
        return {"loss": parts[0]["loss"] + parts[1]["loss"], "grad": torch.cat([p["grad"] for p in parts])}

    return differing(
        setup, "takes the mean of the means of micro-batches",
        lambda: halves(lambda mask, rows: 0.5),
        lambda: halves(lambda mask, rows: mask[rows].sum() / mask.sum()),
    )  # fmt: skip


def length_weighted_tokens(case, setup):
    def scaled(everywhere):
        def change(x):
            lengths, a = x["mask"].sum(dim=1, keepdim=True), x["advantages"][:, :1].expand_as(x["now"])
            mask = torch.ones_like(x["mask"]) if everywhere else x["mask"]
            by = lengths / mask.numel() if everywhere else 1 / len(mask)
            return {"mask": mask, "advantages": a * by}

        how = {k: v for k, v in setup.how.items() if k != "first"}
        return run(case, setup.section | {"aggregation": "token-sum"}, how, change)

    return differing(
        setup, "with ratios of tokens multiplies by the length, over all places, masked or not",
        lambda: scaled(True), lambda: scaled(False),
    )  # fmt: skip


def sign_of_score(case, setup):
    def change(x, rows):
        return {"mask": x["mask"] & rows[:, None]}

    def peers():
        x = case.tensors()
        counts = {"num_tokens": float(x["mask"].sum()), "num_sequences": float(x["mask"].any(dim=1).sum())}
        mode = {"aggregation": setup.section["aggregation"]}
        good = run(case, {"loss": "dro", "beta": 1e-30} | mode, counts, lambda x: change(x, x["rewards"] > 0))
        bad = {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.0} | mode
        bad = run(case, bad, counts, lambda x: change(x, x["rewards"] <= 0))
        return {key: good[key] + bad[key] for key in good}

    def mine():
        x = case.tensors()
        ratio = (x["now"] - x["old"]).exp()
        weight = torch.where(x["advantages"] < 0, ratio.clamp(max=1.0), 1.0)
        rows = x["mask"].any(dim=1).sum() * x["mask"].sum(dim=1, keepdim=True)
        return {"grad": torch.where(x["mask"], -weight * x["advantages"] / rows, 0.0)}

    return differing(setup, "calls a sample bad by its score, ours by its advantage", peers, mine)
