"""The lines of `make gpu-check`: their device-independent parts, and their verdicts on made-up numbers of a
machine with GPUs.
"""

import asyncio
import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_dist.batch.sharding import packed_micro_batches
from grpo_dist.batch.shared_prefixes import shared_prefixes
from grpo_dist.config import Config
from grpo_dist.tools.bench.figures import NeededWork
from grpo_dist.tools.bench.flops import Shape
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.tools.bench.result import BenchResult, DecodeStep
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.calibration import calibrate
from grpo_dist.tools.plan.memory import attended
from grpo_dist.tools.plan.workload import workload_of
from tests.gpu import attention, device, engines, head, loop, transfers, updates
from tests.gpu.check import JOBS
from tests.gpu.loop import loop_config
from tests.gpu.process import CheckTask, run_job
from tests.gpu.sizes import _REAL_UPDATES, SHAPE_OF, UpdateSize, gradient_bound, planned, update_config
from tests.gpu.trainer_job import _digest, made_batch
from tests.support.engine_arguments import QWEN
from tests.support.patience import HANG_S
from tests.support.plans import model_of
from tests.support.tiers import slow_after

H100 = {
    "device/memory_bytes": 79.6 * 2**30, "device/bfloat16": 1.0, "device/matrix_flops_per_s": 7e14,
    "device/copy_bytes_per_s": 1.2e12,
    "device/to_host_bytes_per_s": 5e10, "device/from_host_bytes_per_s": 5e10,
}  # fmt: skip


SHAPE = {  # Qwen2.5-0.5B
    "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "head_dim": 64, "intermediate": 4864,
    "vocabulary": 151936,
}  # fmt: skip


def on_gpu(directory, argument="", **figures):
    return CheckTask(argument, False, directory, H100 | figures)


def on_cpu(directory, argument=""):
    rates = {"device/matrix_flops_per_s": 1e11, "device/copy_bytes_per_s": 1e10}
    return CheckTask(argument, True, directory, rates)


def only(results):
    ((_, findings),) = list(results)
    return findings


def broken(findings):
    return [claim.what for claim in findings.claims if not claim.holds]


def test_bounds_on_gradients_by_hand():
    # 24 layers of 24 roundings of 2^-9: 2 * 24 * 2^-9. In float32 each sum of 64 terms is rounded 64 times.
    assert gradient_bound("bfloat16", layers=24, widest=4864)[0] == pytest.approx(2 * 24 * 2**-9)
    assert gradient_bound("float32", layers=24, widest=64)[0] == pytest.approx(2 * 24 * 8 * 2**-24)


def test_tokens_of_an_update_by_hand():
    size = UpdateSize(prompt=8, completion=12, samples=4, groups=2)
    assert (size.row, size.micro_batch, size.prompts, size.rows) == (20, 2 * (8 + 48), 4, 16)


def test_states_that_an_optimiser_keeps_outside_its_groups_are_compared_too():
    """Between two steps of ZeRO-3, the groups of DeepSpeed's inner optimiser are empty."""
    flat = torch.nn.Parameter(torch.ones(8))
    inner = torch.optim.AdamW([flat])
    flat.grad = torch.ones(8)
    inner.step()
    inner.param_groups[0]["params"] = []
    trainer = SimpleNamespace(
        weights=SimpleNamespace(buckets=lambda size: []),
        engine=SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner)),
    )
    before = _digest(trainer)
    assert len(before) == 4  # the weight, a step count and two moments
    inner.state[flat]["exp_avg"][3] += 1
    assert _digest(trainer) != before


@pytest.mark.parametrize("size", _REAL_UPDATES, ids=str)
def test_micro_batches_of_an_update_are_as_full_as_plan_takes_them_to_be(tmp_path, size):
    batch = made_batch(size, 151936)
    plan = packed_micro_batches(batch.lengths.tolist(), shared_prefixes(batch), size.micro_batch)
    assert [len(part) for part in plan] == [size.groups * size.samples] * 2
    config = update_config(on_gpu(tmp_path), size, dtype="bfloat16", zero_stage=1)
    expected = attended(
        config.batch, config.model, workload_of(config, prompt_tokens=size.prompt), size.micro_batch
    )
    assert expected == pytest.approx(size.groups * size.samples * size.row)


def trainer_result(**changes):
    gradients = {"a": np.linspace(-1, 1, 100, dtype=np.float32)}
    return {"gradients": gradients, "logprobs": np.full(8, -9.0, np.float32), "norm": 1.0} | changes


