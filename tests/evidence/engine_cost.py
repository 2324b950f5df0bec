"""Measures the CPU overhead of an engine step, on a model of one narrow layer.

    python -m tests.evidence.engine_cost [--sequences 64 256 1024] [--profile 256]

A rollout worker, without Ray, samples as in a run: every request has its seed and returns log-probs.
`vllm.LLM` and `AsyncLLM`, whose engine is another process, run with and without either, with the same
arguments. The engines alternate; each figure is the minimum of several. The worker and `vllm.LLM` must sample
the same tokens from the same seeds. --profile: functions of the worker's engine thread by CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import multiprocessing
import os
import pstats
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Prompt, Sampling

SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
GROUP, PROMPT, TOKENS, REPEATS = 8, 24, 64, 3  # samples of a prompt; tokens of a prompt and of a sample
WAYS = {
    "vllm.LLM": [(False, False), (True, False), (False, True), (True, True)],  # seeds, log-probs
    "AsyncLLM": [(False, False), (True, True)],
    "worker": [(True, True)],
}


def prompts(sequences: int) -> list[list[int]]:
    tokens = np.random.default_rng(0).integers(8, SHAPE["vocab_size"], (sequences // GROUP, PROMPT))
    return tokens.tolist()


def specification(directory: str) -> Any:
    from actors.workers.engine_settings import EngineSpec

    return EngineSpec(
        RolloutConfig(max_num_seqs=1024, kv_cache_gib=0.25), WeightSyncConfig(), ModelConfig(path=directory),
        directory, max_length=PROMPT + TOKENS, seed=0,
    )  # fmt: skip


class DirectEngine:
    """`vllm.LLM`, or `AsyncLLM`."""

    def __init__(self, directory: str, *, is_async: bool) -> None:
        from actors.workers.engine_settings import fitting_arguments, set_environment

        set_environment()
        from vllm import LLM, AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = fitting_arguments(specification(directory))
        del arguments["weight_transfer_config"]
        self._is_async, self._numbers = is_async, itertools.count()
        self._loop = asyncio.new_event_loop()
        make = lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))  # noqa: E731
        self._engine: Any = self._loop.run_until_complete(_call(make)) if is_async else LLM(**arguments)

    def generate(self, sequences: int, seeds: bool, logprobs: bool) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        requests = [
            ({"prompt_token_ids": ids}, SamplingParams(
                max_tokens=TOKENS, ignore_eos=True, detokenize=False, flat_logprobs=True,
                seed=seed if seeds else None, logprobs=0 if logprobs else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ))
            for ids in prompts(sequences) for seed in range(GROUP)
        ]  # fmt: skip
        if self._is_async:
            outputs = self._loop.run_until_complete(self._all(requests))
        else:
            outputs = self._engine.generate(*zip(*requests, strict=True), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    async def _all(self, requests: Sequence[tuple[Any, Any]]) -> list[Any]:
        async def one(prompt: Any, params: Any) -> Any:
            async for output in self._engine.generate(prompt, params, str(next(self._numbers))):
                last = output
            return last

        return await asyncio.gather(*(one(*each) for each in requests))


async def _call(make: Any) -> Any:
    return make()


class Worker:
    """A rollout worker of this project."""

    def __init__(self, directory: str) -> None:
        from actors.workers.rollout import RolloutWorker

        self._loop = asyncio.new_event_loop()
        self._worker = RolloutWorker(specification(directory))
        self._loop.run_until_complete(self._worker.start())

    def generate(self, sequences: int, seeds: bool, logprobs: bool) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=TOKENS, lengths=(TOKENS,) * GROUP)
        groups = self._loop.run_until_complete(self._all(sequences, sampling))
        return [rollout.completion_ids.tolist() for _, rollouts in groups for rollout in rollouts]

    async def _all(self, sequences: int, sampling: Sampling) -> list[Any]:
        batch = [Prompt(str(i), np.array(ids, np.int32), "", "") for i, ids in enumerate(prompts(sequences))]
        return await asyncio.gather(*(self._worker.sample(p, range(GROUP), sampling) for p in batch))

    def profile(self, sequences: int) -> None:
        """Print the functions of the engine's thread that take most time by themselves."""
        profiler = cProfile.Profile(time.thread_time)
        self._loop.run_until_complete(self._worker._engine.call(profiler.enable))
        self.generate(sequences, True, True)
        self._loop.run_until_complete(self._worker._engine.call(profiler.disable))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(t.user + t.system for t in (child.cpu_times() for child in children))


def serve(kind: str, directory: str, connection: Any) -> None:
    """Answer (sequences, seeds, log-probs) with CPU seconds of a pass and tokens, an int with a profile."""
    is_async = kind == "AsyncLLM"
    engine: Any = Worker(directory) if kind == "worker" else DirectEngine(directory, is_async=is_async)
    while (request := connection.recv()) is not None:
        if isinstance(request, int):
            connection.send(engine.profile(request))
            continue
        begin = cpu_seconds()
        tokens = engine.generate(*request)
        connection.send(((cpu_seconds() - begin) / TOKENS, tokens))
    os._exit(0)


def measure(engines: dict[str, Any], sequences: int) -> dict[tuple[str, bool, bool], float]:
    """Return the minimal CPU seconds of a pass with ``sequences``, by engine, seeds and log-probs."""
    least: dict[tuple[str, bool, bool], float] = {}
    seeded: list[list[list[int]]] = []
    for repeat in range(1 + REPEATS):  # the first does not count: an engine compiles for new sizes
        for kind, ways in WAYS.items():
            for way in ways:
                engines[kind].send((sequences, *way))
                seconds, tokens = engines[kind].recv()
                if repeat:
                    least[kind, *way] = min(least.get((kind, *way), seconds), seconds)
                seeded += [tokens] if all(way) else []
    assert all(tokens == seeded[0] for tokens in seeded), "the same seeds gave different tokens"
    return least


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.engine_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--profile", type=int, help="sequences; nothing else is measured")
    options = parser.parse_args()
    os.environ |= thread_environment(1)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_dist.demo.tokenizer import character_tokenizer

    spawn, engines = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as directory:
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(directory)
        character_tokenizer(ascii_only=True).save_pretrained(directory)
        for kind in ["worker"] if options.profile else WAYS:
            engines[kind], other = spawn.Pipe()
            spawn.Process(target=serve, args=(kind, directory, other)).start()
        if options.profile:
            for request in ((options.profile, True, True), options.profile):
                engines["worker"].send(request)
                engines["worker"].recv()
        for sequences in () if options.profile else options.sequences:
            figures = measure(engines, sequences)
            base = figures["vllm.LLM", True, True]
            for (kind, seeds, logprobs), seconds in figures.items():
                named = " + ".join(["seeds"] * seeds + ["log-probs"] * logprobs) or "-"
                cost = f"{1e3 * seconds:>8.2f} ms {seconds / base:>6.2f}"
                print(f"{sequences:>6} {kind:<10} {named:<20} {cost}", flush=True)
        for connection in engines.values():
            connection.send(None)


if __name__ == "__main__":
    main()
