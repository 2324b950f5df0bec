"""Losses, advantages, divergences and aggregations as their papers write them: loops over plain numbers.

Nothing here imports the package. A policy loss is a function of one sequence: ``new`` is what the gradient
is taken in, ``fixed`` the same numbers behind a stop-gradient, ``old`` those of the policy that sampled. It
returns the loss of each token, or one number where the paper has a loss of the whole sequence alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Numbers = list[float]
Loss = Callable[..., Numbers | float]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def of_tokens(each: Callable[..., float]) -> Loss:
    """Apply ``each`` to (new, fixed, old, advantage) of every token."""

    def loss(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, **how: float) -> Numbers:
        return [each(*token, **how) for token in zip(new, fixed, old, advantages, strict=True)]

    return loss


# --- policy losses


def reinforce(n: float, f: float, o: float, a: float) -> float:
    """Williams 1992; the value is -A, the gradient -A grad log pi."""
    return -a * (1 + n - f)


def ppo(n: float, f: float, o: float, a: float, *, clip_low=0.2, clip_high=0.2, dual_clip=None) -> float:
    """1707.06347, equation 7; bounds apart: 2503.14476; dual clip: 1912.09729, equation 5."""
    r = math.exp(n - o)
    gain = min(r * a, clip(r, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None and a < 0:
        gain = max(gain, dual_clip * a)
    return -gain


def cispo(
    n: float, f: float, o: float, a: float, *, clip_low=1.0, clip_high=0.2, unified_mask=False
) -> float:
    """2506.13585, equations 4 and 5; the mask M: equations 6 and 7."""
    r = math.exp(f - o)
    if unified_mask and ((a > 0 and r > 1 + clip_high) or (a < 0 and r < 1 - clip_low)):
        return 0.0
    return -clip(r, 1 - clip_low, 1 + clip_high) * a * n


def sapo(n: float, f: float, o: float, a: float, *, tau_positive=1.0, tau_negative=1.05) -> float:
    """2511.20347, equations 5 to 7."""
    tau = tau_positive if a > 0 else tau_negative
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(n - o) - 1)))


def dppo_tv(n: float, f: float, o: float, a: float, *, clip_low=0.2, clip_high=0.2, ratio_cap=20.0) -> float:
    """2602.04879, with the total variation of "this token or any other"."""
    moved = math.exp(f) - math.exp(o)
    if (a > 0 and moved > clip_high) or (a < 0 and -moved > clip_low):
        return 0.0
    return -min(math.exp(f - o), ratio_cap) * a * n


def dppo_kl(
    n: float, f: float, o: float, a: float, *, clip_low=0.05, clip_high=0.05, ratio_cap=20.0
) -> float:
    """2602.04879, with the KL of "this token or any other" from the old to the new policy."""
    p, q = math.exp(o), math.exp(f)
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    if (a > 0 and q > p and kl > clip_high) or (a < 0 and q < p and kl > clip_low):
        return 0.0
    return -min(q / p, ratio_cap) * a * n


def dro(n: float, f: float, o: float, a: float, *, beta=0.1) -> float:
    """2405.19107, equation 4, in the form of tokens."""
    return -a * n + beta / 2 * (n - o) ** 2


def topr_token(n: float, f: float, o: float, a: float) -> float:
    return -a * n if a >= 0 else -min(math.exp(f - o), 1.0) * a * n


def gspo(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, clip_low=3e-4, clip_high=4e-4):
    """2507.18071, equations 13 and 14: the value is that of the sequence, the gradient the token's own."""
    s = math.exp(sum(f - o for f, o in zip(fixed, old, strict=True)) / len(new))
    found = []
    for n, f, a in zip(new, fixed, advantages, strict=True):
        own = s * math.exp(n - f)
        found.append(-min(own * a, clip(own, 1 - clip_low, 1 + clip_high) * a))
    return found


