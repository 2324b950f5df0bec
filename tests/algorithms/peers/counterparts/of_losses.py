"""Why some losses of peers are not ours, and the one change of ours that gives theirs."""

import math
from dataclasses import replace
from functools import partial
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


def differing(case, own, reason, peers, ours):
    """Return the counterpart ``own`` of ``case`` with a difference."""
    return replace(own, differs=Difference(reason, partial(peers, case, own), partial(ours, case, own)))


def value_of_logprob(case, own):
    def peers(case, own):
        section = {k: v for k, v in own.section.items() if not k.startswith("clip")}
        return run(case, section | {"loss": "dro", "beta": 1e-30}, own.how)

    def mine(case, own):
        grad = case.numbers()["grad"]
        return {"grad": grad, "loss": grad.sum()}

    return differing(case, own, "reports -A log pi, ours -A, with one gradient", peers, mine)


def counts_empty_rows(case, own):
    rows = len(case.tensors()["mask"])
    filled = int(case.tensors()["mask"].any(dim=1).sum())

    def peers(case, own):
        return run(case, own.section, own.how | {"num_sequences": rows})

    def mine(case, own):
        return {key: value * rows / filled for key, value in case.numbers().items()}

    return differing(case, own, "counts rows without a token as sequences", peers, mine)


def random_choice(case, own):
    def eligible(x):
        mask, a, now = x["mask"], x["advantages"], x["now"]
        products = token_covariances(
            now, a, mask, mean_logprob=float(now[mask].mean()), mean_advantage=float(a[mask].mean())
        )
        ratio, s = (now - x["old"]).exp(), own.section
        clipped = ((a > 0) & (ratio > 1 + s["clip_high"])) | ((a < 0) & (ratio < 1 - s["clip_low"]))
        return mask & (products > s["cov_low"]) & (products < s["cov_high"]) & ~clipped

    def peers(case, own):
        x = case.tensors()
        chosen = eligible(x) & (case.numbers()["grad"] == 0)
        assert int(chosen.sum()) == int(own.section["cov_share"] * x["mask"].sum())
        return run(case, own.section, own.how | {"selected": chosen})

    def mine(case, own):
        x = case.tensors()
        among = eligible(x)
        rows, columns = x["mask"].shape
        keys = random_keys(torch.arange(rows)[:, None] * (1 << 20) + torch.arange(columns), 0)
        count = int(own.section["cov_share"] * x["mask"].sum())
        last = keys[among].sort().values[count - 1]
        return run(case, own.section, own.how | {"selected": among & (keys <= last)})

    return differing(
        case, own, "holds tokens at random; ours are drawn by a seed, the same on any ranks", peers, mine
    )


def geometric_weights(case, own):
    def weighted(case, own, over):
        def change(x):
            weights, _ = correction(
                x["old"], x["engine"], x["mask"], kind="tis", level="token", low=0.0, high=2.0
            )
            return {"advantages": x["advantages"] * over(weights, x["mask"])}

        return run(case, {k: v for k, v in own.section.items() if k != "correction"}, own.how, change)

    def mean(weights, mask):
        return sequence_mean(torch.where(mask, (weights + 1e-10).log(), 0.0), mask).exp()

    return differing(
        case, own, "weighs a sequence by the geometric mean of its tokens' weights",
        lambda case, own: weighted(case, own, mean),
        lambda case, own: weighted(case, own, lambda weights, mask: weights),
    )  # fmt: skip


def _sequence_gradient(case, own):
    """Gradient of -min(s A_t, clip(s) A_t), each token's through its own log-prob alone, by hand."""
    x = case.tensors()
    if own.how.get("first"):
        x["advantages"] = x["advantages"][:, :1].expand_as(x["now"])
    old = x["engine"] if "bypass" in str(own.section.get("correction")) else x["old"]
    mask, low, high = x["mask"], 1 - own.section["clip_low"], 1 + own.section["clip_high"]
    out = torch.zeros_like(x["now"])
    rows = int(mask.any(dim=1).sum())
    for i, kept in enumerate(mask):
        for part in _parts(own, kept):
            s = math.exp((x["now"] - old)[i][part].mean())
            for t in part:
                a = float(x["advantages"][i, t])
                if (a > 0 and s <= high) or (a < 0 and s >= low):
                    by = mask.sum() if own.section["aggregation"] == "token-mean" else rows * kept.sum()
                    out[i, t] = -s * a / by
    return out


