"""From scored groups to padded rows with fixed denominators, and to the updates of a step.

    prompt [7 8 9], completion [4 5 2]   tokens     7 8 9 4 5 2
                                         loss_mask  . . . x x x     the EOS a model produced (2) is trained
    an episode: sampled [4 5], given     tokens     7 8 9 4 5 6 6 2
    [6 6], sampled [2]                   loss_mask  . . . x x . . x

A row for each sample, group after group. An episode whose history a chat template rewrote has further rows
behind its first one, with the same advantage; each is trained on its own sampled tokens.

A sample that could not be scored (its reward is not finite) stays in the batch with an empty mask: it adds to
no loss, no KL term and no denominator. So does a sample with a token whose log-prob the engine gave as NaN or
infinite: its sampling distribution is unknown. Its reward still counts in its group.

A demonstration is a row of the cross-entropy stream, behind those of the samples:

sample          prompt [7 8], completion [4 2]      policy.mask   . . x x .
demonstration   prompt [7 9 9], completion [5 2]    demonstrated  . . . x x

Which groups each optimiser update has, and those of later epochs over the same batch:

    epoch 1   update 1: groups 0 1     update 2: groups 2 3      in the order of the batch
    epoch 2   update 1: groups 3 0     update 2: groups 1 2      dealt again, `batch.shuffle_epochs`

Groups stay whole, so that rows share their prompt and an update's mean over prompts keeps its meaning. Who
deals is the driver, by a seed: all ranks have the same updates, however many they are. A rank regroups its
own rows; none moves to another rank.
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
        advantages: [G] for each group; the batch's have their type.
        ref_logprobs: float32 [C] for each row in order, or None when there is no KL term.
        max_new_tokens: longest completion that could have been sampled.
        mask_truncated: train nothing of a completion that was cut at ``max_new_tokens``; its reward still
            counts in its group (DAPO's overlong filtering, arXiv:2503.14476, section 3.4).
        mask_outcomes: the same for episodes that ended for one of these reasons. One whose environment
            failed ("error") is never trained on.
        teachers: what the teacher of each row in order gives, None for a row without one; None: there is no
            teacher. A sample needs no reward to learn from its teacher.
        trains_taught: a sample with a teacher belongs to the policy loss without a reward, too.
    """
    samples = [r for g in groups for r in g.rollouts]
    rows = training_rows(samples)
    owner, group_ids = _owners(groups, samples)
    placed, shared = _placed(groups, rows, group_ids)
    tokens = _tokens(groups, placed, group_ids)
    usable = _usable(samples, rows, mask_truncated=mask_truncated, mask_outcomes=mask_outcomes)[owner]
    has_teacher = usable & _are_known(teachers, len(rows))
    is_scored = np.isfinite(np.concatenate([g.rewards for g in groups]))[owner]
    trained = usable & (is_scored | (has_teacher & trains_taught))
    mask = _loss_mask(placed, trained | has_teacher, tokens.shape[1])
    loss_mask, taught, teacher = mask, None, None
    if teachers is not None:
        loss_mask, taught = mask & trained[:, None], mask & has_teacher[:, None]
        teacher = _teacher_stream(teachers, placed, taught, has_teacher)
    advantage = np.where(loss_mask, np.concatenate(list(advantages))[owner, None], 0)

    of_tokens = partial(_of_tokens, placed, mask)
    sequence_tokens = _tokens_together(loss_mask, owner) if len(rows) > len(samples) else None
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
            rollout_logprobs=of_tokens([row.logprobs for row in rows], trained),
            ref_logprobs=None if ref_logprobs is None else of_tokens(ref_logprobs, trained),
            max_tokens=max_new_tokens,
            sequence_tokens=None if sequence_tokens is None else torch.from_numpy(sequence_tokens),
            prompt_tokens=torch.from_numpy(_tokens_together(loss_mask, group_ids)),
        ),
        teacher=teacher,
        denominators=_denominators(loss_mask, group_ids, sequence_tokens, taught),
    )


def sampled_tokens(groups: Sequence[Group]) -> torch.Tensor:
    """Return which tokens of the rows of `make_batch` were sampled with a log-prob that is known, bool
    [B, T], whether they are trained or not; none of an episode whose environment failed.
    """
    samples = [r for g in groups for r in g.rollouts]
    rows = training_rows(samples)
    owner, group_ids = _owners(groups, samples)
    placed, _ = _placed(groups, rows, group_ids)
    usable = _usable(samples, rows, mask_truncated=False, mask_outcomes=())[owner]
    return torch.from_numpy(_loss_mask(placed, usable, int(placed.ends.max())))


@dataclass(frozen=True, slots=True)
class _Placed:
    """Rows, and where the completion of each starts and ends in its row of the batch, int64 [B]."""

    rows: Sequence[Rollout | FurtherRow]
    starts: np.ndarray
    ends: np.ndarray


