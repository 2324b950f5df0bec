"""Random but valid groups, for tests of everything after sampling."""

import pickle
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from grpo_dist.batch.rows import make_batch, with_demonstrations
from grpo_dist.batch.sharding import rows_of_ranks
from grpo_dist.data.demonstrations import Demonstration, load_demonstrations
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.types import (
    Denominators,
    FurtherRow,
    Group,
    KeptTokens,
    PackedSamples,
    Prompt,
    Rollout,
    TeacherLogprobs,
    ToolCall,
    TrainBatch,
    Turn,
)


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
                prompt_uid=prompt.uid, sample=i,
                completion_ids=rng.integers(11, 108, length).astype(np.int32),
                logprobs=-rng.random(length).astype(np.float32) * 5, finish_reason="stop", text="",
                policy_versions=np.zeros(length, np.int32),
            )
        )  # fmt: skip
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


def episode_group(
    index: int, rng: np.random.Generator, *, samples: int = 4, rewards=None, rewritten: float = 0.3
) -> Group:
    """Return episodes of one to four turns. Tokens that were not sampled have NaN log-probs, which nothing
    may read. ``rewritten``: probability that a turn begins a further row, half of these with another prompt.
    """
    prompt = Prompt(f"p{index}", _ids(rng, 6 + index), "1", "made", f"problem {index}")
    rollouts = tuple(_episode(prompt, i, rng, rewritten) for i in range(samples))
    rewards = rng.random(samples) if rewards is None else rewards
    return Group(prompt, rollouts, np.asarray(rewards, np.float32), {}, ("",) * samples)


def _episode(prompt: Prompt, sample: int, rng: np.random.Generator, rewritten: float) -> Rollout:
    rows, turns, contexts = [[]], [], []  # a row has (token, was sampled) pairs
    for t in range(int(rng.integers(1, 5))):
        if t and rng.random() < rewritten:
            rows.append([])
            kept = [*prompt.token_ids] if rng.random() < 0.5 else [99]
            contexts.append(np.array([*kept, *_ids(rng, int(rng.integers(1, 6)))], np.int32))
        elif t:
            rows[-1] += [(token, False) for token in _ids(rng, int(rng.integers(1, 5)))]
        rows[-1] += [(token, True) for token in _ids(rng, int(rng.integers(1, 6)))]
        call = ToolCall("python", f"{t}", "1\n", "ok", 0.25 * (t + 1))
        reward = [None, 0.5, float(t)][int(rng.integers(0, 3))]
        turns.append(Turn(len(rows) - 1, len(rows[-1]), f"action {t}", f"seen {t}", (call,), reward))
    first, *further = [_row_fields(row, rng) for row in rows]
    return Rollout(
        prompt_uid=prompt.uid, sample=sample, finish_reason="stop", text="", turns=tuple(turns), **first,
        further_rows=tuple(
            FurtherRow(context, **row) for context, row in zip(contexts, further, strict=True)
        ),
    )  # fmt: skip


