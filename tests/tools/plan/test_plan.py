"""`grpo-dist plan`: clusters, times by hand, calibration, the best split, output and refusals."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.cli import main
from grpo_dist.config.files import changed
from grpo_dist.errors import UserError
from grpo_dist.tools.bench.result import BenchResult, DecodeStep
from grpo_dist.tools.plan.accelerators import Peaks, card_called, parse_cluster
from grpo_dist.tools.plan.calibration import calibrate
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import Sizes
from grpo_dist.tools.plan.models import frozen_models
from grpo_dist.tools.plan.options import (
    Assumptions,
    Option,
    Setting,
    build_setting,
    option_of,
    option_or_reason,
    planned,
)
from grpo_dist.tools.plan.rates import Rates, Reached, UpdateWork
from grpo_dist.tools.plan.report import driver_lines
from grpo_dist.tools.plan.search import bound, changes_of, longest_s, reason, search
from grpo_dist.tools.plan.simulation import Scenario, simulate
from grpo_dist.tools.plan.workload import Workload, workload_of
from tests.support.fakes import config
from tests.support.plans import model_of, printed, wide
from tests.support.tiers import slow_after

ROOT = Path(__file__).resolve().parents[3]
GPU = str(ROOT / "configs/gsm8k_qwen2.5_1.5b.yaml")


# Clusters


def test_a_cluster_is_parsed_into_nodes_and_cards():
    cluster = parse_cluster("8x4xh100")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus, str(cluster)) == (8, 4, 32, "8x4xH100")
    assert cluster.card.flops == 989e12 and cluster.price == 32 * 3.0
    assert parse_cluster("1x1xA100", price=2.5).price == 2.5
    assert parse_cluster("1x0xCPU").card is None


@pytest.mark.parametrize("name, card", [
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H200", "H200"),
    ("NVIDIA H20", "H20"),
    ("NVIDIA H800", "H800"),
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
    ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ("NVIDIA L40S", "L40S"),
    ("NVIDIA L40", None),
    ("", None),
])  # fmt: skip
def test_a_card_is_found_by_the_name_of_its_driver(name, card):
    match = card_called(name)
    assert (match and match.name) == card


@pytest.mark.parametrize("text, words", [
    ("8xH100", "expected NODESxGPUSxKIND"),
    ("0x8xH100", "0 nodes"),
    ("1x0xH100", "no GPU in a node"),
    ("1x8xH1000", "no data sheet of H1000 is known; expected one of B200, .*did you mean H100"),
    ("2x0xCPU", "one at a time; use 1x0xCPU"),
    ("1x4xCPU", "one at a time; use 1x0xCPU"),
])  # fmt: skip
def test_an_invalid_cluster_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_cluster(text)


# Stage times


# Kernels that reach the data sheet, and a host that costs no time.
PERFECT = Reached(training=1, decode=1, prefill=1, network=1, sync=1, step_s=0, launch_s=0, sync_s=0)


def rates(cluster="1x8xH100", reached=None, **changes):
    c = config(**{"model": {"path": "Qwen/Qwen2.5-7B"}} | changes)
    peaks = Peaks.from_cluster(parse_cluster(cluster))
    return Rates(c, model_of(c), Sizes.from_config(c, gpu=True), peaks, reached or PERFECT)


# Weights that multiply each token.
WEIGHTS = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 152064 * 3584


def test_decoding_is_memory_bound_for_few_sequences_and_compute_bound_for_many():
    r = rates()
    token = 2 * 28 * 4 * 128 * 2
    assert r.decode_step_s(1, 500) == pytest.approx((2 * WEIGHTS + 500 * token) / 3.35e12)
    operations = 2 * WEIGHTS * 4096 + 4 * 28 * 28 * 128 * 4096 * 10
    assert r.decode_step_s(4096, 40_960) == pytest.approx(operations / 989e12)


def test_tensor_parallel_divides_memory_reads_and_adds_two_reductions_per_layer():
    alone, two = rates(), rates(rollout={"tensor_parallel_size": 2})
    hops = 2 * 28 * (12e-6 + 3584 * 2 / 450e9)
    assert two.decode_step_s(1, 0) == pytest.approx(alone.decode_step_s(1, 0) / 2 + hops)


def test_measured_engines_scale_the_roofline():
    r = rates(reached=replace(PERFECT, decode_curve=((1, 2.0), (101, 3.0)), step_s=0.5))
    for sequences, factor in ((1, 2.0), (51, 2.5), (500, 3.0)):
        expected = rates().decode_step_s(sequences, 0) * factor + 0.5
        assert r.decode_step_s(sequences, 0) == pytest.approx(expected)


def test_without_cuda_graphs_a_pass_takes_at_least_the_launches_of_its_layers():
    reached = Reached(step_s=0.004, launch_s=0.001)  # 28 layers
    graphs, eager = rates(reached=reached), rates(reached=reached, rollout={"enforce_eager": True})
    assert graphs.decode_step_s(1, 0) < 0.032 == pytest.approx(eager.decode_step_s(1, 0))
    assert graphs.decode_step_s(1, 10**7) == eager.decode_step_s(1, 10**7) > 0.1  # reads for longer


def test_a_drained_engine_with_drafts_computes_more_tokens_in_a_pass_and_gains_the_accepted_ones():
    drafts = {"tokens": 3, "max_sequences": 2}
    plain, reached = rates(reached=Reached()), Reached(accepted=1.6)
    faster = rates(reached=reached, rollout={"speculation": drafts})
    # Two sequences read weights and cache like one pass over eight tokens.
    assert faster.decode_step_s(2, 1000) == pytest.approx(plain.decode_step_s(2, 1000) / 1.6)
    assert faster.decode_step_s(3, 1000) == plain.decode_step_s(3, 1000)  # too many: nothing is drafted
    nothing = replace(faster, reached=Reached())  # wrong drafts cost nothing while the engine reads weights
    assert nothing.decode_step_s(2, 1000) == pytest.approx(plain.decode_step_s(2, 1000))
    wide = rates(reached=Reached(), rollout={"speculation": {"tokens": 3, "max_sequences": 4096}})
    cost = wide.decode_step_s(4096, 0) - 0.004  # bound by operations: four times as many
    assert cost == pytest.approx(4 * (plain.decode_step_s(4096, 0) - 0.004))


def test_an_update_computes_shared_prompts_once_and_logits_only_of_completions():
    work = UpdateWork(((100, (10, 30)),))
    head = 152064 * 3584
    pairs = (110 * 111 + 130 * 131) / 2
    forward = 2 * ((WEIGHTS - head) * 140 + head * 40) + 4 * 28 * 28 * 128 * pairs
    assert rates().forward_flops(work) == pytest.approx(forward)
    padded = rates(model={"path": "Qwen/Qwen2.5-7B", "packing": False}).forward_flops(work)
    assert padded - forward == pytest.approx(2 * (WEIGHTS - head) * 100)
    passes = {True: 4, False: 3}
    for checkpointing, count in passes.items():
        r = rates(model={"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": checkpointing})
        assert r.compute_s([work]) == pytest.approx(count * forward / 989e12)


def test_what_all_prompts_begin_with_is_computed_once_in_each_micro_batch():
    """Four prompts of 100 tokens with 60 in common; micro-batches of 200 tokens have 140 for the rest."""
    groups = ((100, (10, 30)),) * 4
    alike = rates(batch={"micro_batch_tokens": 200})
    apart = 4 * (100 + 40)
    assert alike.stream_tokens(UpdateWork(groups)) == apart
    assert alike.stream_tokens(UpdateWork(groups, shared=60)) == 4 * (40 + 40) + 3 * 60  # 320 in 140s
    one = rates(batch={"micro_batch_tokens": 4096})
    assert one.stream_tokens(UpdateWork(groups, shared=60)) == 4 * 80 + 60
    two = rates(batch={"micro_batch_tokens": 4096, "prompts_per_step": 4}, policy={"num_workers": 2})
    assert two.stream_tokens(UpdateWork(groups, shared=60)) == 4 * 80 + 2 * 60, "one prefix per rank"
    padded = rates(model={"path": "Qwen/Qwen2.5-7B", "packing": False})
    assert padded.stream_tokens(UpdateWork(groups, shared=60)) == 4 * (2 * 100 + 40)
    saving = one.forward_flops(UpdateWork(groups)) - one.forward_flops(UpdateWork(groups, shared=60))
    assert saving == pytest.approx(2 * (WEIGHTS - 152064 * 3584) * 3 * 60)


def test_demonstrations_of_an_update_are_computed_whole_beside_its_samples():
    groups, demos = ((100, (10, 30)),) * 4, ((20, (50,)), (30, (60,)))
    r = rates(batch={"micro_batch_tokens": 4096})
    alone = [r.forward_flops(UpdateWork(rows, shared)) for rows, shared in ((groups, 60), (demos, 0))]
    assert r.forward_flops(UpdateWork(groups, 60, demos)) == pytest.approx(sum(alone))
    assert r.stream_tokens(UpdateWork(groups, 60, demos)) == 4 * (40 + 40) + 60 + 70 + 90
    few = rates(batch={"micro_batch_tokens": 200})  # 140 beside the prefix, as without demonstrations
    assert few.stream_tokens(UpdateWork(groups, 60, demos)) == 4 * 80 + 160 + 4 * 60


def test_a_plan_with_demonstrations_takes_the_time_of_their_rows_and_says_what_it_assumes():
    batch = {"prompts_per_step": 8, "samples_per_prompt": 2, "updates_per_step": 2}
    model = {"path": "Qwen/Qwen2.5-7B", "max_length": 4096}
    mixed = {"data": "demo:add3", "rows_per_step": 6}
    plain = rates(batch=batch, model=model)
    r = rates(batch=batch, model=model, demonstrations=mixed)
    demos = Scenario(r.config, r, Workload(40, config().bench.lengths, 50), 64).demonstrations()
    assert demos == ((512, (1536,)),) * 3, "demonstrations per update"
    times = [run_simulation(case).stage_s["update"] for case in (plain, r)]
    more = r.compute_s([UpdateWork(demos)] * 2)  # with the pass for old log-probs before the second
    assert times[1] - times[0] == pytest.approx(more)


def test_teachers_of_different_sources_are_planned_also_with_their_likeliest_tokens():
    how = {"batch": {"prompts_per_step": 8, "samples_per_prompt": 2}, "model": {"path": "Qwen/Qwen2.5-0.5B"}}
    teachers = [{"name": n, "model": "Qwen/Qwen2.5-7B", "sources": [n]} for n in ("a", "b")]
    sampled, likeliest = (
        run_simulation(rates(**how, distillation={"teachers": teachers, "kl": kl}))
        for kl in ("sampled", {"name": "top_k", "k": 4})
    )
    assert likeliest.step_s == sampled.step_s and {"teacher-a-0", "teacher-b-0"} <= set(likeliest.bars)


def run_simulation(r):
    """Simulate a run with rates ``r`` and 50 tokens in every sample."""
    workload = Workload(40, config().bench.lengths, 50, measured=(50,))
    return simulate(Scenario(r.config, r, workload, 64, frozen=frozen_models(r.config)[0]))


def test_a_second_update_needs_the_old_log_probs():
    work = UpdateWork(((0, (10,) * 4),))
    one = rates().compute_s([work])
    r = rates(batch={"prompts_per_step": 4, "updates_per_step": 2})
    assert r.compute_s([work, work]) == pytest.approx(2 * one + one / 3)
    twice = rates(batch={"prompts_per_step": 4, "epochs_per_batch": 2})
    assert twice.compute_s([work]) == pytest.approx(2 * one + one / 3)


def test_a_token_baseline_takes_one_forward_pass_of_the_policy():
    work = UpdateWork(((0, (10,) * 4),))
    one = rates().compute_s([work])
    assert rates(algorithm={"advantage": "otb"}).compute_s([work]) == pytest.approx(one + one / 3)


@pytest.mark.parametrize("stage, sent", [(0, 8), (1, 10), (2, 2 + 2), (3, 2 * 2 + 2)])
def test_communication_of_ranks_by_zero_stage(stage, sent):
    work = UpdateWork(((0, (1,) * 4),))
    policy = {"num_workers": 4, "zero_stage": stage}
    batch = {"prompts_per_step": 4}
    r = rates(policy=policy, batch=batch)
    optimizer = 28 * 7_615_616_512 / 4 / 3.35e12
    gathered = 2 * 2 if stage == 3 else 0  # overlaps the computation, which is negligible here
    others = (sent - gathered) * 7_615_616_512 * 3 / 4 / 450e9
    gathers = gathered * 7_615_616_512 * 3 / 4 / 450e9
    assert r.update_s([work]) == pytest.approx(
        max(gathers, r.compute_s([work])) + others + optimizer, rel=1e-6
    )


def test_the_longest_row_limits_how_an_update_is_divided():
    ranks = {"policy": {"num_workers": 8}, "batch": {"prompts_per_step": 8}}
    even = UpdateWork(((0, (100,) * 16),))
    uneven = UpdateWork(((0, (1,) * 15 + (1585,)),))
    assert rates(**ranks).compute_s([even]) == pytest.approx(rates().compute_s([even]) / 8)
    alone = UpdateWork(((0, (1585,)),))
    assert rates(**ranks).compute_s([uneven]) == pytest.approx(rates().compute_s([alone]))


def test_a_weight_sync_uses_the_network_and_adapters_are_small():
    whole, adapters = rates(), rates(policy={"lora": {"rank": 8, "sync": "adapter"}})
    assert whole.sync_s() == pytest.approx(2 * 7_615_616_512 / 50e9)
    assert adapters.sync_s() < 0.01 * whole.sync_s()
    assert rates(policy={"zero_stage": 3}).sync_s() == pytest.approx(2 * whole.sync_s())


def test_deltas_save_the_network_by_the_type_and_the_learning_rate_and_cost_copies_over_pcie():
    def sync_s(lr, **changes):
        policy = {"optimizer": {"lr": lr}} | changes.pop("policy", {})
        return rates(weight_sync={"deltas": True}, policy=policy, **changes).sync_s()

    size = 2 * 7_615_616_512
    copies = 3 * size / (0.8 * rates().peaks.host)
    assert sync_s(1e-6) == pytest.approx(0.019 * size / 50e9 + copies)
    assert sync_s(1e-7) == sync_s(1e-6)  # not measured: no less
    assert sync_s(1e-5) == pytest.approx(0.16 * size / 50e9 + copies)
    assert sync_s(10**-5.5) == pytest.approx((0.019 * 0.16) ** 0.5 * size / 50e9 + copies)
    assert sync_s(2e-5) == pytest.approx(size / 50e9 + copies)  # not measured: whole
    assert sync_s(1e-6, policy={"zero_stage": 3}) == pytest.approx(1.019 * size / 50e9 + copies)
    float32 = {"path": "Qwen/Qwen2.5-7B", "dtype": "float32"}
    assert sync_s(1e-6, model=float32) == pytest.approx(2 * (size / 50e9 + copies))
    assert rates(weight_sync={"deltas": "auto"}).sync_s() == rates().sync_s()


# Options


def setting(c, cluster="1x8xH100", **changes):
    return Setting(parse_cluster(cluster), model_of(c), workload_of(c, prompt_tokens=100), None, **changes)


def test_what_does_not_fit_is_reported_with_a_remedy():
    c = config(
        model={"path": "Qwen/Qwen2.5-72B"}, policy={"num_workers": 4, "zero_stage": 2},
        rollout={"num_workers": 1, "tensor_parallel_size": 1}, cluster={"placement": "separate"},
        batch={"prompts_per_step": 4},
    )  # fmt: skip
    policy, rollout = option_of(c, setting(c)).problems
    assert "policy: a worker needs" in policy and "a H100 has 75.7 GiB for it" in policy
    assert "`model.gradient_checkpointing`=true" in policy and "raise `policy.zero_stage`" in policy
    assert "one sequence of 516 tokens" in rollout and "raise `rollout.tensor_parallel_size`" in rollout


@pytest.mark.parametrize("changes, words", [
    ({"policy": {"num_workers": 8}}, r"9 GPUs are needed \(rollout 1 x 1 \+ policy 8 x 1\) but it has 8"),
    ({"rollout": {"tensor_parallel_size": 16}}, "needs|node"),
    ({"rollout": {"tensor_parallel_size": 3}}, "does not divide the 28 attention heads"),
])  # fmt: skip
def test_a_model_too_large_for_the_cluster_is_refused(changes, words):
    c = config(**{"model": {"path": "Qwen/Qwen2.5-7B"}, "cluster": {"placement": "separate"}} | changes)
    with pytest.raises(UserError, match=words):
        option_of(c, setting(c))


def test_engines_too_large_for_a_node_are_refused():
    c = config(
        model={"path": "Qwen/Qwen2.5-7B"}, policy={"num_workers": 2}, batch={"prompts_per_step": 4},
        rollout={"num_workers": 4, "tensor_parallel_size": 4}, cluster={"placement": "separate"},
    )  # fmt: skip
    with pytest.raises(UserError, match="3x6xH100: its nodes have no room for 4 times 4 GPUs"):
        option_of(c, setting(c, "3x6xH100"))
    assert option_of(c, setting(c, "4x6xH100")).roles.gpus == 18


def options(config, setting):
    """Return the options that fit."""
    candidates = [option_or_reason(config, changes, setting) for changes in changes_of(config, setting)]
    return [option for option in candidates if isinstance(option, Option)]


@pytest.mark.parametrize("staleness", slow_after([0, 1], 1))
def test_the_best_split_equals_that_of_exhaustive_simulation(staleness):
    c = wide(max_staleness=staleness)
    best = search(c, setting(c, "1x4xH100")).best
    everything = [planned(o, steps=2) for o in options(c, setting(c, "1x4xH100"))]
    assert len(everything) >= 4
    most = max(p.simulated.tokens_per_s for p in everything)
    again = planned(best.option, steps=2)
    assert again.simulated.tokens_per_s == most
    for p in everything:  # the bound that lets the search stop early
        assert p.simulated.tokens_per_s <= 1.05 * bound(p.option)


@pytest.mark.slow
def test_every_placement_and_zero_stage_is_tried_and_named():
    """With 7B on 8 GPUs at staleness 0, colocated roles are by far the fastest."""
    c = config(
        model={"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True}, rollout={"num_workers": 4},
        policy={"num_workers": 4, "zero_stage": 3}, sampling={"max_new_tokens": 1024},
        batch={"prompts_per_step": 32, "samples_per_prompt": 16}, cluster={"placement": "separate"},
    )  # fmt: skip
    outcome = search(c, setting(c))
    attempts = {(t.placement, t.zero_stage): t for t in outcome.tried}
    assert [*attempts] == [("separate", 3), ("separate", 2), ("colocated", 3), ("colocated", 2)]
    best_of = {kind: t.best.simulated.tokens_per_s for kind, t in attempts.items() if t.best}
    assert max(best_of, key=best_of.get)[0] == "colocated"
    assert best_of["colocated", 3] > 1.1 * best_of["separate", 3]
    output = printed(make_plan(c, "1x8xH100", Assumptions(prompt_tokens=100)))
    for kind in ("separate, ZeRO-3: ", "separate, ZeRO-2: ", "colocated, ZeRO-3: ", "colocated, ZeRO-2: "):
        assert f"\n  {kind}" in output
    assert "all roles are colocated: generation " in output
    assert "not tried: other batches and staleness, other ZeRO stages" in output


def test_options_that_cannot_be_tried_give_the_reason():
    c = wide(max_staleness=1)
    attempts = search(c, setting(c, "1x4xH100")).tried
    why = next(t.why for t in attempts if t.placement == "colocated")
    assert "`max_staleness` = 1 has sampling and training at the same time" in why
    assert all(0 <= t.fitting <= t.splits and (t.best is None) == (t.fitting == 0) for t in attempts)


def test_what_prompts_begin_with_is_neither_prefilled_nor_trained_again():
    data = {"train": [{"path": "demo:add3"}], "max_prompt_tokens": 1024}
    long = wide(max_staleness=0, data=data)
    apart, alike = (
        build_setting(long, parse_cluster("1x4xH100"), Assumptions(prompt_tokens=800, shared_tokens=shared))
        for shared in (0, 700)
    )
    a, b = (planned(option_of(long, case)).simulated for case in (apart, alike))
    assert b.stage_s["update"] < 0.9 * a.stage_s["update"]
    assert b.stage_s["sample"] < a.stage_s["sample"]
    assert b.tokens == a.tokens


# Calibration


def result(c, **changes):
    """Build a benchmark on two cores: 2 steps of 4 prompts, with samples of 10 and 30 tokens for each."""
    figures = {
        "generation/step_s": 3.0, "training/step_s": 5.0, "training/peak_flops": 2e11, "scoring/step_s": 0.4,
        "sync/bytes_per_s": 5e8, "sync/step_s": 4 * model_of(c).parameters / 5e8,
        "overhead/step_s": 0.05, "overhead/driver_cpu_s": 0.08,
    }  # fmt: skip
    base = BenchResult(
        name="made", config=c.model_dump(mode="json"), machine={"cpu": "made", "cores": 2},
        workload={"prompt_tokens_mean": 16.0, "prompts_per_step": 4, "samples_per_prompt": 2},
        figures=figures, limit_settings={}, actors=[], steps=[{"train/tokens": 4 * (2 * 16 + 40)}] * 2,
        lengths=[10, 30] * 8,
        decode_steps=[DecodeStep(1, 30, 0.02), DecodeStep(8, 30, 0.04)],
    )  # fmt: skip
    return replace(base, **changes)


def cpu_config(**changes):
    model = {"path": "random:" + str(ROOT / "configs/bench/shapes/qwen2_13m.json")}
    base = {"model": model, "sampling": {"max_new_tokens": 30}, "policy": {"zero_stage": 0}}
    return config(**base | changes)


def on_two_cores(c, measured):
    cluster = parse_cluster("1x0xCPU")
    calibration = calibrate(measured, cluster)
    workload = workload_of(c, **calibration.workload)
    return planned(option_of(c, Setting(cluster, model_of(c), workload, calibration))).simulated


@pytest.mark.parametrize("limits", [True, False])
def test_a_plan_of_the_benchmarked_work_gives_its_measured_times(limits):
    c = cpu_config()
    measured = result(c)
    if not limits:
        without = {k: v for k, v in measured.figures.items() if k != "training/peak_flops"}
        measured = replace(measured, decode_steps=[], figures=without)
    run = on_two_cores(c, measured)
    assert run.stage_s["sample"] == pytest.approx(3.0, rel=0.05)
    assert run.stage_s["update"] == pytest.approx(5.0, rel=0.05)
    weights = 4 * model_of(c).parameters
    assert run.stage_s["sync"] == pytest.approx(weights / 5e8)
    scoring = 0.4 / 4  # the last group is scored sample by sample
    assert run.step_s == pytest.approx(3.0 + scoring + 5.0 + weights / 5e8 + 0.05, rel=0.06)


@pytest.mark.parametrize("counted", [True, False])
def test_a_plan_of_prompts_that_begin_alike_gives_the_measured_times_of_such_a_benchmark(counted):
    """12 of 16 tokens are shared: the benchmark's micro-batch computed 12 + 4 * (4 + 40) of 224 tokens."""
    c = cpu_config()
    steps = [{"train/tokens": 4 * (2 * 16 + 40)} | ({COMPUTED_TOKENS: 188.0} if counted else {})] * 2
    base = result(c)
    measured = replace(base, steps=steps, workload=base.workload | {"shared_prompt_tokens": 12})
    cluster = parse_cluster("1x0xCPU")
    calibration = calibrate(measured, cluster)
    assert calibration.workload["shared_tokens"] == 12
    run = on_two_cores(c, measured)
    assert run.stage_s["sample"] == pytest.approx(3.0, rel=0.05)
    assert run.stage_s["update"] == pytest.approx(5.0, rel=0.05)
    twice = cpu_config(batch={"prompts_per_step": 8, "samples_per_prompt": 2})
    # 12 + 8 * 44 tokens instead of 188; the costs of the head and of attention grow with all tokens.
    assert on_two_cores(twice, measured).stage_s["update"] == pytest.approx(5.0 * 364 / 188, rel=0.03)


