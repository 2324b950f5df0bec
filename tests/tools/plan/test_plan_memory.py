"""The memory model of `grpo-dist plan`: by hand, and against activations that real models keep."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from actors.placement.demands import Resources
from grpo_dist.errors import UserError
from grpo_dist.policy.attention import block_spans, varlen_spans
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.memory import (
    GIB,
    Sizes,
    activation_bytes,
    attended,
    lora_parameters,
    policy_rank,
    reference_worker,
    rollout_engine,
    states,
    with_snapshot,
)
from grpo_dist.tools.plan.models import from_config_json, published
from grpo_dist.tools.plan.placement import made_roles, node_host_bytes
from grpo_dist.tools.plan.workload import Workload, workload_of
from tests.gpu.process import CheckTask
from tests.gpu.sizes import MEMORY, UpdateSize, planned, update_config
from tests.support.fakes import config
from tests.support.kept_tensors import SHAPE, kept_for_backward, varlen_that_keeps
from tests.support.plans import model_of

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "tests/gpu/measured"
LENGTHS = Workload(100, config().bench.lengths, 1000, measured=(300,))


def gpu(**changes):
    return config(model={"path": "Qwen/Qwen2.5-7B"} | changes.pop("model", {}), **changes)


@pytest.mark.parametrize("hub_id, parameters", [  # from the model cards or checkpoint indices
    ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
    ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
    ("Qwen/Qwen2.5-Math-7B-Instruct", 7_615_616_512),
    ("Qwen/Qwen2.5-32B", 32_763_876_352),
    ("Qwen/Qwen3-8B-Base", 8_190_735_360),
    ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    ("meta-llama/Llama-3.2-1B", 1_235_814_400),
])  # fmt: skip
def test_published_models_have_their_published_sizes(hub_id, parameters):
    assert published(hub_id).parameters == parameters


def test_adapters_are_counted_as_peft_makes_them(tiny_model):
    from transformers import AutoModelForCausalLM

    from grpo_dist.config import LoRAConfig
    from grpo_dist.policy.lora import adapter_parameters, add_adapters

    for targets in ("all-linear", ["q_proj", "down_proj"]):
        settings = {"rank": 4, "target_modules": targets}
        real = AutoModelForCausalLM.from_pretrained(tiny_model)
        add_adapters(real, LoRAConfig.model_validate(settings), seed=0)
        planned = config(model={"path": str(tiny_model)}, policy={"lora": settings})
        expected = sum(p.numel() for _, p in adapter_parameters(real))
        assert lora_parameters(planned.policy, model_of(planned)) == expected


@pytest.mark.parametrize(
    "policy, dtype, bytes_each",
    [  # (weights, gradients, optimiser) in bytes per parameter on each of 4 ranks
        ({"zero_stage": 0}, "float32", (4, 4, 8)),
        ({"zero_stage": 1}, "float32", (4, 4 + 1, 3)),
        ({"zero_stage": 1}, "bfloat16", (2, 4, 3)),
        ({"zero_stage": 2}, "bfloat16", (2, 1, 3)),
        ({"zero_stage": 3}, "bfloat16", (0.5, 1, 3)),
        ({"zero_stage": 1, "offload": {"optimizer": "cpu"}}, "bfloat16", (2, 4 + 1, 0)),
        ({"zero_stage": 2, "offload": {"optimizer": "cpu"}}, "bfloat16", (2, 1, 0)),
        ({"zero_stage": 1, "offload": {"optimizer": "cpu"}}, "float32", (4, 4, 0)),
        ({"zero_stage": 2, "offload": {"optimizer": "cpu"}}, "float32", (4, 0, 0)),
        ({"zero_stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, "bfloat16", (0, 0, 0)),
    ],
)
def test_states_of_a_rank_by_zero_stage(policy, dtype, bytes_each):
    planned = gpu(policy={"num_workers": 4} | policy, model={"dtype": dtype})
    memory = states(planned.policy, model_of(planned), Sizes.from_config(planned, gpu=True))
    assert [v / 7_615_616_512 for v in memory.values()] == pytest.approx(list(bytes_each))


def test_offloaded_states_are_in_host_memory():
    planned = gpu(policy={"num_workers": 4, "zero_stage": 2, "offload": {"optimizer": "cpu"}})
    rank = policy_rank(planned, model_of(planned), Sizes.from_config(planned, gpu=True), LENGTHS)
    states = 4 * 7_615_616_512  # (12 + 4) / 4 ranks
    shard, whole = 12 / 4 * 7_615_616_512, 2 * 7_615_616_512  # written from copies in host memory
    assert sum(rank.host.values()) == pytest.approx(states + shard)
    assert rank.host_first == pytest.approx({"checkpoint": whole})  # by the first rank


def test_rank_0_and_each_process_of_an_engine_hold_a_copy_of_the_weights_for_deltas():
    changes = {"rollout": {"num_workers": 1, "tensor_parallel_size": 2}, "policy": {"num_workers": 4}}
    deltas, whole = gpu(weight_sync={"deltas": True}, **changes), gpu(**changes)
    model, sizes, card = model_of(whole), Sizes.from_config(whole, gpu=True), parse_cluster("1x8xH100").card
    for copies, worker in (
        (1, lambda c: policy_rank(c, model, sizes, LENGTHS)),
        (2, lambda c: rollout_engine(c, model, sizes, LENGTHS, memory=card.memory)),
    ):
        assert worker(deltas).total_host - worker(whole).total_host == copies * 2 * 7_615_616_512
        assert worker(deltas).parts == worker(whole).parts
    ranks = {"policy": policy_rank(deltas, model, sizes, LENGTHS)}
    without = {"policy": policy_rank(whole, model, sizes, LENGTHS)}
    roles, node = made_roles(deltas, Resources(96, 8)), parse_cluster("1x8xH100")
    more = node_host_bytes(ranks, roles, node) - node_host_bytes(without, roles, node)
    assert more == 2 * 7_615_616_512  # one of the four ranks on the node sends


def test_low_rank_training_keeps_gradients_and_moments_of_the_adapters_alone():
    planned = gpu(policy={"num_workers": 4, "zero_stage": 2, "lora": {"rank": 8}})
    memory = states(planned.policy, model_of(planned), Sizes.from_config(planned, gpu=True))
    adapters = 28 * 8 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert memory == {
        "weights": 2 * (7_615_616_512 + adapters), "gradients": adapters, "optimiser": 3 * adapters
    }  # fmt: skip


def activations(shape, sizes, tokens, attended, checkpointing=False):
    model = from_config_json(shape, "")
    how = {"longest": 128, "checkpointing": checkpointing}
    return activation_bytes(model, sizes, tokens=tokens, attended=attended, **how)


@pytest.mark.parametrize("dtype, itemsize", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("kind, prompt", [("qwen2", 0), ("qwen2", 48), ("llama", 16)])
def test_activations_are_those_that_a_real_forward_pass_keeps(dtype, itemsize, kind, prompt):
    shape = SHAPE | {"model_type": kind, "num_hidden_layers": 8}
    how = {"checkpointing": False, "prompt": max(prompt, 1), "total": 128}
    actual, stream, rows = kept_for_backward(shape, dtype, block_spans, **how)
    estimate = activations(shape, Sizes(False, itemsize, 0, 0, 0), stream, rows)
    assert estimate == pytest.approx(actual, rel=0.02)


@pytest.mark.parametrize("prompt", [1, 48])
def test_activations_on_gpus_are_those_of_a_variable_length_kernel(prompt):
    shape = SHAPE | {"num_hidden_layers": 8}
    kernel = partial(varlen_spans, varlen_that_keeps)
    actual, stream, rows = kept_for_backward(
        shape, torch.bfloat16, kernel, checkpointing=False, prompt=prompt, total=128
    )
    estimate = activations(shape, Sizes(True, 2, 0, 0, 0, varlen=True), stream, rows)
    assert estimate == pytest.approx(actual, rel=0.02)


def test_with_checkpointing_a_layer_keeps_its_input_and_one_is_computed_again():
    few, many = SHAPE | {"num_hidden_layers": 2}, SHAPE | {"num_hidden_layers": 10}
    how = {"checkpointing": True, "prompt": 1, "total": 64}
    actual = [kept_for_backward(s, torch.bfloat16, block_spans, **how) for s in (few, many)]
    estimates = [
        activations(shape, Sizes(False, 2, 0, 0, 0), stream, rows, checkpointing=True)
        for shape, (_, stream, rows) in zip((few, many), actual, strict=True)
    ]
    # Saved tensors exclude the layer that the backward pass recomputes.
    assert estimates[1] - estimates[0] == actual[1][0] - actual[0][0] == 8 * actual[0][1] * 2 * 64
    assert estimates[0] > actual[0][0]


def test_a_rank_of_7b_by_hand():
    planned = gpu(
        policy={"num_workers": 8, "zero_stage": 2},
        model={"gradient_checkpointing": True},
        batch={"prompts_per_step": 8, "samples_per_prompt": 8, "micro_batch_tokens": 16384},
    )
    rank = policy_rank(planned, model_of(planned), Sizes.from_config(planned, gpu=True), LENGTHS)
    n, tokens, vocabulary, hidden = 7_615_616_512, 16384, 152064, 3584
    rows = tokens * 400 / (100 / 8 + 300)  # each sample with its prompt
    norm = 4 * hidden + 4
    layer = tokens * (2 * norm + 6 * 18944 + 4 * 3584 + 4 * 28) + rows * 4 * 512
    assert rank.parts == {
        "weights": 2 * n,
        "gradients": n // 2,
        "optimiser": 12 * n // 8,
        "activations": round(28 * tokens * 2 * hidden + layer + tokens * (norm + 2 * hidden)),
        # The head's gradient in float32 and in bfloat16: more than in float32 beside one and a half blocks.
        "logits": vocabulary * hidden * 6,
        "buckets": 1_000_000_000,
        "runtime": 2 * GIB,
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_takes_the_memory_that_was_measured_on_an_h100(stage, tmp_path):
    record = json.loads((MEASURED / "h100_zero2_zero3.json").read_text())
    task = CheckTask(str(stage), False, tmp_path, {MEMORY: 85_017_493_504.0})
    size = UpdateSize(128, 480, 8, 4)
    settings = update_config(task, size, dtype="bfloat16", zero_stage=stage)
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"kernels": "torch"})})
    expected = planned(task, settings, size)
    assert size.rows * size.row == record["figures"][f"zero{stage}/tokens"]
    peak = record["figures"][f"zero{stage}/peak_bytes"]
    now, then = expected.total - expected.parts["runtime"], record["figures"][f"zero{stage}/planned_bytes"]
    # At that time queries were repeated for each row, and outputs were kept both repeated and once.
    query, heads, rows = 896, 14, size.groups * size.samples * size.row
    now += 24 * (rows * (4 * query + 4 * heads) - size.micro_batch * (2 * query + 4 * heads))
    assert now == pytest.approx(peak, rel=0.01)
    summary = f"memory {1 - peak / then:.1%} below plan, {1 - peak / now:.1%} below what plan says since"
    assert summary.replace("%", " %") in (ROOT / "grpo_dist/guides/gpus.md").read_text()


def test_sequence_parallel_ranks_share_the_tokens_of_a_micro_batch():
    alone, shared = (
        policy_rank(c, model_of(c), Sizes.from_config(c, gpu=True), LENGTHS).parts["activations"]
        for c in (
            gpu(policy={"num_workers": 4, "sequence_parallel": n}, batch={"prompts_per_step": 4})
            for n in (1, 4)
        )
    )
    assert alone == pytest.approx(4 * shared)


def test_a_sequence_above_the_budget_is_what_a_rank_must_hold():
    long = gpu(sampling={"max_new_tokens": 31_000}, batch={"prompts_per_step": 4, "micro_batch_tokens": 4096})
    short = gpu(sampling={"max_new_tokens": 3_000}, batch={"prompts_per_step": 4, "micro_batch_tokens": 4096})
    a, b = (
        policy_rank(c, model_of(c), Sizes.from_config(c, gpu=True), LENGTHS).parts["activations"]
        for c in (long, short)
    )
    assert a / b == pytest.approx((31_000 + 512) / 4096)


def test_rows_of_a_packed_stream_have_their_own_prompts():
    c = config(batch={"samples_per_prompt": 4, "prompts_per_step": 4})
    assert attended(c.batch, c.model, LENGTHS, 1000) == pytest.approx(1000 * (100 + 300) / (100 / 4 + 300))
    long_prompts = Workload(10_000, c.bench.lengths, 1000, measured=(1,))
    assert attended(c.batch, c.model, long_prompts, 1000) == pytest.approx(4 * 1000, rel=0.01)
    padded = config(model={"path": "x", "packing": False})
    assert attended(padded.batch, padded.model, LENGTHS, 1000) == 1000


def test_the_cache_of_an_engine_gets_the_memory_left_by_weights_and_overhead():
    c = gpu(rollout={"tensor_parallel_size": 2, "max_num_seqs": 256, "gpu_memory_utilization": 0.9})
    model, sizes, card = model_of(c), Sizes.from_config(c, gpu=True), parse_cluster("1x8xH100").card
    engine = rollout_engine(c, model, sizes, LENGTHS, memory=card.memory)
    token = 2 * 28 * 2 * 128 * 2  # keys and values, layers, half of 4 heads of size 128, bfloat16
    others = 7_615_616_512 + 8192 * (3 * 18944 // 2 + 4 * 3584) * 2 + 3 * 256 * 152064 * 4 + 2 * GIB
    assert engine.token_bytes == token and engine.cache == int(81_559 * 2**20 * 0.9) - others
    assert engine.longest == engine.cache // token // (512 + 4)
    assert engine.mean == 256  # the maximum batch of decoding
    assert engine.total == int(81_559 * 2**20 * 0.9)
    small = rollout_engine(
        c, model, sizes, LENGTHS, memory=parse_cluster("1x1xL4").card.memory, asleep=2 * GIB
    )
    assert small.cache < engine.cache / 4


def test_each_process_of_an_engine_remembers_texts_for_drafts():
    """16 bytes for each token, and 8 for each of the buckets, which are a power of two."""
    texts = 2 * (16_000_000 * 8 + 2**24 * 8)
    changes = {"rollout": {"tensor_parallel_size": 2, "speculation": {"tokens": 4}}}
    drafts, plain = gpu(**changes), gpu(rollout={"tensor_parallel_size": 2})
    model, card = model_of(plain), parse_cluster("1x8xH100").card
    for memory in (card.memory, 0):
        sizes = Sizes.from_config(plain, gpu=memory > 0)
        engine, without = (rollout_engine(c, model, sizes, LENGTHS, memory=memory) for c in (drafts, plain))
        assert engine.cache == without.cache
        assert engine.total_host + engine.total - without.total_host - without.total == texts
        full, bare = (with_snapshot(e, plain.policy, model, sizes, engines=1)[0] for e in (engine, without))
        assert full.total_host + full.total - bare.total_host - bare.total == texts
        assert engine.total_host == (texts if sizes.gpu else 0)


def test_routes_take_a_byte_for_each_layer_and_expert_of_a_token():
    """An engine keeps routes of its cache and of the samples of two steps; a rank, int16 per micro-batch."""
    on, off = (
        gpu(
            model={"path": "Qwen/Qwen3-30B-A3B"},
            policy={"router_replay": replay, "zero_stage": 3, "num_workers": 8},
            batch={"prompts_per_step": 8, "samples_per_prompt": 4, "micro_batch_tokens": 8192},
            rollout={"num_workers": 2},
            max_staleness=1,
        )
        for replay in (True, False)
    )
    model, sizes, card = model_of(on), Sizes.from_config(on, gpu=True), parse_cluster("1x8xH100").card
    engine, plain = (rollout_engine(c, model, sizes, LENGTHS, memory=card.memory) for c in (on, off))
    cached = engine.cache // engine.token_bytes
    assert engine.host == {"routes": (cached + 2 * 8 * 4 * (100 + 300) // 2) * 48 * 8}
    assert (engine.parts, plain.host) == (plain.parts, {})
    evaluator = rollout_engine(on, model, sizes, LENGTHS, memory=card.memory, trains=False)
    evaluating, _ = with_snapshot(evaluator, on.policy, model, sizes, engines=1)
    assert evaluating.host["routes"] == cached * 48 * 8  # for the sync probe; samples keep no routes
    rank = policy_rank(on, model, sizes, LENGTHS).parts
    assert rank["routes"] == 8192 * 48 * 8 * 2
    assert policy_rank(off, model, sizes, LENGTHS).parts == {k: v for k, v in rank.items() if k != "routes"}
    with pytest.raises(UserError, match=r"policy\.router_replay: model .*7B has no experts"):
        dense = gpu(policy={"router_replay": True})
        rollout_engine(dense, model_of(dense), sizes, LENGTHS, memory=card.memory)


def test_a_reference_keeps_nothing_for_a_backward_pass():
    c = gpu(algorithm={"kl": {"coef": 0.1}})
    parts = reference_worker(c.max_length, model_of(c), Sizes.from_config(c, gpu=True)).parts
    assert parts["weights"] == 2 * 7_615_616_512 and "gradients" not in parts
    assert parts["activations"] == 16384 * (3 * 18944 + 3 * 3584) * 2


def test_missing_lengths_are_assumed_and_reported():
    c = config(sampling={"max_new_tokens": 900})
    workload = workload_of(c, prompt_tokens=None)
    assert workload.prompt_tokens == 128 and workload.mean == pytest.approx(300, rel=0.05)
    assert "a quarter of data.max_prompt_tokens" in workload.assumed and "log-normal" in workload.assumed
    exact = workload_of(c, prompt_tokens=50, measured=[10, 2000])
    assert (exact.prompt_tokens, exact.mean, exact.assumed) == (50, (10 + 900) / 2, "")
    fixed = workload_of(config(bench={"lengths": {"kind": "fixed"}}), prompt_tokens=5, measured=[9])
    assert fixed.mean == 4 and fixed.sample("p", [3]) == (4,)  # requested lengths override measured ones


def test_lengths_of_actions_add_up_and_missing_turns_are_assumed_and_reported():
    tools = {"data": {"train": [{"path": "demo:add3", "environment": "python"}]}}
    fixed = tools | {
        "bench": {"lengths": {"kind": "fixed", "tokens": 30}},
        "sampling": {"max_new_tokens": 100},
    }
    workload = workload_of(config(**fixed), prompt_tokens=5, turns=3, tool_s=0.5)
    assert (workload.mean, workload.turns, workload.tool_s, workload.assumed) == (90, 3, 0.5, "")
    assumed = workload_of(config(**tools), prompt_tokens=5, measured=[4])
    assert (assumed.mean, assumed.turns, assumed.tool_s) == (4, 2, 0.2)
    assert assumed.assumed == "episodes of 2 turns, 0.2 s between two (--turns, --tool-seconds)"
    instant = {"data": {"train": [{"path": "demo:add3", "environment": "calculator"}]}}
    assert workload_of(config(**instant), prompt_tokens=5, turns=4).tool_s == 0
    assert workload_of(config(), prompt_tokens=5).turns == 1


def test_sampling_masks_take_a_list_of_ids_or_a_bit_for_each_token():
    """An engine keeps masks of the samples of two steps; a rank, ids with their rows for a micro-batch, and
    booleans for a block of logits.
    """
    mean = 64

    def build(**sampling):
        return gpu(
            sampling=sampling,
            batch={"prompts_per_step": 8, "samples_per_prompt": 4, "micro_batch_tokens": 8192},
            rollout={"num_workers": 2},
            max_staleness=1,
        )

    plain = build()
    model, sizes, card = model_of(plain), Sizes.from_config(plain, gpu=True), parse_cluster("1x8xH100").card
    for sampling, size in (({"top_p": 0.9}, 4 + 4 * mean), ({"top_k": 20}, 4 + 4 * 20)):
        config = build(**sampling)
        engine = rollout_engine(config, model, sizes, LENGTHS, memory=card.memory)
        assert engine.host == {"sampling masks": 2 * 8 * 4 * 300 // 2 * size}
        assert rollout_engine(config, model, sizes, LENGTHS, memory=card.memory, trains=False).host == {}
        rank = policy_rank(config, model, sizes, LENGTHS).parts
        assert rank["sampling masks"] == 2 * 8192 * size + sizes.chunk // 4
        rest = {k: v for k, v in rank.items() if k != "sampling masks"}
        assert policy_rank(plain, model, sizes, LENGTHS).parts == rest
