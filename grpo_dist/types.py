"""The records that flow through one step: Prompt -> Rollout -> Group -> TrainBatch.

Each is frozen and complete when made; no field is filled in later. Records hold numpy until batching, because
Ray hands numpy arrays back read-only and without a copy, so no worker can spoil another's data.

Shape letters: P prompt tokens, C completion tokens, G samples per prompt, B rows, T tokens of a padded row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, tokenised with its chat template."""

    uid: str  # the group key: stable across runs, never the text itself
    token_ids: np.ndarray  # int32 [P]
    answer: str  # gold answer, as text or LaTeX
    source: str  # name of the data set it came from
    text: str = ""  # the problem as the reader found it, for samples and rewards
    columns: Mapping[str, Any] = field(default_factory=dict)  # extra columns a reward may ask for


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. ``temperature`` 0 is greedy; ``top_p`` 1 and ``top_k`` 0 mean the full
    distribution. ``lengths``: exactly so many tokens of each sample, an EOS among them ending nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of a prompt."""

    prompt_uid: str
    sample: int  # index within its group, 0..G-1
    completion_ids: np.ndarray  # int32 [C], the EOS token included when the model produced it
    logprobs: (
        np.ndarray
    )  # float32 [C], nats, under the distribution actually sampled from (temperature applied)
    finish_reason: str  # "stop" (EOS) or "length"
    text: str  # completion decoded without special tokens
    policy_versions: np.ndarray  # int32 [C], version of the weights that produced each token


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt with its G scored samples. A NaN reward says "could not be scored", which is not 0."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: np.ndarray  # float32 [G]
    reward_parts: Mapping[str, np.ndarray]  # reward name -> float32 [G], before weighting
    outcomes: tuple[
        str, ...
    ]  # [G] of the math grader: correct | wrong | no_answer | timeout | error; "" if none ran
    score_s: float = 0.0  # seconds the scoring of this group took
    baseline_reward: float | None = None  # of the greedy answer; None: not sampled
    # Of a process reward model; None without one. [G] of float32 [S], the score of each step, and of int32
    # [S], the index in completion_ids of each step's last token, not decreasing.
    step_rewards: tuple[np.ndarray, ...] | None = None
    step_ends: tuple[np.ndarray, ...] | None = None


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rows of one optimiser update, right-padded; every [B, T] tensor is indexed by the token it describes.

    ``num_tokens`` and ``num_sequences`` are the denominators of the whole update (all ranks, all
    micro-batches), fixed before any split, so that a selection of rows still carries them. ``None`` in an
    optional field says "not needed".
    """

    tokens: Int[Tensor, "B T"]  # int64
    lengths: Int[Tensor, " B"]  # prompt + completion tokens of each row
    loss_mask: Bool[Tensor, "B T"]  # True on completion tokens
    advantages: Float[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]  # 0 outside loss_mask
    ref_logprobs: Float[Tensor, "B T"] | None
    old_logprobs: Float[Tensor, "B T"] | None
    num_tokens: float
    num_sequences: float
    max_tokens: int  # longest completion allowed: the constant of seq-mean-token-sum-norm
    policy_mask: Bool[Tensor, "B T"] | None = None  # tokens of the policy loss; None: all of loss_mask
    kl_coef: float | None = None  # weight of the KL term in this update; None: that of the loss settings

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def select(self, rows: list[int]) -> TrainBatch:
        """These rows, cut to their own longest; the global denominators stay."""
        index = torch.as_tensor(rows, dtype=torch.long)
        width = int(self.lengths[index].max()) if rows else 1
        taken: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                taken[f.name] = value[index] if value.ndim == 1 else value[index, :width]
        return replace(self, **taken)


def has_signal(rewards: np.ndarray) -> bool:
    """Whether samples of a group differ in reward, so that a group-relative advantage is not 0 for all."""
    known = rewards[~np.isnan(rewards)]
    return len(known) > 1 and bool(np.any(known != known[0]))
