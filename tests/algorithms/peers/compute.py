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
    """``estimated``: settings of the `grpo` that gives the advantages; None: those of the input. ``first``:
    the advantage of a row's first token is that of the row. ``bypassed``: the engine's log-probs are the old
    ones.
    """
    if bypassed:
        x = x | {"engine": x["old"]}
    if first:
        x = x | {"advantages": x["advantages"][:, :1].expand_as(x["now"])}
    if estimated is not None:
        own = ours.estimate(x, "grpo", **estimated)
        x = x | {"advantages": own[:, None].expand_as(x["now"])}
    return ours.loss(x, section, **how)


def advantages(x, section, *, weights=None, estimate=None, earlier=None, summed=None, unscored=None):
    """Return our advantages of samples and tokens.

    ``estimate``: settings of the estimator for its direct call in the type of the rewards; None: what follows
    it decides the numbers. ``earlier``: rewards of steps before. ``summed``: weights of the parts whose sum
    is the reward. ``unscored``: samples that could not be.
    """
    if summed is not None:
        x = x | {"rewards": torch.tensor(summed, dtype=x["parts"].dtype) @ x["parts"]}
    if unscored is not None:
        x["rewards"][unscored] = torch.nan
    moments = None
    if section.get("reward_norm") == "running":
        moments = Moments()
        for own in (*(earlier or ()), x["rewards"]):
            moments = moments.updated(np.asarray(own, np.float64))
    of_samples, of_tokens = ours.advantages(x, section, weights=weights, moments=moments)
    found = {"samples": of_samples, "tokens": of_tokens}
    if estimate is not None:
        found["estimate"] = ours.estimate(x, section["advantage"], **estimate)
    return found


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
    own = ours.configured(section).correction
    found, _ = correction(
        x["old"], x["engine"], x["mask"], kind=own.kind, level=own.level, low=own.low, high=own.high
    )
    if own.normalize:
        total, count = mean_weight_sums(found, x["mask"], level=own.level)
        found = found / (total / count)
    return {"weights": found}


def kept(x, section):
    return {"kept": accepted(x["old"], x["engine"], x["mask"], ours.rules(section))}


def kl_control(x, section, *, start, target, gain, observed):
    coefs, coef = [], start
    for own in observed:
        coef = steer(coef, own, target=target, gain=gain)
        coefs.append(coef)
    return {"coefs": torch.tensor(coefs, dtype=torch.float64)}


def entropy_control(x, section, *, observed):
    bonus, applied, coefs = EntropyBonus(ours.configured(section).entropy), [], []
    for entropy in observed:
        applied.append(bonus.observe({"policy/entropy": entropy})["policy/entropy_coef"])
        coefs.append(bonus.state()["entropy_bonus"][0])
    return {"applied": torch.tensor(applied), "coefs": torch.tensor(coefs)}


def overlong(x, section, *, lengths, max_tokens, buffer_tokens, factor=1.0):
    own = [overlong_punishment(n, max_tokens=max_tokens, buffer_tokens=buffer_tokens) for n in lengths]
    return {"rewards": factor * torch.tensor(own, dtype=torch.float64)}


def repetition(x, section, *, completions, n, factor):
    return {"rewards": torch.tensor([factor * repeated_share(own, n=n) for own in completions])}


def logprobs(x, section, *, entropy, temperature=1.0):
    rows = x["logits"].requires_grad_()
    head = torch.eye(rows.shape[1], dtype=rows.dtype)
    found, entropies, _ = selected_logprobs(
        rows, head, x["targets"], temperature=temperature, chunk_tokens=4, with_entropy=entropy
    )
    value = entropies if entropy else found
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
    """Return our numbers for ``case`` by the names of its own. ``change``: returns other inputs.

    With advantages also ``estimate``, those of the estimator before a run makes float32 of them, if ``how``
    asks for them.
    """
    x = case.tensors() if case.input else None
    found = KINDS[case.kind](x if x is None else x | change(x), section, **how)
    if case.kind not in ("advantages", "rewards"):
        return {name: found[name] for name in case.out}
    by_token = isinstance(case.out[case.kind][0], list)
    own = {case.kind: found["tokens" if by_token else "samples"]}
    if "estimate" in found:
        values = found["estimate"]
        values = values[:, None] if by_token and values.dim() == 1 else values
        own["estimate"] = torch.where(x["mask"], values, 0.0) if by_token else values
    return own
