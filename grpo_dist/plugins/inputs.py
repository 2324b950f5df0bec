"""The inputs of each kind of user-supplied component: a function names those that it needs as arguments.

``B`` rows, ``T`` tokens of the longest; a [B, T] value belongs to the token of its index. A row is a sample,
or one of the rows of an episode whose history was rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.types import Group, Prompt

if TYPE_CHECKING:  # orders, metrics and environments do without it
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Inputs of an advantage estimator, over the whole step: it returns a number per sample, [B].

    Attributes:
        rewards: float64 [B], clipped and normalised as configured. NaN: could not be scored; whatever is
            returned for it becomes 0.
        group_ids: int64 [B]; samples of one prompt share an id.
        lengths: int64 [B], sampled tokens.
        truncated: bool [B], cut off at the largest length.
        parts: by reward name, float64 [B], before weights; NaN where the source has no such reward.
        weights: weight of each reward by name; an estimator that takes them needs one weight for all sources.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    truncated: Tensor
    parts: Mapping[str, Tensor]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Inputs of a policy loss, over some rows of a step: it returns a loss per token, [B, T], with gradient.

    The same rows must get the same losses in any split of the step. Correction weights, aggregation, KL and
    entropy terms are applied by the run.

    Attributes:
        logprobs: float32 [B, T], nats, of the weights being trained, with gradient; 0 where masked.
        old_logprobs: float32 [B, T], nats, of the weights before the step; with `correction: bypass`, by
            the engine.
        rollout_logprobs: float32 [B, T], nats, by the engine that sampled.
        advantages: float32 [B, T]; 0 where masked.
        mask: bool [B, T], tokens that are trained.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class KLInputs:
    """Inputs of a KL estimator: it returns nats per token, [B, T], as a loss with gradient.

    Attributes:
        logprobs: [B, T], nats, of the policy; float64 for a KL term in the rewards.
        ref_logprobs: [B, T], nats, of the reference.
    """

    logprobs: Tensor
    ref_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """Inputs of an aggregation, over some rows of an update: it returns their share of the update's loss, a
    scalar. The shares of any split of the rows must add up to the share of all rows.

    Attributes:
        token_losses: float32 [B, T]; 0 where masked.
        mask: bool [B, T], tokens that are trained.
        num_tokens: trained tokens of the whole update.
        num_sequences: sequences of the whole update that have a trained token.
        max_tokens: `sampling.max_new_tokens` of the step.
        sequence_tokens: int64 [B], trained tokens in the sequence of each row.
        num_prompts: prompts of the whole update that have a trained token.
        prompt_tokens: int64 [B], trained tokens in all sequences with the prompt of each row.
    """

    token_losses: Tensor
    mask: Tensor
    num_tokens: float
    num_sequences: float
    max_tokens: int
    sequence_tokens: Tensor
    num_prompts: float
    prompt_tokens: Tensor


@dataclass(frozen=True, slots=True)
class MetricInputs:
    """Inputs of a metric, in the driver after each step: it returns a number, or numbers by name.

    Attributes:
        step: counted from 1.
        groups: all groups that the step sampled, with rollouts, rewards and reward parts.
        metrics: metrics of the step by name.
    """

    step: int
    groups: Sequence[Group]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """Inputs of a sink, a class with ``log(step, metrics)``, ``table(step, table)`` and ``close(*, failed)``.

    It is made and called in a separate thread: it may raise or hang, and the run continues.

    Attributes:
        directory: run directory.
        name: name of the run.
        run_id: the same after every resume.
        start: steps that are done; the sink replaces its records of later steps.
        settings: the configuration by dotted key, with *** for secrets.
    """

    directory: Path
    name: str
    run_id: str
    start: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """Inputs of a data source, in the driver before a run: it yields a mapping of columns for each row.

    The same rows must come in the same order each time. Columns, patterns and duplicates are handled
    afterwards, as for every source.

    Attributes:
        split: `split` of the source.
        max_rows: `max_rows` of the source; further rows are not read. None: all.
    """

    split: str
    max_rows: int | None


@dataclass(frozen=True, slots=True)
class OrderInputs:
    """Inputs of a prompt order, in the driver when a batch is launched: it returns ``count`` different
    indices of ``prompts``, best first, a function of its inputs alone.

    Attributes:
        batch: number of the batch, from 0; with `batch.order` completion number of the call.
        count: prompts to return: `batch.prompts_per_step` and, with dynamic sampling, spare ones; with
            `batch.order` completion enough that some are not being sampled.
        prompts: all prompts of the run.
        pass_rates: (right, scored) by uid: counts of the samples so far, whose weight each later batch of the
            prompt halves; no entry: not sampled yet. A checkpoint keeps them.
        seed: `seed` of the run.
    """

    batch: int
    count: int
    prompts: Sequence[Prompt]
    pass_rates: Mapping[str, tuple[float, float]]
    seed: int


@dataclass(frozen=True, slots=True)
class RolloutInputs:
    """Inputs of a rollout function, on an engine, once per sample: it returns the sample's parts in order.
    Each is what ``generate`` returned, or a list of token ids that the function adds, which are not trained.

    The sample is the prompt followed by all parts. So pass to ``generate`` the prompt's tokens and the parts
    so far: only then are its log-probs valid for the sample.

    Attributes:
        token_ids: tokens of the prompt.
        generate: ``await generate(token_ids, max_tokens=None, stop=())`` samples a continuation, with
            `token_ids` (list), `finish_reason` ("stop" or "length"), `logprobs` and `versions`. Each call has
            its own seed, derived from the sample's. It samples at most what is left of ``max_new_tokens``,
            and ends with the token that completes ``stop``, a text or several.
        prompt: the prompt's record: answer, columns, text.
        tokenizer: tokenizer of the model.
        max_new_tokens: longest sample after the prompt, sampled and given tokens.
    """

    token_ids: list[int]
    generate: Callable[..., Any]
    prompt: Prompt
    tokenizer: Any
    max_new_tokens: int
