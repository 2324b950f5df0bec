"""Searches for the best GPU split between engines and policy, placement, ZeRO stage and tensor parallelism,
and names the bottleneck of a step.

Every option has an upper bound on its throughput: each stage at full load all the time. Options are simulated
in order of their bounds until the best result exceeds all remaining bounds, so the result is exact. For large
clusters only a part is simulated for comparison (`Scenario.as_part`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.placement.demands import Resources, demands_of
from grpo_dist.config import Config, WeightSyncConfig
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.options import (
    COMPARED_STEPS,
    Option,
    Planned,
    Setting,
    compared,
    option_or_reason,
    planned,
)
from grpo_dist.tools.plan.rates import UpdateWork
from grpo_dist.tools.plan.simulation import POLICY, Scenario

_SPLITS = 16  # maximum policy rank counts to try
_TENSOR_PARALLEL = (1, 2, 4, 8)
_SLACK = 1.05  # sampled lengths may be shorter than the mean
_TAIL = 0.7  # share of a step above which the longest completion is the bottleneck
_FULL = 0.05  # idle share below which workers are the bottleneck
STAGES = {
    "sample": "generation",
    "reward_model": "scoring by models",
    "score": "scoring",
    "logprobs": "reference",
    "update": "training",
    "sync": "weight sync",
    "turn": "role switches",
}
# Stages between sampling and training, and the settings of their workers.
_HELPERS = {
    "logprobs": "reference.num_workers",
    "score": "rewards.num_workers",
    "reward_model": "rewards.models.N.num_workers",
}

Changes = dict[str, int | str]  # by dotted key


@dataclass(frozen=True)
class Tried:
    """Options of one placement and ZeRO stage. ``splits``: number of GPU splits. ``fitting``: number that can
    run. ``why``: the most frequent reason against the others. ``best``: the fastest split.
    """

    placement: str
    zero_stage: int
    splits: int
    fitting: int
    best: Planned | None
    why: str = ""


@dataclass(frozen=True)
class SearchResult:
    """``best``: the option with the most tokens per second; None if none fits."""

    best: Planned | None
    tried: list[Tried]


def search(config: Config, setting: Setting, configured: Planned | None = None) -> SearchResult:
    """Try all splits. The option with the highest bound per placement and ZeRO stage is always simulated, to
    name its bottleneck. ``configured``: the plan of the unchanged ``config``, if it can run.
    """
    options = [(c, option_or_reason(config, c, setting)) for c in changes_of(config, setting)]
    limits = {i: bound(option) for i, (_, option) in enumerate(options) if isinstance(option, Option)}
    best: Planned | None = None
    fastest: dict[tuple[str, int], Planned] = {}
    for i, limit in sorted(limits.items(), key=lambda item: item[1], reverse=True):
        changes, option = options[i]
        assert isinstance(option, Option)
        kind = _kind(changes)
        is_beaten = best is not None and best.simulated.tokens_per_s >= _SLACK * limit
        if is_beaten and kind in fastest:
            continue
        tried = compared(option)
        if kind not in fastest or _is_faster(tried, fastest[kind]):
            fastest[kind] = tried
        if best is None or _is_faster(tried, best):
            best = tried
    # Reuse the full plan, because comparisons simulate fewer steps.
    plans = [configured] if configured else []

    def final(tried: Planned) -> Planned:
        same = (plan for plan in plans if plan.option.config == tried.option.config)
        return next(same, tried)

    if best and final(best) is best:
        plans.append(planned(best.option))
    fastest = {kind: final(tried) for kind, tried in fastest.items()}
    return SearchResult(best and final(best), list(_tried(options, fastest)))


def _is_faster(one: Planned, other: Planned) -> bool:
    return one.simulated.tokens_per_s > other.simulated.tokens_per_s


def _tried(
    options: Sequence[tuple[Changes, Option | str]], fastest: Mapping[tuple[str, int], Planned]
) -> Iterator[Tried]:
    for kind in dict.fromkeys(_kind(changes) for changes, _ in options):
        same = [option for changes, option in options if _kind(changes) == kind]
        reasons = [option for option in same if isinstance(option, str)]
        causes = Counter(reason.partition("; ")[0] for reason in reasons)
        most = causes.most_common(1)[0][0] if causes else ""
        why = next((reason for reason in reasons if reason.startswith(most)), "")
        yield Tried(*kind, len(same), len(same) - len(reasons), fastest.get(kind), why)


def _kind(changes: Changes) -> tuple[str, int]:
    return str(changes["cluster.placement"]), int(changes["policy.zero_stage"])


def changes_of(config: Config, setting: Setting) -> Iterator[Changes]:
    """Yield the splits of the remaining GPUs between engines and ranks, each with the configured ZeRO stage,
    2 and 3: all stages compute the same gradient.
    """
    cluster = setting.cluster
    if cluster.card is None:
        return
    for size in (t for t in _TENSOR_PARALLEL if t <= cluster.gpus_per_node):
        rollout = config.rollout.model_copy(update={"tensor_parallel_size": size})
        sized = config.model_copy(update={"rollout": rollout})
        demands = demands_of(sized, Resources(1, cluster.gpus), training=True, colocated=False)
        others = {r: d.total_gpus for r, d in demands.items() if r not in ("rollout", "policy")}
        free, shared = cluster.gpus - sum(others.values()), cluster.gpus - others.get("evaluation", 0)
        splits = [("separate", ranks, free - ranks) for ranks in _ranks(free, cluster.gpus_per_node)]
        splits += [("colocated", ranks, ranks) for ranks in _shared(shared)]
        for placement, ranks, left in splits:
            for stage in dict.fromkeys((config.policy.zero_stage, 2, 3)):
                if engines := left // size:
                    yield {
                        "rollout.tensor_parallel_size": size,
                        "rollout.num_workers": engines,
                        "rollout.max_workers": engines,
                        "policy.num_workers": ranks,
                        "cluster.placement": placement,
                        "policy.zero_stage": stage,
                    }


def _shared(most: int) -> list[int]:
    """Return rank counts for colocation with all other roles: ``most``, and the largest power of two up to
    it, which divides more batches; [] without a GPU.
    """
    if most < 1:
        return []
    return sorted({most, 1 << most.bit_length() - 1})


def _ranks(free: int, node: int) -> list[int]:
    """Return policy rank counts that leave GPUs for an engine: all if few; otherwise powers of two and whole
    nodes.
    """
    if free <= _SPLITS:
        return list(range(1, free))
    powers = {2**i for i in range(free.bit_length()) if 2**i < free}
    nodes = {n * node for n in range(1, free // node + 1) if n * node < free}
    spread = sorted(nodes)[:: max(1, len(nodes) // (_SPLITS // 2))]
    return sorted(powers | set(spread))


def waits_for_longest(weight_sync: WeightSyncConfig, max_staleness: int) -> bool:
    """Return whether every step waits for all running samples."""
    return max_staleness == 0 or weight_sync.mode == "drain"


def longest_s(scenario: Scenario) -> float:
    """Return the seconds of a step's longest completion on an otherwise idle engine, a lower bound."""
    batch, workload = scenario.config.batch, scenario.workload
    tokens = workload.longest_of(batch.prompts_per_step * batch.samples_per_prompt)
    return tokens * scenario.rates.decode_step_s(1, workload.prompt_tokens + tokens / 2)


