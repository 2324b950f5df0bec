"""Our numbers of each kind of case."""

import numpy as np
import torch

from grpo_dist.algorithms.aggregation import aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.normalise import whiten
from grpo_dist.algorithms.offpolicy import accepted, correction, mean_weight_sums
from grpo_dist.algorithms.ratios import segment_mean
from grpo_dist.algorithms.schedules import steer
from grpo_dist.policy.logprobs import selected_logprobs
from grpo_dist.policy.preparation import EntropyBonus
from grpo_dist.rewards.builtin import overlong_punishment, repeated_share
from tests.algorithms.peers import ours


def loss(x, section, *, estimated=None, first=False, bypassed=False, **how):
    """Return our loss. ``estimated``: settings of the `grpo` that gives the advantages; None: the input has
    them. ``first``: a row has the advantage of its first token. ``bypassed``: the engine's log-probs are the
    old ones.
    """
    if bypassed:
        x = x | {"engine": x["old"]}
    if first:
        x = x | {"advantages": x["advantages"][:, :1].expand_as(x["now"])}
    if estimated is not None:
        values = ours.estimate(x, "grpo", **estimated)
        x = x | {"advantages": values[:, None].expand_as(x["now"])}
    return ours.loss(x, section, **how)


def advantages(x, section, *, weights=None, estimate=None, earlier=None, summed=None, unscored=None):
    """Return our advantages of samples and tokens.

    ``estimate``: settings of a direct call of the estimator, in the type of the rewards; None: later stages
    decide the numbers. ``earlier``: rewards of earlier steps. ``summed``: weights of the parts that add up to
    the reward. ``unscored``: samples without a score.
    """
    if summed is not None:
        x = x | {"rewards": torch.tensor(summed, dtype=x["parts"].dtype) @ x["parts"]}
    if unscored is not None:
        x["rewards"][unscored] = torch.nan
    moments = None
    if section.get("reward_norm") == "running":
        moments = Moments()
        for rewards in (*(earlier or ()), x["rewards"]):
            moments = moments.updated(np.asarray(rewards, np.float64))
    of_samples, of_tokens = ours.advantages(x, section, weights=weights, moments=moments)
    result = {"samples": of_samples, "tokens": of_tokens}
    if estimate is not None:
        result["estimate"] = ours.estimate(x, section["advantage"], **estimate)
    return result


def kl(x, section):
    now = x["now"].requires_grad_()
    value = KL_ESTIMATORS[section["kl"]["estimator"]](now, x["reference"])
    value.sum().backward()
    return {"value": value.detach(), "grad": now.grad}


def aggregation(x, section, *, num_tokens=None, num_sequences=None, max_tokens=None):
    now, mask = x["now"].requires_grad_(), x["mask"]
    value = aggregate(
        now, mask, section["aggregation"], max_tokens=max_tokens or mask.shape[1],
        num_tokens=float(mask.sum()) if num_tokens is None else num_tokens,
        num_sequences=float(mask.any(dim=1).sum()) if num_sequences is None else num_sequences,
    )  # fmt: skip
    value.backward()
    return {"loss": value.detach(), "grad": now.grad}


def weights(x, section):
    rule = ours.configured(section).correction
    values, _ = correction(
        x["old"], x["engine"], x["mask"], kind=rule.kind, level=rule.level, low=rule.low, high=rule.high
    )
    if rule.normalize:
        total, count = mean_weight_sums(values, x["mask"], level=rule.level)
        values = values / (total / count)
    return {"weights": values}


def kept(x, section):
    return {"kept": accepted(x["old"], x["engine"], x["mask"], ours.rules(section))}


def kl_control(x, section, *, start, target, gain, observed):
    coefs, coef = [], start
    for kl in observed:
        coef = steer(coef, kl, target=target, gain=gain)
        coefs.append(coef)
    return {"coefs": torch.tensor(coefs, dtype=torch.float64)}


def entropy_control(x, section, *, observed):
    bonus, applied, coefs = EntropyBonus(ours.configured(section).entropy), [], []
    for entropy in observed:
        applied.append(bonus.observe({"policy/entropy": entropy})["policy/entropy_coef"])
        coefs.append(bonus.state()["entropy_bonus"][0])
    return {"applied": torch.tensor(applied), "coefs": torch.tensor(coefs)}


def overlong(x, section, *, lengths, max_tokens, buffer_tokens, factor=1.0):
    rewards = [overlong_punishment(n, max_tokens=max_tokens, buffer_tokens=buffer_tokens) for n in lengths]
    return {"rewards": factor * torch.tensor(rewards, dtype=torch.float64)}


def repetition(x, section, *, completions, n, factor):
    return {"rewards": torch.tensor([factor * repeated_share(text, n=n) for text in completions])}


def logprobs(x, section, *, entropy, temperature=1.0):
    rows = x["logits"].requires_grad_()
    head = torch.eye(rows.shape[1], dtype=rows.dtype)
    selected, entropies, _ = selected_logprobs(
        rows, head, x["targets"], temperature=temperature, chunk_tokens=4, with_entropy=entropy
    )
    value = entropies if entropy else selected
    value.sum().backward()
    return {"value": value.detach(), "grad": rows.grad}


def whitened(x, section):
    return {"values": whiten(x["advantages"], x["mask"])}


def segments(x, section):
    return {"values": segment_mean(torch.where(x["mask"], x["now"], 0.0), x["mask"])}


KINDS = {
    "loss": loss, "metrics": loss, "advantages": advantages, "rewards": advantages, "kl": kl,
    "aggregation": aggregation, "weights": weights, "kept": kept, "kl_control": kl_control,
    "entropy_control": entropy_control, "overlong": overlong, "repetition": repetition, "logprobs": logprobs,
    "whiten": whitened, "segments": segments,
}  # fmt: skip


def run(case, section, how, change=lambda x: {}):
    """Return our numbers for ``case``, keyed like the recorded ones. ``change``: returns changed inputs.

    If ``how`` has ``estimate``, advantages come with the estimator's values before the cast to float32.
    """
    x = case.tensors() if case.input else None
    result = KINDS[case.kind](x if x is None else x | change(x), section, **how)
    if case.kind not in ("advantages", "rewards"):
        return {name: result[name] for name in case.out}
    by_token = isinstance(case.out[case.kind][0], list)
    numbers = {case.kind: result["tokens" if by_token else "samples"]}
    if "estimate" in result:
        values = result["estimate"]
        values = values[:, None] if by_token and values.dim() == 1 else values
        numbers["estimate"] = torch.where(x["mask"], values, 0.0) if by_token else values
    return numbers