def test_a_benchmark_of_one_prompt_again_and_again_plans_prompts_of_a_token_of_their_own():
    c = cpu_config()
    base = result(c)
    same = replace(base, workload=base.workload | {"shared_prompt_tokens": 16})
    assert calibrate(same, parse_cluster("1x0xCPU")).workload["shared_tokens"] == 15


def test_times_scale_with_the_work():
    c = cpu_config()
    run = on_two_cores(cpu_config(batch={"prompts_per_step": 8, "samples_per_prompt": 2}), result(c))
    assert run.stage_s["update"] == pytest.approx(10.0, rel=0.05)
    assert 3.0 < run.stage_s["sample"] < 6.0  # twice the sequences in as many steps
    one_ahead = on_two_cores(cpu_config(max_staleness=1), result(c))
    assert one_ahead.stage_s["update"] == pytest.approx(5.0 * 2**0.8, rel=0.05)  # on half the cores


def test_tokens_that_prompts_share_in_a_benchmark_do_not_make_its_trainer_faster():
    """Four groups of 16 + 40 tokens, half of them computed: the trainer was half as fast as it seems."""
    steps = [{"train/tokens": 4 * (2 * 16 + 40), "throughput/computed_tokens": n} for n in (112.0, 112.0)]
    apart, shared = (
        calibrate(result(cpu_config(), **changes), parse_cluster("1x0xCPU")).reached.training
        for changes in ({}, {"steps": steps})
    )
    assert shared == pytest.approx(apart / 2)


