"""Searches for the best split of GPUs between engines and policy, placement, ZeRO stage, tensor parallelism,
staleness and batch.

Every option has an upper bound on its throughput: each stage at full load all the time. Options are simulated
in the order of their bounds until the best result exceeds all remaining bounds. The result is the same as if
all were simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.placement.demands import Demand, Resources, demands_of
from grpo_dist.config import BatchConfig, Config, PolicyConfig, WeightSyncConfig
from grpo_dist.tools.plan import teachers
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.options import Option, Planned, Setting, option_or_reason, planned
from grpo_dist.tools.plan.rates import UpdateWork
from grpo_dist.tools.plan.reward_models import role_of
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.shown_rows import shown_rows
from grpo_dist.tools.plan.simulated_gpus import POLICY

_SPLITS = 16  # most numbers of policy ranks to try
_TENSOR_PARALLEL = (1, 2, 4, 8)
_SLACK = 1.05  # the lengths that are drawn may be shorter than the mean
_STEPS = 2  # simulated steps of an option that is only compared
_BATCHES = (0.5, 1, 2)
_STALENESS = {"drain": (0, 1), "keep": (0, 1, 2, 4)}

Changes = dict[str, int | str]  # of dotted keys


@dataclass(frozen=True)
class Cell:
    """Options that train alike, among which the search finds the best."""

    prompts_per_step: int
    staleness: int


def own_cell(batch: BatchConfig, max_staleness: int) -> Cell:
    return Cell(batch.prompts_per_step, max_staleness)


def cells(batch: BatchConfig, max_staleness: int, sync: WeightSyncConfig, *, wide: bool) -> list[Cell]:
    """Return the configuration's own cell; with ``wide`` also those of other batches and staleness."""
    own = own_cell(batch, max_staleness)
    if not wide:
        return [own]
    batches = {round(own.prompts_per_step * factor) for factor in _BATCHES} - {0}
    ahead = {own.staleness, *_STALENESS[sync.mode]}
    return [Cell(prompts, n) for prompts in sorted(batches) for n in sorted(ahead)]


@dataclass(frozen=True)
class Tried:
    """Options of one placement and ZeRO stage. ``splits``: number of splits of the GPUs. ``fitting``: how
    many of them can run. ``why``: the most frequent reason against the others. ``best``: the fastest one.
    """

    placement: str
    zero_stage: int
    splits: int
    fitting: int
    best: Planned | None
    why: str = ""


@dataclass(frozen=True)
class SearchResult:
    """``best``: the option with the most tokens a second; None where none fits."""

    best: Planned | None
    tried: list[Tried]


def search(config: Config, setting: Setting, cell: Cell) -> SearchResult:
    """Try all options of ``cell``. The option with the highest bound of each placement and ZeRO stage is
    always simulated, so that the plan can say what bounds it.
    """
    made = [(c, option_or_reason(config, c, setting)) for c in changes_of(config, setting, cell)]
    limits = {i: bound(option) for i, (_, option) in enumerate(made) if isinstance(option, Option)}
    found: Planned | None = None
    fastest: dict[tuple[str, int], Planned] = {}
    for i, limit in sorted(limits.items(), key=lambda item: item[1], reverse=True):
        changes, option = made[i]
        assert isinstance(option, Option)
        kind = _kind(changes)
        is_beaten = found is not None and found.simulated.tokens_per_s >= _SLACK * limit
        if is_beaten and kind in fastest:
            continue
        tried = planned(option, steps=_STEPS)
        if kind not in fastest or _is_faster(tried, fastest[kind]):
            fastest[kind] = tried
        if found is None or _is_faster(tried, found):
            found = tried
    return SearchResult(found and planned(found.option), list(_tried(made, fastest)))


def likeliest(config: Config, setting: Setting, cell: Cell) -> Option | str:
    """Return the option of ``cell`` with the highest bound, without a simulation, or why none can run."""
    made = [option_or_reason(config, c, setting) for c in changes_of(config, setting, cell)]
    fitting = [option for option in made if isinstance(option, Option)]
    if fitting:
        return max(fitting, key=bound)
    causes = Counter(reason for reason in made if isinstance(reason, str))
    return causes.most_common(1)[0][0] if causes else "each role needs a GPU of its own"


