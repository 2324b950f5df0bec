"""`grpo-dist bench`: lengths, formulas, figures, comparison and refusals on made-up numbers, and one short
real benchmark, whose figures must be consistent. Speeds are not tested.
"""

import asyncio
import json
import math
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from grpo_dist import driver
from grpo_dist.cli import main
from grpo_dist.config import Config, LognormalLengths
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.tools.bench import limits, run
from grpo_dist.tools.bench.figures import MachineLimits, NeededWork, covered_s, figures, shares
from grpo_dist.tools.bench.flops import Shape
from grpo_dist.tools.bench.lengths import lengths_of
from grpo_dist.tools.bench.limits import fastest, training_limit
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, Request, StepRecord
from grpo_dist.tools.bench.result import ActorMemory, BenchResult, DecodeStep
from grpo_dist.tools.bench.run import _workload, make_benchmark_config, timed
from grpo_dist.tools.bench.table import FIGURES, compare, print_result, ratios
from grpo_dist.tools.plan.models import from_config_json
from tests.support.fakes import World, config, prompts
from tests.support.models import COMMON, EXPERT_SHAPES, SHAPES, write_config

SHAPE = Shape(hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocabulary=10)


def test_log_normal_lengths_have_their_mean_and_stay_within_bounds():
    lengths = LognormalLengths(mean=32.0, sigma=0.5)
    samples = lengths_of(range(20_000), lengths, cap=100_000)
    assert statistics.mean(samples) == pytest.approx(32, rel=0.01)
    assert statistics.stdev(map(math.log, samples)) == pytest.approx(0.5, rel=0.03)
    capped = lengths_of(range(5_000), LognormalLengths(mean=32.0), cap=128)
    assert min(capped) >= 1 and max(capped) == 128


def measure(steps, *, peak_flops=None, limits=MachineLimits(), overlapped=False, **changes):  # noqa: B008
    return figures(steps, shape=SHAPE, peak_flops=peak_flops, limits=limits, overlapped=overlapped, **changes)


def training_flops(shape, rows):
    """Return the operations over rows of (tokens, trained tokens) that share nothing."""
    return sum(NeededWork.from_spans([(0, size)], trained=trained).flops(shape) for size, trained in rows)


