"""Limit of generation: `vllm.LLM.generate`, told everything at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from grpo_dist.bench.child import Meeting
from grpo_dist.bench.record import Request
from grpo_dist.config import Rollout
from grpo_dist.hardware import device_type

_PREFILL_TOKENS = 8192


def measure(
    meeting: Meeting,
    *,
    model_dir: str,
    settings: Rollout,
    dtype: str,
    max_length: int,
    temperature: float,
    batches: Sequence[Sequence[Request]],
    repeats: int,
) -> list[list[float]]:
    """Seconds for each batch of requests, [batches][repeats]."""
    engine = _make_engine(model_dir, settings, dtype=dtype, max_length=max_length)
    _generate(engine, batches[0], temperature)
    seconds: list[list[float]] = []
    for batch in batches:
        seconds.append([])
        for _ in range(repeats):
            meeting.wait()
            seconds[-1].append(_generate(engine, batch, temperature))
    return seconds


def _generate(engine: Any, requests: Sequence[Request], temperature: float) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    sampling = [
        SamplingParams(
            temperature=temperature,
            max_tokens=r.length,
            ignore_eos=True,
            seed=r.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for r in requests
    ]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    made = [len(output.outputs[0].token_ids) for output in outputs]
    if made != [r.length for r in requests]:
        raise RuntimeError(f"generation: {sum(made)} tokens, {sum(r.length for r in requests)} were asked")
    return seconds


def _make_engine(model_dir: str, settings: Rollout, *, dtype: str, max_length: int) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": model_dir,
        "dtype": dtype,
        "max_model_len": max_length,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if device_type() == "cpu":
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
        arguments["enable_chunked_prefill"] = False  # of a seeded request, which ends a CPU engine
        arguments["max_num_batched_tokens"] = max(_PREFILL_TOKENS, max_length)
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return LLM(**arguments | settings.engine)
