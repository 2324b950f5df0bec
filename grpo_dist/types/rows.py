"""The records of training: rows of tokens, and the batch of an optimiser update.

Shape letters: B rows, T tokens of a padded row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from grpo_dist.types.samples import Routes

if TYPE_CHECKING:  # torch takes seconds to import, and workers that only sample or score need none of it
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows, right-padded, with the tokens whose log-probs are ``wanted``. Rows of one group with the
    same ``prompt_lengths`` begin with the same so many tokens.
    """

    tokens: Int[Tensor, "B T"]  # int64
    lengths: Int[Tensor, " B"]
    wanted: Bool[Tensor, "B T"]
    group_ids: Int[Tensor, " B"]
    prompt_lengths: Int[Tensor, " B"]
    temperatures: Float[Tensor, " B"] | None = None  # as in `TrainBatch`
    routes: tuple[Routes | None, ...] | None = None  # as in `TrainBatch`
    # Further tokens whose log-probs are wanted at each that is, and a teacher's; None: there are none.
    candidates: Int[Tensor, "B T K"] | None = None
    candidates_at_teacher: Float[Tensor, "B T K"] | None = None


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rows of one optimiser update, right-padded; [B, T] and [B, T, K] tensors are indexed by the token they
    describe.

    A token may belong to the policy loss (``loss_mask``), to that of a teacher (``taught``), and to the
    cross-entropy of demonstrations (``demonstrated``). Each of these streams has denominators of its own,
    those of the whole update (all ranks, all micro-batches), fixed before any split, so that a selection of
    rows still carries them. ``None`` in an optional field means "not needed". A rank makes a `StepBatch` of
    it before the step, and of that a `PreparedBatch` before the update.
    """

    tokens: Int[Tensor, "B T"]  # int64
    lengths: Int[Tensor, " B"]  # prompt + completion tokens of each row
    loss_mask: Bool[Tensor, "B T"]  # True on completion tokens that the policy sampled: the policy loss
    advantages: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]  # 0 outside loss_mask
    ref_logprobs: Float[Tensor, "B T"] | None
    row_ids: Int[Tensor, " B"]  # int64, which row of the step a row is
    num_tokens: float  # of the policy loss
    num_sequences: float  # samples; an episode counts once, whatever its rows
    max_tokens: int  # longest completion allowed: the constant of seq-mean-token-sum-norm
    # Rows of one group with the same ``prompt_lengths`` begin with the same so many tokens; None: no tokens
    # are known to be shared.
    group_ids: Int[Tensor, " B"] | None = None  # int64
    prompt_lengths: Int[Tensor, " B"] | None = None  # int64; 0: the row shares no tokens with others
    # Trained tokens of all rows of a row's sample; None: each row is a sample.
    sample_tokens: Int[Tensor, " B"] | None = None  # int64
    # Trained tokens of all samples of a row's prompt; None: each sample has a prompt of its own.
    prompt_tokens: Int[Tensor, " B"] | None = None  # int64
    num_prompts: float = 0.0  # that have a token of the policy loss
    # Mean of the log-probs of a sample's teachers, 0 outside ``taught``; None: no teacher, or it is part of
    # the advantages.
    teacher_logprobs: Float[Tensor, "B T"] | None = None
    taught: Bool[Tensor, "B T"] | None = None
    num_taught: float = 0.0
    # The teacher's K likeliest tokens in place of each taught one, and their log-probs, float32; None: the
    # KL is that of the sampled tokens.
    top_ids: Int[Tensor, "B T K"] | None = None  # int32
    top_logprobs: Float[Tensor, "B T K"] | None = None
    demonstrated: Bool[Tensor, "B T"] | None = None  # tokens to learn of demonstrations; None: there are none
    num_demonstrated: float = 0.0
    # At which each row was sampled, float64; None: that of the trainer's settings.
    temperatures: Float[Tensor, " B"] | None = None
    # [B]: the experts that the tokens of each row took in the engine; None: the model chooses.
    routes: tuple[Routes | None, ...] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def wanted(self) -> Bool[Tensor, "B T"]:
        """Return the tokens of all streams."""
        mask = self.loss_mask
        for other in (self.taught, self.demonstrated):
            mask = mask if other is None else mask | other
        return mask

    @property
    def rows(self) -> Rows:
        """Return the model's input. Where groups are unknown every row is a group of its own."""
        import torch

        groups, prompts = self.group_ids, self.prompt_lengths
        if groups is None or prompts is None:
            groups, prompts = torch.arange(len(self)), torch.zeros(len(self), dtype=torch.long)
        return Rows(self.tokens, self.lengths, self.wanted, groups, prompts, self.temperatures, self.routes)

    @property
    def rows_with_candidates(self) -> Rows:
        """Return `rows` with what the divergence from a teacher needs besides the sampled tokens."""
        return replace(self.rows, candidates=self.top_ids, candidates_at_teacher=self.top_logprobs)

    def without_candidates(self) -> Self:
        """Return the batch without what is K times as large as log-probs."""
        return replace(self, top_ids=None, top_logprobs=None)

    def select(self, rows: list[int]) -> Self:
        """Return these rows, cut to their own longest; the global denominators stay."""
        import torch

        index = np.array(rows, dtype=np.int64)
        width = int(self.lengths.numpy()[index].max()) if rows else 1
        taken: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor):  # numpy takes rows several times faster
                array = value.numpy()
                taken[f.name] = torch.from_numpy(array[index] if array.ndim == 1 else array[index, :width])
        if self.routes is not None:
            taken["routes"] = tuple(self.routes[row] for row in rows)
        return replace(self, **taken)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as numpy arrays, which Ray does not copy between processes."""
        import torch

        values = [getattr(self, f.name) for f in fields(self)]
        arrays = tuple(v.numpy() if isinstance(v, torch.Tensor) else v for v in values)
        return _own_tensors, (type(self), *arrays)


@dataclass(frozen=True, slots=True)
class StepBatch(TrainBatch):
    """A batch on its rank, with what the weights before the step give for it.

    Attributes:
        old_logprobs: nats, of the weights that ratios are taken to; None: of those that are being trained.
        old_entropies: nats, with `algorithm.top_entropy_share`; else None.
    """

    old_logprobs: Float[Tensor, "B T"] | None = None
    old_entropies: Float[Tensor, "B T"] | None = None

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        *,
        old_logprobs: Float[Tensor, "B T"] | None,
        old_entropies: Float[Tensor, "B T"] | None,
    ) -> StepBatch:
        return cls(**_of_train_batch(batch), old_logprobs=old_logprobs, old_entropies=old_entropies)


@dataclass(frozen=True, slots=True)
class PreparedBatch(TrainBatch):
    """A batch on its rank, ready for its loss.

    Attributes:
        old_logprobs: nats, of the weights that ratios are taken to; None: of those that are being trained,
            because the update is the first on these samples.
        policy_mask: tokens of the policy loss, with `algorithm.top_entropy_share`; None: all of loss_mask.
        selected: tokens that policy losses clip_cov and kl_cov treat differently; None: no token.
        mean_weight: of the correction over the whole update, by which each weight is divided; 1: it is not.
    """

    old_logprobs: Float[Tensor, "B T"] | None = None
    policy_mask: Bool[Tensor, "B T"] | None = None
    selected: Bool[Tensor, "B T"] | None = None
    mean_weight: float = 1.0

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        *,
        old_logprobs: Float[Tensor, "B T"] | None = None,
        policy_mask: Bool[Tensor, "B T"] | None = None,
        selected: Bool[Tensor, "B T"] | None = None,
        mean_weight: float = 1.0,
    ) -> PreparedBatch:
        return cls(
            **_of_train_batch(batch),
            old_logprobs=old_logprobs,
            policy_mask=policy_mask,
            selected=selected,
            mean_weight=mean_weight,
        )


def _of_train_batch(batch: TrainBatch) -> dict[str, Any]:
    return {f.name: getattr(batch, f.name) for f in fields(TrainBatch)}


@dataclass(frozen=True, slots=True)
class EpochUpdate:
    """An optimiser update of a later epoch: the ids of its rows, int64, and its denominators, by their names
    in `TrainBatch`.
    """

    row_ids: np.ndarray
    denominators: dict[str, float]


def _own_tensors(kind: type[TrainBatch], *values: Any) -> TrainBatch:
    import torch

    # Ray's arrays are read-only and lie in memory that others share; a tensor is neither.
    own: list[Any] = [torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in values]
    return kind(*own)