def _is_faster(one: Planned, other: Planned) -> bool:
    return one.simulated.tokens_per_s > other.simulated.tokens_per_s


def _tried(
    made: Sequence[tuple[Changes, Option | str]], fastest: Mapping[tuple[str, int], Planned]
) -> Iterator[Tried]:
    for kind in dict.fromkeys(_kind(changes) for changes, _ in made):
        own = [option for changes, option in made if _kind(changes) == kind]
        reasons = [option for option in own if isinstance(option, str)]
        causes = Counter(reason.partition("; ")[0] for reason in reasons)
        most = causes.most_common(1)[0][0] if causes else ""
        why = next((reason for reason in reasons if reason.startswith(most)), "")
        yield Tried(*kind, len(own), len(own) - len(reasons), fastest.get(kind), why)


def _kind(changes: Changes) -> tuple[str, int]:
    return str(changes["cluster.placement"]), int(changes["policy.zero_stage"])


def changes_of(config: Config, setting: Setting, cell: Cell) -> Iterator[Changes]:
    own = {"batch.prompts_per_step": cell.prompts_per_step, "max_staleness": cell.staleness}
    cluster, rollout = setting.cluster, config.rollout

    def taken(tensor_parallel: int) -> tuple[int, int]:
        size = {"tensor_parallel_size": tensor_parallel}
        sized = config.model_copy(update={"rollout": rollout.model_copy(update=size)})
        return _taken(demands_of(sized, Resources(1, cluster.gpus), training=True, colocated=False))

    for changes in _splits(cluster, taken):
        for stage in stages(config.policy):
            yield own | changes | {"policy.zero_stage": stage}


def stages(policy: PolicyConfig) -> list[int]:
    """Return the ZeRO stages to try: the configuration's, 2, and 3. All stages compute the same gradient."""
    return list(dict.fromkeys((policy.zero_stage, 2, 3)))


def _splits(cluster: ClusterShape, taken: Callable[[int], tuple[int, int]]) -> Iterator[Changes]:
    """Yield the splits between engines and ranks of the GPUs that all other workers leave. ``taken``: see
    `_taken`, for engines of so many GPUs.
    """
    if cluster.card is None:
        return
    for size in (t for t in _TENSOR_PARALLEL if t <= cluster.gpus_per_node):
        apart, beside = taken(size)
        free = cluster.gpus - apart
        for ranks in _ranks(free, cluster.gpus_per_node):
            if engines := (free - ranks) // size:
                yield _split(size, engines, ranks, "separate")
        for ranks in _shared(cluster.gpus - beside):
            if engines := ranks // size:
                yield _split(size, engines, ranks, "colocated")


def _split(tensor_parallel: int, engines: int, ranks: int, placement: str) -> Changes:
    return {
        "rollout.tensor_parallel_size": tensor_parallel,
        "rollout.num_workers": engines,
        "rollout.max_workers": engines,
        "policy.num_workers": ranks,
        "cluster.placement": placement,
    }


def _taken(demands: Mapping[str, Demand]) -> tuple[int, int]:
    """Return the GPUs of all workers but engines and ranks where each role has its own; and of those that
    have their own also where the others share theirs.
    """
    own = {role: demand.total_gpus for role, demand in demands.items() if role not in ("rollout", "policy")}
    return sum(own.values()), own.get("evaluation", 0)


def _shared(most: int) -> list[int]:
    """Return numbers of ranks that share their GPUs with all other roles: ``most``, and the largest power of
    two up to that, which divides more batches; [] without a GPU.
    """
    if most < 1:
        return []
    return sorted({most, 1 << most.bit_length() - 1})