def _parts(own, kept):
    """Return the places of a row that share a ratio: all that are kept, or each run of them."""
    places = kept.nonzero()[:, 0].tolist()
    if own.section["loss"] == "gspo":
        return [places]
    starts = [i for i, t in enumerate(places) if i == 0 or t > places[i - 1] + 1]
    return [places[a:b] for a, b in pairwise([*starts, len(places)])]


def _mean_of_parts(own, grad, mask):
    out = torch.zeros_like(grad)
    for i, kept in enumerate(mask):
        for part in _parts(own, kept):
            out[i, part] = grad[i, part].mean()
    return out


def sequence_gradient(case, own):
    def peers(case, own):
        found = run(case, own.section, own.how)
        return found | {"grad": _mean_of_parts(own, found["grad"], case.tensors()["mask"])}

    def mine(case, own):
        weights = 1.0
        if isinstance(own.section.get("correction"), dict):
            x = case.tensors()
            weights, _ = correction(
                x["old"], x["engine"], x["mask"], level="token", low=0.0, kind="tis",
                high=own.section["correction"]["high"],
            )  # fmt: skip
        return {"grad": _sequence_gradient(case, own) * weights}

    reason = "differentiates the sequence's ratio, so that a token's gradient is the mean of its sequence's"
    return differing(case, own, reason, peers, mine)


def _terms(case, own, *, modes, ratio=None, largest=None, everywhere=False):
    """Add the KL and entropy terms by hand to our policy term.

    ``modes``: how both are aggregated. ``ratio``: of which KL is multiplied, to these log-probs.
    ``largest``: of a token's KL. ``everywhere``: policy and entropy are taken over masked tokens, too.
    """
    section, x = own.section, case.tensors()
    bare = {k: v for k, v in section.items() if k not in ("kl", "entropy")}
    mask = x["mask"]
    every = torch.ones_like(mask) if everywhere else mask
    how = own.how | ({"num_tokens": float(mask.sum())} if everywhere else {})
    found = run(case, bare, how, lambda x: {"mask": every})
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
    further = kl_coef * kl - entropy_coef * entropy
    (grad,) = torch.autograd.grad(further, now) if further.requires_grad else (0.0,)
    return {"loss": found["loss"] + further.detach(), "grad": found["grad"] + grad}


def terms_over_tokens(case, own):
    return differing(
        case, own, "takes KL and entropy as means over tokens where the policy term is one over sequences",
        lambda case, own: _terms(case, own, modes="token-mean"),
        lambda case, own: _terms(case, own, modes=own.section["aggregation"]),
    )  # fmt: skip


def bias_from_old(case, own):
    return differing(
        case, own, "multiplies the KL by the ratio to the trainer's old log-probs, not to what sampled",
        lambda case, own: _terms(case, own, modes="token-mean", ratio="old"),
        lambda case, own: _terms(case, own, modes="token-mean", ratio="engine"),
    )  # fmt: skip


def clamped_kl_term(case, own):
    return differing(
        case, own, "holds the KL of a token within 10",
        lambda case, own: _terms(case, own, modes=own.section["aggregation"], largest=10.0),
        lambda case, own: _terms(case, own, modes=own.section["aggregation"]),
    )  # fmt: skip


def forgets_mask(case, own):
    def peers(case, own):
        if case.kind == "loss":
            return _terms(case, own, modes="token-mean", everywhere=True)
        tokens = float(case.tensors()["mask"].sum())
        return run(case, own.section, {"num_tokens": tokens}, lambda x: {"mask": torch.ones_like(x["mask"])})

    def mine(case, own):
        return {"grad": torch.where(case.tensors()["mask"], case.numbers()["grad"], 0.0)}

    return differing(case, own, "token-mean forgets the mask", peers, mine)


def no_mean_of_rows(case, own):
    rows = int(case.tensors()["mask"].any(dim=1).sum())
    return differing(
        case, own, "seq-mean-token-sum-norm takes no mean over sequences",
        lambda case, own: {k: v * rows for k, v in run(case, own.section, own.how).items()},
        lambda case, own: {k: v / rows for k, v in case.numbers().items()},
    )  # fmt: skip


