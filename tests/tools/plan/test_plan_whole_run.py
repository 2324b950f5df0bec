"""Evaluations and checkpoints of a planned run, by hand."""

import json
from dataclasses import replace

import pytest

from grpo_dist.config import FixedLengths
from grpo_dist.tools.bench.flops import Shape
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes, rank_bytes
from grpo_dist.tools.plan.models import ModelShape, published
from grpo_dist.tools.plan.options import Assumptions, Setting, option_of, planned
from grpo_dist.tools.plan.simulation import Scenario, evaluation_s
from grpo_dist.tools.plan.whole_run import (
    checkpoints,
    evaluations,
    planned_checkpoints,
    planned_evaluation,
    waited,
)
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.plans import Times, judges, printed, wide

TINY = ModelShape("tiny", Shape(8, 1, 2, 2, 4, 16, 100), parameters=1000, tied=True)


def evaluated_on(rows):
    test = {"path": "demo:add3", "split": "test", "max_rows": rows}
    return {"data": {"train": [{"path": "demo:add3"}], "eval": [test]}}


EVAL = evaluated_on(None)


def option(c, cluster="1x4xH100"):
    lengths = Workload(100, FixedLengths(tokens=200), 256)
    return option_of(c, Setting(parse_cluster(cluster), published("Qwen/Qwen2.5-1.5B"), lengths, None))


# Evaluations


@pytest.mark.parametrize("evaluation, export, count", [  # 100 steps
    ({"before": True, "after": True, "every": 0}, True, 2),
    ({"before": False, "after": False, "every": 25}, True, 4),
    ({"before": True, "after": True, "every": 25}, True, 5),  # the last evaluates the exported model
    ({"before": True, "after": True, "every": 30}, True, 5),
    ({"before": True, "after": True, "every": 25}, False, 5),  # without an export step 100 is evaluated
    ({"before": False, "after": False, "every": 0}, True, 0),
])  # fmt: skip
def test_evaluations_are_those_of_the_loop_and_of_the_exported_model(evaluation, export, count):
    c = config(steps=100, evaluation=evaluation, checkpoint={"export": export}, **EVAL)
    assert evaluations(c.evaluation, c.checkpoint, c.steps) == count


def evaluation_time(sizes, *, capacity=100, cap=1000, goes_with=None, **changes):
    """Return the seconds for sets of ``sizes`` prompts of 20 tokens, with completions of 10."""
    settings = config(rewards={"num_workers": 64}, sampling={"max_new_tokens": 1000}, **changes)
    times = Times(models={"judge": 1.5})
    workload = Workload(20, settings.bench.lengths, cap, measured=(10,))
    return evaluation_s(Scenario(settings, times, workload, capacity, **(goes_with or {})), sizes)


def test_an_evaluation_is_sampling_and_scoring_alone():
    assert evaluation_time([7]) == pytest.approx(1.0 + 0.5)  # ten tokens of 0.1 s, and grading
    assert evaluation_time([7, 5]) == pytest.approx(2 * 1.5)  # one set after the other
    assert evaluation_time([6], capacity=2) == pytest.approx(3 * 1.0 + 0.5)  # three at a time
    each = {"evaluation": {"before": False, "after": False, "samples_per_prompt": 4}}
    assert evaluation_time([6], capacity=8, **each) == pytest.approx(3 * 1.0 + 0.5)  # 24 samples, 8 at a time
    assert evaluation_time([7], cap=6) == pytest.approx(0.6 + 0.5)  # the longest completion allowed
    assert evaluation_time([2], goes_with=judges(judge=1)) == pytest.approx(1.0 + 2 * 1.5 + 0.5)


