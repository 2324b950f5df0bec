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
from grpo_dist.admission import Admission
from grpo_dist.config import Model
from grpo_dist.config import Rollout as RolloutSettings
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import collective_backend, device_type, resolve_dtype
from grpo_dist.types import Prompt, Rollout, Sampling
from grpo_dist.usage import Metered, metered
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


class RolloutWorker(Metered):
    """One engine. All methods run on the actor's event loop; many `sample` calls are in it at once."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
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

    @metered("sample")
    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[bool, tuple[Rollout, ...]]:
        """``len(seeds)`` completions of ``prompt``, the i-th drawn with ``seeds[i]`` alone."""
        token_ids = prompt.token_ids.tolist()
        lengths = sampling.lengths or (None,) * len(seeds)
        outputs = await asyncio.gather(
            *(self._generate(token_ids, seed, sampling, n) for seed, n in zip(seeds, lengths, strict=True))
        )
        self.meter.count("tokens", sum(len(ids) for ids, *_ in outputs))
        return True, tuple(self._rollout(prompt.uid, i, *output) for i, output in enumerate(outputs))

    async def _generate(
        self, token_ids: list[int], seed: int, sampling: Sampling, length: int | None = None
    ) -> tuple[list[int], list[float], list[int], str]:
        """Token ids, log-probs, the policy version that produced each, and the finish reason. ``length``: so
        many tokens, whatever they are.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Only weights that change under a request make it necessary to watch its tokens arrive.
        stream = self._spec.sync.mode == "keep"
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=length or sampling.max_new_tokens,
            ignore_eos=length is not None,
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

    @metered("sync")
    async def begin_update(self) -> None:
        """Stop generating. ``drain``: once running requests are done. ``keep``: now; they go on under the new
        weights.

        Either way the key-value cache is dropped: a kept request recomputes it, so that no new token is
        conditioned on keys and values of old weights.
        """
        await self._engine.pause_generation(
            mode="keep" if self._spec.sync.mode == "keep" else "wait", clear_cache=True
        )
        await self._engine.start_weight_update()

    @metered("sync")
    async def receive_weights(
        self, specs: Sequence[ParameterSpec], adapter_scale: float | None = None
    ) -> None:
        """``adapter_scale``: what comes are low-rank adapters, which count so many times."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        parameters = [list(asdict(spec).values()) for spec in specs]
        info = {"parameters": parameters, "adapter_scale": adapter_scale}
        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    @metered("sync")
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
    transfer = "nccl_verified" if collective_backend(spec.sync.backend, device) == "nccl" else "gloo"
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
        "weight_transfer_config": {"backend": transfer},
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

    def __init__(self, spec: EngineSpec, *, options: dict[str, Any], worker: type = RolloutWorker) -> None:
        actor, settings = ray.remote(worker), spec.rollout
        self.tensor_parallel_size = settings.tensor_parallel_size
        self.workers = [
            actor.options(name=f"rollout-{i}", max_concurrency=10_000, **options).remote(spec)
            for i in range(settings.num_workers)
        ]
        self._samplers = [worker.sample.options(num_returns=2) for worker in self.workers]
        self._admission = Admission(settings.num_workers, _IN_HAND * settings.max_num_seqs)

    async def ready(self) -> None:
        await results(worker.start.remote() for worker in self.workers)

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> Any:
        """Reference to the ``tuple[Rollout, ...]`` of ``prompt``, once they are finished; they are not
        fetched here.
        """
        tokens = len(seeds) * (len(prompt.token_ids) + sampling.max_new_tokens)
        index = await self._admission.admit(len(seeds), tokens)
        try:
            finished, rollouts = self._samplers[index].remote(prompt, list(seeds), sampling)
            await finished
            return rollouts
        finally:
            self._admission.release(index, len(seeds), tokens)

    async def shutdown(self) -> None:
        await end(self.workers)
