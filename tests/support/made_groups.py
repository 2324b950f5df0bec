"""Random but valid groups, for tests of everything after sampling."""

import numpy as np

from grpo_dist.batch.rows import make_batch
from grpo_dist.types import Group, Prompt, Rollout


def group(
    index: int, rng: np.random.Generator, *, samples: int = 4, longest: int = 12, rewards=None
) -> Group:
    prompt = Prompt(
        f"p{index}", rng.integers(11, 108, 6 + index).astype(np.int32), "1", "made", f"problem {index}"
    )
    rollouts = []
    for i in range(samples):
        length = int(rng.integers(1, longest))
        rollouts.append(
            Rollout(
                prompt_uid=prompt.uid,
                sample=i,
                completion_ids=rng.integers(11, 108, length).astype(np.int32),
                logprobs=-rng.random(length).astype(np.float32) * 5,
                finish_reason="stop",
                text="",
                policy_versions=np.zeros(length, np.int32),
            )
        )
    rewards = rng.random(samples) if rewards is None else rewards
    return Group(prompt, tuple(rollouts), np.asarray(rewards, np.float32), {}, ("",) * samples)


def batch(*, groups: int = 3, samples: int = 4, seed: int = 0, reference: bool = True, longest: int = 12):
    rng = np.random.default_rng(seed)
    made = [group(i, rng, samples=samples, longest=longest) for i in range(groups)]
    advantages = [rng.standard_normal(samples).astype(np.float32) for _ in made]
    ref = [-rng.random(len(r.completion_ids)).astype(np.float32) * 5 for g in made for r in g.rollouts]
    return make_batch(made, advantages, ref_logprobs=ref if reference else None, max_new_tokens=longest)


def group_of(rewards, lengths, *, prompt_tokens=2, parts=None, reasons=None, **fields):
    reasons = reasons or ["stop"] * len(rewards)
    rollouts = tuple(
        Rollout("p", i, np.full(n, 5, np.int32), np.full(n, -1.0, np.float32), why, "", np.zeros(n, np.int32))
        for i, (n, why) in enumerate(zip(lengths, reasons, strict=True))
    )
    prompt = Prompt("p", np.full(prompt_tokens, 3, np.int32), "1", "made")
    values = np.array(rewards, np.float32)
    return Group(prompt, rollouts, values, parts or {"math": values}, ("",) * len(rewards), **fields)
