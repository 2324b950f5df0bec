"""Aggregation of token losses to one number; every loss works with every aggregation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MODES = (
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
)  # fmt: skip


def aggregate(
    token_losses: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    mode: str,
    *,
    num_tokens: float | int,
    num_sequences: float | int,
    max_tokens: int,
    sequence_tokens: Int[Tensor, " B"] | None = None,
    num_prompts: float | int | None = None,
    prompt_tokens: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, ""]:
    """Sum token losses and divide by a denominator of the whole optimisation step.

    ``num_tokens``, ``num_sequences`` and ``num_prompts`` count the whole step, not these rows, so the results
    for any split of the rows add up to the result for all of them. Sequences and prompts without an unmasked
    token are not counted.

        mode                      each sequence gives   divided by      source
        token-mean                sum of its losses     num_tokens      DAPO, arXiv:2503.14476, equation 8
        token-sum                 sum of its losses     1               verl; the size of a step counts
        seq-mean-token-mean       mean of its losses    num_sequences   GRPO, arXiv:2402.03300, equation 3
        seq-mean-token-sum        sum of its losses     num_sequences
        seq-mean-token-sum-norm   sum / max_tokens      num_sequences   Dr. GRPO, arXiv:2503.20783

        mode                      each prompt gives     divided by      source
        prompt-mean-token-mean    mean over all tokens  num_prompts     ScaleRL, arXiv:2510.13786, section 4
                                  of its sequences

    ``sequence_tokens``: unmasked tokens of each row's sequence, if rows are parts of sequences; None: each
    row is a sequence. ``prompt_tokens``: unmasked tokens of all sequences of each row's prompt; None, with
    ``num_prompts`` None: no two sequences share a prompt.

    With nothing unmasked the result is 0 with gradient 0, whatever ``token_losses`` holds. Raises ValueError
    for an unknown mode.
    """
    losses = torch.where(
        mask, token_losses, torch.zeros((), dtype=token_losses.dtype, device=token_losses.device)
    )
    sums = losses.sum(dim=1)
    if mode == "token-mean":
        return sums.sum() / max(num_tokens, 1.0)
    if mode == "token-sum":
        return sums.sum()
    sequences = max(num_sequences, 1.0)
    if mode == "seq-mean-token-mean":
        tokens = mask.sum(dim=1) if sequence_tokens is None else sequence_tokens
        return (sums / tokens.clamp(min=1)).sum() / sequences
    if mode == "prompt-mean-token-mean":
        tokens_of_unit = sequence_tokens if prompt_tokens is None else prompt_tokens
        tokens = mask.sum(dim=1) if tokens_of_unit is None else tokens_of_unit
        prompts = sequences if num_prompts is None else max(num_prompts, 1.0)
        return (sums / tokens.clamp(min=1)).sum() / prompts
    if mode == "seq-mean-token-sum":
        return sums.sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        return sums.sum() / (sequences * max_tokens)
    raise ValueError(f"aggregation mode {mode!r}: expected one of {', '.join(MODES)}")
