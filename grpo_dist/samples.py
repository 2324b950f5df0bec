"""Groups as Parquet tables, one row per sample: the record of what was sampled, and the in-flight part of a
checkpoint.

The table holds everything a Group does, so `read_groups` gives back what `write_groups` was given, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_dist.durable import publish
from grpo_dist.types import Group, Prompt, Rollout

_PART = "reward/"
_FLOATS, _INTS = pa.list_(pa.float32()), pa.list_(pa.int32())


def write_groups(path: Path, groups: list[Group]) -> None:
    """Write atomically: a reader never sees half a file, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(_table(groups), partial, compression="zstd")
    publish(partial, path)


def read_groups(path: Path, prompts: Mapping[str, Prompt]) -> list[Group]:
    """Groups in the order written. ``prompts`` by uid: the table names them, the data set holds them.

    Raises ValueError when the table names a prompt that the data set no longer has.
    """
    rows = pq.read_table(path).to_pylist()
    order = list(dict.fromkeys(row["uid"] for row in rows))
    missing = [uid for uid in order if uid not in prompts]
    if missing:
        raise ValueError(
            f"{path}: prompt uid {missing[0]!r} (and {len(missing) - 1} more) is not in the training data; "
            f"resume with "
            "the data set this run was started with, or start a new run"
        )
    by_uid: dict[str, list[dict]] = {uid: [] for uid in order}
    for row in rows:
        by_uid[row["uid"]].append(row)
    return [_group(prompts[uid], sorted(by_uid[uid], key=lambda r: r["sample"])) for uid in order]


def _table(groups: list[Group]) -> pa.Table:
    samples = [(g, i, r) for g in groups for i, r in enumerate(g.rollouts)]
    columns = {
        "uid": pa.array([g.prompt.uid for g, _, _ in samples], pa.string()),
        "source": pa.array([g.prompt.source for g, _, _ in samples], pa.string()),
        "problem": pa.array([g.prompt.text for g, _, _ in samples], pa.string()),
        "answer": pa.array([g.prompt.answer for g, _, _ in samples], pa.string()),
        "sample": pa.array([r.sample for _, _, r in samples], pa.int32()),
        "completion": pa.array([r.text for _, _, r in samples], pa.string()),
        "reward": pa.array([g.rewards[i] for g, i, _ in samples], pa.float32()),
        "outcome": pa.array([g.outcomes[i] for g, i, _ in samples], pa.string()),
        "finish_reason": pa.array([r.finish_reason for _, _, r in samples], pa.string()),
        "completion_ids": pa.array([r.completion_ids for _, _, r in samples], _INTS),
        "logprobs": pa.array([r.logprobs for _, _, r in samples], _FLOATS),
        "policy_versions": pa.array([r.policy_versions for _, _, r in samples], _INTS),
        "score_s": pa.array([g.score_s for g, _, _ in samples], pa.float64()),
        "baseline_reward": pa.array([g.baseline_reward for g, _, _ in samples], pa.float64()),
    }
    if any(g.step_rewards is not None for g in groups):
        columns["step_rewards"] = pa.array([_own(g.step_rewards, i) for g, i, _ in samples], _FLOATS)
        columns["step_ends"] = pa.array([_own(g.step_ends, i) for g, i, _ in samples], _INTS)
    for name in groups[0].reward_parts if groups else ():
        columns[_PART + name] = pa.array([g.reward_parts[name][i] for g, i, _ in samples], pa.float32())
    return pa.table(columns)


def _group(prompt: Prompt, rows: list[dict]) -> Group:
    parts = [key for key in rows[0] if key.startswith(_PART)]
    return Group(
        prompt=prompt,
        rollouts=tuple(_rollout(row) for row in rows),
        rewards=np.array([row["reward"] for row in rows], dtype=np.float32),
        reward_parts={
            key.removeprefix(_PART): np.array([row[key] for row in rows], dtype=np.float32) for key in parts
        },
        outcomes=tuple(row["outcome"] for row in rows),
        score_s=rows[0]["score_s"],
        baseline_reward=rows[0]["baseline_reward"],
        step_rewards=_steps(rows, "step_rewards", np.float32),
        step_ends=_steps(rows, "step_ends", np.int32),
    )


def _own(arrays: tuple[np.ndarray, ...] | None, sample: int) -> np.ndarray | None:
    return None if arrays is None else arrays[sample]


def _steps(rows: list[dict], column: str, dtype: type) -> tuple[np.ndarray, ...] | None:
    """None where the group had no process reward model; tables of runs without one lack the column."""
    if rows[0].get(column) is None:
        return None
    return tuple(np.array(row[column], dtype=dtype) for row in rows)


def _rollout(row: dict) -> Rollout:
    return Rollout(
        prompt_uid=row["uid"],
        sample=row["sample"],
        completion_ids=np.array(row["completion_ids"], dtype=np.int32),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        finish_reason=row["finish_reason"],
        text=row["completion"],
        policy_versions=np.array(row["policy_versions"], dtype=np.int32),
    )
