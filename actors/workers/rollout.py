"""Rollout workers: a vLLM engine in an actor each. `rollout_pool` has the driver's handle of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.lifecycle.probe import Health, Probeable
from actors.transfer.connections import Seat
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment
from actors.workers.engine_thread import EngineThread
from grpo_dist.config import TransferBackend
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.load_balancer import Load
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.stacks import calls_in_hand
from grpo_dist.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class RolloutWorker(Metered, Probeable):
    """One engine. All methods run on the actor's event loop; many `sample` calls are in it at once."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._finished = Load(0, 0)
        self._progress = asyncio.Condition()
        self._engine: Any = None
        self._tokenizer: Any = None
        self._updating = False  # between the begin and the end of an update
        self._received = False  # all weights of that update

    async def start(self) -> None:
        """Bring the engine up and run one request through it, which compiles what compiles lazily."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            self._spec.model_dir, trust_remote_code=self._spec.model.trust_remote_code
        )
        set_environment()
        self._engine = EngineThread(fitting_arguments(self._spec))
        await self._engine.start()
        await self._engine.set_weight_version(0)
        length = min(2, self._spec.max_length - 1)
        await self._generate([0], seed=0, sampling=Sampling(max_new_tokens=length), length=None)

    @metered("sample")
    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[Load, tuple[Rollout, ...]]:
        """``len(seeds)`` completions of ``prompt``, the i-th drawn with ``seeds[i]`` alone, and what this
        engine has finished since it started.
        """
        lengths = sampling.lengths or [None] * len(seeds)
        outputs = await asyncio.gather(
            *(
                self._sample_one(prompt, seed, sampling, length)
                for seed, length in zip(seeds, lengths, strict=True)
            )
        )
        self.meter.count("tokens", sum(len(output.token_ids) for output in outputs))
        rollouts = tuple(self._rollout(prompt.uid, i, output) for i, output in enumerate(outputs))
        return self._finished, rollouts

    async def probe(self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> tuple[Rollout, ...]:
        """As `sample`, for the sync probe: it counts neither as work nor as finished, for nobody is admitted
        for it.
        """
        ids = prompt.token_ids.tolist()
        outputs = await asyncio.gather(*(self._generate(ids, seed, sampling, None) for seed in seeds))
        return tuple(self._rollout(prompt.uid, i, output) for i, output in enumerate(outputs))

    async def finished(self, at_least: int) -> Load:
        """What this engine has finished since it started, once that is ``at_least`` sequences."""
        async with self._progress:
            await self._progress.wait_for(  # bounded: by the samples in hand, which are done or fail
                lambda: self._finished.sequences >= at_least
            )
        return self._finished

    async def _sample_one(
        self, prompt: Prompt, seed: int, sampling: Sampling, length: int | None
    ) -> CompletionOutput:
        try:
            return await self._generate(prompt.token_ids.tolist(), seed, sampling, length)
        finally:
            self._finished = self._finished.plus(outstanding(prompt, 1, sampling))
            async with self._progress:
                self._progress.notify_all()

    async def _generate(
        self, token_ids: list[int], seed: int, sampling: Sampling, length: int | None
    ) -> CompletionOutput:
        """One finished completion. The requests of a group are engine requests of their own, each with its
        seed: vLLM's ``n`` would also make one of each, under seeds of its own choice, and their common prompt
        is prefilled once either way, in blocks that the prefix cache shares within a step of the engine.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

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
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output: CompletionOutput = (await self._engine.generate(token_ids, params)).outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"rollout: the engine ended a request with {output.finish_reason!r}")
        return output

    def _rollout(self, uid: str, sample: int, output: CompletionOutput) -> Rollout:
        ids, logprobs = list(output.token_ids), output.logprobs
        # The engine labels every step's tokens with the version its weights had then, so nobody has to watch
        # tokens arrive to know.
        versions = np.empty(len(ids), dtype=np.int32)
        for span in output.weight_versions:
            versions[span.start : span.end] = int(span.version)
        return Rollout(
            prompt_uid=uid,
            sample=sample,
            completion_ids=np.asarray(ids, dtype=np.int32),
            logprobs=np.asarray(logprobs.logprobs, dtype=np.float32)[logprobs.start_indices],
            finish_reason=output.finish_reason,
            text=self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            policy_versions=versions,
        )

    async def health(self) -> Health:  # type: ignore[override]  # on the event loop, like all the rest
        return Health(self._engine.work())

    async def calls(self) -> str:
        """At what the calls in hand wait."""
        return calls_in_hand()

    async def open_transfer(self, backend: TransferBackend, seats: Sequence[Seat], timeout_s: float) -> None:
        """Every process of the engine takes its seat, and gives up the one it had."""
        await self._end_old_update()
        info = {"backend": backend, "seats": list(seats), "timeout_s": timeout_s}
        await self._engine.init_transfer(info)

    @metered("sync")
    async def begin_update(self) -> bool:
        """Stop generating. ``drain``: once running requests are done. ``keep``: now; they go on under the new
        weights. Returns whether it still lacks weights: asked again because another engine was lost on the
        way, it may have all of them.

        Either way the key-value cache is dropped: a kept request recomputes it, so that no new token is
        conditioned on keys and values of old weights.
        """
        await self._engine.pause(drain=self._spec.sync.mode == "drain")
        if not self._updating:
            await self._engine.start_weight_update()
            self._updating = True
        return not self._received

    @metered("sync")
    async def receive_weights(
        self, specs: Sequence[ParameterSpec], bucket_bytes: int, adapter_scale: float | None
    ) -> None:
        """``adapter_scale``: what comes are low-rank adapters, which count so many times."""
        parameters = [list(asdict(spec).values()) for spec in specs]
        self._updating = False  # what fails on the way is begun anew
        await self._engine.update_weights(
            {"parameters": parameters, "bucket_bytes": bucket_bytes, "adapter_scale": adapter_scale}
        )
        self._updating = self._received = True

    @metered("sync")
    async def finish_update(self, version: int) -> int:
        """Serve again, from now on under ``version``; returns the version the engine itself reports."""
        await self._engine.finish_weight_update()
        self._updating = self._received = False
        reported: int = await self._engine.set_weight_version(version)
        await self._engine.resume()
        return reported

    async def abandon(self) -> None:
        """Drop what is in hand: whoever wanted it has gone back to before it was asked for."""
        await self._end_old_update()
        await self._engine.abandon()

    async def _end_old_update(self) -> None:
        """What came from a policy that is gone, and was never given a version, does not count: the next one
        brings everything anew.
        """
        if self._received:
            await self._engine.finish_weight_update()
            self._updating = self._received = False

    async def sleep(self, keep_weights: bool) -> None:
        """Leave the GPU's memory to others, the cache's and, in host memory or not at all, the weights'."""
        await self._engine.sleep(level=1 if keep_weights else 2)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Take back memory: of "weights", of "kv_cache", or of all that sleeps (None)."""
        await self._engine.wake_up(tags)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()


def outstanding(prompt: Prompt, sequences: int, sampling: Sampling) -> Load:
    """What ``sequences`` samples of ``prompt`` may come to."""
    return Load(sequences, sequences * (len(prompt.token_ids) + sampling.max_new_tokens))
