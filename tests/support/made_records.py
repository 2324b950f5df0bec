"""Generated prompts, samples and scores for measurements: valid, of realistic size, light to import."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from grpo_dist.types import Group, Prompt, Rollout, ToolCall, Turn

PROMPT_TOKENS = 64
SHORTEST, LONGEST = 32, 500  # completion tokens, drawn uniformly between


def made_prompts(count: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [
        Prompt(
            uid=f"made/{i:06d}", token_ids=rng.integers(0, 32_000, PROMPT_TOKENS).astype(np.int32),
            answer=str(i), source="made", text=f"How many are {i} and {i + 1} apples? " * 4,
        )
        for i in range(count)
    ]  # fmt: skip


def made_rollouts(uid: str, count: int, rng: np.random.Generator, turns: int = 0) -> tuple[Rollout, ...]:
    """Make ``count`` samples with about three letters per token. ``turns``: 0: completions; otherwise
    episodes of the same length: every fifth token is not sampled, every turn but the last has a call.
    """
    lengths = rng.integers(SHORTEST, LONGEST + 1, count).tolist()
    made = _completions(uid, lengths, rng)
    return tuple(_as_episode(rollout, turns) for rollout in made) if turns else made


def _as_episode(rollout: Rollout, turns: int) -> Rollout:
    length, sampled = len(rollout.completion_ids), np.ones(len(rollout.completion_ids), bool)
    ends = [length * (turn + 1) // turns for turn in range(turns)]
    made = []
    for turn, end in enumerate(ends):
        begin, letters = (ends[turn - 1] if turn else 0), 3
        num_given = (end - begin) // 5 if turn else 0
        sampled[begin : begin + num_given] = False
        text = rollout.text[letters * begin : letters * end]
        call = ToolCall("python", text, text[:60], "ok", 0.2)
        last = turn + 1 == turns
        made.append(Turn(0, end, text, "" if last else text[:60], () if last else (call,)))
    versions = np.where(sampled, rollout.policy_versions, -1).astype(np.int32)
    logprobs = np.where(sampled, rollout.logprobs, 0.0).astype(np.float32)
    return replace(rollout, sampled=sampled, turns=tuple(made), policy_versions=versions, logprobs=logprobs)


def _completions(uid: str, lengths: list[int], rng: np.random.Generator) -> tuple[Rollout, ...]:
    return tuple(
        Rollout(
            prompt_uid=uid,
            sample=i,
            completion_ids=rng.integers(0, 32_000, length).astype(np.int32),
            logprobs=-rng.random(length, dtype=np.float32),
            finish_reason="length" if length == LONGEST else "stop",
            text="".join(map(chr, rng.integers(97, 123, 3 * length).tolist())),
            policy_versions=np.zeros(length, np.int32),
        )
        for i, length in enumerate(lengths)
    )


def made_group(prompt: Prompt, rollouts: tuple[Rollout, ...]) -> Group:
    """Make a group in which every other sample is right, so that no group is zero-variance."""
    rewards = (np.arange(len(rollouts)) % 2).astype(np.float32)
    outcomes = tuple("correct" if reward else "wrong" for reward in rewards)
    return Group(prompt, rollouts, rewards, {"math": rewards}, outcomes, score_s=0.001)
