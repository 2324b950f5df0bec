"""The configuration of a run, with checks for settings that contradict each other across sections or that
nothing would read.

`UNREAD` lists keys that have no effect without others; `EXCLUSIVE` and `RULES` relate two or more keys; the
functions below them check the entries of lists. `Config` reports all problems in one message, before anything
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pydantic import model_validator

from grpo_dist.config.algorithm import ESTIMATOR_TRAITS, AlgorithmConfig
from grpo_dist.config.base import Choice, Section
from grpo_dist.config.data import (
    PROMPT_KEYS,
    CompletionOrder,
    DataSourceConfig,
    DynamicSamplingConfig,
    EpochsOrderConfig,
    LengthOrderConfig,
)
from grpo_dist.config.distillation import TeacherConfig
from grpo_dist.config.environments import AGENT, check_environment_name
from grpo_dist.config.monitoring import FixedLengths
from grpo_dist.config.rewards import RewardsConfig
from grpo_dist.config.sampling import AdaptiveTemperature
from grpo_dist.config.sections import Sections
from grpo_dist.config.text import fill


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings that must not be combined.

    Attributes:
        keys: dotted keys, separated by spaces; the message begins with them and their values.
        breaks: whether a configuration breaks the rule.
        why: what is wrong.
        remedy: what to do.
    """

    keys: str
    breaks: Callable[[Sections], object]
    why: str
    remedy: str = "remove one of them"


def _matches(config: Sections, setting: str) -> bool:
    key, sign, values = setting.partition("=")
    if not sign:
        return bool(_read(config, key))
    return (_value(config, key.removesuffix("!")) in values.split("|")) != key.endswith("!")


def _read(config: Sections, key: str) -> Any:
    """Return the value of a dotted key; None inside a section that is null."""
    whole: Any = config
    return reduce(lambda section, name: getattr(section, name) if section else None, key.split("."), whole)


def _value(config: Sections, key: str) -> str:
    value = _read(config, key)
    if isinstance(value, Choice):
        return str(getattr(value, value.tag))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return (
        f"{value:g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)
    )


def learns_from_equal_rewards(config: Sections) -> bool:
    """Return whether a step can learn from zero-variance groups, or from teachers or demonstrations."""
    other_streams = bool(config.distillation.teachers) or config.demonstrations is not None
    estimates = any(estimator.traits.learns_from_equal_rewards for estimator in config.estimators)
    estimates |= config.algorithm.process is not None
    return estimates or config.rewards.shuffle or other_streams


