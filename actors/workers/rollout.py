"""Rollout workers: a vLLM engine in an actor each. `rollout_pool` has the driver's handle of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.lifecycle.probe import Health, Probeable
from actors.transfer.connections import Seat
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment
from actors.workers.engine_thread import EngineThread
from grpo_dist.config import TransferBackend
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.load_balancer import Load
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.stacks import pending_calls
from grpo_dist.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class RolloutWorker(Metered, Probeable):
    """One engine. All methods run on the actor's event loop, many `sample` calls at once."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._finished = Load(0, 0)
        self._progress = asyncio.Condition()
        self._engine: Any = None
        self._tokenizer: Any = None
        self._updating = False  # between `begin_update` and `finish_update`
        self._received = False  # all weights of that update have arrived

    async def start(self) -> None:
        """Start the engine and warm it up."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            self._spec.model_dir, trust_remote_code=self._spec.model.trust_remote_code
        )
        set_environment()
        self._engine = EngineThread(fitting_arguments(self._spec))
        await self._engine.start()
        await self._engine.set_weight_version(0)
        await self._warm_up()

    async def _warm_up(self) -> None:
        """Sample two tokens in each of the run's ways, on a GPU for as many sequences as it decodes at once.

        It triggers lazy compilation, which would look like a hang once the engine is watched.
        """
        count = self._spec.max_num_seqs if device_type() == "cuda" else 1
        length = min(2, self._spec.max_length - 1)
        for way in self._spec.sampling:
            sampling = replace(way, max_new_tokens=length)
            await asyncio.gather(
                *(self._generate([0], seed, sampling, length=length) for seed in range(count))
            )

    @metered("sample")
    async def sample(
        self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling
    ) -> tuple[Load, tuple[Rollout, ...]]:
        """Sample ``len(seeds)`` completions of ``prompt``, the i-th with ``seeds[i]`` alone.

        Returns the load that this engine has finished since it started, and the completions.
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
        """Sample for the sync probe, outside of admission: it counts neither as work nor as finished load."""
        ids = prompt.token_ids.tolist()
        outputs = await asyncio.gather(*(self._generate(ids, seed, sampling, None) for seed in seeds))
        return tuple(self._rollout(prompt.uid, i, output) for i, output in enumerate(outputs))

    async def finished(self, at_least: int) -> Load:
        """Wait for ``at_least`` finished sequences; return the load finished since this engine started."""
        async with self._progress:
            await self._progress.wait_for(  # bounded: pending samples finish or fail
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
        """Return one finished completion.

        Each sample of a group is an engine request with its own seed: vLLM's ``n`` would choose the seeds
        itself. The common prompt is prefilled once either way, because the prefix cache shares its blocks
        within a step of the engine.
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
        # The engine labels the tokens of every step with the version of its weights.
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
        """Return where the pending calls wait."""
        return pending_calls()

    async def open_transfer(self, backend: TransferBackend, seats: Sequence[Seat], timeout_s: float) -> None:
        """Have every process of the engine join a transfer group with its seat, and leave the group
        before.
        """
        await self._end_old_update()
        info = {"backend": backend, "seats": list(seats), "timeout_s": timeout_s}
        await self._engine.init_transfer(info)

    @metered("sync")
    async def begin_update(self) -> bool:
        """Stop generating, and return whether this engine still lacks the weights.

        In mode ``drain`` running requests finish first; in mode ``keep`` they continue under the new weights.
        Either way the key-value cache is dropped: a kept request recomputes it, so that no new token is
        conditioned on keys and values of old weights. An update that is repeated, because another engine was
        lost, may find all weights here.
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
        """Receive and load the weights. ``adapter_scale``: factor of low-rank adapters; None: whole
        weights.
        """
        parameters = [list(asdict(spec).values()) for spec in specs]
        self._updating = False  # a transfer that fails is started again
        await self._engine.update_weights(
            {"parameters": parameters, "bucket_bytes": bucket_bytes, "adapter_scale": adapter_scale}
        )
        self._updating = self._received = True

    @metered("sync")
    async def finish_update(self, version: int) -> int:
        """Serve again under ``version``; return the version that the engine reports."""
        await self._engine.finish_weight_update()
        self._updating = self._received = False
        reported: int = await self._engine.set_weight_version(version)
        await self._engine.resume()
        return reported

    async def abandon(self) -> None:
        """Abort pending requests: the run resumes from before they were made."""
        await self._end_old_update()
        await self._engine.abandon()

    async def _end_old_update(self) -> None:
        """End an update whose weights never got a version, because the policy was lost; the next update sends
        all weights.
        """
        if self._received:
            await self._engine.finish_weight_update()
            self._updating = self._received = False

    async def sleep(self, keep_weights: bool) -> None:
        """Free the GPU's memory; ``keep_weights`` keeps the weights in host memory, else they are dropped."""
        await self._engine.sleep(level=1 if keep_weights else 2)

    async def wake_up(self, tags: list[str] | None) -> None:
        """Allocate memory again: for "weights", for "kv_cache", or for all that sleeps (None)."""
        await self._engine.wake_up(tags)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()


def outstanding(prompt: Prompt, sequences: int, sampling: Sampling) -> Load:
    """Return the largest load of ``sequences`` samples of ``prompt``."""
    return Load(sequences, sequences * (len(prompt.token_ids) + sampling.max_new_tokens))
