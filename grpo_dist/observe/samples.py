"""Groups as Parquet tables, one row per sample: the samples of a run, and the groups in a checkpoint.

A table holds everything that a Group does, sampling masks and routes on request: `read_groups` returns what
`write_groups` got, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_dist.batch.token_values import TokenValues, ValuesOfSamples, has_tokens
from grpo_dist.runtime.files import clear, publish, record_to_dict
from grpo_dist.types import FurtherRow, Group, HeldRoutes, KeptTokens, Prompt, Rollout, ToolCall, Turn

_NAME = re.compile(r"(?:eval_.+_)?step_(?P<step>\d+)\.parquet")  # sample tables of a run
_PART = "reward/"
_TOKENS_OF_PART = 1 << 20  # per row group
_REPEATED = [
    "uid", "source", "problem", "answer", "outcome", "finish_reason", "temperature", "max_new_tokens",
    "policy_versions.list.element",
]  # fmt: skip
_OF_PROMPTS = ("source", "problem", "answer", "thought", "prompt_ids")  # columns for readers of the file
_OF_TOKENS = ("advantages", "ref_logprobs", "trainer_logprobs")
_FLOATS, _INTS, _BOOLS = pa.list_(pa.float32()), pa.list_(pa.int32()), pa.list_(pa.bool_())
_CALL = pa.struct(
    [*((name, pa.string()) for name in ("name", "arguments", "result", "outcome")), ("seconds", pa.float64())]
)
_TURN = pa.struct(
    {
        "row": pa.int32(),
        "end": pa.int32(),
        "text": pa.string(),
        "observation": pa.string(),
        "calls": pa.list_(_CALL),
        "reward": pa.float64(),
        "thought": pa.string(),  # tables of earlier versions have none
    }.items()
)
_THOUGHT = pa.struct({name: pa.string() for name in ("opening", "closing", "prompt")}.items())
_ROUTES = pa.struct({"dtype": pa.string(), "shape": _INTS, "bytes": pa.binary()}.items())
_KEPT = pa.struct(
    {"counts": pa.binary(), "ids": pa.binary(), "bits": pa.binary(), "width": pa.int32()}.items()
)
_ROW = {
    "context_ids": _INTS,
    "completion_ids": _INTS,
    "logprobs": _FLOATS,
    "policy_versions": _INTS,
    "sampled": _BOOLS,
}


def write_groups(
    path: Path, groups: list[Group], values: ValuesOfSamples | None = None, *, for_training: bool = False
) -> None:
    """Write ``groups`` atomically: a reader never sees half a file, even after a crash.

    ``values`` of trained samples are added for readers of the file; `read_groups` ignores them.
    ``for_training``: write sampling masks and routes, too; raises SamplesLost when some are lost.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    clear(partial)
    columns = _FurtherColumns.from_groups(groups, values or {}, for_training)
    tables = (_table(part, values or {}, columns) for part in _parts(groups))
    first = next(tables)
    # A dictionary of log-probs or token ids would be as long as the data, and slower than everything else.
    with pq.ParquetWriter(
        partial, first.schema, compression="zstd", compression_level=1, use_dictionary=_REPEATED
    ) as writer:
        for table in chain([first], tables):
            writer.write_table(table)
    publish(partial, path)


def remove_after(step: int, directory: Path) -> None:
    """Delete the samples of later steps from a run's ``directory`` of samples, which may be missing."""
    for path in directory.glob("*.parquet"):
        if (match := _NAME.fullmatch(path.name)) and int(match["step"]) > step:
            path.unlink(missing_ok=True)


