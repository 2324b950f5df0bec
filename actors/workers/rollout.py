"""Rollout workers: a vLLM engine in an actor each, and the pool that spreads prompts over them.

driver        pool: waits for room, picks the engine with the fewest outstanding tokens
  |  sample()   |
  +-----------> | --- sample.remote ---> RolloutWorker: G requests, own seed each -> tuple[Rollout, ...]
  | <--- reference to the group's rollouts, as soon as the group is finished

What an engine that is lost had in hand is sampled by another, or by the one in its place: with the same
seeds, so it comes out the same under the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.calls import LOST, Places, end, makers, results
from actors.lifecycle.supervisor import Health, Team, Watched
from actors.transfer.connections import Seat
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment
from actors.workers.engine_thread import EngineThread
from grpo_dist.config import RestartsConfig, TransferBackend
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.load_balancer import IN_HAND, Load
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.stacks import calls_in_hand
from grpo_dist.types import Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class RolloutWorker(Metered, Watched):
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


class RolloutPool:
    """Driver-side handle. A group goes whole to the engine with the fewest outstanding tokens, and waits
    while all are full.

    Not split over engines: each would prefill the prompt again and cost the driver a call of its own, and
    where samples are many the engines are level at the tail without it. Outstanding is what was sent less
    what an engine says it has finished, sample by sample: the last long sample of a group holds one place,
    not those of its whole group.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        options: dict[str, Any],
        places: Places = None,
        worker: type = RolloutWorker,
        restarts: RestartsConfig | None = None,
        start_s: float = 600.0,
        irreplaceable: str | None = None,
    ) -> None:
        """``options`` of every actor; ``places``: those of each one, on top. ``restarts``, ``start_s``,
        ``irreplaceable``: see `Team`.
        """
        actor, settings = ray.remote(worker), spec.rollout
        self.tensor_parallel_size = settings.tensor_parallel_size

        def make(place: dict[str, Any], name: str) -> Any:
            return actor.options(name=name, max_concurrency=10_000, **options | place).remote(spec)

        self.team = Team(
            "rollout",
            makers(make, places, settings.num_workers),
            restarts=restarts,
            start_s=start_s,
            start=lambda worker: worker.start.remote(),
            health=lambda worker: worker.health.remote(),  # on its event loop, beside all that it does
            room=IN_HAND * spec.max_num_seqs,
            on_wait=self._follow_all,
            irreplaceable=irreplaceable,
        )
        self.team.on_lost = self._forget
        self.workers, self._admission = self.team.workers, self.team.admission
        self._samplers = [self._two_returns(worker) for worker in self.workers]
        self._news_every = max(1, spec.max_num_seqs // 8)  # sequences, of an engine that groups wait for
        self._sent = [Load(0, 0)] * settings.num_workers
        self._finished = [Load(0, 0)] * settings.num_workers
        self._not_followed = set(range(settings.num_workers))
        self._following: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        await self.team.ready()

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> Any:
        """Reference to the ``tuple[Rollout, ...]`` of ``prompt``, once they are finished; they are not
        fetched here.
        """
        load = outstanding(prompt, len(seeds), sampling)
        while True:
            index = await self._admission.admit(load.sequences, load.tokens)
            self._sent[index] = self._sent[index].plus(load)
            if self._admission.waiting:
                self._follow_all()
            worker = self.workers[index]
            finished, rollouts = self._sampler(index, worker).remote(prompt, list(seeds), sampling)
            try:
                self._note(index, worker, await finished)
            except LOST as error:
                self.team.lost(index, worker, error)
            except RayTaskError:  # refused, or the engine cannot go on
                if not await self.team.weed_out([worker]):
                    raise
            else:
                return rollouts

    async def abandon(self) -> None:
        """Nobody waits for what is in hand."""
        await gather(self._abandoned(worker) for worker in self.team.alive())

    async def _abandoned(self, worker: Any) -> None:
        try:
            await worker.abandon.remote()
        except RayError:
            if not await self.team.weed_out([worker]):
                raise

    async def sleep(self, *, keep_weights: bool) -> None:
        await results(worker.sleep.remote(keep_weights) for worker in self.workers)

    async def wake_up(self, *tags: str) -> None:
        await results(worker.wake_up.remote(list(tags) or None) for worker in self.workers)

    async def shutdown(self) -> None:
        for task in self._following:
            task.cancel()
        await self.team.shutdown()
        await end(self.workers)

    def _follow_all(self) -> None:
        """Engines are asked how far they are only while a group waits for room."""
        while self._not_followed:
            index = self._not_followed.pop()
            task = asyncio.create_task(self._follow(index), name=f"news of rollout-{index}")
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    async def _follow(self, index: int) -> None:
        """Room is free as samples are finished, not only when their whole group is."""
        worker = self.workers[index]
        try:
            while (
                self._admission.waiting
                and self.team.is_current(index, worker)
                and self._sent[index] != self._finished[index]
            ):
                more = self._finished[index].sequences + self._news_every
                at_least = min(more, self._sent[index].sequences)
                self._note(index, worker, await worker.finished.remote(at_least))
        except LOST as error:
            self.team.lost(index, worker, error)
        finally:
            self._not_followed.add(index)

    def _sampler(self, index: int, worker: Any) -> Any:
        """The method, made once for each engine: it is called for every group."""
        if self._samplers[index][0] is not worker:
            self._samplers[index] = self._two_returns(worker)
        return self._samplers[index][1]

    @staticmethod
    def _two_returns(worker: Any) -> tuple[Any, Any]:
        return worker, worker.sample.options(num_returns=2)

    def _forget(self, index: int) -> None:
        """The engine in the place of a lost one begins to count anew."""
        self._sent[index] = self._finished[index] = Load(0, 0)

    def _note(self, index: int, worker: Any, finished: Load) -> None:
        if not self.team.is_current(index, worker):
            return
        known = self._finished[index]
        if finished > known:  # replies may overtake each other
            self._finished[index] = finished
            news = finished.minus(known)
            self._admission.release(index, news.sequences, news.tokens)


def outstanding(prompt: Prompt, sequences: int, sampling: Sampling) -> Load:
    """What ``sequences`` samples of ``prompt`` may come to."""
    return Load(sequences, sequences * (len(prompt.token_ids) + sampling.max_new_tokens))