def test_prompts_are_counted_if_their_files_are_readable(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"problem": "1+1", "answer": str(i)}) + "\n" for i in range(9)))
    sets = [{"path": str(file)}, {"path": "some/set", "max_rows": 40}, {"path": "other/set"}]
    data = {"train": [{"path": "demo:add3"}], "eval": sets}
    evaluation = planned_evaluation(option(wide(data=data, evaluation={"after": False})), 1.0)
    assert (evaluation.prompts, evaluation.assumed, evaluation.left_out) == (49, ("set",), ("set",))
    data["eval"] = [one | {"max_rows": 5} for one in sets]
    few = planned_evaluation(option(wide(data=data, evaluation={"after": False})), 1.0)
    assert (few.prompts, few.assumed, few.left_out) == (15, ("set", "set"), ())
    assert 0 < evaluation.seconds < few.seconds  # two sets, three sets
    assert few.count == 1 and few.total_s == few.seconds


def test_an_evaluation_has_its_own_longest_completion():
    """It has 200 tokens at training's limit of 256, and 50 at a limit of 50."""
    usual, short = (
        option(wide(evaluation={"max_new_tokens": most}, **evaluated_on(8))) for most in (None, 50)
    )
    rates = usual.scenario.rates
    longer_s = 150 * rates.decode_step_s(8, 8 * (100 + 125))  # with the tokens that eight hold midway
    saving = planned_evaluation(usual, 1.0).seconds - planned_evaluation(short, 1.0).seconds
    assert saving == pytest.approx(longer_s, rel=0.01)


# Checkpoints


@pytest.mark.parametrize("stage, dtype, expected", [  # 1000 parameters, two ranks
    (0, "float32", [12_000, 0]),
    (1, "bfloat16", [8_000, 6_000]),
    (2, "float32", [10_000, 6_000]),
    (3, "bfloat16", [6_000, 6_000]),
])  # fmt: skip
def test_ranks_write_their_deepspeed_shards(stage, dtype, expected):
    c = config(policy={"num_workers": 2, "zero_stage": stage}, model={"path": "demo:tiny", "dtype": dtype})
    model = replace(TINY, linear_sides={"o_proj": 8 + 8})
    assert rank_bytes(c.policy, model, Sizes.from_config(c, gpu=True)) == expected


def test_only_adapters_are_written_if_only_they_are_trained():
    c = config(policy={"num_workers": 1, "zero_stage": 1, "lora": {"rank": 2, "target_modules": ["o_proj"]}})
    model = replace(TINY, linear_sides={"o_proj": 8 + 8})
    assert rank_bytes(c.policy, model, Sizes.from_config(c, gpu=True)) == [2 * (8 + 8) * (2 + 12)]


@pytest.mark.parametrize("every, count", [(0, 1), (10, 10), (30, 4), (100, 1), (1000, 1)])
def test_the_last_step_is_always_saved(every, count):
    assert checkpoints(every, 100) == count


WEIGHTS = 1_543_714_304


def plan_saves(**changes):
    base = {"policy": {"num_workers": 2}, "steps": 100, "checkpoint": {"every": 50}}
    return planned_checkpoints(planned(option(wide(**base | changes))))


def test_background_saves_block_the_loop_only_for_the_copy_and_at_the_end():
    """ZeRO 2 on two ranks: rank 0 copies 2 + 6 bytes a weight at 5 GB/s; 14 bytes are written at 1 GB/s."""
    saves = plan_saves()
    assert (saves.count, saves.size) == (2, 14 * WEIGHTS)
    assert saves.held_s == pytest.approx(8 * WEIGHTS / 5e9) and saves.late_s == 0
    assert saves.last_s == pytest.approx(14 * WEIGHTS / 1e9)
    assert saves.total_s == pytest.approx(2 * saves.held_s + saves.last_s)


def test_a_checkpoint_waits_for_the_previous_one():
    saves = plan_saves(checkpoint={"every": 1}, steps=3)
    run = planned(option(wide(policy={"num_workers": 2}))).simulated
    assert saves.late_s == pytest.approx(14 * WEIGHTS / 1e9 - run.step_s)
    assert saves.total_s == pytest.approx(3 * saves.held_s + 2 * saves.late_s + saves.last_s)


def test_a_foreground_checkpoint_blocks_the_loop_until_it_is_written():
    saves = plan_saves(checkpoint={"every": 50, "background": False})
    assert saves.held_s == pytest.approx(14 * WEIGHTS / 1e9) and saves.last_s == saves.late_s == 0
    assert saves.total_s == pytest.approx(2 * saves.held_s)