def timed_result(expected, **changes):
    defaults = {
        "update_s": 0.5, "peak_bytes": expected, "same": True, "tensors": 290, "after": 1.0,
        "moved_bytes": 7e9, "offload_s": [9.0, 0.2], "reload_s": [0.3, 0.2], "freed_bytes": 3e10,
        "offload_parts": {"time/offload_copies_s": 0.15, "time/offload_free_s": 0.03},
    }  # fmt: skip
    return trainer_result(**defaults | changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"peak": 1.06}, ["peak memory, off from plan"]),
        ({"peak": 0.94}, ["peak memory, off from plan"]),
        ({"same": False}, ["states after a turn, the same bits"]),
        ({"offload_s": [1.0, 1.0]}, []),
        (
            {"offload_parts": {"time/offload_copies_s": 1.0, "time/offload_free_s": 0.03}},
            ["states off, share of a pinned copy"],
        ),
        ({"after": math.nan}, ["an update after the turn"]),
        (
            {"gradients": {"a": np.ones(100, np.float32)}},
            ["gradients, packed and padded: relative difference"],
        ),
        ({"logprobs": np.full(8, -9.2, np.float32)}, ["log-probs, packed and padded: mean difference"]),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_update_is_held_to_plan_to_padded_rows_and_to_its_own_states(
    tmp_path, monkeypatch, stage, changes, wrong
):
    task = on_gpu(tmp_path, str(stage))

    def run(sections, size, *, timed=False):
        assert sections.model.dtype == "bfloat16" and sections.policy.zero_stage == stage
        assert sections.model.packing == timed
        parts = planned(task, update_config(task, size, dtype="bfloat16", zero_stage=stage), size)
        expected = parts.total - parts.parts["runtime"]
        extra = dict(changes)
        return [timed_result(expected * extra.pop("peak", 1.0), **extra) if timed else trainer_result()]

    monkeypatch.setattr(updates, "run_trainers", run)
    findings = only(updates.zero(task))
    assert broken(findings) == wrong
    assert findings.figures[f"zero{stage}/rows"] == 64
    parts = {key: v for key, v in findings.figures.items() if key.startswith(f"zero{stage}/offload_")}
    copies = changes.get("offload_parts", {}).get("time/offload_copies_s", 0.15)
    rest = parts[f"zero{stage}/offload_s"] - copies - 0.03
    assert parts[f"zero{stage}/offload_copies_s"] == copies
    assert parts[f"zero{stage}/offload_rest_s"] == pytest.approx(rest)