def corrects(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss corrects the mismatch between engine and trainer."""
    return algorithm.correction.kind != "none"


def contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for settings that contradict each other, and for settings that a run would ignore."""
    yield from _check_unread(config)
    yield from _broken_rules(config)
    yield from _check_sizes(config)
    yield from _check_estimator(_without_other_estimators(config))
    yield from _check_source_algorithms(config)
    yield from _check_environments(config)
    yield from _check_templates(config)
    yield from _check_prefills(config)
    yield from _check_sources(config)
    yield from _check_source_rewards(config)
    yield from _check_teachers(config)


def _nvme(config: Sections) -> bool:
    return "nvme" in (config.policy.offload.optimizer, config.policy.offload.parameters)


def _single_completions(config: Sections) -> list[str]:
    """Return the names of the training sources without environment."""
    return [source.label for source in config.data.train if config.data.environment_of(source) is None]


def _teaches_itself(config: Sections) -> bool:
    """Return whether nothing but the reference teaches: the initial policy, or a follower of the policy."""
    is_only = all(not t.has_workers and t.prompt is None for t in config.distillation.teachers)
    return is_only and config.demonstrations is None and not config.algorithm.has_entropy_bonus


def _measures_rewards_only(config: Sections) -> bool:
    return bool(config.distillation.teachers) and not config.distillation.reward_coef


def _has_teachers(config: Sections) -> bool:
    return bool(config.distillation.teachers)


# Losses whose weight or penalty depends on the policy's distance from the sampling policy.
_OFF_POLICY = ("dro", "kimi15", "topr", "topr_token", "reinforce_is", "vespo")


def _every_ratio_is_1(config: Sections) -> bool:
    return not config.algorithm.correction.bypasses and _updates(config) == 1


def _updates(config: Sections) -> int:
    return config.batch.updates_per_step * config.batch.epochs_per_batch


def _has_no_group(config: Sections) -> bool:
    """Return whether a prompt has one sample, whose only baseline is its batch."""
    traits = config.algorithm.advantage.traits
    others = traits.learns_from_one_sample or config.algorithm.process is not None
    return config.batch.samples_per_prompt == 1 and not others


# Settings that exclude each other, why, and the remedy (by default: remove one of them). `key=a|b` lists the
# excluded values, `key!=a` excludes all others, and `key` excludes every value that is set.
EXCLUSIVE = {
    "batch.order.name=completion max_staleness=0": "slow groups are carried over to later steps, but no "
    "older samples are allowed; set `max_staleness` to 1 or more, or `batch.order` to launched",
    "model.path=sft sft=null": "needs an `sft` section that configures that model's training; add it, or "
    "name a model",
    "model.adapter model.path=sft": "an adapter is of a model that exists, and this run trains its model "
    "first; remove the adapter, or name its base as `model.path`",
    "model.attention=eager model.packing": "eager attention does not support packed rows; use "
    "`model.attention` = auto, or set `model.packing` = false",
    "policy.sequence_parallel!=1 model.packing=false": "packed rows are split over the ranks",
    "policy.compile policy.zero_stage=3": "ZeRO-3 gathers the weights of a layer inside the compiled "
    "region; remove `policy.compile`, or use stage 2",
    "policy.compile model.kernels=liger": "these kernels cannot be compiled",
    "policy.router_replay policy.compile": "replay chooses experts outside of the compiled region, and the "
    "routers are in it",
    "policy.router_replay rollout.speculation.tokens": "engines that verify drafts may not return the "
    "routes of every token",
    "policy.router_replay weight_sync.mode=keep": "samples continue with new weights, which route earlier "
    "tokens differently; set it to drain",
    "policy.router_replay rollout.function": "tokens that the function inserts have no experts to replay",
    "policy.optimizer.name=adamw_8bit policy.offload.optimizer!=none": "DeepSpeed's Adam on the CPU has no "
    "states of 8 bits; set `policy.offload.optimizer` to none, or `policy.optimizer.name` to adamw",
    "policy.offload.optimizer!=none policy.zero_stage=0": "offload needs ZeRO; set `policy.zero_stage` to "
    "1, 2 or 3",
    "policy.offload.optimizer=nvme policy.zero_stage=1|2": "nvme needs stage 3; set stage 3, or offload to "
    "cpu",
    "policy.offload.parameters!=none policy.zero_stage!=3": "needs stage 3: other stages keep all "
    "parameters on every rank; set stage 3, or the offload to none",
    "weight_sync.deltas=true policy.lora.sync=adapter": "deltas are of full weights, not of adapters; set "
    "`weight_sync.deltas` to auto, or `policy.lora.sync` to merged",
    "weight_sync.backend=nccl cluster.placement=colocated": "nccl cannot connect two processes on one GPU; "
    "set `weight_sync.backend` to auto",
    "rollout.quantization!=none algorithm.correction=none": "the engine's log-probs differ from the "
    "trainer's, uncorrected; set algorithm.correction (tis is the default), or remove rollout.quantization",
    "rollout.quantization!=none model.dtype=float32": "quantised layers compute in bfloat16; set "
    "model.dtype to auto or bfloat16, or remove `rollout.quantization`",
    "checkpoint.keep_best evaluation.num_workers": "an evaluation on separate engines ends after later "
    "steps, so the checkpoint would have later weights; set `evaluation.num_workers` to 0, or remove "
    "`checkpoint.keep_best`",
    "algorithm.loss=policy_gradient algorithm.correction=bypass": "the loss has no ratio whose denominator "
    "could be the engine's log-probs; set the second to tis, which corrects the mismatch, or none",
    "algorithm.reward_norm=group batch.samples_per_prompt=1": "rewards are normalised over the samples of a "
    "prompt; use batch or running",
}

RULES = (
    # Batches and lengths
    Rule(
        "bench.lengths.tokens sampling.max_new_tokens",
        lambda c: (
            isinstance(c.bench.lengths, FixedLengths)
            and (c.bench.lengths.tokens or 0) > c.sampling.longest
        ),
        "a completion would be longer than the longest",
        "lower the first or raise the second",
    ),
    Rule(
        "batch.order.oversample max_staleness",
        lambda c: (
            isinstance(c.batch.order, CompletionOrder)
            and (c.batch.order.oversample or 0) > 1 + c.max_staleness > 1
        ),
        "above 1 + `max_staleness`, the steps that a group may be in flight",
        "lower it or raise `max_staleness`",
    ),
    Rule(
        "dynamic_sampling.oversample batch.order.name",
        lambda c: (
            c.batch.order.name == "completion"
            and isinstance(c.dynamic_sampling, DynamicSamplingConfig)
            and c.dynamic_sampling.oversample != 1.0
        ),
        "the first has no effect, as each group is replaced by one",
        "use `batch.order.oversample`",
    ),
    Rule(
        "health.min_signal_groups batch.prompts_per_step",
        lambda c: c.health.min_signal_groups > c.batch.prompts_per_step,
        "no step would be trained on",
        "lower the first or raise the second",
    ),
    Rule(
        "profile.steps steps",
        lambda c: c.epochs is None and max(c.profile.steps, default=0) > c.steps,  # else see `resolve_steps`
        "the run ends before",
        "name earlier steps, or raise `steps` or `epochs`",
    ),
    # Model, ranks and engines
    Rule(
        "policy.num_workers policy.sequence_parallel",
        lambda c: c.policy.num_workers % c.policy.sequence_parallel,
        "the first must be a multiple of the second",
        "change one of them",
    ),
    Rule(
        "policy.router_replay rollout.num_workers rollout.max_workers",
        lambda c: c.policy.router_replay and c.rollout.may_grow,
        "engines may leave before their samples are trained on, and their routes with them",
        "set a fixed number of engines, or remove `policy.router_replay`",
    ),
    Rule(
        "policy.offload.nvme_path",
        lambda c: c.policy.offload.nvme_path is None and _nvme(c),
        "`policy.offload` = nvme needs a directory on a local NVMe disk",
        "set it",
    ),
    Rule(
        "rollout.speculation.tokens",
        lambda c: c.rollout.speculation and (c.sampling.stop or c.has_environments),
        "an engine step samples several tokens, and `sampling.stop` or `data.environment` may end a sample "
        "inside a step, where speculative decoding is not proven lossless",
        "remove `rollout.speculation`, or what ends samples",
    ),
    Rule(
        "sampling.top_p sampling.top_k sampling.min_p rollout.speculation.tokens",
        lambda c: c.sampling.is_truncated and c.rollout.speculation,
        "engines that verify drafts return no sampling masks, without which ratios would be biased",
        "remove `rollout.speculation`, or sample from the whole vocabulary",
    ),
    Rule(
        "sampling.top_p sampling.top_k sampling.min_p distillation.kl",
        lambda c: c.sampling.is_truncated and _has_teachers(c) and c.distillation.top_k,
        "the policy may be unable to sample the teacher's likeliest tokens",
        "set `distillation.kl` to sampled or advantage, or sample from the whole vocabulary",
    ),
    Rule(
        "rollout.function",
        lambda c: c.rollout.function and all(map(c.data.environment_of, (*c.data.train, *c.data.eval))),
        "it draws samples of prompts without environment, and every source has one",
    ),
    # Data and environments
    Rule(
        "environments.sandbox.call_s environments.sandbox.episode_s",
        lambda c: c.environments.sandbox.call_s > c.environments.sandbox.episode_s,
        "one call may not take longer than all calls of an episode",
        "lower the first or raise the second",
    ),
    # The algorithm
    Rule(
        "algorithm.loss algorithm.correction batch.updates_per_step batch.epochs_per_batch",
        lambda c: c.algorithm.loss.name in _OFF_POLICY and _every_ratio_is_1(c),
        "the loss depends on the policy's distance from the sampling policy, and every ratio to the "
        "trainer's log-probs is 1 in a first update: it would be only -A log pi",
        "set `algorithm.correction` to bypass, which compares with the engine, or use policy_gradient",
    ),
    Rule(
        "algorithm.loss batch.updates_per_step batch.epochs_per_batch",
        lambda c: c.algorithm.loss.name == "kl_cov" and _every_ratio_is_1(c),
        "the penalty measures the change since sampling, and in a first update there is none",
        "set `batch.updates_per_step` to 2 or more, or use ppo_clip",
    ),
    Rule(
        "algorithm.loss batch.updates_per_step batch.epochs_per_batch",
        lambda c: c.algorithm.loss.name == "policy_gradient" and _updates(c) > 1,
        "the loss has no ratio, so nothing bounds a second update on the same samples",
        "set both to 1, or use ppo_clip",
    ),
    Rule(
        "algorithm.advantage algorithm.correction",
        lambda c: c.algorithm.advantage.traits.reads_policy and c.algorithm.correction.bypasses,
        "the estimator needs the policy's distribution of every token, from a forward pass that bypass skips",
        "set the correction to tis or none, or use another advantage",
    ),
    Rule(
        "batch.shuffle_epochs batch.updates_per_step batch.epochs_per_batch",
        lambda c: c.batch.shuffle_epochs and 1 in (c.batch.updates_per_step, c.batch.epochs_per_batch),
        "groups are dealt to updates again in every epoch, which needs several of both",
        "raise them, or remove the first",
    ),
    Rule(
        "algorithm.advantage.k batch.samples_per_prompt",
        lambda c: getattr(c.algorithm.advantage, "k", 0) >= c.batch.samples_per_prompt,
        "the first must be below the second: every choice of k out of k samples is the same",
        "lower the first or raise the second",
    ),
    Rule(
        "algorithm.advantage batch.samples_per_prompt",
        lambda c: c.batch.samples_per_prompt == 1 and c.algorithm.advantage.traits.needs_group,
        "it compares the samples of a prompt, so that every advantage would be 0",
        "raise the second to 2 or more, or use "
        f"{' or '.join(name for name, traits in ESTIMATOR_TRAITS.items() if not traits.needs_group)}",
    ),
    Rule(
        "dynamic_sampling.enabled batch.samples_per_prompt",
        lambda c: (
            _has_no_group(c) and not c.algorithm.advantage.traits.needs_group and c.dynamic_sampling.enabled
        ),
        "zero-variance groups are replaced, and every group of one is such a group",
        "set one of the two",
    ),
    Rule(
        "algorithm.zero_variance_filter batch.samples_per_prompt",
        lambda c: _has_no_group(c) and c.algorithm.zero_variance_filter,
        "zero-variance groups are filtered out, and every group of one is such a group",
        "set one of the two",
    ),
    Rule(
        "algorithm.zero_variance_filter distillation.kl",
        lambda c: (
            _has_teachers(c) and c.algorithm.zero_variance_filter and c.distillation.kl_as == "advantage"
        ),
        "zero-variance groups are filtered out, but a teacher gives them advantages",
        "remove the first, or set the second to sampled or top_k",
    ),
    Rule(
        "algorithm.advantage",
        lambda c: c.algorithm.process and c.algorithm.advantage.name in ("process", "turn"),
        "`algorithm.process` adds the advantages of steps to the advantages of outcomes, but this estimator "
        "already uses rewards of steps",
        "use an estimator of outcomes, e.g. grpo, or remove `algorithm.process`",
    ),
    Rule(
        "algorithm.advantage.gamma",
        lambda c: c.algorithm.process and getattr(c.algorithm.advantage, "gamma", 1.0) < 1.0,
        "it discounts the reward at the end of a sample, and `algorithm.process` adds rewards at the ends of "
        "steps",
        "set one of them",
    ),
    Rule(
        "reference.refresh_every algorithm.kl.coef",
        lambda c: c.reference.refresh_every and not c.needs_reference,
        "without a KL term and a teacher that is the reference, no reference is created",
        "set `algorithm.kl.coef` above 0, or remove `reference.refresh_every`",
    ),
    # Teachers and demonstrations
    Rule(
        "dynamic_sampling.enabled",
        lambda c: _has_teachers(c) and c.dynamic_sampling.enabled,
        "zero-variance groups are replaced, but `distillation.teachers` teach from them",
        "set it to false",
    ),
    Rule(
        "distillation.reward_coef algorithm.kl.in_reward",
        lambda c: (
            _has_teachers(c)
            and c.distillation.reward_coef != 1.0
            and c.algorithm.advantage.whiten
            and c.algorithm.kl.in_reward
        ),
        "whitening mixes the advantages of rewards, which the first weighs, with the KL of the second",
        "set `algorithm.kl.in_reward` or `algorithm.advantage.whiten` to false, or remove "
        "`distillation.reward_coef`",
    ),
    Rule(
        "data.order distillation.reward_coef",
        lambda c: _measures_rewards_only(c) and c.data.order.name in ("pass_rate", "pools"),
        "prompts are drawn by rewards, but nothing is learned from rewards",
        "set `data.order` to epochs, or raise `distillation.reward_coef`",
    ),
    Rule(
        "data.order.drop_solved distillation.reward_coef",
        lambda c: _measures_rewards_only(c) and c.data.drop_solved is not None,
        "solved prompts are dropped although teachers could still improve them",
        "remove the first, or raise the second",
    ),
    Rule(
        "distillation.reward_coef",
        lambda c: _measures_rewards_only(c) and _teaches_itself(c),
        "the initial policy teaches itself, so nothing is learned",
        "give a teacher a `prompt`, add another teacher or `demonstrations`, or raise "
        "`distillation.reward_coef`",
    ),
    Rule(
        "demonstrations.rows_per_step batch.updates_per_step",
        lambda c: c.demonstrations and c.demonstrations.rows_per_step % c.batch.updates_per_step,
        "the first must be divisible by the second",
        "change one of them",
    ),
)  # fmt: skip


# Keys that a run ignores unless something else is set: its description, and whether it is set.
UNREAD: dict[str, tuple[str, Callable[[Sections], object]]] = {
    "policy.offload.nvme_path": (
        "policy.offload.optimizer=nvme or policy.offload.parameters=nvme", lambda c: _nvme(c),
    ),
    "reference.refresh_mix": ("reference.refresh_every", lambda c: c.reference.refresh_every),
    "evaluation.num_workers": (
        "`data.eval` and evaluations during training (`evaluation.every` or `evaluation.before`)",
        lambda c: c.data.eval and (c.evaluation.before or c.evaluation.every),
    ),
    "checkpoint.keep_best": (
        "`data.eval` and `evaluation.every`", lambda c: c.data.eval and c.evaluation.every,
    ),
    **dict.fromkeys(
        ("checkpoint.patience", "checkpoint.target"),
        ("a metric to look at, `checkpoint.keep_best`", lambda c: c.checkpoint.keep_best),
    ),
    **dict.fromkeys(
        ("environments.mask_outcomes", "environments.outcome_rewards"),
        ("an environment (`data.environment`)", lambda c: c.has_environments),
    ),
    **dict.fromkeys(
        ("distillation.coef", "distillation.kl", "distillation.reward_coef"),
        ("a teacher (`distillation.teachers`)", lambda c: c.distillation.teachers),
    ),
    "data.prefill_as": (
        "a `data.prefill`",
        lambda c: any(source.prefill for source in c.data.resolve_prompts((*c.data.train, *c.data.eval))),
    ),
}  # fmt: skip


def _check_unread(config: Sections) -> Iterator[str]:
    for key, (needed, is_set) in UNREAD.items():
        parent, _, name = key.rpartition(".")
        section: Section = reduce(getattr, parent.split("."), config)
        is_default = getattr(section, name) == type(section).model_fields[name].get_default()
        if not is_default and not is_set(config):
            value = _value(config, key)
            yield f"`{key}` = {value}: has no effect without {needed}; set that, or remove `{key}`"


def _check_sizes(config: Sections) -> Iterator[str]:
    b, ranks = config.batch, config.policy.replicas
    if config.max_length <= config.data.max_prompt_tokens:
        yield (
            f"`model.max_length` = {config.model.max_length} leaves no token for an answer after a prompt "
            f"of `data.max_prompt_tokens` = {config.data.max_prompt_tokens}; raise it, or lower the prompt's"
        )
    if b.prompts_per_step % b.updates_per_step:
        near = _divisors_near(b.prompts_per_step, b.updates_per_step)
        yield (
            f"`batch.prompts_per_step` = {b.prompts_per_step} must be divisible by "
            f"`batch.updates_per_step` = {b.updates_per_step}; use {near}"
        )
        return
    samples = b.prompts_per_step * b.samples_per_prompt // b.updates_per_step
    if samples % ranks:
        per_update = " / `batch.updates_per_step`" if b.updates_per_step > 1 else ""
        shared = config.policy.sequence_parallel
        per_sequence = f" / `policy.sequence_parallel` = {shared}" if shared > 1 else ""
        yield (
            f"`batch.prompts_per_step` * `batch.samples_per_prompt`{per_update} = {samples} must be "
            f"divisible by `policy.num_workers` = {config.policy.num_workers}{per_sequence}; use "
            f"{_divisors_near(samples, ranks)}{' times that' if per_sequence else ''}"
        )


def _divisors_near(total: int, number: int) -> str:
    """Return the divisors of ``total`` closest to ``number``, for a message: (512, 3) -> "2 or 4"."""
    below = [d for d in range(1, number) if total % d == 0]
    above = [d for d in range(number + 1, total + 1) if total % d == 0]
    return " or ".join(str(d) for d in below[-1:] + above[:1])


def _broken_rules(config: Sections) -> Iterator[str]:
    for settings, why in EXCLUSIVE.items():
        if all(_matches(config, setting) for setting in settings.split()):
            keys = [setting.partition("=")[0].removesuffix("!") for setting in settings.split()]
            yield f"{_with_values(config, keys)}: {why}{'' if ';' in why else '; remove one of them'}"
    for rule in RULES:
        if rule.breaks(config):
            yield f"{_with_values(config, rule.keys.split())}: {rule.why}; {rule.remedy}"


def _with_values(config: Sections, keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}` = {_value(config, key)}" for key in keys)


def _with_sources(
    config: Sections, sources: tuple[DataSourceConfig, ...], rewards: RewardsConfig
) -> Sections:
    data = config.data.model_copy(update={"train": sources})
    return config.model_copy(update={"data": data, "rewards": rewards})


def _without_other_estimators(config: Sections) -> Sections:
    """Return ``config`` without the sources that override `algorithm.advantage`, unless all do."""
    apart = config.source_estimators
    sources = tuple(source for source in config.data.train if source.label not in apart)
    if not apart or not sources:
        return config
    return _with_sources(config, sources, config.rewards_by_estimator[0][1])


def _check_source_algorithms(config: Sections) -> Iterator[str]:
    """Check each source's overrides of `algorithm` as if they were the run's algorithm."""
    run_messages = set(_broken_rules(config)) if config.source_algorithms else set()
    for number, source in enumerate(config.data.train):
        if source.algorithm is None:
            continue
        where = f"`data.train.{number}.algorithm`"
        if source.algorithm.kl is not None and not config.has_kl_term:
            yield (
                f"{where}: `kl.coef` = {source.algorithm.kl.coef:g} needs a reference, and "
                "`algorithm.kl.coef` = 0 makes none; set that above 0, and 0 for sources without a KL term"
            )
        if source.algorithm.loss is not None and config.algorithm.loss.selection:
            yield (
                f"{where}: `loss` = {source.algorithm.loss.name} cannot be combined with `algorithm.loss` = "
                f"{config.algorithm.loss.name}, which chooses tokens of all sources; remove one of them"
            )
        # The reference exists for the other sources even if this source's KL weight is 0.
        algorithm = source.algorithm.model_copy(update={"kl": None}).over(config.algorithm)
        overridden = config.model_copy(update={"algorithm": algorithm})
        further = (message for message in _broken_rules(overridden) if message not in run_messages)
        yield from (f"{where}: {message}" for message in further)
        if source.algorithm.advantage is not None:
            only = _with_sources(overridden, (source,), config.rewards.select_source(source.label))
            yield from (f"{where}: {message}" for message in _check_estimator(only))


def _check_estimator(config: Sections) -> Iterator[str]:
    """Check which rewards the estimator reads, and which it refuses."""
    yield from _check_read_rewards(config)
    yield from _check_single_rewards(config)
    yield from _check_binary_rewards(config)
    yield from _check_outcome_rewards(config)


def _check_read_rewards(config: Sections) -> Iterator[str]:
    """Check what the estimator reads besides total rewards."""
    a, rewards = config.algorithm, config.rewards
    advantage, estimator = a.advantage.name, a.advantage.traits
    others = estimator.other_rewards
    if others is not None and not estimator.reads_greedy_answer and a.reward_clip is not None:
        yield (
            f"`algorithm.reward_clip` = {a.reward_clip} clips total rewards, but `algorithm.advantage` = "
            f"{advantage} uses {others}; remove `algorithm.reward_clip`"
        )
    if others is not None and a.reward_norm.name != "none":
        yield (
            f"`algorithm.reward_norm` = {a.reward_norm.name} normalises total rewards, but "
            f"`algorithm.advantage` = {advantage} uses {others}; remove `algorithm.reward_norm`"
        )
    reads_unshuffled = {
        f"`algorithm.advantage` = {advantage}": others is not None,
        "`algorithm.process`": a.process is not None,
        "`dynamic_sampling.enabled`": config.dynamic_sampling.enabled,
        "`data.order.drop_solved`": config.data.drop_solved is not None,
        f"`data.order` = {config.data.order.name}": not isinstance(
            config.data.order, EpochsOrderConfig | LengthOrderConfig
        ),
    }
    for setting in (name for name, is_set in reads_unshuffled.items() if is_set and rewards.shuffle):
        yield (
            f"`rewards.shuffle` = true shuffles only the total rewards of a step, but {setting} reads other "
            "rewards, which stay unshuffled, so the run is no control; remove one of the two"
        )
    single = _single_completions(config)
    lacking = [label for label in single if not rewards.select_source(label).scores_steps]
    if (a.process or advantage == "process") and lacking:
        reader = "`algorithm.process`" if a.process else "`algorithm.advantage` = process"
        where = f"rewards.by_source.{lacking[0]}" if lacking[0] in rewards.by_source else "rewards"
        yield (
            f"{reader} needs scores of reasoning steps or turns, but `{where}` has no "
            f"rewards of steps, and source {lacking[0]} of `data.train` no environment; "
            "add one of them"
        )
    sums = [r.weight for r in rewards.all_functions if r.function == "environment" and r.weight]
    for reader, reads in ((f"`algorithm.advantage` = {advantage}", advantage == "turn"),
                          ("reward `environment`", bool(sums))):  # fmt: skip
        if reads and single:
            yield (
                f"{reader} needs the rewards of turns, but source {single[0]} of `data.train` has no "
                "environment, so none of its samples would be scored; set `data.environment`, or remove it"
            )
    if advantage == "turn" and sums:
        yield (
            "`algorithm.advantage` = turn adds the rewards of turns to the reward of the episode, and reward "
            f"`environment` of weight {sums[0]:g} is their sum, so each would count twice; set its weight to "
            "0, which only reports it"
        )


def _check_single_rewards(config: Sections) -> Iterator[str]:
    """Check that an estimator can read each reward separately."""
    advantage, rewards = config.algorithm.advantage, config.rewards
    if not advantage.traits.reads_each_reward:
        return
    gated = [r.gate for r in (*rewards.all_functions, *rewards.models) if r.gate is not None]
    if gated:
        yield (
            f"`algorithm.advantage` = {advantage.name} normalises every reward separately, which contradicts "
            f"a gate between two rewards; remove `gate` = {gated[0]}"
        )
    if not any(rewards.weights.values()):
        yield (
            f"`algorithm.advantage` = {advantage.name} normalises every reward whose `weight` is not 0, but "
            f"all of `rewards` have 0: {', '.join(rewards.names)}; give one a weight"
        )


def _check_binary_rewards(config: Sections) -> Iterator[str]:
    """Check that total rewards are 0 or 1 where the estimator needs that. Before a run,
    `rewards.registry.graded_problems` also names built-in rewards with other values.
    """
    a, rewards = config.algorithm, config.rewards
    if not a.advantage.traits.only_right_and_wrong:
        return
    needs = f"`algorithm.advantage` = {a.advantage.name} needs a reward of 0 and 1, but"
    for source, settings in rewards.variants.items():
        weighted = [r for r in (*settings.functions, *settings.models) if r.weight]
        at = f"rewards.by_source.{source}" if source else "rewards"
        if (settings.functions or settings.models) and (len(weighted) != 1 or weighted[0].weight != 1):
            yield f"{needs} `{at}` sums {len(weighted)} with their weights; keep one, with `weight` = 1"
    for name in (model.name for model in rewards.models if model.weight):
        yield (
            f"{needs} a score of the model {name} has other values; set its `weight` to 0, or use another "
            "advantage"
        )
    clip, norm = a.reward_clip, a.reward_norm.name
    for key, value, has_others in (
        ("reward_clip", clip, clip is not None and clip < 1), ("reward_norm", norm, norm != "none"),
    ):  # fmt: skip
        if has_others:
            yield (f"{needs} `algorithm.{key}` = {value} gives others; remove it, or use another advantage")


def _check_outcome_rewards(config: Sections) -> Iterator[str]:
    """Check that the estimator reads what the ends of episodes add to total rewards."""
    advantage, traits = config.algorithm.advantage.name, config.algorithm.advantage.traits
    added = {end: value for end, value in config.environments.outcome_rewards.items() if value}
    if not added or not any(map(config.data.environment_of, config.data.train)):
        return
    if traits.only_right_and_wrong:
        reads = "needs a reward of 0 and 1"
    elif traits.reads_each_reward or advantage == "process":
        reads = f"uses {traits.other_rewards}"
    else:
        return
    yield (
        f"`environments.outcome_rewards` = {added} adds to total rewards, but `algorithm.advantage` = "
        f"{advantage} {reads}; set them to 0, or use another advantage"
    )


def _check_environments(config: Sections) -> Iterator[str]:
    data, rewards = config.data, config.rewards
    named = [("data.environment", data.environment)] if data.environment != "none" else []
    for key, sources in (("train", data.train), ("eval", data.eval)):
        for number, source in enumerate(sources):
            where = f"data.{key}.{number}"
            if source.environment not in (None, "none"):
                named.append((f"{where}.environment", str(source.environment)))
            if data.environment_of(source) is not None:
                continue
            if source.path is None:
                yield (
                    f"`{where}` has neither `path` nor `environment`; set its `path`, or an environment that "
                    "provides problems"
                )
            if source.environment_kwargs:
                yield (
                    f"`{where}.environment_kwargs` has no effect without an environment; set "
                    f"`{where}.environment`, or remove it"
                )
    for key, name in named:
        try:
            check_environment_name(name)
        except ValueError as error:
            yield f"`{key}`: {error}"
    episodes = {source.label for source in data.train if data.environment_of(source) is not None}
    for label in sorted(label for label in episodes if rewards.select_source(label).scores_steps):
        key = f"rewards.by_source.{label}" if label in rewards.by_source else "rewards"
        yield (
            f"`{key}` has a reward of steps, which scores the steps of a single "
            f"completion, but the environment of source {label} makes episodes; remove it "
            "(`algorithm.advantage` = process then takes the rewards of turns) or the environment, or give "
            f"the source rewards without it in `rewards.by_source.{label}`"
        )


def _check_templates(config: Sections) -> Iterator[str]:
    """Refuse a gold answer in a box of the prompt. Outside of a box it may be needed: Countdown's target."""
    data = config.data
    for source in data.resolve_prompts((*data.train, *data.eval)):
        for key in ("template", "problem_template"):
            box = f"\\boxed{{{source.answer_column}}}"
            filled = fill(getattr(source, key) or "", lambda name: f"{{{name}}}\0")
            if f"{box}\0" in filled:
                yield (
                    f"`{key}` of source {source.label} has {box}, so that every prompt would show its "
                    f"answer; write \\boxed{{{{{source.answer_column}}}}} for the text {box}"
                )


def _check_prefills(config: Sections) -> Iterator[str]:
    data, rewards = config.data, config.rewards
    prefilled = [source for source in data.resolve_prompts((*data.train, *data.eval)) if source.prefill]
    for source in prefilled:
        if (data.environment_of(source) or "").startswith(AGENT):
            yield (
                f"`data.prefill` begins each message of the policy, but the agent of source {source.label} "
                "writes the requests; set the source's `prefill` to empty, or write the prefill after "
                "`add_generation_prompt` of a `model.chat_template`"
            )
        if data.prefill_as == "completion" and rewards.select_source(source.label).scores_steps:
            yield (
                "`data.prefill_as` = completion: a reward of steps splits the sampled tokens, which exclude "
                "the prefill; set data.prefill_as=prompt"
            )


def _check_sources(config: Sections) -> Iterator[str]:
    """Check weights, temperatures and algorithms of single sources."""
    data, temperature = config.data, config.sampling.temperature
    labels = [source.label for source in data.train]
    source_keys = ("weight", "temperature", "algorithm")
    special = [s.label for s in data.train if any(getattr(s, key) is not None for key in source_keys)]
    if twice := [label for label in special if labels.count(label) > 1]:
        yield (
            f"`data.train`: several sources have the name {twice[0]}, and one of them a weight, a "
            "temperature or an algorithm; give each its own `name`"
        )
    formats: dict[str, list[Any]] = {}  # a prompt stores only the label of its source
    for source in data.resolve_prompts(data.train):
        keys = [getattr(source, key) for key in PROMPT_KEYS]
        if formats.setdefault(source.label, keys) != keys:
            yield (
                f"`data.train`: several sources have the name {source.label}, but different prompt settings "
                f"({', '.join(PROMPT_KEYS)}); give each its own `name`"
            )
    weighted = [source.label for source in data.train if source.weight is not None]
    if weighted and len(weighted) < len(labels):
        lacking = next(label for label in labels if label not in weighted)
        yield (
            f"`data.train`: source {weighted[0]} has a `weight` and {lacking} has none; give each one, or "
            "none"
        )
    if weighted and not isinstance(data.order, EpochsOrderConfig):
        yield (
            f"`data.order` = {data.order.name} chooses the sources, so `weight` of {weighted[0]} has no "
            "effect; remove it, or set `data.order` to epochs"
        )
    steered = isinstance(temperature, AdaptiveTemperature)
    if steered and data.temperatures:
        yield (
            "`sampling.temperature` follows the entropy of all samples, but source "
            f"{next(iter(data.temperatures))} sets a `temperature`; remove one of them"
        )
    for i, source in enumerate(data.eval):
        for key in source_keys:
            if getattr(source, key) is not None:
                yield (
                    f"`data.eval.{i}.{key}` has no effect: it applies to training sources; remove it "
                    "(`evaluation.temperature` applies to all evaluations)"
                )


def _check_source_rewards(config: Sections) -> Iterator[str]:
    """Check the rewards of single sources, and the names of rewards in other sections."""
    rewards, dynamic = config.rewards, config.dynamic_sampling
    metric = dynamic.metric if isinstance(dynamic, DynamicSamplingConfig) else None
    labels = dict.fromkeys(source.label for source in (*config.data.train, *config.data.eval))
    if unknown := [name for name in rewards.by_source if name not in labels]:
        yield (
            f"`rewards.by_source` has {unknown[0]}, but no source of `data.train` and `data.eval` has that "
            f"name; expected one of {', '.join(labels)}"
        )
    if not rewards.functions and not rewards.models:
        for label in (label for label in labels if label not in rewards.by_source):
            yield (
                f"source {label} has no rewards: `rewards.functions` and `rewards.models` are empty and "
                f"`rewards.by_source` does not have it; add rewards.by_source.{label}"
            )
    separate = {one.name: one for one in config.estimators if one.traits.reads_each_reward}
    for advantage in separate.values():
        yield from rewards.check_common_weights(advantage.name)
    if metric not in (None, "accuracy", *rewards.names):
        yield (
            f"`dynamic_sampling.metric` = {metric}: no such reward; expected accuracy or one of "
            f"{', '.join(rewards.names)}"
        )


def _check_teachers(config: Sections) -> Iterator[str]:
    teachers, fields = config.distillation.teachers, TeacherConfig.model_fields
    for i, teacher in enumerate(teachers):
        where = f"`distillation.teachers` {teacher.name}"
        if teacher.prompt is not None and config.has_environments:
            yield (
                f"{where}: `prompt` replaces the problem, but an environment begins and rewrites its "
                "episodes itself; remove `prompt`, or train without environments"
            )
        for key in ("revision", "num_workers"):
            value = getattr(teacher, key)
            if not teacher.has_workers and value != fields[key].default:
                yield (
                    f"{where}: `{key}` = {value} applies to a teacher with workers, but its model is the "
                    f"reference; remove it, or set `{'model' if key == 'revision' else 'reference'}.{key}`"
                )
        for other in teachers[i + 1 :] if config.distillation.top_k else ():
            common = sorted(set(teacher.sources) & set(other.sources))
            if common or not teacher.sources or not other.sources:
                yield (
                    "`distillation.kl` = top_k: `distillation.teachers` "
                    f"{teacher.name} and {other.name} both teach "
                    f"{common[0] if common else 'the same source'}, but their likeliest tokens differ; name "
                    "other `sources` for each, or set `distillation.kl` to sampled"
                )


class Config(Sections):
    """The configuration of a run."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """Report all contradictions in one message."""
        if problems := list(contradictions(self)):
            raise ValueError("; ".join(problems))
        return self