def _row_fields(row: list[tuple[int, bool]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    sampled = np.array([was_sampled for _, was_sampled in row])
    return {
        "completion_ids": np.array([token for token, _ in row], np.int32),
        "logprobs": np.where(sampled, -5 * rng.random(len(row)), np.nan).astype(np.float32),
        "policy_versions": np.where(sampled, 3, -1).astype(np.int32),
        "sampled": sampled,
    }


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(11, 108, count).astype(np.int32)


def episode_groups(*, groups: int = 3, samples: int = 4, seed: int = 0, rewritten: float = 0.3):
    rng = np.random.default_rng(seed)
    return [episode_group(i, rng, samples=samples, rewritten=rewritten) for i in range(groups)]


def episode_batch(*, groups: int = 3, samples: int = 4, seed: int = 0, rewritten: float = 0.3):
    """Like `batch`, of episodes."""
    made = episode_groups(groups=groups, samples=samples, seed=seed, rewritten=rewritten)
    rng = np.random.default_rng(seed + 1)
    advantages = [rng.standard_normal(samples).astype(np.float32) for _ in made]
    rows = [row for g in made for r in g.rollouts for row in r.rows]
    reference = [-5 * rng.random(len(row.completion_ids), dtype=np.float32) for row in rows]
    return make_batch(made, advantages, ref_logprobs=reference, max_new_tokens=40)


def demonstrations(count: int, *, seed: int = 0, longest: int = 9):
    """Return demonstrations as groups; every other one begins with tokens that are not learned."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        completion = _ids(rng, int(rng.integers(3, longest)))
        learned = np.arange(len(completion)) >= 2 if i % 2 else None
        made.append(
            Demonstration(
                f"d{i}", _ids(rng, 3 + i % 4), "", "made", completion_ids=completion, sampled=learned
            ).to_group()
        )
    return made


def taught_row(row, rng: np.random.Generator, top_k: int = 0) -> TeacherLogprobs:
    """Return plausible teacher log-probs for ``row``; ``top_k`` tokens have about 2/3 of the probability."""
    size = len(row.completion_ids)
    sampled = -5 * rng.random(size, dtype=np.float32)
    if not top_k:
        return TeacherLogprobs(sampled)
    ids = np.stack([rng.permutation(108)[:top_k] for _ in range(size)]).astype(np.int32)
    probabilities = rng.dirichlet(np.ones(top_k), size) * rng.uniform(0.4, 0.9, (size, 1))
    return TeacherLogprobs(sampled, ids, np.log(probabilities + 1e-6).astype(np.float32))


def mixed_batch(*, samples: int = 4, seed: int = 0, with_reference: bool = True, top_k: int = 0):
    """Return rows of all three streams: four groups of completions and two of episodes, half of which have a
    teacher with ``top_k`` tokens; an unscored sample in each half; and five demonstrations. Every group has
    another temperature.
    """
    rng = np.random.default_rng(seed)
    made = [group(i, rng, samples=samples) for i in range(4)]
    made += [episode_group(i, rng, samples=samples) for i in range(4, 6)]
    for i, g in enumerate(made):
        made[i] = replace(g, rollouts=tuple(replace(r, temperature=0.55 + 0.2 * i) for r in g.rollouts))
    for index in (0, 3):
        made[index].rewards[1] = np.nan
    advantages = [rng.standard_normal(samples).astype(np.float32) for _ in made]
    rows = [(i, row) for i, g in enumerate(made) for r in g.rollouts for row in r.rows]
    reference = [-5 * rng.random(len(row.completion_ids), dtype=np.float32) for _, row in rows]
    teachers = [taught_row(row, rng, top_k) if i in (0, 1, 4) else None for i, row in rows]
    ref_logprobs = reference if with_reference else None
    batch = make_batch(made, advantages, ref_logprobs=ref_logprobs, max_new_tokens=40, teachers=teachers)
    return with_demonstrations(batch, demonstrations(5, seed=seed), first_row=len(rows))


def demonstrated_batch(*, seed: int = 0):
    """Return `mixed_batch` with demonstrations as its only stream, as if every sample were excluded."""
    batch = mixed_batch(seed=seed)
    sizes = Denominators(0.0, 0.0, demonstrated=batch.denominators.demonstrated)
    policy = replace(batch.policy, mask=torch.zeros_like(batch.policy.mask))
    return replace(batch, policy=policy, denominators=sizes, teacher=None)


def truncated(groups, vocabulary: int, *, seed: int = 0):
    """Return ``groups`` whose sampled tokens have sampling masks: lists, bits, and none for the whole
    vocabulary. The last sample of each group has no masks at all.
    """
    rng = np.random.default_rng(seed)

    def masks(row):
        lists = []
        for token in row.completion_ids:
            size = rng.choice([1, 2, 3, vocabulary // 2, vocabulary - 1, vocabulary])
            lists.append(np.union1d(rng.permutation(vocabulary)[:size], [token]))
        if row.sampled is not None:
            lists = [ids if sampled else [] for ids, sampled in zip(lists, row.sampled, strict=True)]
        return KeptTokens.from_lists(lists, vocabulary)

    def with_masks(rollout):
        further = tuple(replace(row, kept=masks(row)) for row in rollout.further_rows)
        return replace(rollout, kept=masks(rollout), further_rows=further)

    return [replace(g, rollouts=(*map(with_masks, g.rollouts[:-1]), g.rollouts[-1])) for g in groups]


def batch_of(groups):
    """Return the batch of ``groups``, with advantages of 1."""
    advantages = [np.ones(len(g.rollouts), np.float32) for g in groups]
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=40)


def truncated_batch(vocabulary: int, *, groups: int = 3, samples: int = 4, seed: int = 0):
    """Like `episode_batch`, with sampling masks."""
    made = truncated(episode_groups(groups=groups, samples=samples, seed=seed), vocabulary, seed=seed)
    rng = np.random.default_rng(seed + 1)
    advantages = [rng.standard_normal(samples).astype(np.float32) for _ in made]
    rows = [row for g in made for r in g.rollouts for row in r.rows]
    reference = [-5 * rng.random(len(row.completion_ids), dtype=np.float32) for row in rows]
    return make_batch(made, advantages, ref_logprobs=reference, max_new_tokens=40)


def check_stored(groups, directory, field, same):
    """Assert that ``field`` of every row, also further ones, survives sending and checkpoint files, by
    ``same(one, other)``, and that the records of a run lack it.
    """
    prompts = {g.prompt.uid: g.prompt for g in groups}
    write_groups(directory / "kept.parquet", groups, for_training=True)
    write_groups(directory / "shown.parquet", groups)
    sent = pickle.loads(pickle.dumps(PackedSamples.from_groups([g.rollouts for g in groups])))
    kept = read_groups(directory / "kept.parquet", prompts)
    for stored in ([sent.group(i) for i in range(len(groups))], [g.rollouts for g in kept]):
        for group, others in zip(groups, stored, strict=True):
            for one, two in zip(group.rollouts, others, strict=True):
                for a, b in zip(one.rows, two.rows, strict=True):
                    assert same(getattr(a, field), getattr(b, field))
    shown = [r for g in read_groups(directory / "shown.parquet", prompts) for r in g.rollouts]
    assert all(getattr(row, field) is None for r in shown for row in r.rows)
    assert any(r.further_rows for r in shown)


def shard(batch: TrainBatch, ranks: int, *, square: float = 0.0) -> list[TrainBatch]:
    """Return the rows of each rank, as it receives them."""
    return [batch.select(rows) for rows in rows_of_ranks(batch, ranks, square=square)]


class Pair(NamedTuple):
    """Token ids of a demonstration; ``sampled``: whether each token of the completion is learned."""

    prompt: list[int]
    completion: list[int]
    sampled: list[bool]


def load_pairs(settings, tokenizer, **how):
    """Return the demonstrations of ``settings`` as lists."""
    return [
        Pair(row.token_ids.tolist(), row.completion_ids.tolist(),
             [True] * len(row.completion_ids) if row.sampled is None else row.sampled.tolist())
        for row in load_demonstrations(settings, tokenizer, **how)
    ]  # fmt: skip