def test_a_refreshed_reference_is_written_while_the_loop_waits():
    renewed = {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"refresh_every": 10}}
    saves, plain = plan_saves(**renewed), plan_saves()
    assert saves.held_s - plain.held_s == pytest.approx(2 * WEIGHTS / 1e9)
    assert saves.size - plain.size == 2 * WEIGHTS
    average = renewed | {"reference": {"refresh_every": 10, "refresh_mix": 0.5}}
    assert plan_saves(**average).size - plain.size == 4 * WEIGHTS  # float32


def test_colocated_roles_change_turns_to_save():
    shared = {"rollout": {"num_workers": 2}, "policy": {"num_workers": 2, "zero_stage": 1}}
    c = wide(cluster={"placement": "colocated"}, steps=100, checkpoint={"every": 50}, **shared)
    one = option(c, "1x2xH100")
    assert one.scenario.sharing == {"policy", "rollout"}
    turns_s = 2 * one.scenario.rates.turn_s() + one.scenario.rates.sync_s()
    assert planned_checkpoints(planned(one)).held_s == pytest.approx(turns_s + 8 * WEIGHTS / 5e9)


# Messages


def test_the_whole_run_is_in_hours_and_price():
    settings = {"evaluation": {"every": 50}, "checkpoint": {"every": 50}, "steps": 100} | evaluated_on(64)
    plan = make_plan(wide(**settings), "1x4xH100", Assumptions(prompt_tokens=100), splits=False)
    whole, run = plan.whole, plan.simulated.simulated
    assert whole.evaluation.count == 3 and whole.evaluation.prompts == 64
    beside_s = 3 * whole.evaluation.seconds + whole.checkpoints.total_s
    assert whole.seconds == pytest.approx(100 * run.step_s + beside_s)
    text = printed(plan).replace("\n", " ")
    assert f"100 steps take {100 * run.step_s / 3600:,.1f} h" in text
    assert f"${plan.setting.cluster.price * 100 * run.step_s / 3600:,.0f} the run (steps alone)" in text
    assert "evaluation: 64 prompt(s) with 1 sample(s) each take " in text and ", 3 time(s): " in text
    assert "checkpoints: 2 of 21.6 GB block the loop for " in text and "assumed: 5 GB/s" in text
    hours = whole.seconds / 3600
    assert f"the whole run, with these: {hours:,.2f} h, ${plan.setting.cluster.price * hours:,.2f}; " in text
    assert "left out: its start, the export at its end" in text
    assert "fresh engines for `evaluation.after`" in text and "warning" not in text


def test_training_waits_for_evaluations_on_their_own_engines_only_where_they_are_late():
    assert waited(0, 10.0, 60.0) == 0.0
    assert waited(3, 10.0, 60.0) == 10.0  # the last one, after the last step
    assert waited(3, 70.0, 60.0) == 2 * 10.0 + 70.0


def test_a_plan_counts_the_memory_and_the_wait_of_engines_of_evaluation():
    settings = {"before": False, "after": False, "every": 3}
    shared = option(wide(**evaluated_on(8), evaluation=settings))
    dedicated = option(wide(**evaluated_on(8), evaluation=settings | {"num_workers": 1}))
    assert dedicated.roles.gpus == shared.roles.gpus + 1 and dedicated.roles.workers["evaluation"] == 1
    added = dedicated.memory.pop("evaluation")
    snapshot = dedicated.memory["policy"].host_first.pop("snapshot")
    assert snapshot == 2 * published("Qwen/Qwen2.5-1.5B").parameters
    assert dedicated.memory == shared.memory and not added.host
    assert added.parts["weights"] == shared.memory["rollout"].parts["weights"]
    waits, beside = planned_evaluation(shared, 1.0), planned_evaluation(dedicated, 1.0)
    assert (waits.count, waits.waited_s) == (2, None) and waits.total_s == 2 * waits.seconds
    assert beside.total_s == max(0.0, beside.seconds - 3.0) + beside.seconds