def test_the_speed_is_a_share_of_the_bare_loop_on_the_tokens_that_the_rows_need(tmp_path, monkeypatch):
    jobs_run = []
    monkeypatch.setattr(updates, "model_dir_of", lambda *_: "made")
    monkeypatch.setattr(updates, "run_trainers", lambda *_, timed: [timed_result(1.0, update_s=0.8)])
    monkeypatch.setattr(
        updates,
        "run_jobs",
        lambda _, jobs, **__: jobs_run.append(jobs[0]) or [{"seconds": [0.5, 0.4], "matmul": 7e14}],
    )
    result = only(updates.speed(on_gpu(tmp_path)))
    assert result.holds
    assert result.figures["speed/tokens_per_s"] == pytest.approx(64 * 608 / 0.8)
    needed = NeededWork(8 * 128 + 64 * 480, 8 * 128 * 129 // 2 + 64 * sum(range(129, 609)), 64 * 480)
    assert (jobs_run[0]["rows"], jobs_run[0]["row_tokens"]) == (52, 608)
    computed = jobs_run[0]["rows"] * jobs_run[0]["row_tokens"] / needed.tokens
    assert result.figures["speed/of_limit"] == pytest.approx(0.4 / computed / 0.8)
    assert jobs_run[0]["trained_share"] == pytest.approx(64 * 480 / needed.tokens)
    assert result.figures["speed/of_matrix_rate"] == pytest.approx(needed.flops(Shape(**SHAPE)) / 7e14 / 0.8)
    monkeypatch.setattr(updates, "run_trainers", lambda *_, timed: [timed_result(1.0, update_s=1.0)])
    assert broken(only(updates.speed(on_gpu(tmp_path)))) == ["speed, share of a bare loop"]


STEP = {
    "policy/grad_norm": 1.0, "health/skipped_updates": 0.0, "health/bad_weights": 0.0,
    "probe/logprob_diff_mean": 0.04, "mismatch/logprob_diff_mean": 0.05,
    "time/sync_s": 1.0, "time/sync_stop_s": 0.01, "time/sync_travel_s": 0.1, "time/sync_take_s": 0.02,
    "time/turn_engines_sleep_s": 0.2, "time/turn_engines_wake_s": 0.1, "time/turn_policy_reload_s": 0.2,
    "time/turn_policy_offload_s": 0.3, "time/policy_offload_copies_busy_s": 0.2,
    "time/policy_offload_free_busy_s": 0.04, "time/policy_update_busy_s": 0.7,
}  # fmt: skip


def steps_of(tmp_path, monkeypatch, argument="bfloat16", cut_after=3, **changes):
    """Return the last findings of each line for made-up steps, in the order of their first report."""
    task = on_gpu(tmp_path, argument)
    size = 2 * model_of(loop_config(task, dtype="bfloat16")).parameters
    metrics = STEP | {"sync/bytes": float(size)} | changes
    records = [StepRecord(i + 1, 10.0 * i, 10.0 * i + 5, metrics, {}, ()) for i in range(3)]

    async def run(config, check_task):
        for done in range(1, cut_after + 1):
            yield records[:done]
        if cut_after < 3:
            raise RuntimeError("cut")

    monkeypatch.setattr(loop, "steps_of", run)
    by_line = {}
    with nullcontext() if cut_after == 3 else pytest.raises(RuntimeError, match="cut"):
        for line, findings in loop.loop(task):
            by_line[line] = findings
    return by_line


def test_the_real_loop_is_held_to_the_bounds_of_the_sync_probe(tmp_path, monkeypatch):
    by_line = steps_of(tmp_path, monkeypatch)
    assert all(findings.holds for findings in by_line.values())
    assert list(by_line) == ["mismatch-bfloat16", "turns", "sync", "steps"]
    assert by_line["turns"].figures["turns/all_s"] == pytest.approx(0.8)
    offload = {k: v for k, v in by_line["turns"].figures.items() if k.startswith("turns/offload_")}
    assert offload == {
        "turns/offload_copies_s": 0.2,
        "turns/offload_free_s": 0.04,
        "turns/offload_rest_s": pytest.approx(0.06),
    }
    assert by_line["turns"].figures["turns/policy_offload_first_s"] == 0.3
    seconds = 0.01 + 0.1 + 0.02
    assert by_line["sync"].figures["sync/bytes_per_s"] == pytest.approx(2 * 494032768 / seconds)
    float32 = steps_of(tmp_path, monkeypatch, "float32")
    assert (
        list(float32) == ["mismatch-float32"] and not float32["mismatch-float32"].holds
    )  # 0.05 is above 1e-3


@pytest.mark.parametrize(("cut_after", "lines"), [(1, []), (2, ["mismatch-bfloat16", "turns", "sync"])])
def test_a_loop_that_is_cut_leaves_what_its_steps_have_shown(tmp_path, monkeypatch, cut_after, lines):
    """After the first step no engine has received updated weights."""
    by_line = steps_of(tmp_path, monkeypatch, cut_after=cut_after)
    assert list(by_line) == lines and all(findings.holds for findings in by_line.values())
    assert all("after 2 of 3 steps" in findings.notes for findings in by_line.values())


def test_engines_of_the_check_share_what_vllm_compiles(tmp_path, monkeypatch):
    """vLLM's cache key has all arguments except the one excluded here: see `compute_hash` in vllm.config."""
    from actors.workers.engine_settings import EngineSpec, engine_arguments

    monkeypatch.setattr(loop, "bench", lambda config: configs.append(config) or tmp_path)
    task, configs = on_gpu(tmp_path), [engines.engine_config(on_gpu(tmp_path), eager=False)]
    configs.append(loop_config(task, dtype="bfloat16"))
    with pytest.raises(FileNotFoundError):
        list(loop.short_bench(task))
    options = []
    for config in configs:
        spec = EngineSpec.from_config(config, tmp_path, colocated=True)
        arguments = engine_arguments(spec, QWEN, device="cuda", free_memory=0)
        options.append({name: value for name, value in arguments.items() if name != "gpu_memory_utilization"})
    assert len(options) == 3 and options[0] == options[1] == options[2]
    assert (options[0]["max_num_seqs"], options[0]["enforce_eager"]) == (256, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"policy/grad_norm": 0.0}, "steps"),
        ({"health/skipped_updates": 1.0}, "steps"),
        ({"probe/logprob_diff_mean": 0.2}, "mismatch-bfloat16"),
        ({"mismatch/logprob_diff_mean": math.nan}, "mismatch-bfloat16"),
        ({"sync/bytes": 5.0}, "sync"),
    ],
)
def test_one_number_out_of_bounds_fails_its_own_line_alone(tmp_path, monkeypatch, changes, line):
    by_line = steps_of(tmp_path, monkeypatch, **changes)
    assert [name for name, findings in by_line.items() if not findings.holds] == [line]