def read_groups(path: Path, prompts: Mapping[str, Prompt]) -> list[Group]:
    """Read the groups in the order written. The table has only the uids of the ``prompts``.

    Raises ValueError for a uid that is not in ``prompts``.
    """
    rows = _rows(path)
    order = list(dict.fromkeys(row["uid"] for row in rows))
    missing = [uid for uid in order if uid not in prompts]
    if missing:
        raise ValueError(
            f"{path}: prompt uid {missing[0]!r} (and {len(missing) - 1} more) is not in the training data; "
            "resume with the data set of the original run, or start a new run"
        )
    by_uid: dict[str, list[dict]] = {uid: [] for uid in order}
    for row in rows:
        by_uid[row["uid"]].append(row)
    return [_group(prompts[uid], sorted(by_uid[uid], key=lambda r: r["sample"])) for uid in order]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return what a Group holds of each row, with an array for each list of numbers."""
    with pq.ParquetFile(path) as file:
        names = [name for name in file.schema_arrow.names if name not in _OF_PROMPTS]
        parts = (file.read_row_group(i, columns=names) for i in range(file.num_row_groups))
        columns = ([_values(column.combine_chunks()) for column in part.columns] for part in parts)
        return [dict(zip(names, row, strict=True)) for part in columns for row in zip(*part, strict=True)]


def _values(column: pa.Array) -> list[Any]:
    """Return the values of ``column`` as `to_pylist` does, but a list of numbers as an array: a Python object
    per token takes ten times as much memory, and holds the GIL.
    """
    if pa.types.is_struct(column.type):
        names = [field.name for field in column.type]
        rows = zip(*map(_values, column.flatten()), strict=True)
        values: Iterable[Any] = (dict(zip(names, row, strict=True)) for row in rows)
    elif pa.types.is_list(column.type):
        inner = column.flatten()
        is_numbers = pa.types.is_primitive(inner.type)
        items = inner.to_numpy(zero_copy_only=False) if is_numbers else _values(inner)
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0)).tolist()
        values = (items[begin:end] for begin, end in pairwise([0, *ends]))
    else:
        return column.to_pylist()
    return [v if valid else None for v, valid in zip(values, column.is_valid().to_pylist(), strict=True)]


@dataclass(frozen=True, slots=True)
class _FurtherColumns:
    """The optional columns of a table."""

    names: frozenset[str]
    parts: tuple[str, ...]  # names of the rewards
    token_values: Sequence[str]

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], values: ValuesOfSamples, for_training: bool
    ) -> _FurtherColumns:
        rollouts = [r for g in groups for r in g.rollouts]
        has = {
            "failures": any(g.failures for g in groups),
            "step_rewards": any(g.step_rewards is not None for g in groups),
            "context_ids": any(r.context_ids is not None for r in rollouts),
            "sampled": any(r.sampled is not None for r in rollouts),
            "turns": any(r.turns for r in rollouts),
            "further_rows": any(r.further_rows for r in rollouts),
            "kept": for_training and any(r.kept for r in rollouts),
            "routes": for_training and any(r.routes for r in rollouts),
        }
        return cls(
            frozenset(name for name, is_present in has.items() if is_present),
            tuple(dict.fromkeys(name for g in groups for name in g.reward_parts)),
            _OF_TOKENS if has_tokens(values) else (),
        )


def _parts(groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Split ``groups`` into the row groups of a file, at least one: a whole step may be gigabytes, and each
    row group reuses the memory of the one before.
    """
    begin = tokens = 0
    for index, group in enumerate(groups):
        tokens += sum(r.num_tokens for r in group.rollouts)
        if tokens >= _TOKENS_OF_PART:
            yield groups[begin : index + 1]
            begin, tokens = index + 1, 0
    if begin < len(groups) or not groups:
        yield groups[begin:]