def test_training_flops_by_hand():
    # Weights of a layer: 4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 8 = 144; two layers 288; head 4 * 10 = 40.
    assert SHAPE.layer_weights == 144
    # 3 tokens, 2 of them trained. Attention: 1 + 2 + 3 pairs, 2 products, 2 layers, 2 heads of size 2.
    weights, attention = 288 * 3 + 40 * 2, 6 * 2 * 2 * 2 * 2
    assert training_flops(SHAPE, [(3, 2)]) == 6 * (weights + attention)
    assert training_flops(SHAPE, [(3, 2), (3, 2)]) == 2 * training_flops(SHAPE, [(3, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({kind for kind, _ in SHAPES.values()} | {*EXPERT_SHAPES}))
def test_the_weights_that_compute_a_token_are_counted_or_the_model_has_no_shape(tmp_path, kind):
    """Against transformers' own model, as `plan` measures it."""
    c = {"model_type": kind, **EXPERT_SHAPES.get(kind, COMMON), "head_dim": 32, "pad_token_id": 0}
    write_config(tmp_path, c).rename(tmp_path / "config.json")
    shape = Shape.from_model_dir(tmp_path)
    if kind in ("glm4_moe", "gpt_neox", "gpt_oss", "nemotron", "phi", "starcoder2"):
        assert shape is None
        return
    head = shape.hidden * shape.vocabulary
    assert shape.layers * shape.layer_weights == from_config_json(c, kind).computing - head


def test_what_a_config_json_leaves_out_is_counted_and_layers_of_two_kinds_are_not(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert Shape.from_model_dir(tmp_path) == Shape(64, 2, 8, 4, 256, 96, 262_208)
    mixed = EXPERT_SHAPES["qwen3_moe"] | {"model_type": "qwen3_moe", "mlp_only_layers": [0]}
    for other in (mixed, COMMON | {"model_type": "starcoder2"}):
        (tmp_path / "config.json").write_text(json.dumps(other))
        assert Shape.from_model_dir(tmp_path) is None


@pytest.mark.parametrize(("dtype", "peak"), [("auto", 312e12), ("bfloat16", 312e12), ("float32", None)])
def test_the_peak_of_the_data_sheet_is_that_of_half_precision(monkeypatch, dtype, peak):
    monkeypatch.setattr(run, "device_type", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "NVIDIA A100-SXM4-80GB")
    assert run._half_precision_peak(dtype) == peak


def test_without_a_shape_there_is_no_utilisation():
    values = figures([step(0, SPANS)], shape=None, peak_flops=9.0, limits=MachineLimits(), overlapped=False)
    assert "training/mfu" not in values and values["training/peak_flops"] == 9.0


def test_frozen_weights_have_no_gradients_and_attention_has():
    weights, attention = 288 * 3 + 40 * 2, 6 * 2 * 2 * 2 * 2
    work = NeededWork.from_spans([(0, 3)], trained=2)
    assert work.flops(SHAPE, frozen=True) == 4 * weights + 6 * attention
    trained, frozen = (measure([step(0, SPANS)], peak_flops=1.0, frozen=frozen) for frozen in (False, True))
    assert 4 / 6 < frozen["training/mfu"] / trained["training/mfu"] < 1


def test_covered_seconds_count_an_overlap_once():
    spans = [Span("a", 1, 3), Span("b", 0, 2), Span("c", 5, 9), Span("d", 5, 6)]
    assert covered_s(spans, 0, 6) == 4
    assert covered_s(spans, 2.5, 5.5) == 1
    assert covered_s([], 0, 6) == 0


def step(begin, spans, *, tokens=(10, 30), **metrics):
    """Build a step of 10 seconds with two samples of 4 prompt tokens; ``spans`` in seconds from its start."""
    usage = {
        actor: Usage(spans=tuple(Span(stage, begin + a, begin + b) for stage, a, b in actor_spans))
        for actor, actor_spans in spans.items()
    }
    defaults = {
        "time/rollout_sample_busy_s": 5.0, "time/policy_update_busy_s": 3.0, "time/policy_sync_busy_s": 0.5,
        "time/reward_score_busy_s": 1.0, "time/sync_s": 1.0, "sync/bytes": 100.0, "train/tokens": 48.0,
        "throughput/rollout_tokens": 40.0, "time/driver_cpu_s": 0.1,
    }  # fmt: skip
    requests = tuple(Request((1, 2, 3, 4), seed, n) for seed, n in enumerate(tokens))
    return StepRecord(1, begin, begin + 10, defaults | metrics, usage, requests)


@pytest.mark.parametrize(("prompts", "expected"), [
    ([(1, 2, 3), (1, 2, 4), (1, 2, 3, 5)], 2),
    ([(1, 2), (1, 2, 4)], 2),
    ([(7, 8)], 2),
    ([(1, 2, 3), (2, 2, 3), (1, 2, 3)], 0),
    ([(1, 5), (1, 2, 9), (1, 4)], 1),
])  # fmt: skip
def test_the_tokens_that_all_prompts_begin_with_are_counted(prompts, expected):
    requests = tuple(Request(ids, seed, 3) for seed, ids in enumerate(prompts))
    steps = [replace(step(0, {}), requests=requests)]
    assert _workload(config().batch, 0, steps)["shared_prompt_tokens"] == expected


def step_of_shared_prompts():
    """Two groups of two: prompts of 9 tokens, 8 in common; completions of 10 and 30 tokens, 5 more given."""
    prompts = [(*range(8), last) for last in (50, 50, 60, 60)]
    lengths = [10, 30, 10, 30]
    requests = [Request(ids, 0, n, 5) for ids, n in zip(prompts, lengths, strict=True)]
    return replace(step(0, {}), requests=tuple(requests))


def test_what_prompts_begin_with_is_needed_once():
    """Each needed token multiplies all weights of the layers, and attends to its context and itself."""
    needed = NeededWork.from_step(step_of_shared_prompts())
    context = [*range(1, 9), 9, 9, *range(10, 25), *range(10, 45), *range(10, 25), *range(10, 45)]
    assert needed == NeededWork(8 + 1 + 1 + 15 + 35 + 15 + 35, sum(context), 80)
    layers, logits = SHAPE.layers * SHAPE.layer_weights, SHAPE.hidden * SHAPE.vocabulary
    pairs = 2 * SHAPE.layers * SHAPE.heads * SHAPE.head_dim * sum(context)
    assert needed.flops(SHAPE) == pytest.approx(6 * (layers * len(context) + logits * 80 + pairs))


def test_samples_that_share_nothing_need_all_their_tokens():
    requests = (Request((1, 2, 3), 0, 4), Request((5, 6), 1, 7, 2))
    needed = NeededWork.from_step(replace(step(0, {}), requests=requests))
    assert needed == NeededWork(7 + 11, 28 + 66, 11)
    assert needed.flops(SHAPE) == training_flops(SHAPE, [(7, 4), (11, 7)])


def test_rows_that_share_nothing_are_not_longer_than_the_longest_sample():
    """Tokens of 4 samples see their prompt of 1,000 tokens, so rows of 2,000 would have as many pairs."""
    requests = tuple(Request(tuple(range(1000)), seed, 500) for seed in range(4))
    needed = NeededWork.from_step(replace(step(0, {}), requests=requests))
    assert needed.row_tokens(10_000) == round(2 * needed.pairs / 3000 - 1) > 1800
    assert needed.row_tokens(1500) == 1500


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bare_training_loop_computes_what_a_step_needs(monkeypatch, ranks):
    """Two steps of 110 tokens with 2,454 pairs: rows of 44 tokens have as many pairs for each."""
    all_jobs = []

    def run(module, jobs, **_):
        all_jobs.extend(jobs)
        return [{"seconds": [4.0, 2.0], "micro_batch": 1, "matmul": 7.0} for _ in jobs]

    monkeypatch.setattr(limits, "run_jobs", run)
    steps = [step_of_shared_prompts()] * 2
    rate, peak, _ = training_limit(config(policy={"num_workers": ranks}), Path(), steps, threads=1)
    rows = 2 // ranks
    assert [(job["rows"], job["row_tokens"]) for job in all_jobs] == [(rows, 44)] * ranks
    assert all_jobs[0]["trained_share"] == pytest.approx(80 / 110)
    # 136 tokens count each prompt once per sample; 110 are needed
    assert rate == pytest.approx(2 * 44 * (136 / 110) / 2.0) and peak == 7.0 * ranks


SPANS = {
    "rollout-0": [("sample", 0, 5), ("sync", 8.5, 9)],
    "reward-0": [("score", 4, 5.5)],
    "policy-0": [("update", 5.5, 8.5), ("sync", 8.4, 9)],
}


def test_shares_count_every_moment_once_and_add_up():
    values = shares([step(0, SPANS), step(10, SPANS)])
    assert values["share/generation"] == pytest.approx(0.5)
    assert values["share/training"] == pytest.approx(0.3)
    assert values["share/sync"] == pytest.approx(0.05)
    assert values["share/scoring"] == pytest.approx(0.05)
    assert values["share/reference"] == 0
    assert values["share/overhead"] == pytest.approx(0.1)
    assert values["overhead/step_s"] == pytest.approx(1.0)
    assert sum(v for k, v in values.items() if k.startswith("share/")) == pytest.approx(1)
    assert values["idle/rollout"] == pytest.approx(0.5)
    assert values["idle/trainer"] == pytest.approx(0.65)


def test_changes_of_turns_are_neither_part_of_the_weight_sync_nor_of_the_overhead():
    """1 s of each 10 s belongs to no stage; 0.7 s of it switches roles. Stop, travel and take are 0.13 s."""
    parts = {"time/sync_s": 1.3, "time/sync_stop_s": 0.02}
    parts |= {"time/sync_travel_s": 0.1, "time/sync_take_s": 0.01}
    turns = {"time/turn_policy_offload_s": 0.5, "time/turn_engines_wake_s": 0.2}
    steps = [step(10 * i, SPANS, **parts, **turns) for i in range(2)]
    values = measure(steps)
    assert values["sync/step_s"] == pytest.approx(0.13)
    assert values["sync/bytes_per_s"] == pytest.approx(100 / 0.13)
    assert values["share/turns"] == pytest.approx(0.07) and values["share/overhead"] == pytest.approx(0.03)
    assert values["overhead/step_s"] == pytest.approx(0.3)
    assert sum(v for k, v in values.items() if k.startswith("share/")) == pytest.approx(1)
    assert set(values) <= set(FIGURES)
    long = [step(0, SPANS, **turns | {"time/turn_policy_reload_s": 9.0})]  # most of it behind other stages
    behind = shares(long)
    assert behind["share/overhead"] == pytest.approx(0) and behind["share/turns"] == pytest.approx(0.1)


def test_figures_by_hand():
    limits = MachineLimits(16.0, 24.0, 400.0)
    steps = [step(0, SPANS), step(10, SPANS)]
    values = measure(steps, peak_flops=1000.0, limits=limits)
    assert values["loop/step_s"] == 10 and values["loop/samples_per_s"] == 0.2
    assert values["loop/tokens_per_s"] == 4.8 and values["loop/completion_tokens_per_s"] == 4.0
    assert values["generation/tokens_per_s"] == 8.0 and values["of_limit/generation"] == 0.5
    assert values["training/tokens_per_s"] == 16.0
    assert values["of_limit/training"] == pytest.approx(2 / 3)
    assert values["sync/bytes_per_s"] == 100.0 and values["of_limit/sync"] == 0.25
    work = training_flops(SHAPE, [(14, 10), (34, 30)]) - training_flops(SHAPE, [(4, 0)])  # one prompt of two
    assert values["training/mfu"] == pytest.approx(work / 3.0 / 1000.0)
    # At the limits: 40 tokens / 16, 48 / 24, 100 bytes / 400.
    assert values["limit/step_s"] == pytest.approx(2.5 + 2.0 + 0.25)
    overlapped = measure(steps, limits=limits, overlapped=True)
    assert overlapped["limit/step_s"] == pytest.approx(2.5)
    assert overlapped["loop/step_over_limit"] == pytest.approx(4.0)
    assert set(values) <= set(FIGURES)


def test_figures_of_episodes_are_means_over_turns_and_their_tools_are_part_of_generation():
    """Four samples have six turns: 0.5 s after each of 2 turns, 0.2 s after each of 4."""
    spans = SPANS | {"environment-0": [("act", 0.0, 9.0)]}
    turns = [(2.0, 0.5), (4.0, 0.2)]
    steps = [
        step(10 * i, spans, **{"throughput/rollout_turns": n, "time/tool_wait_s": s,
                               "throughput/episode_cached_share": 0.9})
        for i, (n, s) in enumerate(turns)
    ]  # fmt: skip
    values = measure(steps)
    assert values["episodes/turns"] == 1.5
    assert values["episodes/tool_wait_s"] == pytest.approx((2 * 0.5 + 4 * 0.2) / 6)
    assert values["episodes/cached_share"] == 0.9
    plain = [step(10 * i, SPANS) for i in range(2)]
    without = measure(plain)
    assert {k: v for k, v in values.items() if not k.startswith("episodes/")} == without


def test_shared_prompts_and_changed_weights_are_means_over_the_steps_that_have_them():
    steps = [
        step(0, SPANS, **{"throughput/packing_efficiency": 0.9, "sync/changed_share": 0.02}),
        step(10, SPANS, **{"throughput/packing_efficiency": 1.0}),
    ]
    values = measure(steps)
    assert values["training/needed_share"] == pytest.approx(0.95) and values["sync/changed_share"] == 0.02
    without = measure([step(0, SPANS)])
    assert not {"training/needed_share", "sync/changed_share"} & set(without)


def test_the_acceptance_length_is_weighted_by_the_drafts_of_each_step(capsys):
    counts = [(30.0, 30.0), (10.0, 30.0), (0.0, 0.0)]
    steps = [
        step(10 * i, SPANS, **{"throughput/rollout_drafts": n, "throughput/rollout_accepted_tokens": right})
        for i, (n, right) in enumerate(counts)
    ]
    values = measure(steps)
    assert values["generation/acceptance_length"] == 1 + 60 / 40
    print_result(result(figures=values))
    output = capsys.readouterr().out
    assert re.search(r"mean acceptance length .* 2.50 tok", output)
    assert re.search(r"peak memory of policy-0 .* 2,147.5 MB|peak memory of policy-0 .* 2.1 GB", output)
    assert "limit, step: sum of the limits" in output
    without = measure([step(0, SPANS)])
    assert "generation/acceptance_length" not in without


def test_given_tokens_are_of_a_samples_length_in_training_and_not_in_generation():
    assert Request((1, 2, 3, 4), 0, 10, given=6).tokens == 20


def test_rows_left_out_of_training_do_not_count_as_work():
    whole = measure([step(0, SPANS)], peak_flops=1.0)
    half = step(0, SPANS, **{"train/tokens": 24.0})
    values = measure([half], peak_flops=1.0)
    assert values["training/mfu"] == pytest.approx(whole["training/mfu"] / 2)
    assert not [key for key in values if key.startswith(("limit/", "of_limit/"))]


class OneSecond:
    """Usage of workers that report one busy second."""

    def __init__(self):
        self.latest = {}

    async def read(self):
        return {"time/rollout_sample_busy_s": 1.0}


def test_only_timed_steps_count_and_each_has_the_requests_it_was_trained_on():
    bench, all_rows = {"warmup_steps": 2, "steps": 3}, {"skip_idle_rows": False}
    settings = make_benchmark_config(config(max_staleness=1, bench=bench, algorithm=all_rows))
    assert settings.steps == 2 + 3 + 1  # the last step samples nothing ahead
    world, usage = World(), OneSecond()
    recorder = BenchRecorder(settings.seed, Path(), lambda step, metrics: None)
    workers = replace(world.workers(), usage=usage)
    asyncio.run(driver.run(settings, workers, prompts(32), [], recorder, NoCheckpoints()))
    steps = timed(settings.bench, recorder.steps)
    assert [s.step for s in steps] == [3, 4, 5]
    assert all(a.end == b.begin for a, b in pairwise(steps))
    assert all(s.metrics["time/rollout_sample_busy_s"] == 1.0 for s in steps)
    assert all(s.metrics["train/tokens"] == sum(r.tokens for r in s.requests) for s in steps)
    sampled_seeds = {seed for _, seeds, _ in world.sampled for seed in seeds}
    trained_seeds = [request.seed for s in recorder.steps for request in s.requests]
    assert len(trained_seeds) == len(set(trained_seeds)) == 6 * 4 * 2 and set(trained_seeds) == sampled_seeds


def result(**changes):
    values = measure([step(0, SPANS)], peak_flops=1e6, limits=MachineLimits(16.0, 24.0, 400.0))
    base = BenchResult(
        name="made", config={"seed": 0}, machine={"cpu": "a", "cores": 2}, workload={
            "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "completion_tokens_mean": 20.0,
        },
        figures=values, limit_settings={"step": "sum of the limits"},
        actors=[ActorMemory(name, 2**30, 0) for name in ("rollout-0", "environment-0")]
        + [ActorMemory("policy-0", 2**31, 0)],
        steps=[{"seconds": 10.0}],
    )  # fmt: skip
    return replace(base, **changes)


def test_a_result_reads_back_unchanged(tmp_path):
    original = result(lengths=[3, 4], decode_steps=[DecodeStep(2, 17.5, 0.01)])
    original.write(tmp_path / "bench.json")
    assert BenchResult.read(tmp_path / "bench.json") == original
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_comparison_gives_ratios_of_b_to_a(tmp_path):
    a = result()
    figures_b = {k: v * 2 for k, v in a.figures.items() if k != "training/mfu"}
    b = replace(a, figures=figures_b, workload=a.workload | {"steps": 3})
    assert set(ratios(a.figures, b.figures).values()) == {2.0}
    a.write(tmp_path / "a.json")
    b.write(tmp_path / "b.json")
    with open("/dev/null", "w") as null:
        console = Console(width=140, record=True, force_terminal=False, file=null)
        compare(tmp_path / "a.json", tmp_path / "b.json", console)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "generation, of its limit" in line)
    assert "50.0 %" in row and "100.0 %" in row and "2.000" in row
    assert "–" in next(line for line in text.splitlines() if "FLOPs utilisation" in line)
    assert "workload: steps is 1 in A and 3 in B" in text


@pytest.mark.parametrize("content, words", [
    ('{"schema": 99}', ["`schema` = 99", "schema 2", "measure again"]),
    ('{"figures": {}}', ["no `schema`"]),
    ("[]", ["no `schema`"]),
    ('{"schema": 2, "figures": []}', ["`figures` is not a mapping", "measure again"]),
    ('{"schema": 2, "figures": {"loop/step_s": "x"}}', ["`figures.loop/step_s` = 'x' is not a number"]),
    ("not json", ["not JSON"]),
    (None, ["cannot be read", "No such file"]),
])  # fmt: skip
def test_comparison_refuses_files_that_are_no_results(tmp_path, capsys, content, words):
    result().write(tmp_path / "a.json")
    if content is not None:
        (tmp_path / "b.json").write_text(content)
    assert main(["bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    error = capsys.readouterr().err
    assert "b.json" in error and all(word in error for word in words)


def test_bench_needs_a_configuration_or_two_results(tmp_path, capsys):
    assert main(["bench"]) == 2
    assert main(["bench", "configs/demo.yaml", "--compare", "a.json", "b.json"]) == 2
    assert capsys.readouterr().err.count("--compare A.json B.json alone") == 2


@pytest.mark.parametrize("bench, words", [
    ({"lengths": {"kind": "lognormal"}}, "bench.lengths.lognormal.mean"),
    ({"lengths": {"kind": "fixed", "mean": 3.0}}, "bench.lengths.fixed.mean"),
    ({"lengths": {"kind": "natural", "tokens": 3}}, "bench.lengths.natural.tokens"),
    ({"lengths": {"kind": "fixed", "tokens": 5}}, "`bench.lengths.tokens` = 5, "),
    ({"warmup_steps": 0}, "greater than 0"),
])  # fmt: skip
def test_invalid_bench_settings_are_refused(bench, words):
    with pytest.raises(ValueError, match=words):
        config(bench=bench)  # sampling.max_new_tokens = 4


def test_a_repeat_takes_as_long_as_its_slowest_process_and_the_fastest_repeat_counts():
    one_process = [[[3.0, 2.0], [5.0, 6.0]]]  # [process][batch][repeat]
    assert fastest(one_process) == 2.0 + 5.0
    assert fastest([*one_process, [[1.0, 4.0], [7.0, 5.5]]]) == 3.0 + 6.0


@pytest.mark.parametrize("content, words", [
    (None, "no such file"),
    ("{", "not JSON"),
    ("{}", "expected an object with model_type"),
    ('{"model_type": "qwen2", "vocab_size": 100}', "at least 107 for the tokenizer"),
])  # fmt: skip
def test_a_shape_that_cannot_be_used_is_refused(tmp_path, content, words):
    from grpo_dist.demo.model import random_model

    file = tmp_path / "shape.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=words):
        random_model(file, seed=0)


REAL = """
name: short
output_dir: {directory}
model: {{path: "demo:tiny", dtype: float32}}
data: {{train: [{{path: "demo:add3"}}], max_prompt_tokens: 16}}
batch: {{prompts_per_step: 4, samples_per_prompt: 4}}
sampling: {{max_new_tokens: 16}}
rewards: {{functions: [{{function: parity}}, {{function: math, weight: 0}}], processes_per_worker: 1}}
policy: {{zero_stage: 0, threads: 1}}
rollout: {{kv_cache_gib: 0.25, enforce_eager: true, threads: 1}}
bench: {{warmup_steps: 1, steps: 2, lengths: {{kind: lognormal, mean: 8}}}}
"""


@pytest.mark.slow
def test_a_short_real_benchmark_adds_up(tmp_path, capsys):
    path = tmp_path / "short.yaml"
    path.write_text(REAL.format(directory=tmp_path))
    assert main(["bench", str(path)]) == 0
    assert "loop, of its limit" in capsys.readouterr().out
    bench = BenchResult.read(tmp_path / "short/bench.json")
    settings = Config.model_validate(bench.config)
    f = bench.figures
    # The lengths follow from the seeds, so the work is known in advance.
    from grpo_dist.data.order import step_prompts
    from grpo_dist.runs.start import load_inputs
    from grpo_dist.runtime.seeds import request_seed
    from grpo_dist.tools.bench.lengths import lengths_of

    pool = load_inputs(settings, print).prompts
    chosen = [(batch, pool[i]) for batch in (1, 2) for i in step_prompts(len(pool), 4, 0, batch)]
    lengths = [
        lengths_of([request_seed(0, batch, prompt.uid, i)], settings.bench.lengths, cap=16)[0]
        for batch, prompt in chosen
        for i in range(4)
    ]
    assert bench.workload["completion_tokens"] == sum(lengths)
    assert sum(s["rollout/tokens"] for s in bench.steps) == sum(lengths)
    assert sum(s["throughput/rollout_tokens"] for s in bench.steps) == sum(lengths)
    seconds = sum(s["seconds"] for s in bench.steps)
    prompt_tokens = sum(4 * len(prompt.token_ids) for _, prompt in chosen)
    assert f["loop/tokens_per_s"] * seconds == pytest.approx(sum(lengths) + prompt_tokens)
    assert sum(s["train/tokens"] for s in bench.steps) == sum(lengths) + prompt_tokens
    shares = {key: value for key, value in f.items() if key.startswith("share/")}
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    assert 0 < f["idle/rollout"] < 1 and 0 < f["idle/trainer"] < 1
    assert f["share/generation"] == pytest.approx(1 - f["idle/rollout"], abs=0.05)
    assert f["sync/bytes"] == pytest.approx(4 * 823_424, rel=0.01)  # parameters of demo:tiny, tied
    # Only with completion order, weight deltas, colocated roles and drafts.
    elsewhere = (
        "episodes/", "tail/waited_steps", "tail/length_bias",
        "sync/changed_share", "share/turns", "generation/acceptance_length",
    )  # fmt: skip
    assert set(f) == {key for key in FIGURES if not key.startswith(elsewhere)}
    assert all(math.isfinite(value) and value >= 0 for value in f.values())
    assert {a.name for a in bench.actors} == {"rollout-0", "reward-0", "policy-0"}
    assert all(a.peak_bytes > 100e6 for a in bench.actors)
    assert bench.lengths == lengths
    assert {s.sequences for s in bench.decode_steps} == {1, 4, 16, 64, 256} and len(bench.decode_steps) == 10
    longest = max(len(prompt.token_ids) for _, prompt in chosen)
    assert all(0 < s.seconds < 10 and s.context > longest for s in bench.decode_steps)