def _ranks(free: int, node: int) -> list[int]:
    """Return numbers of policy ranks that leave GPUs for an engine: all where they are few; powers of two and
    whole nodes otherwise.
    """
    if free <= _SPLITS:
        return list(range(1, free))
    powers = {2**i for i in range(free.bit_length()) if 2**i < free}
    nodes = {n * node for n in range(1, free // node + 1) if n * node < free}
    spread = sorted(nodes)[:: max(1, len(nodes) // (_SPLITS // 2))]
    return sorted(powers | set(spread))


def waits_for_longest(weight_sync: WeightSyncConfig, max_staleness: int) -> bool:
    """Return True where every step waits for all running samples."""
    return max_staleness == 0 or weight_sync.mode == "drain"


def longest_s(scenario: Scenario) -> float:
    """Return the seconds of a step's longest completion alone on an engine, a lower bound. It counts as slow
    only where all engines are.
    """
    batch, workload, slow = scenario.config.batch, scenario.workload, scenario.stragglers
    tokens = workload.longest_of(batch.prompts_per_step * batch.samples_per_prompt)
    factor = slow.engine_factor if slow.engines >= scenario.config.rollout.num_workers else 1.0
    return factor * tokens * scenario.rates.decode_step_s(1, workload.prompt_tokens + tokens / 2)


def bound(option: Option) -> float:
    """Return an upper bound on the tokens a second of ``option``."""
    scenario, config = option.scenario, option.config
    rates, workload, batch = scenario.rates, scenario.workload, config.batch
    mean, prompt, samples = (
        workload.mean,
        workload.prompt_tokens,
        batch.prompts_per_step * batch.samples_per_prompt,
    )
    sampled = samples * _sampled_for_each(scenario.signal_share, batch.prompts_per_step)
    in_flight = sampled * (1 + config.max_staleness) / config.rollout.num_workers
    held = prompt / batch.samples_per_prompt + mean / 2  # tokens in the cache of a sequence, half way
    counts = np.unique(np.geomspace(1, max(1.0, min(scenario.capacity, in_flight)), 16))
    rate = max(n / rates.decode_step_s(n, n * held) for n in counts.tolist())
    sampling = sampled * mean / config.rollout.num_workers / rate
    each = (round(mean),) * batch.samples_per_prompt
    size = batch.prompts_per_step // batch.updates_per_step
    shown = shown_rows(config.demonstrations, updates=batch.updates_per_step, longest=config.max_length)
    update = UpdateWork(((prompt, each),) * size, workload.shared_tokens, shown)
    work = [update] * batch.updates_per_step
    training = rates.update_s(work) + rates.sync_s() + (2 * rates.turn_s() if scenario.sharing else 0.0)
    # Mean lengths give a bound: longer rows only add to attention.
    if waits_for_longest(config.weight_sync, config.max_staleness):
        sampling = max(sampling, longest_s(scenario))
    between = _between_s(scenario, prompt, each)
    training += sum(seconds for role, seconds in between.items() if role in scenario.sharing)
    stages = [sampling, training, *between.values()]
    if waits_for_longest(config.weight_sync, config.max_staleness):
        stages.append(sampling + rates.sync_s())
    seconds = max(stages) if config.max_staleness else max(sampling + training, *stages)
    return sampled * (prompt + mean) / seconds


def _sampled_for_each(signal_share: float, prompts_per_step: int) -> float:
    """Return the most groups that dynamic sampling is likely to take for each that is trained: the mean and
    two standard deviations over the simulated steps.
    """
    mean, trained = 1 / signal_share, _STEPS * prompts_per_step
    return mean * (1 + 2 * ((1 - signal_share) / trained) ** 0.5)


def _between_s(scenario: Scenario, prompt: int, lengths: tuple[int, ...]) -> dict[str, float]:
    """Return the seconds of a step in the reference and in each reward model, by role. On shared GPUs their
    turns count, too.
    """
    config, rates, found = scenario.config, scenario.rates, {}
    groups = config.batch.prompts_per_step
    if config.needs_reference:
        group_s = rates.reference_s(UpdateWork(((prompt, lengths),)))
        role = POLICY if scenario.reference_is_base and scenario.sharing else "reference"
        turn_s = rates.reference_turn_s() if role in scenario.sharing - {POLICY} else 0.0
        found[role] = group_s * groups / scenario.reference_workers + turn_s
    for teacher in config.distillation.of_own_models:
        role, own = teachers.role_of(teacher), teachers.rates_of(teacher, rates)
        turn_s = own.reference_turn_s() if role in scenario.sharing else 0.0
        group_s = own.reference_s(UpdateWork(((prompt, lengths),)))
        found[role] = group_s * groups / scenario.teacher_workers(teacher) + turn_s
    for model in scenario.reward_models:
        role = role_of(model.settings)
        turn_s = rates.reward_model_turn_s(model) if role in scenario.sharing else 0.0
        group_s = rates.reward_model_s(model, prompt, lengths)
        found[role] = group_s * groups / scenario.reward_model_workers(model) + turn_s
    return found