def gspo_segment(
    new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, clip_low=0.2, clip_high=0.2
) -> Numbers:
    """ROLL's ratio_type: segment, of a sequence that is one action, in the token form of 2507.18071."""
    return gspo(new, fixed, old, advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, clip_low=0.4, clip_high=0.4):
    """2507.20673, equation 4: each log-ratio has one bound, by the sign of its advantage."""
    logs = [
        min(n - o, clip_high) if a > 0 else max(n - o, -clip_low) if a < 0 else n - o
        for n, o, a in zip(new, old, advantages, strict=True)
    ]
    mean = math.exp(sum(logs) / len(logs))
    return [-a * mean for a in advantages]


def kimi15(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, tau=0.1) -> float:
    """2501.12599, equation 3, with r - mean for the advantage."""
    total = sum(n - o for n, o in zip(new, old, strict=True))
    return -sum(a * n for a, n in zip(advantages, new, strict=True)) + tau / 2 * total**2


def topr(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers) -> Numbers:
    """2503.14286, equation 8."""
    w = math.exp(sum(f - o for f, o in zip(fixed, old, strict=True)))
    return [-a * n if a >= 0 else -min(w, 1.0) * a * n for n, a in zip(new, advantages, strict=True)]


def reinforce_is(
    new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, ratio_cap=2.0
) -> Numbers:
    """verl's bypass mode, loss_type: reinforce with rollout_is: sequence."""
    w = math.exp(sum(f - o for f, o in zip(fixed, old, strict=True)))
    return [-min(w, ratio_cap) * a * n for n, a in zip(new, advantages, strict=True)]


def vespo(
    new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *,
    k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0,
) -> Numbers:  # fmt: skip
    """2602.10693, section 3.4."""
    w = math.exp(sum(f - o for f, o in zip(fixed, old, strict=True)))
    found = []
    for n, a in zip(new, advantages, strict=True):
        k, decay = (k_positive, lambda_positive) if a >= 0 else (k_negative, lambda_negative)
        found.append(-(w**k) * math.exp(decay * (1 - w)) * a * n)
    return found


SELECTED_EVERY = 3  # clip_cov, kl_cov: the tokens 0, 3, 6, ... of a sequence are those selected


def clip_cov(
    new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, clip_low=0.2, clip_high=0.2
) -> Numbers:
    """2505.22617, equation 12: a selected token has no loss."""
    losses = of_tokens(ppo)(new, fixed, old, advantages, clip_low=clip_low, clip_high=clip_high)
    return [0.0 if t % SELECTED_EVERY == 0 else loss for t, loss in enumerate(losses)]


def kl_cov(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, cov_kl_coef=1.0) -> Numbers:
    """2505.22617, equation 13: a selected token pays for the size of its log-ratio."""
    return [
        -math.exp(n - o) * a + (cov_kl_coef * abs(n - o) if t % SELECTED_EVERY == 0 else 0.0)
        for t, (n, o, a) in enumerate(zip(new, old, advantages, strict=True))
    ]


POLICY_LOSSES: dict[str, Loss] = {
    "policy_gradient": of_tokens(reinforce), "ppo_clip": of_tokens(ppo), "cispo": of_tokens(cispo),
    "sapo": of_tokens(sapo), "dppo_tv": of_tokens(dppo_tv), "dppo_kl": of_tokens(dppo_kl),
    "dro": of_tokens(dro), "topr_token": of_tokens(topr_token),
    "gspo": gspo, "gspo_segment": gspo_segment, "gmpo": gmpo, "kimi15": kimi15, "topr": topr,
    "reinforce_is": reinforce_is, "vespo": vespo, "clip_cov": clip_cov, "kl_cov": kl_cov,
}  # fmt: skip


# --- advantages: of the rewards of one group, all of them scored


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / max(len(values) - ddof, 1))


