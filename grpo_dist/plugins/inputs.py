"""The inputs of every kind of piece: a function names those that it wants as its arguments.

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
    """Of an advantage estimator, over the whole step: it returns a number per sample, [B].

    Attributes:
        rewards: float64 [B], clipped and normalised as configured. NaN: could not be scored; whatever is
            returned for it becomes 0.
        group_ids: int64 [B]; samples of one prompt share an id.
        lengths: int64 [B], sampled tokens.
        truncated: bool [B], cut off at the largest length.
        parts: float64 [B] of each reward by name, before weights; NaN where the source has no such reward.
        weights: of each reward by name.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    truncated: Tensor
    parts: Mapping[str, Tensor]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Of a policy loss, over some rows of a step: it returns a loss per token, [B, T], with gradient.

    The same rows must get the same losses in any split of the step. Correction weights, aggregation, KL and
    entropy terms are applied by the run.

    Attributes:
        logprobs: float32 [B, T], nats, of the weights being trained, with gradient; 0 where masked.
        old_logprobs: float32 [B, T], nats, of the weights before the step; with `correction: bypass`, of
            the engine.
        rollout_logprobs: float32 [B, T], nats, of the engine that sampled.
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
    """Of a KL estimator: it returns nats per token, [B, T], as a loss with gradient.

    Attributes:
        logprobs: [B, T], nats, of the policy; float64 for a KL term in the rewards.
        ref_logprobs: [B, T], nats, of the reference.
    """

    logprobs: Tensor
    ref_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """Of an aggregation, over some rows of an update: it returns their share of the update's loss, a scalar.
    The shares of any split of the rows must add up to that of all rows.

    Attributes:
        token_losses: float32 [B, T]; 0 where masked.
        mask: bool [B, T], tokens that are trained.
        num_tokens: trained tokens of the whole update.
        num_sequences: sequences of the whole update that have a trained token.
        max_tokens: `sampling.max_new_tokens` of the step.
        sequence_tokens: int64 [B], trained tokens of the sequence of each row.
        num_prompts: prompts of the whole update that have a trained token.
        prompt_tokens: int64 [B], trained tokens of all sequences of the prompt of each row.
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
    """Of a metric, in the driver after each step: it returns a number, or numbers by name.

    Attributes:
        step: counted from 1.
        groups: all groups that the step sampled, with rollouts, rewards and reward parts.
        metrics: the step's own metrics by name.
    """

    step: int
    groups: Sequence[Group]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """Of a sink, a class with ``log(step, metrics)``, ``table(step, table)`` and ``close(*, failed)``.

    It is made and called in a thread of its own: it may raise or hang, and the run continues.

    Attributes:
        directory: of the run.
        name: of the run.
        run_id: the same after every resume.
        start: steps that are done; records of later steps are to be replaced.
        settings: the configuration by dotted key, with *** for secrets.
    """

    directory: Path
    name: str
    run_id: str
    start: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """Of a data source, in the driver before a run: it yields a mapping of columns for each row.

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
    """Of a prompt order, in the driver when a batch is launched: it returns ``count`` different indices of
    ``prompts``, best first, a function of its inputs alone.

    Attributes:
        batch: number of the batch, from 0; with `batch.order` completion of the call.
        count: prompts that it takes: `batch.prompts_per_step` and, with dynamic sampling, spare ones; with
            `batch.order` completion as many as it takes to leave enough that are not being sampled.
        prompts: all prompts of the run.
        pass_rates: (right, scored) by uid of the samples so far, of which each later batch of the prompt
            halves the weight; no entry: not sampled yet. A checkpoint keeps them.
        seed: `seed` of the run.
    """

    batch: int
    count: int
    prompts: Sequence[Prompt]
    pass_rates: Mapping[str, tuple[float, float]]
    seed: int


@dataclass(frozen=True, slots=True)
class RolloutInputs:
    """Of a rollout function, on an engine, once per sample: it returns the sample's parts in order. Each is
    what ``generate`` returned, or a list of token ids that the function put in, which are not trained.

    The sample is the prompt and all parts behind each other. So what is passed to ``generate`` must be the
    prompt's tokens and the parts so far: then the log-probs are those of the sample.

    Attributes:
        token_ids: of the prompt.
        generate: ``await generate(token_ids, max_tokens=None, stop=())`` samples a continuation, with
            `token_ids` (list), `finish_reason` ("stop" or "length"), `logprobs` and `versions`. Each call has
            a seed of its own, derived from the sample's. At most what is left of ``max_new_tokens`` is
            sampled.
        prompt: the prompt's record: answer, columns, text.
        tokenizer: of the model.
        max_new_tokens: longest sample behind the prompt, sampled and given tokens.
    """

    token_ids: list[int]
    generate: Callable[..., Any]
    prompt: Prompt
    tokenizer: Any
    max_new_tokens: int
