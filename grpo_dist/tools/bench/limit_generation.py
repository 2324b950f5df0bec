"""Limit of generation: one call of `vllm.LLM.generate` with all requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_dist.tools.bench.child import Barrier
from grpo_dist.tools.bench.record import Request

if TYPE_CHECKING:
    from actors.workers.engine_settings import EngineSpec

_STEP_SEQUENCES = (1, 4, 16, 64, 256)  # and as many as the engine decodes at once
_STEP_TOKENS = 48


def measure(
    barrier: Barrier,
    *,
    spec: EngineSpec,
    temperature: float,
    batches: Sequence[Sequence[Request]],
    repeats: int,
) -> dict[str, Any]:
    """Return `seconds` of each batch of requests, [batches][repeats]; and `steps`, [sequences, tokens of
    each, seconds] of single engine steps, from one sequence to as many as it decodes at once.
    """
    engine = _make_engine(spec)
    _generate(engine, batches[0], temperature)
    seconds: list[list[float]] = []
    for batch in batches:
        seconds.append([])
        for _ in range(repeats):
            barrier.wait()  # bounded: it ends with its parent
            seconds[-1].append(_generate(engine, batch, temperature))
    barrier.wait()  # bounded: it ends with its parent
    return {"seconds": seconds, "steps": _steps(engine, spec, batches[0], temperature)}


def _steps(
    engine: Any, spec: EngineSpec, requests: Sequence[Request], temperature: float
) -> list[tuple[int, float, float]]:
    """Return medians of the first and the last third of the steps of batches with requests of one length."""
    timings = []
    prompt = requests[0].prompt_ids
    tokens = min(_STEP_TOKENS, spec.max_length - len(prompt))
    third = max(1, tokens // 3)
    counts = [n for n in _STEP_SEQUENCES if n < spec.max_num_seqs] + [spec.max_num_seqs]
    for count in counts:
        asked = [Request(prompt, seed, tokens) for seed in range(count)]
        times = _step_times(engine, asked, temperature)[-tokens:]
        for part, begin in ((times[:third], 0), (times[-third:], tokens - third)):
            timings.append((count, len(prompt) + begin + third / 2, statistics.median(part)))
    return timings


def _step_times(engine: Any, requests: Sequence[Request], temperature: float) -> list[float]:
    inner, times = engine.llm_engine, []
    for i, request in enumerate(requests):
        inner.add_request(
            f"step-{i}", {"prompt_token_ids": list(request.prompt_ids)}, _asked(request, temperature)
        )
    while inner.has_unfinished_requests():
        begin = time.perf_counter()
        inner.step()
        times.append(time.perf_counter() - begin)
    return times


def _generate(engine: Any, requests: Sequence[Request], temperature: float) -> float:
    prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    sampling = [_asked(r, temperature) for r in requests]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [r.length for r in requests]:
        raise RuntimeError(f"generation: {sum(lengths)} tokens, {sum(r.length for r in requests)} were asked")
    return seconds


def _asked(request: Request, temperature: float) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=request.length,
        ignore_eos=True,
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def _make_engine(spec: EngineSpec) -> Any:
    """Make an engine as a rollout worker does, without weight transfer, in vLLM's class for whole batches."""
    # Only a measured limit needs these.
    from actors.workers.engine_settings import fitting_arguments, set_environment

    set_environment()
    from vllm import LLM

    arguments = fitting_arguments(spec)
    del arguments["weight_transfer_config"]
    return LLM(**arguments)
