"""What bounds a simulated step: the stage that would have to be faster."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from grpo_dist.config import Config
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.simulation import simulate
from grpo_dist.tools.plan.sweep import longest_s, waits_for_longest

STAGES = {
    "sample": "generation",
    "reward_model": "scoring by models",
    "score": "scoring",
    "logprobs": "reference",
    "update": "training",
    "sync": "weight sync",
    "turn": "changes of turns",
}

# Stages between sampling and training, and what sets their workers.
_HELPERS = {
    "logprobs": "reference.num_workers",
    "score": "rewards.num_workers",
    "reward_model": "rewards.models.N.num_workers",
}
_NAMES = {"logprobs": "the reference", "score": "scoring", "reward_model": "scoring by models"}
_HELPS = 0.25  # share of a step; stages that take less are not tried
_TAIL = 0.7  # share of a step; a longest completion that takes more bounds it
_FULL = 0.05  # idle share; workers that are idle for less bound the step


def reason(planned: Planned) -> str:
    """Return what bounds the step, in words."""
    run, scenario = planned.simulated, planned.option.scenario
    idle, stages, alone = run.idle, run.stage_s, longest_s(scenario)
    longest = max(stages, key=stages.__getitem__)
    if longest in _HELPERS and not scenario.sharing and stages[longest] > 0.9 * run.step_s:
        name = _NAMES[longest]
        return f"{name} bounds the step: busy all the time; raise `{_HELPERS[longest]}`"
    if not scenario.sharing and (held := _held_by_helper(planned)):
        return held
    if idle["policy"] >= _FULL and (slow := _waits_for_slow(planned)):
        return slow
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
        shares = sorted(stages.items(), key=lambda item: item[1], reverse=True)
        listed = ", ".join(f"{STAGES[stage]} {written(s / run.step_s, '%')}" for stage, s in shares)
        return f"all take turns on the same GPUs: {listed} of the step"
    if idle["rollout"] < _FULL < idle["policy"]:
        return "generation bounds the step: engines are always busy, the policy waits for them"
    if idle["policy"] < _FULL < idle["rollout"]:
        rank = scenario.stragglers.rank_factor
        why = f"; {written(1 - 1 / rank, '%')} of it wait for the slow rank" if rank > 1 else ""
        return f"training bounds the step: the policy is always busy, engines wait for it{why}"
    if max(idle.values()) < 2 * _FULL:
        return "generation and training take about as long"
    return "generation and training take turns, or wait for long completions: both are idle at times"


def _held_by_helper(planned: Planned) -> str:
    """Return which of reference, reward models and graders bounds the step: twice as many would shorten it.
    They work between sampling and training, so they can bound a step without being busy all the time.
    """
    run, scenario = planned.simulated, planned.option.scenario
    gains: dict[str, float] = {}
    for stage, section in _HELPERS.items():
        if run.stage_s.get(stage, 0.0) > _HELPS * run.step_s:
            more = simulate(replace(scenario, config=_doubled(scenario.config, stage, section)))
            gains[stage] = more.step_s
    if not gains:
        return ""
    stage = min(gains, key=gains.__getitem__)
    if gains[stage] > (1 - _FULL) * run.step_s:
        return ""
    seconds, share = written(run.stage_s[stage], "s"), written(run.stage_s[stage] / run.step_s, "%")
    return (
        f"{_NAMES[stage]} bounds the step: busy for {seconds} of it ({share}), between sampling and "
        f"training; with twice as many workers (`{_HELPERS[stage]}`) a step takes "
        f"{written(gains[stage], 's')}"
    )


def _doubled(config: Config, stage: str, key: str) -> Config:
    """Return ``config`` with twice the workers of ``stage``, even where there are too few GPUs."""
    if stage == "reward_model":
        models = tuple(m.model_copy(update={"num_workers": 2 * m.num_workers}) for m in config.rewards.models)
        return config.model_copy(update={"rewards": config.rewards.model_copy(update={"models": models})})
    name = key.partition(".")[0]
    section = getattr(config, name)
    more = section.model_copy(update={"num_workers": 2 * section.num_workers})
    return config.model_copy(update={name: more})


def _waits_for_slow(planned: Planned) -> str:
    """Return "" where engines are alike, or the slow ones are idle about as long as the others."""
    scenario, each = planned.option.scenario, planned.simulated.engines_idle
    count = scenario.stragglers.engines
    if not 0 < count < len(each):
        return ""
    slow, others = fmean(each[:count]), fmean(each[count:])
    if others - slow < 2 * _FULL:
        return ""
    remedy = (
        "; `weight_sync.mode`=keep with more staleness does not wait for them"
        if waits_for_longest(scenario.config.weight_sync, scenario.config.max_staleness)
        else ""
    )
    return (
        f"slow engines bound the step: they are idle for {written(slow, '%')} of the time, the others, which "
        f"wait for them, for {written(others, '%')}{remedy}"
    )