def test_a_reward_model_has_one_thread_where_there_are_no_gpus():
    measured = calibrate(result(cpu_config()), parse_cluster("1x0xCPU"))
    both = measured.peaks_of(measured.roles)  # the rank had two threads, 1.74 times as fast as one
    assert measured.roles.policy_threads == 2
    assert both.thread_flops == pytest.approx(both.flops / 2**0.8)


@pytest.mark.parametrize("changes, cluster, words", [
    ({}, "1x8xH100", "measured on a machine without GPUs, and --cluster is 1x8xH100"),
    ({"machine": {"gpu": "NVIDIA A100-SXM4-80GB", "gpus": 1}}, "1x8xH100", "measured on NVIDIA A100"),
    ({"machine": {"gpu": "NVIDIA L4", "gpus": 1}}, "1x0xCPU", "measured on NVIDIA L4"),
    ({"machine": {"gpu": "NVIDIA L40S", "gpus": 1}}, "1x8xL4", "measured on NVIDIA L40S"),
    ({"machine": {"gpu": "NVIDIA H200", "gpus": 1}}, "1x8xH20", "measured on NVIDIA H200"),
    ({"machine": {"gpu": "some card", "gpus": 1}}, "1x0xCPU", "measured on some card"),
    ({"lengths": []}, "1x0xCPU", "does not say how long its completions were"),
])  # fmt: skip
def test_a_benchmark_of_other_hardware_is_refused(changes, cluster, words):
    with pytest.raises(UserError, match=words):
        calibrate(result(cpu_config(), **changes), parse_cluster(cluster))