def test_a_part_of_a_turn_that_did_not_take_place_is_found(tmp_path, monkeypatch):
    without = {name: value for name, value in STEP.items() if name != "time/turn_policy_offload_s"}
    monkeypatch.setitem(globals(), "STEP", without)
    by_line = steps_of(tmp_path, monkeypatch)
    assert broken(by_line["turns"]) == ["parts of a turn that took place"]


def test_nccl_reports_losses_and_rates(tmp_path, monkeypatch):
    sent = {
        "seconds": [0.02, 0.01], "raw_seconds": [0.008], "noticed_s": 0.3, "lost": True, "reconnect_s": 0.2,
    }  # fmt: skip
    received = {"whole": True, "whole_again": True}
    monkeypatch.setattr(transfers, "run_jobs", lambda *_, **__: [sent, received])
    findings = only(transfers.nccl(on_gpu(tmp_path)))
    assert findings.holds and findings.figures["nccl/of_raw"] == pytest.approx(0.8)
    monkeypatch.setattr(
        transfers, "run_jobs", lambda *_, **__: [sent | {"lost": False, "noticed_s": 61.0}, received]
    )
    assert len(broken(only(transfers.nccl(on_gpu(tmp_path))))) == 2


def test_ranks_that_share_sequences_are_held_to_one_rank(tmp_path, monkeypatch):
    def run(sections, size, *, timed=False):
        return [timed_result(1.0)] * sections.policy.num_workers

    monkeypatch.setattr(updates, "run_trainers", run)
    assert only(updates.sequence_parallel(on_gpu(tmp_path))).holds


def made_benchmark(config, **figures):
    """Return the result of a benchmark of ``config`` on one H100."""
    defaults = {
        "share/generation": 0.6, "share/overhead": 0.4, "generation/step_s": 2.0, "training/step_s": 1.0,
        "scoring/step_s": 0.1, "sync/bytes_per_s": 5e9, "sync/step_s": 0.2,
        "overhead/driver_cpu_s": 0.05, "overhead/step_s": 0.1,
        "of_limit/generation": 0.9, "of_limit/training": 0.8,
    }  # fmt: skip
    lengths = [200] * (2 * config.batch.prompts_per_step * config.batch.samples_per_prompt)
    tokens = sum(lengths) / 2 + len(lengths) / 2 * 20
    return BenchResult(
        name="bench", config=config.model_dump(mode="json"),
        machine={"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1},
        workload={
            "prompt_tokens_mean": 20.0, "samples_per_prompt": config.batch.samples_per_prompt,
            "prompts_per_step": config.batch.prompts_per_step,
        },
        figures=defaults | figures, limit_settings={}, actors=[], steps=[{"train/tokens": tokens}] * 2,
        lengths=lengths,
        decode_steps=[DecodeStep(n, 100.0, 0.003 + 1e-5 * n) for n in (1, 16, 256)],
    )  # fmt: skip


@pytest.fixture
def benchmarked(tmp_path, monkeypatch):
    """Run the line `bench` on a benchmark with these figures."""

    def run(**figures):
        def bench(config):
            assert config.bench.lengths.mean == 200 and config.model.dtype == "bfloat16"
            made_benchmark(config, **figures).write(tmp_path / "bench.json")
            return tmp_path

        monkeypatch.setattr(loop, "bench", bench)
        return only(loop.short_bench(on_gpu(tmp_path)))

    return run


def test_a_benchmark_at_half_of_its_limits_does_not_hold(benchmarked):
    assert benchmarked().holds
    assert broken(benchmarked(**{"of_limit/training": 0.4})) == ["training, share of its limit"]


def test_plan_is_calibrated_with_the_record_of_another_machine(tmp_path, benchmarked):
    """That machine lacks the model's file: its shape is known by name."""
    findings = benchmarked()
    record = {"kind": "gpu-check", "schema": 3, "bench": findings.bench, "figures": {}}
    (tmp_path / "gpu-check.json").write_text(json.dumps(record))
    (tmp_path / "qwen2_0.5b.json").unlink()
    result = BenchResult.read(tmp_path / "gpu-check.json")
    assert Config.model_validate(result.config).model.path == SHAPE_OF
    calibration = calibrate(result, parse_cluster("8x8xH100"))
    assert 0.01 < calibration.reached.training < 1 and "H100" in calibration.reached.source


def test_a_card_is_held_to_its_data_sheet(tmp_path, monkeypatch):
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    for rate, copy, wrong in ((7e14, 1.3e12, 0), (3e14, 1.3e12, 1), (7e14, 0.5e12, 1)):
        findings = device.Findings({"device/matrix_flops_per_s": rate, "device/copy_bytes_per_s": copy})
        device._check_card(findings, torch.bfloat16)
        assert len(broken(findings)) == wrong and findings.figures["device/capability"] == 9.0


def test_a_sleeping_engine_frees_its_weights_and_its_cache(tmp_path, monkeypatch):
    free = [20 * 2**30]

    class Engine:
        async def sleep(self, keep_weights):
            free[0] += freed

        async def wake_up(self, tags):
            free[0] -= freed

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 80 * 2**30))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30)
    )
    config = engines.engine_config(on_gpu(tmp_path), eager=True)
    assert isinstance(config, Config) and config.rollout.gpu_memory_utilization == 0.3
    for freed, wrong in ((20 * 2**30, []), (2**30, ["bytes freed asleep"])):
        findings = engines.Findings()
        weights = 2 * model_of(config).parameters
        asyncio.run(engines._sleep(Engine(), weights, findings, "engine-eager", keep_weights=True))
        assert broken(findings) == wrong and findings.figures["engine-eager/freed_bytes"] == freed