def bound(option: Option) -> float:
    """Return an upper bound on the tokens per second of ``option``."""
    scenario, config = option.scenario, option.config
    rates, workload, batch = scenario.rates, scenario.workload, config.batch
    mean, prompt = workload.mean, workload.prompt_tokens
    samples = batch.prompts_per_step * batch.samples_per_prompt
    sampled = samples * _sampled_for_each(scenario.signal_share, batch.prompts_per_step)
    in_flight = sampled * (1 + config.max_staleness) / config.rollout.num_workers
    cached_tokens = prompt / batch.samples_per_prompt + mean / 2  # mean cached tokens of a sequence
    counts = np.unique(np.geomspace(1, max(1.0, min(scenario.capacity, in_flight)), 16))
    rate = max(n / rates.decode_step_s(n, n * cached_tokens) for n in counts.tolist())
    sampling = sampled * mean / config.rollout.num_workers / rate
    each = (round(mean),) * batch.samples_per_prompt
    size = batch.prompts_per_step // batch.updates_per_step
    update = UpdateWork(((prompt, each),) * size, workload.shared_tokens, scenario.demonstrations())
    work = [update] * batch.updates_per_step
    training = rates.update_s(work) + rates.sync_s() + (2 * rates.turn_s() if scenario.sharing else 0.0)
    # Mean lengths give an upper bound, because longer rows add attention work.
    if waits_for_longest(config.weight_sync, config.max_staleness):
        sampling = max(sampling, longest_s(scenario))
    between = _between_s(scenario, prompt, each)
    training += sum(seconds for role, seconds in between.items() if role in scenario.sharing)
    limits = [sampling, training, *between.values()]
    if waits_for_longest(config.weight_sync, config.max_staleness):
        limits.append(sampling + rates.sync_s())
    seconds = max(limits) if config.max_staleness else max(sampling + training, *limits)
    return sampled * (prompt + mean) / seconds


