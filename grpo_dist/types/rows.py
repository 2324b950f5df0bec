"""The records of training: rows of tokens, and the batch of an optimiser update with its streams.

Shape letters: B rows, T tokens of a padded row, K likeliest tokens of a teacher. [B, T] and [B, T, K] tensors
are indexed by the token they describe. ``None`` in an optional field means "not needed".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from grpo_dist.types.samples import KeptTokens, Routes

if TYPE_CHECKING:  # torch takes seconds to import, and workers that only sample or score need none of it
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class TensorRecord:
    """A dataclass of tensors, whose first dimension is the rows, of other values, and of further such
    records.
    """

    __slots__ = ()

    @classmethod
    def combine(cls, records: Sequence[Self], function: Callable[[list[Tensor]], Tensor]) -> Self:
        """Return the first of ``records`` with each tensor replaced by ``function`` of those of all."""
        import torch

        changes: dict[str, Any] = {}
        for f in fields(records[0]):  # type: ignore[arg-type]
            values = [getattr(record, f.name) for record in records]
            if isinstance(values[0], torch.Tensor):
                changes[f.name] = function(values)
            elif isinstance(values[0], TensorRecord):
                changes[f.name] = type(values[0]).combine(values, function)
        return replace(records[0], **changes)  # type: ignore[type-var]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the record with ``function`` of each tensor in its place."""
        return self.combine([self], lambda values: function(values[0]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as numpy arrays, which Ray does not copy between processes."""
        import torch

        values = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        arrays = tuple(v.numpy() if isinstance(v, torch.Tensor) else v for v in values)
        return _from_arrays, (type(self), *arrays)


def _from_arrays(kind: type[TensorRecord], *values: Any) -> TensorRecord:
    import torch

    # Ray's arrays are read-only and lie in memory that others share; a tensor is neither.
    return kind(*(torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in values))


@dataclass(frozen=True, slots=True)
class Rows(TensorRecord):
    """Token rows, right-padded.

    Attributes:
        lengths: prompt + completion tokens of each row.
        group_ids: rows of one group with the same ``prompt_lengths`` begin with the same tokens.
        prompt_lengths: 0: the row shares no tokens with others.
        temperatures: at which each row was sampled; None: that of the trainer's settings.
        routes: [B], the experts that the tokens of each row took in the engine; None: the model chooses.
        kept: [B], the sampling masks of the last tokens of each row; None: of no row.
    """

    tokens: Int[Tensor, "B T"]  # int64
    lengths: Int[Tensor, " B"]
    group_ids: Int[Tensor, " B"]  # int64
    prompt_lengths: Int[Tensor, " B"]  # int64
    temperatures: Float[Tensor, " B"] | None  # float64
    routes: tuple[Routes | None, ...] | None
    kept: tuple[KeptTokens | None, ...] | None


@dataclass(frozen=True, slots=True)
class PolicyStream(TensorRecord):
    """The policy loss.

    Attributes:
        mask: True on completion tokens that the policy sampled and that are trained.
        rollout_logprobs: nats, of the engine; 0 outside the mask.
        max_tokens: longest completion allowed: the constant of seq-mean-token-sum-norm.
        sequence_tokens: trained tokens of all rows of a row's sample; None: each row is a sample.
        prompt_tokens: trained tokens of all samples of a row's prompt; None: each sample has a prompt of its
            own.
        old_logprobs: nats, of the weights that ratios are taken to, known on a rank from the begin of the
            step; None: of those that are being trained.
        old_entropies: nats, with `algorithm.top_entropy_share`.
        loss_ids: which loss a row has: 0: `algorithm.loss`, n: that of the n-th source with parts of its own;
            None: all have the first.
        kl_weights: of each row's KL, as a share of `algorithm.kl.coef`; None: all have 1.
    """

    mask: Bool[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"] | None
    max_tokens: int
    sequence_tokens: Int[Tensor, " B"] | None = None  # int64
    prompt_tokens: Int[Tensor, " B"] | None = None  # int64
    old_logprobs: Float[Tensor, "B T"] | None = None
    old_entropies: Float[Tensor, "B T"] | None = None
    loss_ids: Int[Tensor, " B"] | None = None  # int64
    kl_weights: Float[Tensor, " B"] | None = None  # float64


@dataclass(frozen=True, slots=True)
class TeacherStream(TensorRecord):
    """The divergence from a teacher that is no part of the advantages.

    Attributes:
        logprobs: mean of the log-probs of a sample's teachers, nats; 0 outside the mask.
        top_ids: the teacher's K likeliest tokens at each taught one; None: the KL is that of the sampled
            tokens.
        top_logprobs: theirs, nats.
    """

    mask: Bool[Tensor, "B T"]
    logprobs: Float[Tensor, "B T"]
    top_ids: Int[Tensor, "B T K"] | None = None  # int32
    top_logprobs: Float[Tensor, "B T K"] | None = None  # float32


@dataclass(frozen=True, slots=True)
class TokenChoice(TensorRecord):
    """What a rank has chosen over all tokens of an update before its loss.

    Attributes:
        kept: tokens of the policy loss, with `algorithm.top_entropy_share`; None: all of its mask.
        selected: tokens that policy losses clip_cov and kl_cov treat differently; None: no token.
        mean_weight: of the correction over the whole update, by which each weight is divided; 1: it is not.
    """

    kept: Bool[Tensor, "B T"] | None = None
    selected: Bool[Tensor, "B T"] | None = None
    mean_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sizes of a whole update (all ranks, all micro-batches), fixed before any split.

    Attributes:
        tokens: of the policy loss.
        sequences: samples with a token of the policy loss; an episode counts once, whatever its rows.
        prompts: that have a token of the policy loss.
    """

    tokens: float
    sequences: float
    prompts: float = 0.0
    taught: float = 0.0
    demonstrated: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainBatch(Rows):
    """Rows of one optimiser update. A token may belong to several streams: the policy loss, that of a
    teacher, and the cross-entropy of demonstrations.

    Attributes:
        row_ids: which row of the step a row is.
        demonstrated: tokens to learn of demonstrations; None: there are none.
    """

    row_ids: Int[Tensor, " B"]  # int64
    policy: PolicyStream
    denominators: Denominators
    teacher: TeacherStream | None = None
    demonstrated: Bool[Tensor, "B T"] | None = None
    choice: TokenChoice = TokenChoice()  # frozen

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def wanted(self) -> Bool[Tensor, "B T"]:
        """Return the tokens of all streams."""
        mask = self.policy.mask if self.teacher is None else self.policy.mask | self.teacher.mask
        return mask if self.demonstrated is None else mask | self.demonstrated

    def drop_candidates(self) -> Self:
        """Return the batch without what is K times as large as log-probs."""
        if self.teacher is None or self.teacher.top_ids is None:
            return self
        return replace(self, teacher=replace(self.teacher, top_ids=None, top_logprobs=None))

    def select(self, rows: list[int]) -> Self:
        """Return these rows, cut to their own longest; the denominators stay."""
        import torch

        index = np.array(rows, dtype=np.int64)
        width = int(self.lengths.numpy()[index].max()) if rows else 1

        def select_rows(values: Tensor) -> Tensor:
            array = values.numpy()  # numpy takes rows several times faster
            return torch.from_numpy(array[index] if array.ndim == 1 else array[index, :width])

        def select_own(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(values[row] for row in rows)

        selected = self.map_tensors(select_rows)
        return replace(selected, routes=select_own(self.routes), kept=select_own(self.kept))


@dataclass(frozen=True, slots=True)
class SentRows:
    """Some rows of a batch on their way to another process, where they are what `TrainBatch.select` returns.
    Only their tokens are sent and copied, no padding.
    """

    batch: TrainBatch
    rows: Sequence[int]

    def __reduce__(self) -> tuple[Any, ...]:
        rows = np.array(self.rows, np.int64)
        lengths = self.batch.lengths.numpy()[rows]
        return _receive_rows, (lengths, _pack(self.batch, rows, lengths.tolist()))


class _PackedRecord(NamedTuple):
    kind: type[TensorRecord]
    values: list[Any]


class _PackedTokens(NamedTuple):
    values: np.ndarray  # of the rows end to end; token ids as int32
    dtype: np.dtype


def _pack(value: Any, rows: np.ndarray, lengths: list[int]) -> Any:
    import torch

    if isinstance(value, TensorRecord):
        values = [_pack(getattr(value, f.name), rows, lengths) for f in fields(value)]  # type: ignore[arg-type]
        return _PackedRecord(type(value), values)
    if isinstance(value, tuple):
        return tuple(value[row] for row in rows)
    if not isinstance(value, torch.Tensor):
        return value
    array = value.numpy()
    if array.ndim == 1:
        return array[rows]
    parts = [array[row, :size] for row, size in zip(rows.tolist(), lengths, strict=True)]
    kind = np.int32 if array.dtype == np.int64 else array.dtype
    return _PackedTokens(np.concatenate([array[:0, 0], *parts], dtype=kind, casting="same_kind"), array.dtype)


def _receive_rows(lengths: np.ndarray, packed: _PackedRecord) -> TensorRecord:
    """Pad packed rows with zeros."""
    import torch

    is_token = np.arange(lengths.max(initial=1)) < lengths[:, None]

    def unpack(value: Any) -> Any:
        if isinstance(value, _PackedRecord):
            return value.kind(*map(unpack, value.values))
        if isinstance(value, _PackedTokens):
            padded = np.zeros((*is_token.shape, *value.values.shape[1:]), value.dtype)
            padded[is_token] = value.values
            return torch.from_numpy(padded)
        # Ray's arrays are read-only and lie in memory that others share; a tensor is neither.
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    record: TensorRecord = unpack(packed)
    return record


@dataclass(frozen=True, slots=True)
class EpochUpdate:
    """An optimiser update of a later epoch: the ids of its rows, int64, and its denominators."""

    row_ids: np.ndarray
    denominators: Denominators