def test_attention_is_rehearsed(tmp_path):
    findings = only(attention.attention(on_cpu(tmp_path)))
    assert findings.holds and len(findings.claims) == 4


def test_attention_that_looks_ahead_does_not_hold(tmp_path, monkeypatch):
    from grpo_dist.policy import attention as product

    def all_to_all(q, k, v, *, scale, window, dropout):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)

    monkeypatch.setattr(product, "_causal", all_to_all)
    assert len(broken(only(attention.attention(on_cpu(tmp_path))))) == 4


def test_the_head_is_rehearsed(tmp_path):
    assert only(head.head(on_cpu(tmp_path))).holds


def test_a_head_with_logits_in_bfloat16_does_not_hold(tmp_path, monkeypatch):
    from grpo_dist.policy import logprobs

    exact = logprobs._Head.logits

    def rounded(self, rows):
        out = exact(self, rows)
        return out.bfloat16().float() if rows.dtype == torch.bfloat16 else out

    monkeypatch.setattr(logprobs._Head, "logits", rounded)
    findings = only(head.head(on_cpu(tmp_path)))
    assert "log-probs, largest error in nats" in broken(findings)


def test_speed_and_memory_of_the_head_are_measured_by_the_same_code(tmp_path):
    findings = head.Findings()
    head._speed_and_memory(on_cpu(tmp_path), findings)
    assert findings.figures["head/backward_s"] > 0 and findings.figures["head/planned_bytes"] > 0


@pytest.mark.slow
def test_rates_of_this_machine_are_rehearsed(tmp_path):
    findings = only(device.device(on_cpu(tmp_path)))
    assert findings.holds and (tmp_path / "machine.json").exists()
    assert findings.figures["device/copy_bytes_per_s"] > 0


def rehearse(directory, name):
    """Run the job of line ``name`` as a rehearsal, in its own process."""
    job = next(job for job in JOBS if name in job.lines)
    task = on_cpu(directory, job.argument)
    end = run_job(job, task, limit_s=HANG_S)
    assert end.error == ""
    assert set(end.findings) == set(job.lines)
    assert {line: broken(findings) for line, findings in end.findings.items() if not findings.holds} == {}
    return end.findings


@pytest.mark.slow
def test_a_cut_transfer_and_the_next_one_are_rehearsed(tmp_path):
    assert rehearse(tmp_path, "nccl")["nccl"].figures["nccl/noticed_s"] < 60


RANKS = [("zero0",), ("zero1",), ("zero2",), ("zero3",), ("speed",), ("sequence-parallel",)]
ENGINES = ["engine-eager", "seeds", "mismatch-float32", "replace", "tensor-parallel", "bench"]


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.parametrize("name", slow_after(RANKS, 1))
def test_lines_with_ranks_are_rehearsed(tmp_path, name):
    rehearse(tmp_path, name)


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_lines_with_engines_are_rehearsed(tmp_path, name):
    rehearse(tmp_path, name)


@pytest.mark.machine
@pytest.mark.slow
def test_three_steps_of_the_real_loop_are_rehearsed(tmp_path):
    by_line = rehearse(tmp_path, "steps")
    assert by_line["sync"].figures["sync/bytes"] > 0 and by_line["turns"].figures["turns/all_s"] > 0


def test_every_line_is_rehearsed_by_a_test():
    ran = {"device", "attention", "head", "nccl", "steps"} | {*ENGINES} | {name for (name,) in RANKS}
    jobs = {job.name for job in JOBS for line in job.lines if line in ran}
    assert jobs == {job.name for job in JOBS}
