"""Losses, advantages, divergences and aggregations as their papers write them: loops over plain numbers.

Nothing here imports the package. A policy loss is a function of one sequence's log-probs: ``new`` carries the
gradient, ``fixed`` has the same numbers behind a stop-gradient, ``old`` is from the policy that sampled. It
returns the loss of each token, or one number if the paper only has a loss of the whole sequence.
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


def per_token(each: Callable[..., float]) -> Loss:
    """Apply ``each`` to (new, fixed, old, advantage) of every token."""

    def loss(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, **how: float) -> Numbers:
        return [each(*token, **how) for token in zip(new, fixed, old, advantages, strict=True)]

    return loss


# --- policy losses


def reinforce(n: float, f: float, o: float, a: float) -> float:
    """Williams 1992; the value is -A, the gradient -A grad log pi."""
    return -a * (1 + n - f)


def ppo(n: float, f: float, o: float, a: float, *, clip_low=0.2, clip_high=0.2, dual_clip=None) -> float:
    """1707.06347, equation 7; separate bounds: 2503.14476; dual clip: 1912.09729, equation 5."""
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
    change = math.exp(f) - math.exp(o)
    if (a > 0 and change > clip_high) or (a < 0 and -change > clip_low):
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
    """2507.18071, equations 13 and 14: the value is the sequence's, the gradient the token's."""
    s = math.exp(sum(f - o for f, o in zip(fixed, old, strict=True)) / len(new))
    losses = []
    for n, f, a in zip(new, fixed, advantages, strict=True):
        ratio = s * math.exp(n - f)
        losses.append(-min(ratio * a, clip(ratio, 1 - clip_low, 1 + clip_high) * a))
    return losses


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
    losses = []
    for n, a in zip(new, advantages, strict=True):
        k, decay = (k_positive, lambda_positive) if a >= 0 else (k_negative, lambda_negative)
        losses.append(-(w**k) * math.exp(decay * (1 - w)) * a * n)
    return losses


SELECTED_EVERY = 3  # clip_cov, kl_cov: the tokens 0, 3, 6, ... of a sequence are selected


def clip_cov(
    new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, clip_low=0.2, clip_high=0.2
) -> Numbers:
    """2505.22617, equation 12: a selected token has no loss."""
    losses = per_token(ppo)(new, fixed, old, advantages, clip_low=clip_low, clip_high=clip_high)
    return [0.0 if t % SELECTED_EVERY == 0 else loss for t, loss in enumerate(losses)]


def kl_cov(new: Numbers, fixed: Numbers, old: Numbers, advantages: Numbers, *, cov_kl_coef=1.0) -> Numbers:
    """2505.22617, equation 13: a selected token pays for the size of its log-ratio."""
    return [
        -math.exp(n - o) * a + (cov_kl_coef * abs(n - o) if t % SELECTED_EVERY == 0 else 0.0)
        for t, (n, o, a) in enumerate(zip(new, old, advantages, strict=True))
    ]


POLICY_LOSSES: dict[str, Loss] = {
    "policy_gradient": per_token(reinforce), "ppo_clip": per_token(ppo), "cispo": per_token(cispo),
    "sapo": per_token(sapo), "dppo_tv": per_token(dppo_tv), "dppo_kl": per_token(dppo_kl),
    "dro": per_token(dro), "topr_token": per_token(topr_token),
    "gspo": gspo, "gspo_segment": gspo_segment, "gmpo": gmpo, "kimi15": kimi15, "topr": topr,
    "reinforce_is": reinforce_is, "vespo": vespo, "clip_cov": clip_cov, "kl_cov": kl_cov,
}  # fmt: skip


# --- advantages: from the rewards of groups, all of them scored


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / max(len(values) - ddof, 1))


def grpo(groups: list[Numbers], *, std="group", eps=1e-6, **_: Any) -> list[Numbers]:
    """2402.03300, section 4.1.2; std of the batch: 2501.03262 and 2508.08221; none: 2503.20783."""
    centred = [[r - mean(group) for r in group] for group in groups]
    everything = [value for group in centred for value in group]
    scales = {
        "none": [1.0 for _ in groups],
        "group": [deviation(group) + eps for group in groups],
        "batch": [deviation(everything) + eps for _ in groups],
        "batch_raw": [deviation([r for group in groups for r in group]) + eps for _ in groups],
    }[std]
    return [[value / scale for value in group] for group, scale in zip(centred, scales, strict=True)]


def without_std(groups: list[Numbers], **_: Any) -> list[Numbers]:
    return grpo(groups, std="none")


def rloo(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2402.14740, equation 6: minus the mean of the others."""
    return [
        [r - mean(group[:i] + group[i + 1 :]) if len(group) > 1 else 0.0 for i, r in enumerate(group)]
        for group in groups
    ]


def rloo_normalized(groups: list[Numbers], *, eps=1e-6, **_: Any) -> list[Numbers]:
    """NeMo-RL: minus the mean of the others, over their sample deviation unless they are equal."""
    advantages = []
    for group in groups:
        others = [group[:i] + group[i + 1 :] for i in range(len(group))]
        scales = [deviation(o) + eps if len(set(o)) > 1 else 1.0 for o in others]
        advantages.append([c / scale for c, scale in zip(rloo([group])[0], scales, strict=True)])
    return advantages


