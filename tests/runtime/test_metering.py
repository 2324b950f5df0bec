"""Usage reports of workers: busy seconds, spans, counts, memory."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from grpo_dist.runtime.metering import (
    Meter,
    Metered,
    Span,
    Usage,
    device_bytes_in_use,
    metered,
    peak_gpu_memory,
    usage_metrics,
)
from tests.support.patience import HANG_S, wait_until


class Clock:
    """Replaces `time.time`; advances when set."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("grpo_dist.runtime.metering.time.time", lambda: self.now)


def test_overlapping_calls_of_a_stage_are_busy_once(monkeypatch):
    clock, meter = Clock(monkeypatch), Meter()
    with meter("sample"):
        clock.now += 1
        with meter("sample"):
            clock.now += 2
        clock.now += 1
    clock.now += 5
    with meter("sample"), meter("sync"):
        clock.now += 3
    usage = meter.read()
    assert usage.busy_s == {"sample": 7.0, "sync": 3.0}
    assert sorted(usage.spans, key=lambda s: (s.begin, s.stage)) == [
        Span("sample", 100.0, 104.0), Span("sample", 109.0, 112.0), Span("sync", 109.0, 112.0)
    ]  # fmt: skip


def test_a_stage_that_still_runs_is_split_at_the_reading(monkeypatch):
    clock, meter = Clock(monkeypatch), Meter()
    with meter("sample"):
        clock.now += 2
        assert meter.read().busy_s == {"sample": 2.0}
        clock.now += 3
    assert meter.read().spans == (Span("sample", 102.0, 105.0),)
    assert meter.read().busy_s == {}


class Worker(Metered):
    @metered("slow")
    async def slow(self, number: int, gate: asyncio.Barrier) -> int:
        await gate.wait()
        self.meter.count("calls", 1)
        return number

    @metered("blocking")
    def blocking(self, gate: threading.Barrier) -> str:
        gate.wait(HANG_S)
        return "done"


def test_coroutines_and_threads_of_one_worker_are_counted(monkeypatch):
    """Concurrent calls are busy once: ten for one second, then four for two."""
    clock, worker = Clock(monkeypatch), Worker()

    async def call_concurrently():
        gate = asyncio.Barrier(11)
        calls = [asyncio.create_task(worker.slow(number, gate)) for number in range(10)]
        while gate.n_waiting < 10:
            await asyncio.sleep(0)
        clock.now += 1
        await gate.wait()
        return await asyncio.gather(*calls)

    assert asyncio.run(call_concurrently()) == list(range(10))
    gate = threading.Barrier(5)
    threads = [threading.Thread(target=worker.blocking, args=(gate,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: gate.n_waiting == 4, "threads have not begun")
    clock.now += 2
    gate.wait(HANG_S)
    for thread in threads:
        thread.join()
    usage = worker.usage()
    assert usage.busy_s == {"slow": 1.0, "blocking": 2.0}
    assert usage.counts == {"calls": 10.0}
    assert asyncio.iscoroutinefunction(worker.slow)  # Ray runs an actor's coroutines on its event loop


def test_a_failed_call_ends_its_span():
    class Fails(Metered):
        @metered("work")
        def work(self):
            raise ValueError("no")

    worker = Fails()
    with pytest.raises(ValueError, match="no"):
        worker.work()
    assert len(worker.usage().spans) == 1 and worker.usage().spans == ()


class Nvml:
    """Replaces the driver's library: device i has (i + 1) GB in use."""

    def __init__(self):
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(handle + 1) * 10**9)


def test_an_engine_in_other_processes_is_asked_for_where_its_actor_has_started_cuda(monkeypatch):
    """With `dtype: auto` the actor queries CUDA for dtypes, and has no memory of its own on the GPU."""
    import torch

    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    assert peak_gpu_memory() == 1e9 + 3e9
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5)
    assert peak_gpu_memory() == 5


def test_an_engine_reports_the_memory_of_its_devices(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert device_bytes_in_use("2") == 3e9
    assert device_bytes_in_use("0,GPU-b") == 3e9
    assert nvml.open == 0


def test_metrics_are_means_over_the_workers_of_a_role_and_sums_of_counts():
    usage = {
        "rollout-0": Usage({"sample": 3.0}, counts={"tokens": 10.0}, peak_bytes=2**30),
        "rollout-1": Usage({"sample": 1.0, "sync": 1.0}, counts={"tokens": 5.0}, peak_bytes=2**31),
        "reward_model-0": Usage({"score": 1.0}, peak_bytes=2**30, peak_gpu_bytes=2**32),
    }
    assert usage_metrics(usage) == {
        "time/rollout_sample_busy_s": 2.0, "time/rollout_sync_busy_s": 0.5, "throughput/rollout_tokens": 15.0,
        "memory/rollout_gib": 2.0, "time/reward_model_score_busy_s": 1.0, "memory/reward_model_gib": 1.0,
        "memory/reward_model_gpu_gib": 4.0,
    }  # fmt: skip


def drafts(verified, accepted):
    return Usage(counts={"drafts": verified, "drafted_tokens": 4 * verified, "accepted_tokens": accepted})


def test_the_acceptance_length_is_the_right_tokens_of_a_draft_and_the_one_drawn_after_them():
    """For training alone: 5 drafts of both engines had 6 accepted tokens."""
    usage = {"rollout-0": drafts(4.0, 6.0), "rollout-1": drafts(1.0, 0.0), "evaluation-0": drafts(9.0, 0.0)}
    metrics = usage_metrics(usage)
    assert metrics["rollout/acceptance_length"] == 1 + 6 / 5
    assert metrics["throughput/rollout_drafts"] == 5 and metrics["throughput/evaluation_drafts"] == 9
    assert "rollout/acceptance_length" not in usage_metrics({"rollout-0": drafts(0.0, 0.0)})


def test_turns_of_all_engines_become_the_wait_for_a_tool_and_the_share_of_cached_prompts():
    """Three turns of 6 s in total. The two later turns have 400 prompt tokens, 380 of them cached."""
    first = {"turns": 1.0, "tool_wait_s": 4.0, "later_prompt_tokens": 100.0, "later_cached_tokens": 96.0}
    second = {"turns": 2.0, "tool_wait_s": 2.0, "later_prompt_tokens": 300.0, "later_cached_tokens": 284.0}
    metrics = usage_metrics({"rollout-0": Usage(counts=first), "rollout-1": Usage(counts=second)})
    assert metrics == {
        "memory/rollout_gib": 0.0, "throughput/rollout_turns": 3.0, "time/tool_wait_s": 2.0,
        "throughput/episode_cached_share": 0.95,
    }  # fmt: skip