def _table(groups: Sequence[Group], values: ValuesOfSamples, further: _FurtherColumns) -> pa.Table:
    rollouts = [r for g in groups for r in g.rollouts]
    owner = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])

    def repeat(values: Iterable[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(pa.array(owner))

    columns = {
        "uid": repeat((g.prompt.uid for g in groups), pa.string()),
        "source": repeat((g.prompt.source for g in groups), pa.string()),
        "problem": repeat((g.prompt.text for g in groups), pa.string()),
        "answer": repeat((g.prompt.answer for g in groups), pa.string()),
        "thought": repeat((record_to_dict(g.prompt.thought) for g in groups), _THOUGHT),
        "sample": pa.array([r.sample for r in rollouts], pa.int32()),
        "completion": pa.array([r.text for r in rollouts], pa.string()),
        "reward": _concatenate([g.rewards for g in groups], pa.float32()),
        "outcome": pa.array([o for g in groups for o in g.outcomes], pa.string()),
        "finish_reason": pa.array([r.finish_reason for r in rollouts], pa.string()),
        "temperature": pa.array([r.temperature for r in rollouts], pa.float64()),
        "max_new_tokens": pa.array([r.max_new_tokens for r in rollouts], pa.int32()),
        "completion_ids": _lists([r.completion_ids for r in rollouts], _INTS),
        "logprobs": _lists([r.logprobs for r in rollouts], _FLOATS),
        "policy_versions": _lists([r.policy_versions for r in rollouts], _INTS),
        "score_s": repeat((g.score_s for g in groups), pa.float64()),
        "degenerate": repeat((g.degenerate for g in groups), pa.int32()),
        "baseline_reward": repeat((g.baseline_reward for g in groups), pa.float64()),
        # Only for the first sample of each group: they share their prompt.
        "prompt_ids": pa.array(
            [None if i else g.prompt.token_ids for g in groups for i in range(len(g.rollouts))], _INTS
        ),
    }
    if "failures" in further.names:
        reasons = [sample_reasons for g in groups for sample_reasons in g.failures or [()] * len(g.rollouts)]
        columns["failures"] = pa.array(reasons, pa.list_(pa.string()))
    if "step_rewards" in further.names:
        samples = [(g, i) for g in groups for i in range(len(g.rollouts))]
        columns["step_rewards"] = pa.array([_select(g.step_rewards, i) for g, i in samples], _FLOATS)
        columns["step_ends"] = pa.array([_select(g.step_ends, i) for g, i in samples], _INTS)
    columns |= _episode_columns(rollouts, values, further)
    if "kept" in further.names:
        columns["kept"] = pa.array([[_mask_dict(row) for row in r.rows] for r in rollouts], pa.list_(_KEPT))
    if "routes" in further.names:
        columns["routes"] = pa.array([[_routes(row) for row in r.rows] for r in rollouts], pa.list_(_ROUTES))
    if values:
        entries = [values.get((r.prompt_uid, r.sample)) for r in rollouts]
        columns["advantage"] = pa.array([None if v is None else v.advantage for v in entries], pa.float32())
        for name in further.token_values:
            columns[name] = pa.array([None if v is None else getattr(v, name) for v in entries], _FLOATS)
    for name in further.parts:
        columns[_PART + name] = _part(groups, name)
    return pa.table(columns)


def _part(groups: Sequence[Group], name: str) -> pa.Array:
    """Return the reward ``name``; null, not NaN, where the group's source has no such reward."""
    if all(name in group.reward_parts for group in groups):
        return _concatenate([group.reward_parts[name] for group in groups], pa.float32())
    lists = [group.reward_parts.get(name, [None] * len(group.rollouts)) for group in groups]
    return pa.array([value for values in lists for value in values], pa.float32())


def _episode_columns(
    rollouts: list[Rollout], values: ValuesOfSamples, further: _FurtherColumns
) -> dict[str, pa.Array]:
    """Make the columns of episodes; {} without episodes."""
    columns = {}
    if "context_ids" in further.names:
        columns["context_ids"] = pa.array([r.context_ids for r in rollouts], _INTS)
    if "sampled" in further.names:
        columns["sampled"] = pa.array([r.sampled for r in rollouts], _BOOLS)
    if "turns" in further.names:
        columns["turns"] = pa.array([[_turn_dict(t) for t in r.turns] for r in rollouts], pa.list_(_TURN))
    if "further_rows" in further.names:
        kinds = _ROW | dict.fromkeys(further.token_values, _FLOATS)
        rows = [_row_dicts(r, values.get((r.prompt_uid, r.sample)), kinds) for r in rollouts]
        columns["further_rows"] = pa.array(rows, pa.list_(pa.struct(kinds.items())))
    return columns


def _routes(row: Rollout | FurtherRow) -> dict[str, Any] | None:
    if row.routes is None:
        return None
    experts = row.routes.fetch()
    return {"dtype": experts.dtype.str, "shape": experts.shape, "bytes": experts.tobytes()}


def _read_routes(row: dict, index: int) -> HeldRoutes | None:
    """Read the routes of a sample's training row ``index``; None: the table has none."""
    stored = row["routes"][index] if "routes" in row else None
    if stored is None:
        return None
    return HeldRoutes(np.frombuffer(stored["bytes"], stored["dtype"]).reshape(stored["shape"]))


def _mask_dict(row: Rollout | FurtherRow) -> dict[str, Any] | None:
    if row.kept is None:
        return None
    _, values = row.kept.__reduce__()
    return dict(zip(("counts", "ids", "bits", "width"), values, strict=True))


def _read_kept(row: dict, index: int) -> KeptTokens | None:
    """Read the sampling masks of a sample's training row ``index``; None: the table has none."""
    stored = row["kept"][index] if "kept" in row else None
    return None if stored is None else KeptTokens.from_bytes(**stored)


def _turn_dict(turn: Turn) -> dict[str, Any]:
    return record_to_dict(turn) | {"calls": [record_to_dict(call) for call in turn.calls]}


def _row_dicts(rollout: Rollout, values: TokenValues | None, names: Iterable[str]) -> list[dict[str, Any]]:
    row_values = values.further_rows if values and values.further_rows else [None] * len(rollout.further_rows)
    return [
        {name: getattr(row_value if name in _OF_TOKENS else row, name, None) for name in names}
        for row, row_value in zip(rollout.further_rows, row_values, strict=True)
    ]


def _concatenate(arrays: list[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Concatenate ``arrays`` into a column, without a Python object per number."""
    return pa.array(np.concatenate(arrays) if arrays else [], kind)


def _lists(arrays: list[np.ndarray], kind: pa.ListType) -> pa.Array:
    """Make a list column with one list per array."""
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), _concatenate(arrays, kind.value_type))


def _group(prompt: Prompt, rows: list[dict]) -> Group:
    failures = tuple(tuple(row.get("failures") or ()) for row in rows)
    parts = [key for key, value in rows[0].items() if key.startswith(_PART) and value is not None]
    return Group(
        prompt=prompt,
        rollouts=tuple(_rollout(row) for row in rows),
        rewards=np.array([row["reward"] for row in rows], dtype=np.float32),
        reward_parts={
            key.removeprefix(_PART): np.array([row[key] for row in rows], dtype=np.float32) for key in parts
        },
        outcomes=tuple(row["outcome"] for row in rows),
        score_s=rows[0]["score_s"],
        degenerate=rows[0]["degenerate"],
        baseline_reward=rows[0]["baseline_reward"],
        step_rewards=_steps(rows, "step_rewards", np.float32),
        step_ends=_steps(rows, "step_ends", np.int32),
        failures=failures if any(failures) else (),
    )


def _select(arrays: tuple[np.ndarray, ...] | None, sample: int) -> np.ndarray | None:
    return None if arrays is None else arrays[sample]


def _steps(rows: list[dict], column: str, dtype: type) -> tuple[np.ndarray, ...] | None:
    """Read per-step values; None without a process reward model: the table may lack the column."""
    if rows[0].get(column) is None:
        return None
    return tuple(np.array(row[column], dtype=dtype) for row in rows)


def _rollout(row: dict) -> Rollout:
    arrays = _arrays(row)
    return Rollout(
        prompt_uid=row["uid"],
        sample=row["sample"],
        completion_ids=arrays["completion_ids"],
        logprobs=arrays["logprobs"],
        finish_reason=row["finish_reason"],
        text=row["completion"],
        policy_versions=arrays["policy_versions"],
        sampled=arrays["sampled"],
        turns=tuple(
            Turn(**turn | {"calls": tuple(ToolCall(**call) for call in turn["calls"])})
            for turn in row.get("turns") or ()
        ),
        further_rows=tuple(
            FurtherRow(**_arrays(further), routes=_read_routes(row, i), kept=_read_kept(row, i))
            for i, further in enumerate(row.get("further_rows") or (), 1)
        ),
        temperature=row["temperature"],
        max_new_tokens=row["max_new_tokens"],
        routes=_read_routes(row, 0),
        kept=_read_kept(row, 0),
        context_ids=arrays.get("context_ids"),
    )


def _arrays(row: dict) -> dict[str, Any]:
    """Read the arrays of a training row. A table without episodes has no ``sampled``."""
    return {
        name: None if row.get(name) is None else np.array(row[name], kind.value_type.to_pandas_dtype())
        for name, kind in _ROW.items()
        if name in row or name == "sampled"
    }