def the_reward(groups: list[Numbers], **_: Any) -> list[Numbers]:
    return groups


def flash_reinforce(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """FlashREINFORCE (Hu et al. 2026): minus the mean of the batch, regardless of groups."""
    baseline = mean([r for group in groups for r in group])
    return [[r - baseline for r in group] for group in groups]


def remax(groups: list[Numbers], *, baselines: list[Numbers], **_: Any) -> list[Numbers]:
    """2310.10505: minus the reward of the greedy answer."""
    pairs = zip(groups, baselines, strict=True)
    return [[r - b for r, b in zip(group, greedy, strict=True)] for group, greedy in pairs]


def opo(groups: list[Numbers], *, lengths: list[Numbers], **_: Any) -> list[Numbers]:
    """2505.23585, equation 6."""
    advantages = []
    for group, sizes in zip(groups, lengths, strict=True):
        baseline = math.fsum(n * r for n, r in zip(sizes, group, strict=True)) / math.fsum(sizes)
        advantages.append([r - baseline if len(group) > 1 else 0.0 for r in group])
    return advantages


def pass_at_k(groups: list[Numbers], *, k: int, eps=1e-6, **_: Any) -> list[Numbers]:
    """2508.10751, section 2.4, over every subset of k samples."""
    out = []
    for group in groups:
        if len(group) <= k or max(group) == min(group):
            out.append([0.0] * len(group))
            continue
        tries = [(set(t), max(group[i] for i in t)) for t in combinations(range(len(group)), k)]
        bests = [best for _, best in tries]
        scale = deviation(bests, ddof=0) + eps
        out.append([(mean([b for t, b in tries if i in t]) - mean(bests)) / scale for i in range(len(group))])
    return out


def gdpo(
    groups: list[Numbers], *, parts: list[list[Numbers]], weights: Numbers, std="group", eps=1e-6, **_: Any
) -> list[Numbers]:
    """2601.05242: each reward normalised in its group, their weighted sum over the batch."""
    each = [grpo(part, std=std, eps=eps) for part in parts]
    total = [
        [math.fsum(w * part[g][i] for w, part in zip(weights, each, strict=True)) for i in range(len(group))]
        for g, group in enumerate(groups)
    ]
    scale = deviation([value for group in total for value in group]) + eps
    return [[value / scale for value in group] for group in total]


def gpg(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2504.02546, equation 9."""
    everyone = sum(map(len, groups))
    with_signal = sum(len(group) for group in groups if max(group) > min(group))
    return [[value * everyone / max(with_signal, 1) for value in group] for group in without_std(groups)]


def maxrl(groups: list[Numbers], **_: Any) -> list[Numbers]:
    """2602.02710: the mean score of the right answers, minus the mean of all."""
    return [[(r - mean(group)) / mean(group) if any(group) else 0.0 for r in group] for group in groups]


def grpo_passk(groups: list[Numbers], *, std="group", eps=1e-6, **_: Any) -> list[Numbers]:
    """2503.19595: the best minus the second best, only for the best."""
    advantages = []
    scales = {"group": [deviation(group) + eps for group in groups], "none": [1.0] * len(groups)}[std]
    for group, scale in zip(groups, scales, strict=True):
        first, second = sorted(group, reverse=True)[:2] if len(group) > 1 else (group[0], group[0])
        advantages.append([(first - second) / scale if r == first else 0.0 for r in group])
    return advantages


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


# --- aggregation: of the token losses of each sequence; a sequence without tokens has none

Sequences = list[Numbers]
AGGREGATIONS: dict[str, Callable[[Sequences, int], float]] = {
    "token-mean": lambda s, longest: math.fsum(x for seq in s for x in seq) / sum(map(len, s)),
    "token-sum": lambda s, longest: math.fsum(x for seq in s for x in seq),
    "seq-mean-token-mean": lambda s, longest: mean([mean(seq) for seq in s if seq]),
    "seq-mean-token-sum": lambda s, longest: mean([math.fsum(seq) for seq in s if seq]),
    "seq-mean-token-sum-norm": lambda s, longest: mean([math.fsum(seq) / longest for seq in s if seq]),
    "prompt-mean-token-mean": lambda s, longest: mean([mean(tokens) for tokens in _by_prompt(s) if tokens]),
}
PROMPTS = [[0, 1], [2, 3], [4]]  # indices of each prompt's sequences


def _by_prompt(sequences: Sequences) -> list[Numbers]:
    """ScaleRL, 2510.13786, section 4: all tokens of a prompt's sequences in one mean."""
    return [[x for i in prompt for x in sequences[i]] for prompt in PROMPTS]


# --- corrections: token weights of one sequence


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
    weights = ratios if kind == "mis" else [math.exp(value) for value in logs]
    return [weight if low <= r <= high else 0.0 for r, weight in zip(ratios, weights, strict=True)]
