"""Colocated roles: memory, host memory and times of 7B by hand, and DeepSpeed's estimates."""

from dataclasses import replace

import pytest

from actors.placement.demands import Resources
from grpo_dist.tools.plan.accelerators import Peaks, parse_cluster
from grpo_dist.tools.plan.memory import GIB, Footprint, Sizes, policy_rank, rank_bytes, rollout_engine, states
from grpo_dist.tools.plan.models import FrozenModel, published
from grpo_dist.tools.plan.options import Setting, option_of
from grpo_dist.tools.plan.placement import REFRESH, SYNC, asleep, made_roles, memory_problems, node_host_bytes
from grpo_dist.tools.plan.rates import Rates, Reached
from grpo_dist.tools.plan.simulation import Scenario, simulate
from grpo_dist.tools.plan.workload import Workload
from tests.support.fakes import config
from tests.support.plans import Times, judges, model_of, shape

N = 7_615_616_512
EMBEDDING = 152064 * 3584
BUFFERS = 2 * 2 * EMBEDDING  # for the weight sync: the embedding is larger than a bucket
LENGTHS = Workload(100, config().bench.lengths, 1000, measured=(300,))
ALL = frozenset({"policy", "rollout", "reference"})


def seven(**changes):
    base = {
        "model": {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True},
        "policy": {"num_workers": 8, "zero_stage": 3},
        "rollout": {"num_workers": 8},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "micro_batch_tokens": 16384},
        "algorithm": {"kl": {"coef": 0.001}},
        "cluster": {"placement": "colocated"},
        "max_staleness": 0,
    }
    return config(**base | changes)


def option(c, cluster="1x8xH100", **changes):
    return option_of(c, Setting(parse_cluster(cluster), model_of(c), LENGTHS, None, **changes))


# Eight GPUs with all roles colocated: 7B, ZeRO-3, KL on


def test_everything_on_eight_gpus_is_planned():
    opt = option(seven())
    assert not opt.problems and opt.roles.sharing == ALL and opt.roles.gpus == 8
    assert opt.roles.workers == {"rollout": 8, "rewards": 1, "policy": 8, "reference": 8}