def _sampled_for_each(signal_share: float, prompts_per_step: int) -> float:
    """Return an upper estimate of sampled groups per trained group under dynamic sampling: the mean plus two
    standard deviations over the simulated steps.
    """
    mean, trained = 1 / signal_share, COMPARED_STEPS * prompts_per_step
    return mean * (1 + 2 * ((1 - signal_share) / trained) ** 0.5)


def _between_s(scenario: Scenario, prompt: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return seconds per step in the reference, each teacher and each reward model, by role. Includes role
    switches on shared GPUs.
    """
    rates, seconds = scenario.rates, dict[str, float]()
    for model in scenario.scorers:
        role = scenario.turn_of(model) if scenario.sharing else model.role
        turn_s = rates.scoring_turn_s(model) if role in scenario.sharing - {POLICY} else 0.0
        groups = scenario.config.batch.prompts_per_step / scenario.workers_of(model)
        seconds[role] = rates.scoring_s(model, prompt, lengths) * groups + turn_s
    return seconds


def reason(planned: Planned) -> str:
    """Describe the bottleneck of the step."""
    run, scenario = planned.simulated, planned.option.scenario
    idle, times, alone = run.idle, run.stage_s, longest_s(scenario)
    longest = max(times, key=times.__getitem__)
    if longest in _HELPERS and not scenario.sharing and times[longest] > 0.9 * run.step_s:
        return f"{STAGES[longest]} bounds the step: busy all the time; raise `{_HELPERS[longest]}`"
    if (
        waits_for_longest(scenario.config.weight_sync, scenario.config.max_staleness)
        and alone > _TAIL * run.step_s
    ):
        return (
            f"the longest completions bound the step: one alone takes {written(alone, 's')}; a larger "
            "`rollout.tensor_parallel_size` shortens that, and `weight_sync.mode`=keep with more staleness "
            "does not wait for it"
        )
    if scenario.sharing:
        shares = sorted(times.items(), key=lambda item: item[1], reverse=True)
        listed = ", ".join(f"{STAGES[stage]} {written(s / run.step_s, '%')}" for stage, s in shares)
        return f"all roles are colocated: {listed} of the step"
    if idle["rollout"] < _FULL < idle["policy"]:
        return "generation bounds the step: engines are always busy, the policy waits for them"
    if idle["policy"] < _FULL < idle["rollout"]:
        return "training bounds the step: the policy is always busy, engines wait for it"
    if max(idle.values()) < 2 * _FULL:
        return "generation and training take about as long"
    others = [stage for stage in _HELPERS if times.get(stage, 0.0) > 0.25 * run.step_s]
    if others:
        words = " and ".join(
            f"{STAGES[stage]} ({written(times[stage] / run.step_s, '%')} of the step; `{_HELPERS[stage]}`)"
            for stage in others
        )
        return f"engines and policy are both idle at times; between them lies {words}"
    return "generation and training alternate, or wait for long completions: both are idle at times"