def _owners(groups: Sequence[Group], samples: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the index of its sample, and of its group."""
    owner = np.repeat(np.arange(len(samples)), [1 + len(r.further_rows) for r in samples])
    sample_group = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])
    return owner, sample_group[owner]


def _are_known(values: Sequence[TeacherLogprobs | None] | None, rows: int) -> np.ndarray:
    return np.zeros(rows, bool) if values is None else np.array([own is not None for own in values], bool)


def _tokens_together(loss_mask: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return for each row the trained tokens of all rows of its ``owner``, a sample or a group, int64 [B]."""
    return np.bincount(owner, np.count_nonzero(loss_mask, axis=1))[owner].astype(np.int64)


def _temperatures(samples: Sequence[Rollout], owner: np.ndarray) -> torch.Tensor | None:
    known = [r.temperature for r in samples if r.temperature is not None]
    assert len(known) in (0, len(samples)), "either all samples have a temperature or none"
    return torch.from_numpy(np.array(known, np.float64)[owner]) if known else None


def context_ids(prompt: Prompt, row: Rollout | FurtherRow) -> np.ndarray:
    """Return the tokens in front of the row's completion, int32 [P]."""
    return prompt.token_ids if row.context_ids is None else row.context_ids


def shared_tokens(prompt: Prompt, row: Rollout | FurtherRow) -> int:
    """Return how many tokens of ``prompt`` the row begins with: all, or 0 if it has rewritten them."""
    size, context = len(prompt.token_ids), context_ids(prompt, row)
    same = context is prompt.token_ids or np.array_equal(context[:size], prompt.token_ids)
    return size if same else 0


def _placed(
    groups: Sequence[Group], rows: Sequence[Rollout | FurtherRow], group_ids: np.ndarray
) -> tuple[_Placed, np.ndarray]:
    """Place completions behind their contexts. Also return how many tokens of each context are the group's
    prompt.
    """
    starts = np.array([len(g.prompt.token_ids) for g in groups])[group_ids]
    shared = starts.copy()
    for i, row in enumerate(rows):
        if row.context_ids is not None:
            starts[i] = len(row.context_ids)
            shared[i] = shared_tokens(groups[group_ids[i]].prompt, row)
    lengths = np.fromiter((len(row.completion_ids) for row in rows), np.int64, len(rows))
    return _Placed(rows, starts, starts + lengths), shared


def _tokens(groups: Sequence[Group], placed: _Placed, group_ids: np.ndarray) -> np.ndarray:
    # Allocated and filled by numpy: torch pays for every fresh page, and a call for each row.
    tokens = np.zeros((len(placed.rows), int(placed.ends.max())), np.int64)
    ends = np.searchsorted(group_ids, np.arange(len(groups) + 1)).tolist()
    for group, first, end in zip(groups, ends, ends[1:], strict=False):
        prompt = group.prompt.token_ids[: tokens.shape[1]]  # longer than rows with contexts of their own
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
    left_out = {"error", *(["length"] if mask_truncated else [])}
    of_episodes = left_out.union(mask_outcomes)
    usable &= np.array([r.finish_reason not in (of_episodes if r.turns else left_out) for r in samples])
    return usable


def _loss_mask(placed: _Placed, trained: np.ndarray, width: int) -> np.ndarray:
    column, starts, ends = np.arange(width), placed.starts, placed.ends
    mask: np.ndarray = column >= starts[:, None]
    mask &= column < np.where(trained, ends, 0)[:, None]
    for i, row in enumerate(placed.rows):
        if row.sampled is not None:
            mask[i, starts[i] : ends[i]] &= row.sampled
    return mask


def _of_tokens(
    placed: _Placed, mask: np.ndarray, values: Sequence[np.ndarray | None], wanted: np.ndarray
) -> torch.Tensor:
    """Return ``values`` of the completions of the rows ``wanted``, float32 [B, T], 0 elsewhere."""
    out = np.zeros(mask.shape, np.float32)
    _fill(out, placed, values, wanted)
    given = any(row.sampled is not None for row in placed.rows)
    return torch.from_numpy(np.where(mask, out, 0) if given else out)


def _teacher_stream(
    teachers: Sequence[TeacherLogprobs | None], placed: _Placed, taught: np.ndarray, wanted: np.ndarray
) -> TeacherStream:
    """Return log-probs of ``taught`` tokens, and likeliest tokens where teachers give any. ``wanted``: the
    rows that are taught.
    """
    by_row = [TeacherLogprobs(np.empty(0)) if teacher is None else teacher for teacher in teachers]
    sampled = _of_tokens(placed, taught, [teacher.sampled for teacher in by_row], wanted)
    stream = TeacherStream(torch.from_numpy(taught), sampled)
    sizes = {teacher.top_ids.shape[1] for teacher in by_row if teacher.top_ids is not None}
    if not sizes:
        return stream
    (count,) = sizes
    ids, top = (np.zeros((*taught.shape, count), kind) for kind in (np.int32, np.float32))
    _fill(ids, placed, [teacher.top_ids for teacher in by_row], wanted)
    _fill(top, placed, [teacher.top for teacher in by_row], wanted)
    return replace(stream, top_ids=torch.from_numpy(ids), top_logprobs=torch.from_numpy(top))


def _fill(
    out: np.ndarray,
    placed: _Placed,
    values: Sequence[np.ndarray | None],
    wanted: np.ndarray | None = None,
) -> None:
    """Write the ``values`` of completions where these stand in ``out``: those of the rows ``wanted``."""
    rows = range(len(values)) if wanted is None else np.flatnonzero(wanted).tolist()
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
    """Split whole groups in order, as many to each optimiser update, each with denominators of its own."""
    if num_updates == 1:
        return [batch]
    dealt = rows_of_updates(batch.group_ids.numpy(), num_groups=num_groups, num_updates=num_updates)
    parts = [batch.select(rows.tolist()) for rows in dealt]
    return [replace(part, denominators=count_denominators(part)) for part in parts]


def count_denominators(batch: TrainBatch) -> Denominators:
    """Return the denominators of an update that has the rows of ``batch`` alone, without demonstrations."""
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
    # The shares of the rows of a sample add up to 1.
    shares = tokens > 0 if sequence_tokens is None else tokens / np.maximum(sequence_tokens, 1)
    return Denominators(
        tokens=float(tokens.sum()),
        sequences=float(round(shares.sum())),
        prompts=float(len(np.unique(group_ids[tokens > 0]))),
        taught=0.0 if taught is None else float(np.count_nonzero(taught)),
    )


def batch_of(groups: Sequence[Group], max_length: int) -> TrainBatch:
    """Make the batch of an update on demonstrations alone: a row for each, and the tokens of all completions
    as denominator.
    """
    ones = [np.ones(1, np.float32)] * len(groups)
    return make_batch(groups, ones, ref_logprobs=None, max_new_tokens=max_length)


def with_demonstrations(update: TrainBatch, groups: Sequence[Group], *, first_row: int) -> TrainBatch:
    """Return ``update`` with a row for each of ``groups``, demonstrations, for the cross-entropy alone.

    ``first_row``: id of the first of these rows, above those of all samples of the step.
    """
    demonstration_rows = batch_of(groups, update.policy.max_tokens)
    above, rows, count = len(update), len(update) + len(demonstration_rows), len(demonstration_rows)
    width = max(update.tokens.shape[1], demonstration_rows.tokens.shape[1])

    def extend(values: Tensor) -> Tensor:
        """Add rows and padding of zeros."""
        out = values.new_zeros((rows, width, *values.shape[2:]) if values.ndim > 1 else (rows,))
        out[(slice(above), *(slice(size) for size in values.shape[1:]))] = values
        return out

    joined = update.map_tensors(extend)
    first_group = int(update.group_ids.max()) + 1
    joined.tokens[above:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.tokens
    joined.lengths[above:] = demonstration_rows.lengths
    joined.group_ids[above:] = torch.arange(first_group, first_group + count)
    joined.row_ids[above:] = torch.arange(first_row, first_row + count)
    if joined.temperatures is not None:
        joined.temperatures[above:] = 1.0  # cross-entropy is that of the model itself
    demonstrated = torch.zeros(rows, width, dtype=torch.bool)
    demonstrated[above:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.policy.mask
    return replace(
        joined,
        demonstrated=demonstrated,
        # No engine has sampled a demonstration.
        routes=None if update.routes is None else (*update.routes, *[None] * count),
        kept=None if update.kept is None else (*update.kept, *[None] * count),
        denominators=replace(update.denominators, demonstrated=demonstration_rows.denominators.tokens),
    )


def rows_of_updates(
    group_ids: np.ndarray, *, num_groups: int, num_updates: int, order: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of each update: whole groups, as many to each, in ``order`` (of group ids; None: that
    of the ids).
    """
    assert num_groups % num_updates == 0, (num_groups, num_updates)
    place = np.arange(num_groups) if order is None else np.argsort(order)
    update_of = place[group_ids] // (num_groups // num_updates)
    return [np.flatnonzero(update_of == i) for i in range(num_updates)]


def redrawn(batch: TrainBatch, *, num_groups: int, num_updates: int, seed: int) -> list[EpochUpdate]:
    """Deal the groups of a whole step to the updates of an epoch; a function of ``seed``."""
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


def regrouped(batches: Sequence[TrainBatch], update: EpochUpdate) -> TrainBatch:
    """Return the rows of ``batches``, those of one rank, that belong to ``update``, in their order."""
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
    """Return the rows of all parts, those of tokens padded with 0 to the widest."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    behind = [0] * 2 * (parts[0].ndim - 2)  # `pad` begins with the last dimension
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (*behind, 0, width - part.shape[1])) for part in parts])