def test_a_turn_of_each_role_by_hand():
    memory = option(seven()).memory
    policy, engine, reference = memory["policy"], memory["rollout"], memory["reference"]
    share = {"weights": 2 * N // 8, "gradients": 4 * N // 8, "optimiser": 12 * N // 8}
    assert {part: policy.parts[part] for part in share} == share
    sleepers = 2 * GIB + 3 * GIB // 4  # an engine, and the reference's context
    assert policy.parts["asleep"] == sleepers
    assert policy.parts["buckets"] == 2 * 500_000_000 + 2 * (1_000_000_000 + 50_000_000)
    assert reference.parts["weights"] == 2 * N and reference.parts["asleep"] == 4 * GIB
    assert engine.parts["weights"] == 2 * N and engine.total == int(81_559 * 2**20 * 0.6)
    assert memory[SYNC].parts == {
        "policy's weights": 2 * N // 8, "engine's weights": 2 * N, "buckets": BUFFERS,
        "gathered": 2 * EMBEDDING, "runtime": 2 * GIB, "asleep": sleepers,
    }  # fmt: skip


def test_between_turns_states_and_copies_are_in_the_host_memory_of_the_node():
    opt = option(seven())
    assert opt.memory["policy"].host == {"checkpoint": 12 * N // 8, "between turns": 3 * (2 * N // 8 * 3)}
    assert opt.memory["reference"].host == {"between turns": 2 * N} and not opt.memory["rollout"].host
    node = 8 * (12 * N // 8 + 18 * N // 8 + 2 * N)
    assert node_host_bytes(opt.memory, opt.roles, parse_cluster("1x8xH100")) == pytest.approx(node)
    two = option(seven(policy={"num_workers": 16, "zero_stage": 3}), "2x8xH100")
    assert node_host_bytes(two.memory, two.roles, parse_cluster("2x8xH100")) == pytest.approx(
        8 * (30 * N // 16 + 2 * N)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_in_host_memory_has_whole_weights_once(stage):
    c = seven(policy={"num_workers": 8, "zero_stage": stage})
    model, sizes = model_of(c), Sizes.from_config(c, gpu=True)
    rank = policy_rank(c, model, sizes, LENGTHS)
    parts = {
        kind: {"checkpoint": part.get("checkpoint", 0)}
        for kind, part in vars(rank).items()
        if kind != "parts"
    }
    node = node_host_bytes({"policy": Footprint({}, **parts)}, option(c).roles, parse_cluster("1x8xH100"))
    assert node == sum(rank_bytes(c.policy, model, sizes))


def test_a_node_with_too_little_host_memory_is_refused_with_the_remedy():
    opt = option(seven())
    cluster = parse_cluster("1x8xH100")
    small = replace(cluster, card=replace(cluster.card, host=20 * GIB))
    (problem,) = memory_problems(seven(), opt.memory, small, opt.roles)
    assert problem.startswith(
        "host memory: the workers of one node keep 326 GiB there, and a node of 1x8xH100"
    )
    assert "set checkpoint.background=false, or add nodes" in problem


@pytest.mark.parametrize(("workers", "expected"), [
    ((8, 1, 4), 50 + 4 * 10 + 3),
    ((8, 2, 4), 2 * 50),
    ((8, 4, 1), 4 * 50 + 4 * 10 + 3),
    ((8, 2, 8), 8 * 10 + 3),
    ((4, 2, 8), 50),
    ((8, 2, 4, "colocated"), 8 * 10 + 2 * 50 + 3),
    ((8, 2, 3, "colocated"), 8 * 10 + 2 * 50 + 3),
    ((16, 2, 8, "colocated"), 8 * 10 + 50 + 3),
])  # fmt: skip
def test_the_fullest_node_holds_what_fits_on_its_gpus(workers, expected):
    """Policy ranks, engines, and GPUs of an engine, on nodes of 8 GPUs."""
    roles = made_roles(shape(*workers), Resources(768, 64))
    memory = {"policy": Footprint({}, {"": 10}, {"": 3}), "rollout": Footprint({}, {"": 50})}
    assert node_host_bytes(memory, roles, parse_cluster("8x8xH100")) == expected


def test_a_snapshot_for_evaluation_engines_is_on_the_node_of_policy_rank_0():
    held = {"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add3"}]}
    c = shape(8, 1, 8, evaluation={"num_workers": 2, "every": 1}, data=held)
    memory = {"evaluation": Footprint({}, {"": 20}), "policy": Footprint({}, {"": 1}, {"snapshot": 70})}
    assert node_host_bytes(memory, made_roles(c, Resources(768, 64)), parse_cluster("8x8xH100")) == 8 + 70


def test_one_wide_engine_a_node_is_counted_and_the_remedy_is_what_takes_the_memory():
    c = seven(
        model={"path": "Qwen/Qwen2.5-72B", "gradient_checkpointing": True, "dtype": "bfloat16"},
        policy={"num_workers": 32, "zero_stage": 3}, weight_sync={"deltas": True},
        rollout={"num_workers": 4, "tensor_parallel_size": 8}, cluster={"placement": "separate"},
        batch={"prompts_per_step": 8, "samples_per_prompt": 8}, algorithm={"kl": {"coef": 0.0}},
    )  # fmt: skip
    opt, cluster = option(c, "8x8xH100"), parse_cluster("8x8xH100")
    assert node_host_bytes(opt.memory, opt.roles, cluster) == 8 * 2 * model_of(c).parameters
    assert not [problem for problem in opt.problems if problem.startswith("host memory")]
    small = replace(cluster, card=replace(cluster.card, host=100 * GIB))
    problem = memory_problems(c, opt.memory, small, opt.roles)[-1]
    assert "set weight_sync.deltas=false, or add nodes" in problem and "`policy.offload`" not in problem


@pytest.mark.parametrize("policy, has_reference", [({"lora": {"rank": 16}}, False), ({}, True)])
def test_with_adapters_the_reference_is_the_base_and_costs_no_memory(policy, has_reference):
    opt = option(seven(policy={"num_workers": 8, "zero_stage": 3} | policy))
    assert ("reference" in opt.memory) == ("reference" in opt.roles.sharing) == has_reference
    assert opt.scenario.reference_is_base is not has_reference
    (reference,) = opt.scenario.scorers
    assert opt.scenario.workers_of(reference) == 8


def test_a_refreshed_reference_lies_next_to_the_policys_weights():
    memory = option(seven(reference={"refresh_every": 5, "refresh_mix": 0.5})).memory
    assert memory[REFRESH].parts["average"] == 4 * N
    assert memory[REFRESH].parts["reference's weights"] == 2 * N
    assert memory[REFRESH].parts["buckets"] == 2 * BUFFERS  # for this transfer and the weight sync


@pytest.mark.parametrize(("changes", "each"), [
    ({}, 2 * EMBEDDING),
    ({"weight_sync": {"bucket_mb": 2048}}, 2**31),
    ({"policy": {"num_workers": 8, "lora": {"rank": 16, "sync": "adapter"}}}, 2**28),
])  # fmt: skip
def test_buffers_of_the_weight_sync_hold_a_bucket_or_the_largest_parameter(changes, each):
    assert option(seven(**changes)).memory[SYNC].parts["buckets"] == 2 * each


def test_engines_that_join_get_the_weights_through_buffers_of_their_own():
    """The buffers on the shared GPUs may stay mapped until the next role has the GPUs."""
    rollout = {"num_workers": {"min": 8, "max": 12}, "tensor_parallel_size": 1}
    assert option(seven(rollout=rollout)).memory[SYNC].parts["buckets"] == 2 * BUFFERS


def test_a_reference_that_is_larger_than_a_gpu_shows_that_it_is_whole():
    c = seven(model={"path": "Qwen/Qwen2.5-72B", "gradient_checkpointing": True})
    problem = next(p for p in option(c).problems if p.startswith("reference: "))
    assert "its weights are a whole copy on one GPU" in problem


# Other placements of 7B, by hand


def test_separate_roles_have_their_gpus_alone():
    c = seven(
        policy={"num_workers": 4, "zero_stage": 3}, rollout={"num_workers": 3},
        cluster={"placement": "separate"},
    )  # fmt: skip
    opt = option(c)
    assert opt.roles.sharing == frozenset() and SYNC not in opt.memory
    assert sum(states(c.policy, model_of(c), Sizes.from_config(c, gpu=True)).values()) == pytest.approx(
        18 * N / 4, rel=1e-6
    )
    assert "asleep" not in opt.memory["policy"].parts
    assert opt.memory["reference"].host == {} and opt.roles.workers["reference"] == 1


def test_zero_2_on_shared_gpus_keeps_whole_weights_while_it_sends_them():
    c = seven(policy={"num_workers": 8, "zero_stage": 2})
    opt = option(c)
    assert opt.memory[SYNC].parts["policy's weights"] == 2 * N and opt.memory[SYNC].parts["gathered"] == 0
    turn = (2 * N + 16 * N / 8) / (64e9 * 0.8) + 0.5
    assert opt.scenario.rates.turn_s() == pytest.approx(turn)


def test_what_sleepers_keep_is_counted_once_for_each_process():
    five = ALL | {"reward model a", "reward model b"}
    assert asleep("rollout", five) == 2 * GIB + 3 * (3 * GIB // 4)
    assert asleep("reference", five) == 2 * 2 * GIB + 2 * (3 * GIB // 4)
    assert asleep("policy", frozenset()) == 0


# DeepSpeed's estimates


@pytest.mark.parametrize("nodes, gpus", [(1, 8), (2, 8), (8, 8)])
def test_states_are_those_that_deepspeed_estimates(nodes, gpus):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    ranks, model = nodes * gpus, published("Qwen/Qwen2.5-7B")
    three, two = (seven(policy={"num_workers": ranks, "zero_stage": stage}) for stage in (3, 2))
    sizes = Sizes.from_config(three, gpu=True)
    largest = model.embedding
    _, gpu, gathered = estimate_zero3_model_states_mem_needs(N, largest, gpus, nodes, cpu_offload=False)
    assert sum(states(three.policy, model, sizes).values()) == pytest.approx(gpu - gathered, rel=1e-8)
    _, gpu = estimate_zero2_model_states_mem_needs(N, gpus, nodes, cpu_offload=False)
    # DeepSpeed's estimate includes bfloat16 gradients; they are in the bucket, which a plan counts apart.
    assert sum(states(two.policy, model, sizes).values()) == pytest.approx(gpu - 2 * N / ranks, rel=1e-8)


@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_offloaded_states_are_those_that_deepspeed_estimates(parameters):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    offload = {"optimizer": "cpu", "parameters": parameters}
    c = seven(
        policy={"num_workers": 8, "zero_stage": 3, "offload": offload}, checkpoint={"background": False}
    )
    model, sizes = model_of(c), Sizes.from_config(c, gpu=True)
    host, gpu, gathered = estimate_zero3_model_states_mem_needs(
        N, model.embedding, 8, 1, cpu_offload_params=parameters == "cpu", additional_buffer_factor=1.0
    )
    assert sum(states(c.policy, model, sizes).values()) == pytest.approx(gpu - gathered, abs=8)
    rank = policy_rank(c, model, sizes, LENGTHS)
    node = node_host_bytes({"policy": rank}, option(c).roles, parse_cluster("1x8xH100"))
    assert node == pytest.approx(host, rel=1e-8)


# Times


def run(times, sharing, **changes):
    base = {"rewards": {"num_workers": 64}, "sampling": {"max_new_tokens": 1000}}
    workload = Workload(20, config().bench.lengths, 1000, measured=(10,))
    goes_with = changes.pop("goes_with", {})
    return simulate(Scenario(config(**base | changes), times, workload, 100, sharing, **goes_with))


def test_a_step_of_roles_that_take_turns_is_the_sum_of_their_turns():
    """Sampling 1.0, scoring 0.5 on CPUs, the reference, update 2.0, sync 0.3, two switches."""
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    kl = {"algorithm": {"kl": {"coef": 0.1}}, "batch": batch}
    alone = run(Times(), frozenset({"policy", "rollout"}), batch=batch)
    assert alone.step_s == pytest.approx(1.0 + 0.5 + 2.0 + 0.3 + 2 * 0.25)
    both = run(Times(reference=0.75), ALL, **kl)
    # One rank scores two groups one after the other; the grader is done meanwhile.
    assert both.step_s == pytest.approx(1.0 + 0.125 + 2 * 0.75 + 2.0 + 0.3 + 2 * 0.25)
    base = run(
        Times(reference=0.75), frozenset({"policy", "rollout"}), goes_with={"reference_is_base": True}, **kl
    )
    assert base.step_s == pytest.approx(1.0 + 2 * 0.75 + 2.0 + 0.3 + 2 * 0.25)


def test_reward_models_take_turns_after_the_last_sample():
    sharing = frozenset({"policy", "rollout", "reward model a", "reward model b"})
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    result = run(Times(models={"a": 1.0, "b": 2.0}), sharing, goes_with=judges(a=5, b=5), batch=batch)
    # Each model scores two groups on the one GPU; the graders follow, and then the policy.
    each = 2 * 0.0625 + 2 * 1.0 + 2 * 2.0
    assert result.step_s == pytest.approx(1.0 + each + 0.5 + 2.0 + 0.3 + 2 * 0.25)


def test_a_turn_takes_the_time_of_its_bytes_on_the_bus_of_the_card():
    for card, bus in (("H100", 64e9), ("A100", 32e9)):
        c = seven()
        peaks = Peaks.from_cluster(parse_cluster(f"1x8x{card}"))
        rates = Rates(c, model_of(c), Sizes.from_config(c, gpu=True), peaks, Reached())
        assert rates.turn_s() == pytest.approx(18 * N / 8 / (0.8 * bus) + 0.5)
        assert rates.scoring_turn_s(FrozenModel(rates.model)) == pytest.approx(2 * N / (0.8 * bus) + 0.5)
        judge = FrozenModel(published("Qwen/Qwen2.5-7B"), judges(a=1)["frozen"][0].settings)
        assert rates.scoring_turn_s(judge) == pytest.approx(2 * (N - EMBEDDING) / (0.8 * bus) + 0.5)


# fp8


def test_an_engine_in_fp8_has_half_the_bytes_of_its_linear_layers_and_a_faster_decode_bound():
    c = seven(rollout={"num_workers": 8, "quantization": "fp8"}, algorithm=CORRECTED)
    plain = seven(algorithm=CORRECTED)
    model, memory = model_of(c), parse_cluster("1x8xH100").card.memory
    linear = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944)
    small, whole = (
        rollout_engine(x, model, Sizes.from_config(x, gpu=True), LENGTHS, memory=memory) for x in (c, plain)
    )
    assert whole.parts["weights"] == 2 * N and small.parts["weights"] == 2 * N - linear
    assert small.cache - whole.cache == linear
    sizes, perfect = Sizes.from_config(c, gpu=True), Reached(1, 1, 1, 1, 1, 0, 0)
    peaks = Peaks.from_cluster(parse_cluster("1x8xH100"))
    fast, slow = (Rates(x, model, sizes, peaks, perfect) for x in (c, plain))
    assert fast.decode_step_s(1, 0) == pytest.approx((linear + 2 * EMBEDDING) / 3.35e12)
    assert slow.decode_step_s(1, 0) == pytest.approx(2 * (linear + EMBEDDING) / 3.35e12)
    assert fast.prefill_s(1000) == pytest.approx(slow.prefill_s(1000) / 2)
    old = replace(fast, peaks=Peaks.from_cluster(parse_cluster("1x8xA100")))
    assert old.prefill_s(1000) == pytest.approx(2 * linear * 1000 / 312e12)


CORRECTED = {"kl": {"coef": 0.001}, "correction": {"kind": "tis"}}
