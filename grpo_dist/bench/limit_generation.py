"""Limit of generation: `vllm.LLM.generate`, told everything at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_dist.bench.child import Meeting
from grpo_dist.bench.record import Request

if TYPE_CHECKING:
    from actors.engine import EngineSpec


def measure(
    meeting: Meeting,
    *,
    spec: EngineSpec,
    temperature: float,
    batches: Sequence[Sequence[Request]],
    repeats: int,
) -> list[list[float]]:
    """Seconds for each batch of requests, [batches][repeats]."""
    engine = _make_engine(spec)
    _generate(engine, batches[0], temperature)
    seconds: list[list[float]] = []
    for batch in batches:
        seconds.append([])
        for _ in range(repeats):
            meeting.wait()  # bounded: it ends with its parent
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


def _make_engine(spec: EngineSpec) -> Any:
    """As a rollout worker's, but for the weight transfer, in the class that is made for a batch at once."""
    from actors.engine import fitting_arguments, set_environment

    set_environment()
    from vllm import LLM

    arguments = fitting_arguments(spec)
    del arguments["weight_transfer_config"]
    return LLM(**arguments)
