"""This project's numbers for an input, from a section `algorithm` of its configuration."""

import numpy as np
import torch

from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS, ADVANTAGES
from grpo_dist.algorithms.normalise import length_weights
from grpo_dist.algorithms.offpolicy import RejectionRule
from grpo_dist.algorithms.token_advantages import optimal_token_baseline
from grpo_dist.batch.credit_assignment import AdvantageSettings, sample_advantages, token_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.config import AlgorithmConfig
from grpo_dist.config.base import member_called, members
from grpo_dist.policy.loss import Objective, batch_loss, finish_stats
from grpo_dist.policy.preparation import Preparation
from grpo_dist.types import Group, Prompt, Rollout
from tests.support.losses import change, train_batch

_PROMPT = 2  # tokens


def configured(section):
    """Build `algorithm` from a counterpart's flat section: a setting goes to the loss or advantage that has
    it. The default is no correction.
    """
    fields = AlgorithmConfig.model_fields
    flat = {"loss": "ppo_clip", "advantage": "grpo", "correction": "none"} | section
    nested = {key: value for key, value in flat.items() if key in fields}
    for key in ("loss", "advantage"):
        member = member_called(members(fields[key].annotation), flat[key])
        values = {name: flat[name] for name in member.model_fields if name in flat and name not in fields}
        nested[key] = {"name": flat[key], **values}
    if norm := flat.get("reward_norm"):
        shift, scale = flat.get("reward_shift"), flat.get("reward_scale")
        # In ROLL a key means "only this step"; both false: both.
        both = {"shift": shift or scale is False or not scale, "scale": scale or shift is False or not shift}
        nested["reward_norm"] = norm if norm == "none" else {"name": norm, **both}
    return AlgorithmConfig(**nested)


def rules(section):
    """Return the rejection rules of a section `algorithm`."""
    return [RejectionRule(**rule.model_dump()) for rule in configured(section).correction.reject]


def loss(x, section, *, max_tokens=None, num_tokens=None, num_sequences=None, selected=None):
    """Return the loss, its gradient by the log-probs, and the metrics of an update with the rows of ``x``."""
    algorithm, mask = configured(section), x["mask"]
    settings, advantages = Objective(algorithm), x["advantages"]
    if algorithm.length_weights:
        advantages = advantages * length_weights(mask)
    sizes = {"tokens": num_tokens, "sequences": num_sequences}
    before = train_batch(
        mask, advantages=advantages, rollout_logprobs=x["engine"],
        ref_logprobs=x["reference"] if algorithm.kl.loss_coef else None,
        old_logprobs=x["engine"] if algorithm.correction.bypasses else x["old"],
        old_entropies=x["entropy"] if algorithm.top_entropy_share < 1 else None,
        max_tokens=max_tokens or mask.shape[1],
        sizes={name: size for name, size in sizes.items() if size is not None},
    )  # fmt: skip
    preparation = Preparation(lambda _: (x["now"], x["entropy"]), torch.device("cpu"), reports=True)
    prepared = preparation.prepare_update(before, algorithm, number=0)
    if selected is not None:
        prepared = change(prepared, choice={"selected": selected})
    now = x["now"].detach().clone().requires_grad_()
    value, stats = batch_loss(now, prepared, settings, entropy=x["entropy"])
    value.backward()
    metrics = finish_stats(stats)
    return {
        "loss": value.detach(),
        "grad": now.grad,
        "clip_share": metrics["policy/clip_low_share"] + metrics["policy/clip_high_share"],
        "dual_share": metrics["policy/dual_clip_share"],
        "k3_kl": metrics["mismatch/kl"],
    }


def groups(x, *, weights=None):
    """Return the rewards and completions of ``x`` as groups, and the order of their rows."""
    order = torch.argsort(x["groups"], stable=True)
    result = []
    for i in x["groups"].unique().tolist():
        rows = order[x["groups"][order] == i].tolist()
        prompt = Prompt(f"p{i}", np.full(_PROMPT, 3, np.int32), "1", "made")
        rollouts = tuple(_rollout(x, row, j) for j, row in enumerate(rows))
        parts = {name: x["parts"][k][rows].numpy() for k, name in enumerate(weights or {})}
        rewards = x["rewards"][rows].numpy()
        greedy = float(x["greedy"][rows[0]])
        result.append(Group(prompt, rollouts, rewards, parts, ("",) * len(rows), baseline_reward=greedy))
    return result, order


def _rollout(x, row, sample):
    mask = x["mask"][row]
    length = int((mask * torch.arange(1, len(mask) + 1)).max())
    sampled = mask[:length].numpy()
    return Rollout(
        prompt_uid="p", sample=sample, completion_ids=np.full(length, 5, np.int32),
        logprobs=x["engine"][row, :length].numpy().astype(np.float32), finish_reason="stop", text="",
        policy_versions=np.zeros(length, np.int32), sampled=None if sampled.all() else sampled,
    )  # fmt: skip


def advantages(x, section, *, weights=None, moments=None):
    """Return advantages as a run computes them, float32: of samples [B] before any per-token step, and of
    tokens [B, T].
    """
    algorithm = configured(section)
    scored, order = groups(x, weights=weights)
    kl_coef = algorithm.kl.coef if algorithm.kl.in_reward else 0.0
    how = AdvantageSettings(algorithm, weights or {}, moments, kl_coef)
    per_sample = sample_advantages(scored, how)
    lengths = [len(r.completion_ids) for g in scored for r in g.rollouts]
    reference = [
        x["reference"][row, :n].numpy().astype(np.float32) for row, n in zip(order, lengths, strict=True)
    ]
    batch = make_batch(scored, per_sample, ref_logprobs=reference, max_new_tokens=x["mask"].shape[1])
    norms = torch.zeros(batch.policy.mask.shape, dtype=x["old"].dtype)
    norms[:, _PROMPT:] = score_norms(x)[order][:, : norms.shape[1] - _PROMPT]
    tokens = token_advantages(batch, scored, how, norms).policy.advantages[:, _PROMPT:]
    inverse = torch.argsort(order)
    out = torch.zeros(x["mask"].shape)
    out[:, : tokens.shape[1]] = tokens[inverse]
    return torch.from_numpy(np.concatenate(per_sample))[inverse], out


def score_norms(x):
    """Return score norms with only the token's term in the sum of squares, as recorded."""
    return (1 - x["old"].exp()).square()


def estimate(x, name, **settings):
    """Return the advantages of one estimator in the type of the rewards, [B], of `otb` [B, T]."""
    if name == "otb":
        return optimal_token_baseline(x["rewards"], x["groups"], score_norms(x), x["mask"])
    values = {
        "eps": 1e-6, "std": "group", "lengths": x["mask"].sum(dim=1), "baselines": x["greedy"],
        "parts": x["parts"], "weights": torch.ones(len(x["parts"])),
    } | settings  # fmt: skip
    arguments = {key: values[key] for key in ADVANTAGE_INPUTS.get(name, ())}
    return ADVANTAGES[name](x["rewards"], x["groups"], **arguments)