def kept_only(case, own):
    """Rejected tokens leave the denominators."""

    def mask(x):
        bypassed = "bypass" in str(own.section.get("correction"))  # what was old is then the engine's
        policy, engine = (x["now"], x["old"]) if bypassed else (x["old"], x["engine"])
        return accepted(policy, engine, x["mask"], ours.rules(own.section))

    def peers(case, own):
        bypassed = "bypass" in str(own.section.get("correction"))
        section = own.section | {"correction": "bypass" if bypassed else "none"}
        rows = float(case.tensors()["mask"].any(dim=1).sum())
        how = own.how | ({} if section["aggregation"] == "token-mean" else {"num_sequences": rows})
        return run(case, section, how, lambda x: {"mask": mask(x)})

    def mine(case, own):
        x, by_token = case.tensors(), own.section["aggregation"] == "token-mean"
        kept = mask(x)
        share = kept.sum() / x["mask"].sum() if by_token else sequence_mean(kept.double(), x["mask"])
        return {"grad": case.numbers()["grad"] * share}

    return differing(case, own, "counts rejected tokens in no denominator", peers, mine)


def quantile_share(case, own):
    def peers(case, own):
        tokens = int(case.tensors()["mask"].sum())
        share = own.section["top_entropy_share"]
        count = tokens - math.ceil((tokens - 1) * (1 - share))
        return run(case, own.section | {"top_entropy_share": count / tokens}, own.how)

    def mine(case, own):
        x = case.tensors()
        count = round(own.section["top_entropy_share"] * int(x["mask"].sum()))
        least = x["entropy"][x["mask"]].sort(descending=True).values[count - 1]
        return {"grad": torch.where(x["entropy"] >= least, case.numbers()["grad"], 0.0)}

    return differing(
        case, own, "takes tokens above an interpolated quantile, one more than the share", peers, mine
    )


def micro_batch_means(case, own):
    def halves(case, own, share):
        found = []
        for rows in (slice(0, 4), slice(4, 8)):
            part = run(
                case,
                own.section,
                own.how,
                lambda x, rows=rows: {k: v[rows] for k, v in x.items() if k != "parts"},
            )
            weight = share(case.tensors()["mask"], rows)
            found.append({k: v * weight for k, v in part.items()})
        return {
            "loss": found[0]["loss"] + found[1]["loss"],
            "grad": torch.cat([own["grad"] for own in found]),
        }

    return differing(
        case, own, "takes the mean of the means of micro-batches",
        lambda case, own: halves(case, own, lambda mask, rows: 0.5),
        lambda case, own: halves(case, own, lambda mask, rows: mask[rows].sum() / mask.sum()),
    )  # fmt: skip


def length_weighted_tokens(case, own):
    def scaled(case, own, everywhere):
        def change(x):
            lengths, a = x["mask"].sum(dim=1, keepdim=True), x["advantages"][:, :1].expand_as(x["now"])
            mask = torch.ones_like(x["mask"]) if everywhere else x["mask"]
            by = lengths / mask.numel() if everywhere else 1 / len(mask)
            return {"mask": mask, "advantages": a * by}

        how = {k: v for k, v in own.how.items() if k != "first"}
        return run(case, own.section | {"aggregation": "token-sum"}, how, change)

    return differing(
        case, own, "with ratios of tokens multiplies by the length, over all places, masked or not",
        lambda case, own: scaled(case, own, True), lambda case, own: scaled(case, own, False),
    )  # fmt: skip


def sign_of_score(case, own):
    def change(x, rows):
        return {"mask": x["mask"] & rows[:, None]}

    def peers(case, own):
        x = case.tensors()
        counts = {"num_tokens": float(x["mask"].sum()), "num_sequences": float(x["mask"].any(dim=1).sum())}
        mode = {"aggregation": own.section["aggregation"]}
        good = run(case, {"loss": "dro", "beta": 1e-30} | mode, counts, lambda x: change(x, x["rewards"] > 0))
        bad = {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.0} | mode
        bad = run(case, bad, counts, lambda x: change(x, x["rewards"] <= 0))
        return {key: good[key] + bad[key] for key in good}

    def mine(case, own):
        x = case.tensors()
        ratio = (x["now"] - x["old"]).exp()
        weight = torch.where(x["advantages"] < 0, ratio.clamp(max=1.0), 1.0)
        rows = x["mask"].any(dim=1).sum() * x["mask"].sum(dim=1, keepdim=True)
        return {"grad": torch.where(x["mask"], -weight * x["advantages"] / rows, 0.0)}

    return differing(case, own, "calls a sample bad by its score, ours by its advantage", peers, mine)