def grpo(groups: list[Numbers], *, std="group", eps=1e-6, **_: Any) -> list[Numbers]:
    """2402.03300, section 4.1.2; of the batch: 2501.03262 and 2508.08221; none: 2503.20783."""
    centred = [[r - mean(own) for r in own] for own in groups]
    everything = [value for own in centred for value in own]
    scales = {
        "none": [1.0 for _ in groups],
        "group": [deviation(own) + eps for own in groups],
        "batch": [deviation(everything) + eps for _ in groups],
        "batch_raw": [deviation([r for own in groups for r in own]) + eps for _ in groups],
    }[std]
    return [[value / scale for value in own] for own, scale in zip(centred, scales, strict=True)]


def without_std(groups: list[Numbers], **_: Any) -> list[Numbers]:
    return grpo(groups, std="none")


def rloo(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2402.14740, equation 6: less the mean of the others."""
    return [
        [r - mean(own[:i] + own[i + 1 :]) if len(own) > 1 else 0.0 for i, r in enumerate(own)]
        for own in groups
    ]


def rloo_normalized(groups: list[Numbers], *, eps=1e-6, **_: Any) -> list[Numbers]:
    """NeMo-RL: less the mean of the others, over their sample deviation unless they are equal."""
    found = []
    for own in groups:
        others = [own[:i] + own[i + 1 :] for i in range(len(own))]
        scales = [deviation(o) + eps if len(set(o)) > 1 else 1.0 for o in others]
        found.append([c / scale for c, scale in zip(rloo([own])[0], scales, strict=True)])
    return found


def the_reward(groups: list[Numbers], **_: Any) -> list[Numbers]:
    return groups


def flash_reinforce(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """FlashREINFORCE (Hu et al. 2026): less the mean of the batch, whatever its groups."""
    baseline = mean([r for own in groups for r in own])
    return [[r - baseline for r in own] for own in groups]


def remax(groups: list[Numbers], *, baselines: list[Numbers], **_: Any) -> list[Numbers]:
    """2310.10505: less the reward of the greedy answer."""
    pairs = zip(groups, baselines, strict=True)
    return [[r - b for r, b in zip(own, greedy, strict=True)] for own, greedy in pairs]


def opo(groups: list[Numbers], *, lengths: list[Numbers], **_: Any) -> list[Numbers]:
    """2505.23585, equation 6."""
    found = []
    for own, sizes in zip(groups, lengths, strict=True):
        baseline = math.fsum(n * r for n, r in zip(sizes, own, strict=True)) / math.fsum(sizes)
        found.append([r - baseline if len(own) > 1 else 0.0 for r in own])
    return found


def pass_at_k(groups: list[Numbers], *, k: int, eps=1e-6, **_: Any) -> list[Numbers]:
    """2508.10751, section 2.4, over every subset of k samples."""
    found = []
    for own in groups:
        if len(own) <= k or max(own) == min(own):
            found.append([0.0] * len(own))
            continue
        tries = [(set(t), max(own[i] for i in t)) for t in combinations(range(len(own)), k)]
        bests = [best for _, best in tries]
        scale = deviation(bests, ddof=0) * math.sqrt(1) + eps
        found.append([(mean([b for t, b in tries if i in t]) - mean(bests)) / scale for i in range(len(own))])
    return found


def gdpo(
    groups: list[Numbers], *, parts: list[list[Numbers]], weights: Numbers, std="group", eps=1e-6, **_: Any
) -> list[Numbers]:
    """2601.05242: each reward normalised in its group, their weighted sum over the batch."""
    own = [grpo(part, std=std, eps=eps) for part in parts]
    total = [
        [math.fsum(w * part[g][i] for w, part in zip(weights, own, strict=True)) for i in range(len(group))]
        for g, group in enumerate(groups)
    ]
    scale = deviation([value for group in total for value in group]) + eps
    return [[value / scale for value in group] for group in total]


def gpg(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2504.02546, equation 9."""
    everyone = sum(map(len, groups))
    moved = sum(len(own) for own in groups if max(own) > min(own))
    return [[value * everyone / max(moved, 1) for value in own] for own in without_std(groups)]


def maxrl(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2602.02710: the mean score of the right answers, less the mean of all."""
    return [[(r - mean(own)) / mean(own) if any(own) else 0.0 for r in own] for own in groups]


def grpo_passk(groups: list[Numbers], *, std="group", eps=1e-6, **_: Any) -> list[Numbers]:
    """2503.19595: the best less the second best, for the best alone."""
    found = []
    scales = {"group": [deviation(own) + eps for own in groups], "none": [1.0] * len(groups)}[std]
    for own, scale in zip(groups, scales, strict=True):
        first, second = sorted(own, reverse=True)[:2] if len(own) > 1 else (own[0], own[0])
        found.append([(first - second) / scale if r == first else 0.0 for r in own])
    return found


ADVANTAGES: dict[str, Callable[..., list[Numbers]]] = {
    "grpo": grpo, "dr_grpo": without_std, "reinforce_pp_baseline": without_std, "rloo": rloo,
    "rloo_normalized": rloo_normalized,
    "reinforce_pp": the_reward, "flash_reinforce": flash_reinforce, "remax": remax, "opo": opo,
    "pass_at_k": pass_at_k, "gdpo": gdpo, "gpg": gpg, "maxrl": maxrl, "grpo_passk": grpo_passk,
}  # fmt: skip


# --- divergences: value and slope at d = log pi - log ref; Schulman 2020, and 2506.09477 for the "+" forms

KL: dict[str, Callable[[float], tuple[float, float]]] = {
    "k1": lambda d: (d, 1.0),
    "k2": lambda d: (d * d / 2, d),
    "k3": lambda d: (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    "k1+": lambda d: (d, d),
    "k3+": lambda d: (math.exp(-d) - 1 + d, d),
    "abs": lambda d: (abs(d), math.copysign(1.0, d)),
}


# --- aggregation: of the losses of the tokens of each sequence, in which a sequence without tokens has none

Sequences = list[Numbers]
AGGREGATIONS: dict[str, Callable[[Sequences, int], float]] = {
    "token-mean": lambda s, longest: math.fsum(x for own in s for x in own) / sum(map(len, s)),
    "token-sum": lambda s, longest: math.fsum(x for own in s for x in own),
    "seq-mean-token-mean": lambda s, longest: mean([mean(own) for own in s if own]),
    "seq-mean-token-sum": lambda s, longest: mean([math.fsum(own) for own in s if own]),
    "seq-mean-token-sum-norm": lambda s, longest: mean([math.fsum(own) / longest for own in s if own]),
    "prompt-mean-token-mean": lambda s, longest: mean([mean(own) for own in _by_prompt(s) if own]),
}
PROMPTS = [[0, 1], [2, 3], [4]]  # the sequences of each prompt


def _by_prompt(sequences: Sequences) -> list[Numbers]:
    """ScaleRL, 2510.13786, section 4: all tokens of a prompt's sequences in one mean."""
    return [[x for i in prompt for x in sequences[i]] for prompt in PROMPTS]


# --- corrections: weights of the tokens of one sequence


def correction(
    train: Numbers, rollout: Numbers, *, kind: str, level: str, low: float, high: float, veto: float
) -> Numbers:
    """Truncated, masked and IcePop importance weights, over token, sequence or geometric mean."""
    logs = [t - r for t, r in zip(train, rollout, strict=True)]
    over = {"token": logs, "sequence": [math.fsum(logs)] * len(logs), "geometric": [mean(logs)] * len(logs)}
    ratios = [math.exp(value) for value in over[level]]
    if any(math.exp(value) < veto for value in logs):
        return [0.0] * len(logs)
    if kind == "tis":
        return [clip(r, low, high) for r in ratios]
    kept = ratios if kind == "mis" else [math.exp(value) for value in logs]
    return [own if low <= r <= high else 0.0 for r, own in zip(ratios, kept, strict=True)]
