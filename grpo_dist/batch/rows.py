"""From scored groups to padded rows with fixed denominators, and to the updates of a step.

    prompt [7 8 9], completion [4 5 2]   tokens     7 8 9 4 5 2
                                         loss_mask  . . . x x x     the EOS a model produced (2) is trained
    an episode: sampled [4 5], given     tokens     7 8 9 4 5 6 6 2
    [6 6], sampled [2]                   loss_mask  . . . x x . . x

One row per sample, group after group. An episode whose history a chat template rewrote has further rows after
its first one, with the same advantage; each row trains on its own sampled tokens.

An unscored sample (its reward is not finite) stays in the batch with an empty mask: it adds to no loss, KL
term or denominator. So does a sample with a NaN or infinite engine log-prob: its sampling distribution is
unknown. Its reward still counts in its group.

A demonstration is a row of the cross-entropy stream, after the sample rows:

sample          prompt [7 8], completion [4 2]      policy.mask   . . x x .
demonstration   prompt [7 9 9], completion [5 2]    demonstrated  . . . x x

Groups of each optimiser update, in the first and in later epochs over the same batch:

    epoch 1   update 1: groups 0 1     update 2: groups 2 3      in the order of the batch
    epoch 2   update 1: groups 3 0     update 2: groups 1 2      dealt again, `batch.shuffle_epochs`

Groups stay whole, so that rows share their prompt and an update's mean over prompts keeps its meaning. The
driver deals them by a seed, so updates do not depend on the number of ranks. A rank regroups its own rows; no
row moves to another rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from grpo_dist.types import (
    Denominators,
    EpochUpdate,
    FurtherRow,
    Group,
    PolicyStream,
    Prompt,
    Rollout,
    TeacherLogprobs,
    TeacherStream,
    TrainBatch,
    have_logprobs,
    sampled_logprobs,
    training_rows,
)


def make_batch(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    *,
    ref_logprobs: Sequence[np.ndarray] | None,
    max_new_tokens: int,
    mask_truncated: bool = False,
    mask_outcomes: Collection[str] = (),
    teachers: Sequence[TeacherLogprobs | None] | None = None,
    trains_taught: bool = False,
) -> TrainBatch:
    """Make the right-padded rows of all samples.

    Args:
        advantages: [G] for each group; the batch keeps their dtype.
        ref_logprobs: float32 [C] for each row in order, or None when there is no KL term.
        max_new_tokens: longest completion that could have been sampled.
        mask_truncated: do not train on completions cut at ``max_new_tokens``; their rewards still count in
            the group (DAPO's overlong filtering, arXiv:2503.14476, section 3.4).
        mask_outcomes: the same for episodes with one of these outcomes. Episodes whose environment failed
            ("error") are never trained on.
        teachers: teacher log-probs of each row in order, None for an untaught row; None: there is no
            teacher. An unscored sample still learns from its teacher.
        trains_taught: unscored samples with a teacher are in the policy loss, too.
    """
    samples = [r for g in groups for r in g.rollouts]
    rows = training_rows(samples)
    owner, group_ids = _owners(groups, samples)
    placed, shared = _place_rows(groups, rows, group_ids)
    tokens = _tokens(groups, placed, group_ids)
    usable = _usable(samples, rows, mask_truncated=mask_truncated, mask_outcomes=mask_outcomes)[owner]
    has_teacher = usable & _has_teacher(teachers, len(rows))
    is_scored = np.isfinite(np.concatenate([g.rewards for g in groups]))[owner]
    trained = usable & (is_scored | (has_teacher & trains_taught))
    mask = _loss_mask(placed, trained | has_teacher, tokens.shape[1])
    loss_mask, taught, teacher = mask, None, None
    if teachers is not None:
        loss_mask, taught = mask & trained[:, None], mask & has_teacher[:, None]
        teacher = _teacher_stream(teachers, placed, taught, has_teacher)
    advantage = np.where(loss_mask, np.concatenate(list(advantages))[owner, None], 0)

    spread_values = partial(_spread_values, placed, mask)
    sequence_tokens = _count_owner_tokens(loss_mask, owner) if len(rows) > len(samples) else None
    return TrainBatch(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(placed.ends),
        group_ids=torch.from_numpy(group_ids),
        prompt_lengths=torch.from_numpy(shared),
        temperatures=_temperatures(samples, owner),
        routes=tuple(row.routes for row in rows) if any(row.routes for row in rows) else None,
        kept=tuple(row.kept for row in rows) if any(row.kept for row in rows) else None,
        row_ids=torch.arange(len(rows)),
        policy=PolicyStream(
            mask=torch.from_numpy(loss_mask),
            advantages=torch.from_numpy(advantage),
            rollout_logprobs=spread_values([row.logprobs for row in rows], trained),
            ref_logprobs=None if ref_logprobs is None else spread_values(ref_logprobs, trained),
            max_tokens=max_new_tokens,
            sequence_tokens=None if sequence_tokens is None else torch.from_numpy(sequence_tokens),
            prompt_tokens=torch.from_numpy(_count_owner_tokens(loss_mask, group_ids)),
        ),
        teacher=teacher,
        denominators=_denominators(loss_mask, group_ids, sequence_tokens, taught),
    )


def sampled_tokens(groups: Sequence[Group]) -> torch.Tensor:
    """Return which tokens of `make_batch`'s rows were sampled with a known log-prob, trained or not, bool
    [B, T]. Episodes whose environment failed have none.
    """
    samples = [r for g in groups for r in g.rollouts]
    rows = training_rows(samples)
    owner, group_ids = _owners(groups, samples)
    placed, _ = _place_rows(groups, rows, group_ids)
    usable = _usable(samples, rows, mask_truncated=False, mask_outcomes=())[owner]
    return torch.from_numpy(_loss_mask(placed, usable, int(placed.ends.max())))


@dataclass(frozen=True, slots=True)
class _PlacedRows:
    """Rows, and where each row's completion starts and ends in the batch, int64 [B]."""

    rows: Sequence[Rollout | FurtherRow]
    starts: np.ndarray
    ends: np.ndarray


def _owners(groups: Sequence[Group], samples: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sample index and the group index of each row."""
    owner = np.repeat(np.arange(len(samples)), [1 + len(r.further_rows) for r in samples])
    sample_group = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])
    return owner, sample_group[owner]


def _has_teacher(teachers: Sequence[TeacherLogprobs | None] | None, rows: int) -> np.ndarray:
    return np.zeros(rows, bool) if teachers is None else np.array([t is not None for t in teachers], bool)


def _count_owner_tokens(loss_mask: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return for each row the trained tokens over all rows of its ``owner``, sample or group, int64 [B]."""
    return np.bincount(owner, np.count_nonzero(loss_mask, axis=1))[owner].astype(np.int64)


def _temperatures(samples: Sequence[Rollout], owner: np.ndarray) -> torch.Tensor | None:
    temperatures = [r.temperature for r in samples if r.temperature is not None]
    assert len(temperatures) in (0, len(samples)), "either all samples have a temperature or none"
    return torch.from_numpy(np.array(temperatures, np.float64)[owner]) if temperatures else None


def context_ids(prompt: Prompt, row: Rollout | FurtherRow) -> np.ndarray:
    """Return the tokens before the row's completion, int32 [P]."""
    return prompt.token_ids if row.context_ids is None else row.context_ids


def shared_tokens(prompt: Prompt, row: Rollout | FurtherRow) -> int:
    """Return how many tokens of ``prompt`` the row begins with: all, or 0 if its context was rewritten."""
    size, context = len(prompt.token_ids), context_ids(prompt, row)
    same = context is prompt.token_ids or np.array_equal(context[:size], prompt.token_ids)
    return size if same else 0


def _place_rows(
    groups: Sequence[Group], rows: Sequence[Rollout | FurtherRow], group_ids: np.ndarray
) -> tuple[_PlacedRows, np.ndarray]:
    """Place completions after their contexts. Also return the number of prompt tokens in each context."""
    starts = np.array([len(g.prompt.token_ids) for g in groups])[group_ids]
    shared = starts.copy()
    for i, row in enumerate(rows):
        if row.context_ids is not None:
            starts[i] = len(row.context_ids)
            shared[i] = shared_tokens(groups[group_ids[i]].prompt, row)
    lengths = np.fromiter((len(row.completion_ids) for row in rows), np.int64, len(rows))
    return _PlacedRows(rows, starts, starts + lengths), shared


def _tokens(groups: Sequence[Group], placed: _PlacedRows, group_ids: np.ndarray) -> np.ndarray:
    # numpy allocates and fills: torch pays for every fresh page, and a call per row.
    tokens = np.zeros((len(placed.rows), int(placed.ends.max())), np.int64)
    ends = np.searchsorted(group_ids, np.arange(len(groups) + 1)).tolist()
    for group, first, end in zip(groups, ends, ends[1:], strict=False):
        prompt = group.prompt.token_ids[: tokens.shape[1]]  # may be longer than rows with rewritten contexts
        tokens[first:end, : len(prompt)] = prompt
    for i, row in enumerate(placed.rows):
        if row.context_ids is not None:
            tokens[i] = 0
            tokens[i, : placed.starts[i]] = row.context_ids
    _fill(tokens, placed, [row.completion_ids for row in placed.rows])
    return tokens


def _usable(
    samples: Sequence[Rollout],
    rows: Sequence[Rollout | FurtherRow],
    *,
    mask_truncated: bool,
    mask_outcomes: Collection[str],
) -> np.ndarray:
    """Return which samples may be trained on, whatever their rewards, bool [samples]."""
    usable = have_logprobs(samples, np.isfinite(sampled_logprobs(rows)))
    excluded = {"error", *(["length"] if mask_truncated else [])}
    excluded_episodes = excluded.union(mask_outcomes)
    usable &= np.array([r.finish_reason not in (excluded_episodes if r.turns else excluded) for r in samples])
    return usable


def _loss_mask(placed: _PlacedRows, trained: np.ndarray, width: int) -> np.ndarray:
    column, starts, ends = np.arange(width), placed.starts, placed.ends
    mask: np.ndarray = column >= starts[:, None]
    mask &= column < np.where(trained, ends, 0)[:, None]
    for i, row in enumerate(placed.rows):
        if row.sampled is not None:
            mask[i, starts[i] : ends[i]] &= row.sampled
    return mask


def _spread_values(
    placed: _PlacedRows, mask: np.ndarray, values: Sequence[np.ndarray | None], row_mask: np.ndarray
) -> torch.Tensor:
    """Return completion ``values`` of the rows in ``row_mask``, float32 [B, T], 0 elsewhere."""
    out = np.zeros(mask.shape, np.float32)
    _fill(out, placed, values, row_mask)
    has_given_tokens = any(row.sampled is not None for row in placed.rows)
    return torch.from_numpy(np.where(mask, out, 0) if has_given_tokens else out)


def _teacher_stream(
    teachers: Sequence[TeacherLogprobs | None], placed: _PlacedRows, taught: np.ndarray, row_mask: np.ndarray
) -> TeacherStream:
    """Return log-probs of ``taught`` tokens, and the teachers' likeliest tokens, if any. ``row_mask``: taught
    rows.
    """
    by_row = [TeacherLogprobs(np.empty(0)) if teacher is None else teacher for teacher in teachers]
    sampled = _spread_values(placed, taught, [teacher.sampled for teacher in by_row], row_mask)
    stream = TeacherStream(torch.from_numpy(taught), sampled)
    sizes = {teacher.top_ids.shape[1] for teacher in by_row if teacher.top_ids is not None}
    if not sizes:
        return stream
    (count,) = sizes
    ids, top = (np.zeros((*taught.shape, count), kind) for kind in (np.int32, np.float32))
    _fill(ids, placed, [teacher.top_ids for teacher in by_row], row_mask)
    _fill(top, placed, [teacher.top for teacher in by_row], row_mask)
    return replace(stream, top_ids=torch.from_numpy(ids), top_logprobs=torch.from_numpy(top))


def _fill(
    out: np.ndarray,
    placed: _PlacedRows,
    values: Sequence[np.ndarray | None],
    row_mask: np.ndarray | None = None,
) -> None:
    """Write completion ``values`` to their places in ``out``, for the rows in ``row_mask`` (None: all)."""
    rows = range(len(values)) if row_mask is None else np.flatnonzero(row_mask).tolist()
    begin, end = placed.starts.tolist(), placed.ends.tolist()
    for i in rows:
        out[i, begin[i] : end[i]] = values[i]


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids with 0 on the right: int64 [B, T]; and bool [B, T], True from ``starts`` to each
    row's end.
    """
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = torch.as_tensor(row)
        mask[i, start : len(row)] = True
    return tokens, mask


def split_updates(batch: TrainBatch, *, num_groups: int, num_updates: int) -> list[TrainBatch]:
    """Split whole groups, in order and evenly, into optimiser updates with separate denominators."""
    if num_updates == 1:
        return [batch]
    dealt = rows_of_updates(batch.group_ids.numpy(), num_groups=num_groups, num_updates=num_updates)
    parts = [batch.select(rows.tolist()) for rows in dealt]
    return [replace(part, denominators=count_denominators(part)) for part in parts]


def count_denominators(batch: TrainBatch) -> Denominators:
    """Return the denominators of an update with only the rows of ``batch``, without demonstrations."""
    sequence_tokens, teacher = batch.policy.sequence_tokens, batch.teacher
    return _denominators(
        batch.policy.mask.numpy(),
        batch.group_ids.numpy(),
        None if sequence_tokens is None else sequence_tokens.numpy(),
        None if teacher is None else teacher.mask.numpy(),
    )


def _denominators(
    mask: np.ndarray, group_ids: np.ndarray, sequence_tokens: np.ndarray | None, taught: np.ndarray | None
) -> Denominators:
    # numpy counts booleans a hundred times faster than torch
    tokens = np.count_nonzero(mask, axis=1)
    # The shares of a sample's rows add up to 1.
    shares = tokens > 0 if sequence_tokens is None else tokens / np.maximum(sequence_tokens, 1)
    return Denominators(
        tokens=float(tokens.sum()),
        sequences=float(round(shares.sum())),
        prompts=float(len(np.unique(group_ids[tokens > 0]))),
        taught=0.0 if taught is None else float(np.count_nonzero(taught)),
    )


def batch_of(groups: Sequence[Group], max_length: int) -> TrainBatch:
    """Make a batch of demonstrations only: one row each, with all completion tokens as denominator."""
    ones = [np.ones(1, np.float32)] * len(groups)
    return make_batch(groups, ones, ref_logprobs=None, max_new_tokens=max_length)


def with_demonstrations(update: TrainBatch, groups: Sequence[Group], *, first_row: int) -> TrainBatch:
    """Return ``update`` with one cross-entropy row for each demonstration in ``groups``.

    ``first_row``: id of the first demonstration row, above all sample row ids of the step.
    """
    demonstration_rows = batch_of(groups, update.policy.max_tokens)
    offset, rows, count = len(update), len(update) + len(demonstration_rows), len(demonstration_rows)
    width = max(update.tokens.shape[1], demonstration_rows.tokens.shape[1])

    def extend(values: Tensor) -> Tensor:
        """Add rows and padding of zeros."""
        out = values.new_zeros((rows, width, *values.shape[2:]) if values.ndim > 1 else (rows,))
        out[(slice(offset), *(slice(size) for size in values.shape[1:]))] = values
        return out

    joined = update.map_tensors(extend)
    first_group = int(update.group_ids.max()) + 1
    joined.tokens[offset:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.tokens
    joined.lengths[offset:] = demonstration_rows.lengths
    joined.group_ids[offset:] = torch.arange(first_group, first_group + count)
    joined.row_ids[offset:] = torch.arange(first_row, first_row + count)
    if joined.temperatures is not None:
        joined.temperatures[offset:] = 1.0  # cross-entropy is at temperature 1
    demonstrated = torch.zeros(rows, width, dtype=torch.bool)
    demonstrated[offset:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.policy.mask
    return replace(
        joined,
        demonstrated=demonstrated,
        # No engine sampled the demonstrations.
        routes=None if update.routes is None else (*update.routes, *[None] * count),
        kept=None if update.kept is None else (*update.kept, *[None] * count),
        denominators=replace(update.denominators, demonstrated=demonstration_rows.denominators.tokens),
    )


def rows_of_updates(
    group_ids: np.ndarray, *, num_groups: int, num_updates: int, order: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of each update: equally many whole groups, in ``order`` of group ids (None: sorted)."""
    assert num_groups % num_updates == 0, (num_groups, num_updates)
    place = np.arange(num_groups) if order is None else np.argsort(order)
    update_of = place[group_ids] // (num_groups // num_updates)
    return [np.flatnonzero(update_of == i) for i in range(num_updates)]


def shuffle_updates(batch: TrainBatch, *, num_groups: int, num_updates: int, seed: int) -> list[EpochUpdate]:
    """Deal the groups of a step to the updates of an epoch in random order, by ``seed``."""
    order = np.random.default_rng(seed).permutation(num_groups)
    dealt = rows_of_updates(
        batch.group_ids.numpy(), num_groups=num_groups, num_updates=num_updates, order=order
    )
    ids, batch = batch.row_ids.numpy(), batch.drop_candidates()
    return [EpochUpdate(ids[rows], count_denominators(batch.select(rows.tolist()))) for rows in dealt]


def with_rows_of(update: EpochUpdate, other: TrainBatch, *, first_row: int) -> EpochUpdate:
    """Return ``update`` with the demonstrations of ``other``: its rows from the id ``first_row`` on."""
    ids = other.row_ids.numpy()
    return EpochUpdate(
        np.concatenate([update.row_ids, ids[ids >= first_row]]),
        replace(update.denominators, demonstrated=other.denominators.demonstrated),
    )


def select_update(batches: Sequence[TrainBatch], update: EpochUpdate) -> TrainBatch:
    """Return the rows of one rank's ``batches`` that belong to ``update``, in order."""
    parts = [
        batch.select(np.flatnonzero(np.isin(batch.row_ids.numpy(), update.row_ids)).tolist())
        for batch in batches
    ]
    parts = [part for part in parts if len(part)] or parts[:1]
    joined = replace(TrainBatch.combine(parts, _join), denominators=update.denominators)
    routes, kept = (
        None
        if getattr(joined, name) is None
        else tuple(item for part in parts for item in getattr(part, name))
        for name in ("routes", "kept")
    )
    return replace(joined, routes=routes, kept=kept)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all parts, with token dimensions padded with 0 to the widest."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    trailing = [0] * 2 * (parts[0].ndim - 2)  # `pad` begins with the last dimension
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (*trailing, 0, width - part.shape[1])) for part in parts])