@pytest.mark.parametrize("lacks, words", [
    (("figures", "sync/step_s"), "made has no number for `figures.sync/step_s`; expected"),
    (("figures", "generation/step_s"), "`figures.generation/step_s`"),
    (("workload", "prompts_per_step"), "`workload.prompts_per_step`"),
    (("machine", "cores"), "`machine.cores`"),
    (("steps", 1, "train/tokens"), "`steps.1.train/tokens`"),
    (("config", "model"), "settings of made: `model` is missing"),
])  # fmt: skip
def test_a_benchmark_without_a_figure_is_refused_by_its_name(tmp_path, capsys, lacks, words):
    """A stage that was not measured has null; older versions had other figures."""
    file, (*parents, name) = tmp_path / "bench.json", lacks
    for change in ("null", "missing"):
        result(cpu_config()).write(file)
        plain = json.loads(file.read_text())
        section = plain
        for key in parents:
            section = section[key]
        section[name] = None
        if change == "missing" or lacks[0] == "config":
            del section[name]
        file.write_text(json.dumps(plain))
        assert main(["plan", GPU, "--cluster", "1x0xCPU", "--bench", str(file)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: --bench: ") and error.count("\n") == 1


def test_a_benchmark_of_the_same_card_is_taken():
    c = config(model={"path": "Qwen/Qwen2.5-1.5B"}, policy={"zero_stage": 2})
    machine = {"gpu": "NVIDIA A100-SXM4-80GB", "gpus": 2}
    measured = result(c, machine=machine, decode_steps=[])
    calibration = calibrate(measured, parse_cluster("4x8xA100-80GB"))
    assert calibration.cpus is None and calibration.reached.source.endswith("NVIDIA A100-SXM4-80GB")
    # More ranks leave each fewer CPU threads, but the same GPU.
    fewer = replace(calibration.roles, policy_threads=calibration.roles.policy_threads // 4)
    assert calibration.peaks_of(fewer) == calibration.peaks


def test_a_record_of_gpu_check_calibrates_the_copies_of_a_turn_too(tmp_path):
    c = config(model={"path": "Qwen/Qwen2.5-1.5B"}, policy={"zero_stage": 2})
    measured = result(c, machine={"gpu": "NVIDIA H100 80GB HBM3", "gpus": 2}, decode_steps=[])
    measured.write(tmp_path / "bench.json")
    figures = {"device/to_host_bytes_per_s": 40e9, "device/from_host_bytes_per_s": 32e9,
               "zero2/update_s": 1.0}  # fmt: skip
    bench = json.loads((tmp_path / "bench.json").read_text())
    record = {"kind": "gpu-check", "schema": 2, "figures": figures, "bench": bench}
    (tmp_path / "gpu-check.json").write_text(json.dumps(record))
    cluster = parse_cluster("1x8xH100")
    plain, checked = (
        calibrate(BenchResult.read(tmp_path / name), cluster) for name in ("bench.json", "gpu-check.json")
    )
    assert plain.reached.host == Reached().host and checked.reached.host == 32e9 / 64e9
    assert replace(checked.reached, host=plain.reached.host) == plain.reached


def test_drafts_gain_what_a_benchmark_measured_or_the_option_says(tmp_path):
    """The engine's time is the same: a pass takes longer, the more tokens it yields."""
    settings = cpu_config()
    measured = result(settings)
    figures = measured.figures | {"generation/acceptance_length": 2.5}
    measured = replace(measured, figures=figures)
    assert calibrate(measured, parse_cluster("1x0xCPU")).reached.accepted == 2.5
    assert calibrate(result(settings), parse_cluster("1x0xCPU")).reached.accepted == 1.0
    measured.write(tmp_path / "bench.json")
    drafting = changed(settings, {"rollout.speculation": {"tokens": 4}})
    for count, gained, words in ((None, 2.5, "1.5 accepted per draft (measured)"),
                                 (3, 4, "3 accepted per draft (--")):  # fmt: skip
        assumptions = Assumptions(tmp_path / "bench.json", accepted=count)
        plan = make_plan(drafting, "1x0xCPU", assumptions, splits=False)
        assert plan.simulated.option.scenario.rates.reached.accepted == gained
        assert words in " ".join(printed(plan).split())


def test_without_a_figure_a_plan_says_that_no_draft_is_right_and_one_without_drafts_refuses_it():
    drafting = wide(rollout={"speculation": {"tokens": 4}})
    step_s = {}
    for count in (None, 2.0):
        plan = make_plan(drafting, "1x4xH100", Assumptions(prompt_tokens=100, accepted=count), splits=False)
        step_s[count] = plan.simulated.simulated.step_s
        assert ("assumed: drafts of 4 tokens" in printed(plan)) == (count is None)
    assert step_s[2.0] < step_s[None]
    for config_, count, words in (
        (wide(), 1.0, "nothing is drafted; set `rollout.speculation.tokens`"),
        (drafting, 4.5, "--accepted 4.5: expected accepted tokens per draft, 0 to"),
        (drafting, math.nan, "--accepted nan"),
    ):
        with pytest.raises(UserError, match=words):
            make_plan(config_, "1x4xH100", Assumptions(prompt_tokens=100, accepted=count), splits=False)


# The command


@pytest.mark.slow
def test_the_command_prints_a_plan(capsys):
    small = ["batch.prompts_per_step=16", "sampling.max_new_tokens=256"]
    assert main(["plan", GPU, "--cluster", "1x8xH100", "--price", "2", *small]) == 0
    output = capsys.readouterr().out
    for words in (
        "1.544 billion parameters on 1x8xH100", "key-value cache", "tokens/s", "at $2 an hour",
        "a million tokens", "best split: rollout.num_workers=", "assumed: ",
    ):  # fmt: skip
        assert words in output


def test_settings_that_every_policy_rank_refuses_are_refused_in_a_plan():
    """bfloat16 needs a ZeRO stage, which keeps float32 weights; CPUs use float32."""
    zero = {"policy": {"num_workers": 2, "zero_stage": 0}, "rollout": {"num_workers": 2}}
    with pytest.raises(UserError, match=r"`?policy\.zero_stage`? = 0"):
        make_plan(wide(**zero), "1x4xH100", Assumptions(prompt_tokens=100), splits=False)


@pytest.mark.parametrize("arguments, words", [
    ([], ["--cluster is missing", "8x8xH100"]),
    (["--cluster", "1x1xH100", "model.path=./x"], ["no such directory in /", "random:config.json"]),
    (["--cluster", "1x1xH100", f"model.path={__file__}"], ["a file; expected the directory"]),
    (["--cluster", "1x0xCPU"], ["in no data sheet", "grpo-dist bench"]),
    (["--cluster", "1x8xH100", "--price", "-1"], ["--price -1"]),
    (["--cluster", "1x8xH100", "--prompt-tokens", "0"], ["--prompt-tokens 0"]),
    (["--cluster", "1x8xH100", "--prompt-tokens", "50000"],
     ["--prompt-tokens 50000", "`data.max_prompt_tokens` = 512"]),
    (["--cluster", "1x8xH100", "--shared-tokens", "-1"], ["--shared-tokens -1", "expected 0 or more"]),
    (["--cluster", "1x8xH100", "--prompt-tokens", "90", "--shared-tokens", "90"],
     ["--shared-tokens 90: a prompt has 90 tokens", "expected fewer"]),
    (["--cluster", "1x8xH100", "--turns", "2"], ["--turns", "no source of problems has an environment"]),
    (["--cluster", "1x8xH100", "--tool-seconds", "-1"], ["--tool-seconds -1", "expected 0 or more"]),
    (["--cluster", "99999999999x8xH100"], ["99999999999x8xH100", "at most 10000 nodes"]),
    (["--cluster", f"1x{'9' * 5000}xH100"], ["at most 1024 GPUs in a node"]),
    (["--cluster", "1x8xH100", "--bench", "nothing.json"], ["nothing.json", "cannot be read"]),
    (["--cluster", "1x8xH100", "model.path=some/model"], ["some/model", "whose sizes are known"]),
    (["--cluster", "1x1xL4", "model.path=Qwen/Qwen2.5-72B"], ["gsm8k-qwen2.5-1.5b on 1x1xL4"]),
])  # fmt: skip
def test_a_run_that_cannot_be_planned_is_refused_in_one_line(arguments, words, capsys):
    assert main(["plan", GPU, *arguments]) == 2
    output = capsys.readouterr()
    assert len(output.err.strip().splitlines()) == 1 and all(word in output.err for word in words)


def test_a_model_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "config.json"
    for content, words in (
        ('{"model_type": "sparkle"}', "`model_type` = sparkle: transformers makes no decoder with attention"),
        ('{"model_type": "mamba2"}', "`model_type` = mamba2: transformers makes no decoder with attention"),
        ('{"model_type": "qwen2"}', "no 'num_attention_heads'"),
        ("[]", "is no object"),
        ("{", "cannot be read"),
    ):
        file.write_text(content)
        with pytest.raises(UserError, match=words):
            model_of(config(model={"path": f"random:{file}"}))


def test_the_reason_names_what_bounds_the_step():
    c = wide(max_staleness=1)
    base = make_plan(c, "1x4xH100", Assumptions(prompt_tokens=100), splits=False).simulated
    run = replace(base.simulated, step_s=100.0)
    bounds = {"rollout": (0.01, 0.5, "generation bounds"), "policy": (0.5, 0.01, "training bounds")}
    for rollout, policy, words in bounds.values():
        idle = {"rollout": rollout, "policy": policy}
        assert reason(replace(base, simulated=replace(run, idle=idle))).startswith(words)
    slow = replace(run, stage_s={"sample": 1.0, "logprobs": 95.0})
    assert reason(replace(base, simulated=slow)).startswith("reference bounds the step")
    tail = replace(run, step_s=longest_s(base.option.scenario))
    assert reason(replace(base, simulated=tail)).startswith("the longest completions bound the step")
    assert Workload(1, c.bench.lengths, 5, measured=(9,)).sample("p", [3]) == (5,)


def test_the_drivers_memory_is_that_of_all_rows_in_local_files(tmp_path):
    for name, size in (("train.jsonl", 2**28), ("eval.jsonl", 2**27), ("answers.parquet", 2**25)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    data = {"train": [{"path": str(tmp_path / "train.jsonl")}]}
    (line,) = driver_lines(config(data=data))
    assert "at most 1.0 GiB for prompts and demonstrations" in line
    data["eval"] = [{"path": str(tmp_path / "eval.jsonl")}]
    demonstrations = {"data": [{"path": str(tmp_path / "answers.parquet")}]}
    (line,) = driver_lines(config(data=data, demonstrations=demonstrations))
    assert "at most 2.0 GiB" in line  # 256 + 128 + 4 x 32 MiB, times four
    assert driver_lines(config()) == []
