"""Rollout workers: a vLLM engine in an actor each, and the pool that spreads prompts over them.

driver        pool: waits for room, picks the engine with the fewest outstanding tokens
  |  sample()   |
  +-----------> | --- sample.remote ---> RolloutWorker: G requests, own seed each -> tuple[Rollout, ...]
  | <--- reference to the group's rollouts, as soon as the group is finished
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray

from actors.calls import end, results
from actors.vllm_plugin import WEIGHT_TRANSFER
from grpo_dist.config import Model
from grpo_dist.config import Rollout as RolloutSettings
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import device_type, resolve_dtype
from grpo_dist.types import Prompt, Rollout, Sampling
from grpo_dist.weight_buckets import ParameterSpec

# Sequences an engine may have in hand, as a multiple of what it decodes at once: enough to keep it full, few
# enough that the rest waits in the pool, where it can still go to whichever engine is free first.
_IN_HAND = 2
_CPU_PREFILL_TOKENS = 8192  # prefilled at once by an engine without a GPU


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made from. ``max_length``: of prompt and completion together, tokens."""

    rollout: RolloutSettings
    sync: SyncSettings
    model: Model
    model_dir: str
    max_length: int
    seed: int


class RolloutWorker:
    """One engine. All methods run on the actor's event loop; many `sample` calls are in it at once."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._version = 0
        self._requests = 0
        self._engine: Any = None
        self._tokenizer: Any = None

    async def start(self) -> None:
        """Bring the engine up and run one request through it, which compiles what compiles lazily."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            self._spec.model_dir, trust_remote_code=self._spec.model.trust_remote_code
        )
        self._engine = _make_engine(self._spec)
        await self._generate([0], seed=0, sampling=Sampling(max_new_tokens=min(2, self._spec.max_length - 1)))

    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[bool, tuple[Rollout, ...]]:
        """``len(seeds)`` completions of ``prompt``, the i-th drawn with ``seeds[i]`` alone."""
        token_ids = prompt.token_ids.tolist()
        outputs = await asyncio.gather(*(self._generate(token_ids, seed, sampling) for seed in seeds))
        return True, tuple(self._rollout(prompt.uid, i, *output) for i, output in enumerate(outputs))

    async def _generate(
        self, token_ids: list[int], seed: int, sampling: Sampling
    ) -> tuple[list[int], list[float], list[int], str]:
        """Token ids, log-probs, the policy version that produced each, and the finish reason."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Only weights that change under a request make it necessary to watch its tokens arrive.
        stream = self._spec.sync.mode == "keep"
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        self._requests += 1
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        reason = None
        async for output in self._engine.generate(
            {"prompt_token_ids": token_ids}, params, request_id=f"r{self._requests}"
        ):
            piece = output.outputs[0]
            new = list(piece.token_ids)
            ids += new
            logprobs += [piece.logprobs.logprobs[start] for start in piece.logprobs.start_indices]
            versions += [self._version] * len(new)
            reason = piece.finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"rollout: the engine ended a request with finish reason {reason!r}")
        return ids, logprobs, versions, reason

    def _rollout(
        self, uid: str, sample: int, ids: list[int], logprobs: list[float], versions: list[int], reason: str
    ) -> Rollout:
        return Rollout(
            prompt_uid=uid,
            sample=sample,
            completion_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            finish_reason=reason,
            text=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            policy_versions=np.asarray(versions, dtype=np.int32),
        )

    async def open_transfer(self, **init_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def begin_update(self) -> None:
        """Stop generating. ``drain``: once running requests are done. ``keep``: now; they go on under the new
        weights.

        Either way the key-value cache is dropped: a kept request recomputes it, so that no new token is
        conditioned on keys and values of old weights.
        """
        # What `pause_generation` does less a sleep of 20 ms, which is as long as the transfer of a small
        # model: outputs on their way are in front of the answer.
        await self._engine.engine_core.pause_scheduler_async(
            mode="keep" if self._spec.sync.mode == "keep" else "wait", clear_cache=True
        )
        await self._engine.start_weight_update()

    async def receive_weights(self, specs: Sequence[ParameterSpec], bucket_bytes: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        parameters = [list(asdict(spec).values()) for spec in specs]
        info = {"parameters": parameters, "bucket_bytes": bucket_bytes}
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish_update(self, version: int) -> int:
        """Serve again, from now on under ``version``; returns the version the engine itself reports."""
        await self._engine.finish_weight_update(weight_version=str(version))
        reported = int(await self._engine.get_weight_version())
        self._version = version
        await self._engine.resume_generation()
        return reported

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def _make_engine(spec: EngineSpec) -> Any:
    # Read by vLLM when it is imported. Binding threads to cores is left to the scheduler: engine and trainer
    # take turns on the same cores, and OMP_NUM_THREADS already says how many threads this engine may use.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    device, settings = device_type(), spec.rollout
    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        "dtype": str(resolve_dtype(spec.model.dtype, device)).removeprefix("torch."),
        "trust_remote_code": spec.model.trust_remote_code,
        "max_model_len": spec.max_length,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "seed": spec.seed,
        "logprobs_mode": "processed_logprobs",  # those of the distribution sampled from: temperature applied
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
        "disable_log_stats": True,
    }
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
        # A prompt prefilled in pieces makes vLLM rewind its request's generator, which CPU generators cannot
        # do: the engine dies with "CPU Generator does not use offset". So prompts are prefilled whole.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_CPU_PREFILL_TOKENS, spec.max_length)
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments | settings.engine))


class RolloutPool:
    """Driver-side handle. A group goes to the engine with the fewest outstanding tokens, and waits while all
    are full.
    """

    def __init__(self, spec: EngineSpec, *, options: dict[str, Any]) -> None:
        actor, settings = ray.remote(RolloutWorker), spec.rollout
        self.tensor_parallel_size = settings.tensor_parallel_size
        self.workers = [
            actor.options(name=f"rollout-{i}", max_concurrency=10_000, **options).remote(spec)
            for i in range(settings.num_workers)
        ]
        self._room = _IN_HAND * settings.max_num_seqs
        self._sequences = [0] * settings.num_workers
        self._tokens = [0] * settings.num_workers
        self._freed = asyncio.Condition()

    async def ready(self) -> None:
        await results(worker.start.remote() for worker in self.workers)

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> Any:
        """Reference to the ``tuple[Rollout, ...]`` of ``prompt``, once they are finished; they are not
        fetched here.
        """
        tokens = len(seeds) * (len(prompt.token_ids) + sampling.max_new_tokens)
        index = await self._admit(len(seeds), tokens)
        try:
            finished, rollouts = (
                self.workers[index].sample.options(num_returns=2).remote(prompt, list(seeds), sampling)
            )
            await finished
            return rollouts
        finally:
            await self._release(index, len(seeds), tokens)

    async def _admit(self, sequences: int, tokens: int) -> int:
        def free() -> list[int]:
            # An idle engine takes any group, even one larger than its room.
            return [i for i, n in enumerate(self._sequences) if n == 0 or n + sequences <= self._room]

        async with self._freed:
            await self._freed.wait_for(free)
            index = min(free(), key=self._tokens.__getitem__)
            self._sequences[index] += sequences
            self._tokens[index] += tokens
            return index

    async def _release(self, index: int, sequences: int, tokens: int) -> None:
        async with self._freed:
            self._sequences[index] -= sequences
            self._tokens[index] -= tokens
            self._freed.notify(sequences)

    async def shutdown(self) -> None:
        await end(self.workers)
