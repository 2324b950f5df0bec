"""The best of many: how GPUs are split between engines and policy, tensor parallelism, staleness, batch.

Every option has a bound that its throughput cannot pass, from the same stage times: each stage at full load
all the time. Options are simulated best bound first, until the best that was simulated is above all bounds
that are left; so the result is that of simulating all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grpo_dist.config import Config
from grpo_dist.plan.options import Option, Planned, Setting, planned, try_option
from grpo_dist.plan.rates import UpdateWork
from grpo_dist.plan.simulation import Scenario

_SPLITS = 16  # numbers of policy ranks that are tried, at most
_TENSOR_PARALLEL = (1, 2, 4, 8)
_SLACK = 1.05  # the lengths that are drawn may be shorter than the mean
_STEPS = 2  # simulated of an option that is only compared
_BATCHES = (0.5, 1, 2)
_STALENESS = {"drain": (0, 1), "keep": (0, 1, 2, 4)}


@dataclass(frozen=True)
class Cell:
    """Options among which the best is sought: they train alike."""

    prompts_per_step: int
    staleness: int


def cells(config: Config, *, wide: bool) -> list[Cell]:
    """The configuration's own; with ``wide`` other batches and staleness, too."""
    own = Cell(config.batch.prompts_per_step, config.max_staleness)
    if not wide:
        return [own]
    batches = {round(own.prompts_per_step * factor) for factor in _BATCHES} - {0}
    ahead = {own.staleness, *_STALENESS[config.weight_sync.mode]}
    return [Cell(batch, n) for batch in sorted(batches) for n in sorted(ahead)]


def best(config: Config, setting: Setting, cell: Cell) -> Planned | None:
    """The option of ``cell`` with the most tokens a second; None where none fits."""
    options = sorted(
        ((bound(option), i, option) for i, option in enumerate(_options(config, setting, cell))), reverse=True
    )
    found: Planned | None = None
    for limit, _, option in options:
        if found and found.simulated.tokens_per_s >= _SLACK * limit:
            break
        tried = planned(option, steps=_STEPS)
        if found is None or tried.simulated.tokens_per_s > found.simulated.tokens_per_s:
            found = tried
    return found and planned(found.option)


def _options(config: Config, setting: Setting, cell: Cell) -> Iterator[Option]:
    for changes in _splits(config, setting):
        own = {"batch.prompts_per_step": cell.prompts_per_step, "max_staleness": cell.staleness}
        if option := try_option(config, own | changes, setting):
            yield option


def _splits(config: Config, setting: Setting) -> Iterator[dict[str, int | str]]:
    cluster, reference = setting.cluster, config.reference.num_workers if config.needs_reference else 0
    if cluster.card is None:
        return
    free = cluster.gpus - reference - sum(model.num_workers for model in config.rewards.models)
    for size in (t for t in _TENSOR_PARALLEL if t <= cluster.gpus_per_node):
        for ranks in _ranks(free, cluster.gpus_per_node):
            yield {
                "rollout.tensor_parallel_size": size,
                "rollout.num_workers": (free - ranks) // size,
                "policy.num_workers": ranks,
                "cluster.placement": "separate",
            }
        yield {
            "rollout.tensor_parallel_size": size,
            "rollout.num_workers": free // size,
            "policy.num_workers": free // size * size,
            "cluster.placement": "colocated",
        }


def _ranks(free: int, node: int) -> list[int]:
    """Numbers of policy ranks that leave an engine some GPU: all of few, powers of two and whole nodes of
    many.
    """
    if free <= _SPLITS:
        return list(range(1, free))
    powers = {2**i for i in range(free.bit_length()) if 2**i < free}
    nodes = {n * node for n in range(1, free // node + 1) if n * node < free}
    spread = sorted(nodes)[:: max(1, len(nodes) // (_SPLITS // 2))]
    return sorted(powers | set(spread))


def waits_for_longest(config: Config) -> bool:
    """Whether every step ends with all that is sampled."""
    return config.max_staleness == 0 or config.weight_sync.mode == "drain"


def longest_s(scenario: Scenario) -> float:
    """Seconds of the longest completion of a step, were it alone: no engine takes less. Where only some are
    slow it may be with another.
    """
    batch, workload, slow = scenario.config.batch, scenario.workload, scenario.slow
    tokens = workload.longest_of(batch.prompts_per_step * batch.samples_per_prompt)
    factor = slow.engine if slow.engines >= scenario.config.rollout.num_workers else 1.0
    return factor * tokens * scenario.rates.decode_step_s(1, workload.prompt_tokens + tokens / 2)


def bound(option: Option) -> float:
    """Tokens a second that the option cannot pass."""
    scenario, config = option.scenario, option.config
    rates, workload, batch = scenario.rates, scenario.workload, config.batch
    mean, prompt, samples = (
        workload.mean,
        workload.prompt_tokens,
        batch.prompts_per_step * batch.samples_per_prompt,
    )
    in_hand = samples * (1 + config.max_staleness) / config.rollout.num_workers
    held = prompt / batch.samples_per_prompt + mean / 2  # by a sequence, half way
    counts = np.unique(np.geomspace(1, max(1.0, min(scenario.seats, in_hand)), 16))
    rate = max(n / rates.decode_step_s(n, n * held) for n in counts.tolist())
    sampling = samples * mean / config.rollout.num_workers / rate
    each = (round(mean),) * batch.samples_per_prompt
    size = batch.prompts_per_step // batch.updates_per_step
    work = [UpdateWork(((prompt, each),) * size)] * batch.updates_per_step
    training = rates.update_s(work) + rates.sync_s() + (2 * rates.turn_s() if scenario.colocated else 0.0)
    # Means of lengths: rows that are longer only add to attention.
    stages = [sampling, training]
    if waits_for_longest(config):
        sampling = max(sampling, longest_s(scenario))
        stages.append(sampling + rates.sync_s())
    if config.needs_reference:
        group = UpdateWork(((prompt, each),))
        stages.append(rates.reference_s(group) * batch.prompts_per_step / config.reference.num_workers)
    for model in scenario.reward_models:
        group_s = rates.reward_model_s(model, prompt, each)
        stages.append(group_s * batch.prompts_per_step / model.settings.num_workers)
    seconds = max(stages) if config.max_staleness else max(sampling + training, *stages)
    return samples * (prompt + mean) / seconds
