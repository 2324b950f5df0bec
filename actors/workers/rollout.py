"""Rollout workers: actors with a vLLM engine each, which sample and receive weights, and the driver's handle,
which spreads prompts over them.

driver        pool: waits for capacity, picks the engine with the fewest outstanding tokens
  |  sample()   |
  +-----------> | --- with others ---> RolloutWorker: G requests, one seed each -> tuple[Rollout, ...]
  | <--- reference to the group's samples, as soon as it is finished (`exchange`)

Groups of a lost engine are resampled by another engine or by its replacement. The seeds are the same, so the
samples are the same under the same weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.calls import LOST, Health, Probeable, end, reason, results
from actors.lifecycle.team import ActorSpec, ElasticTeam, Team
from actors.placement.own_gpus import check_gpus
from actors.transfer.connections import Seat
from actors.transfer.stream import HeldTransfer, held_token
from actors.workers import drafter
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment, shares_tails
from actors.workers.engine_thread import EngineThread
from actors.workers.environment import EnvironmentAddresses, EnvironmentPool
from actors.workers.episodes import EpisodeSampler, episode_sampler
from actors.workers.exchange import Line, SamplingActor, StoredGroups, StoredSamples
from grpo_dist.chat.ends import SampleEnds, ends_of
from grpo_dist.chat.template import read_tokenizer
from grpo_dist.config import TransferBackend
from grpo_dist.environments.episode import Generation
from grpo_dist.environments.user_rollout import UserRollout
from grpo_dist.errors import SamplesFailed, SamplesLost
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.load_balancer import QUEUE_DEPTH, Load
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.stacks import pending_calls
from grpo_dist.types import FurtherRow, HeldRoutes, KeptTokens, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput


class WeightReceiver(Metered):
    """The part of a `RolloutWorker` that receives weights. Its methods run on the actor's event loop.

    A call continues even if the driver no longer waits for it, and the driver may restart the update
    meanwhile: a lock serialises calls that change the state of an update.
    """

    _spec: EngineSpec
    _engine: Any

    def __init__(self) -> None:
        super().__init__()
        self._received = False  # whether all weights of the update that has begun have arrived
        self._update_key: tuple[int, int] | None = None  # version and update count; None: unknown
        self._one_at_a_time = asyncio.Lock()

    async def open_transfer(
        self, backend: TransferBackend, seats: Sequence[Seat], timeout_s: float, *, file: str | None = None
    ) -> None:
        """Make every process of the engine join a transfer group with its seat, and leave the previous group.
        ``file``: read the next weights from this snapshot instead.
        """
        async with self._one_at_a_time:
            await self._end_old_update()
        info = {"backend": backend, "seats": list(seats), "timeout_s": timeout_s, "file": file}
        await self._engine.init_transfer(info)

    @metered("sync")
    async def begin_update(self, of: tuple[int, int] | None = None) -> bool:
        """Stop generating, and return whether this engine still lacks the weights.

        Args:
            of: version of the weights, and the policy's updates before them. Ends an abandoned update of
                other weights. None: unknown, the engine lacks them.

        In mode ``drain`` running requests finish first; in mode ``keep`` they continue under the new weights.
        Both drop the key-value cache: a kept request recomputes it, so that no new token is conditioned on
        keys and values of old weights. If an update is repeated because another engine was lost, this engine
        may already have all weights.
        """
        async with self._one_at_a_time:
            await self._engine.pause(drain=self._spec.sync.mode == "drain")
            if self._spec.rollout.speculation:
                for name, tokens in (await self._engine.in_workers(drafter.take_counts))[0]._asdict().items():
                    self.meter.count(name, tokens)
            if of is None or of != self._update_key:
                await self._end_old_update()
            self._update_key = of
            await self._engine.start_weight_update()
            return not self._received

    async def held_weights(self) -> str | None:
        """Return the token of the weights that all engine processes hold a copy of, if any."""
        tokens = set(await self._engine.in_workers(held_token))
        return tokens.pop() if len(tokens) == 1 else None

    @metered("sync")
    async def receive_weights(
        self,
        specs: Sequence[ParameterSpec],
        bucket_bytes: int,
        adapter_scale: float | None,
        held: HeldTransfer | None = None,
    ) -> bool:
        """Receive and load the weights.

        Args:
            adapter_scale: factor of low-rank adapters; None: whole weights.
            held: keep a copy of the weights, to which the next changes apply; None: no copy.

        Returns:
            False: after the changes, the copy differs from the sender's; whole weights must follow.
        """
        parameters = [list(asdict(spec).values()) for spec in specs]
        info = {"parameters": parameters, "bucket_bytes": bucket_bytes, "adapter_scale": adapter_scale}
        async with self._one_at_a_time:
            await self._engine.update_weights(info | {"held": held})
            self._received = held is None or await self.held_weights() == held.token
            return self._received

    @metered("sync")
    async def finish_update(self, version: int) -> int:
        """Serve again under ``version``; return the engine's reported version."""
        async with self._one_at_a_time:
            await self._engine.finish_weight_update()
            self._received = False
            reported: int = await self._engine.set_weight_version(version)
            await self._engine.resume()
            return reported

    async def _end_old_update(self) -> None:
        """End an update whose weights never got a version, because the policy was lost or the sync abandoned.
        The next update sends all weights. The caller holds the lock.
        """
        if self._received:
            await self._engine.finish_weight_update()
            self._received = False


_FETCH_S = 120.0  # deadline for the routes of one sample: megabytes, maybe from another node


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """Routes that an engine has put into the object store; they are lost with that engine.

    ``digests``: `digest` by number of tokens: of the row's prompt, and of the prompt that all rows of the
    sample share. They let ranks plan without fetching routes.
    """

    reference: Any  # ray.ObjectRef
    digests: Mapping[int, bytes]

    def fetch(self) -> np.ndarray:
        """Fetch the routes. Raises SamplesLost if they are lost."""
        try:
            routes: np.ndarray = ray.get(self.reference, timeout=_FETCH_S)  # bounded: by its timeout
        except RayError as error:
            why = " ".join(str(error).split())[:200]
            raise SamplesLost(f"policy.router_replay: the routes of a sample are lost: {why}") from error
        return routes

    def digest(self, tokens: int) -> bytes:
        if tokens == 0:
            return b""
        if (digest := self.digests.get(tokens)) is not None:
            return digest
        return HeldRoutes(self.fetch()).digest(tokens)


def stored(rollout: Rollout) -> Rollout:
    """Return ``rollout`` with the routes of all its rows in the object store."""
    if rollout.routes is None:
        return rollout
    shared = _prompt_tokens(rollout)
    further = tuple(replace(row, routes=_put(row, shared)) for row in rollout.further_rows)
    return replace(rollout, routes=_put(rollout, shared), further_rows=further)


def _put(row: Rollout | FurtherRow, shared: int) -> StoredRoutes:
    """Store the routes of ``row``. ``shared``: tokens of the prompt of the sample's first row."""
    assert row.routes is not None
    routes = HeldRoutes(row.routes.fetch())
    digests = {tokens: routes.digest(tokens) for tokens in (_prompt_tokens(row), shared)}
    return StoredRoutes(ray.put(routes.experts), digests)


def _prompt_tokens(row: Rollout | FurtherRow) -> int:
    """Return the prompt's token count: a completion's last token has no route."""
    assert row.routes is not None
    return len(row.routes.fetch()) + 1 - len(row.completion_ids)


logger = logging.getLogger("grpo_dist")


class RolloutWorker(SamplingActor, WeightReceiver, Probeable):
    """One engine. All methods run on the actor's event loop, many groups at once."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._spec = spec
        self._engine: Any = None
        self._tokenizer: Any = None
        self._ends = SampleEnds(frozenset(), None)
        self._episodes: EpisodeSampler | None = None  # None: no prompt has an environment
        self._user_rollout = UserRollout.from_config(spec.rollout, spec.code_paths)
        self._vocabulary = 0  # the model's vocabulary size, if it returns sampling masks
        self._weights_on_host = False  # whether the sleeping engine keeps a copy

    async def start(self, environments: EnvironmentAddresses | None = None) -> None:
        """Start the engine and warm it up. ``environments``: None if no prompt has one.

        Raises ValueError if this node lacks the model directory, and UserError like `check_gpus`.
        """
        check_gpus()
        check_on_node(self._spec.model_dir)
        set_environment()  # before transformers and vLLM are imported, which read it
        if device_type() == "cpu":
            os.nice(self._spec.niceness)  # for this thread and threads that it starts: the engine's
        self._tokenizer = read_tokenizer(
            self._spec.model_dir, trust_remote_code=self._spec.model.trust_remote_code
        )
        self._ends = ends_of(self._spec.data, self._tokenizer)
        if environments is not None:
            self._episodes = episode_sampler(self._spec, self._tokenizer, self._generate, self.meter)
            self._episodes.workers.use(environments)
        self._engine = EngineThread(
            fitting_arguments(self._spec),
            shares_tails=shares_tails(self._spec),
            records_masks=self._spec.returns_masks and device_type() == "cpu",
        )
        await self._engine.start()
        if self._spec.returns_masks:
            self._vocabulary = (await self._engine.in_workers(_vocabulary_size))[0]
        if self._spec.rollout.speculation:
            await self._engine.in_workers(drafter.require_exact_sampler)
        await self._engine.set_weight_version(0)
        await self._warm_up()
        if self._spec.rollout.speculation:
            await self._engine.in_workers(drafter.take_counts)  # discards the counts of both warm-ups

    async def _warm_up(self) -> None:
        """Sample two tokens with each of the run's sampling settings, on a GPU for a full decoding batch.

        This triggers lazy compilation, which would look like a hang once the engine is watched.
        """
        count = self._spec.max_num_seqs if device_type() == "cuda" else 1
        length = min(2, self._spec.max_length - 1)
        for settings in self._spec.sampling:
            sampling = replace(settings, max_new_tokens=length)
            await asyncio.gather(
                *(self._generate([0], seed, sampling, length, exact=True) for seed in range(count))
            )

    async def use_environments(self, addresses: EnvironmentAddresses) -> None:
        """Use the changed addresses of environment workers."""
        if self._episodes is not None:  # else it is starting, with addresses that are as new
            self._episodes.workers.use(addresses)

    @metered("sample")
    async def sample(self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> tuple[Rollout, ...]:
        """Sample ``len(seeds)`` completions or episodes of ``prompt``, the i-th with only ``seeds[i]``.

        Omits samples whose request failed in the engine or an environment worker. Raises SamplesFailed if
        fewer than ``sampling.least`` remain.
        """
        lengths = sampling.lengths or [None] * len(seeds)
        outcomes = await asyncio.gather(
            *(
                self._sample_one(prompt, i, seed, sampling, length)
                for i, (seed, length) in enumerate(zip(seeds, lengths, strict=True))
            )
        )
        rollouts = tuple(outcome for outcome in outcomes if isinstance(outcome, Rollout))
        if failures := [outcome for outcome in outcomes if not isinstance(outcome, Rollout)]:
            why = f"{len(rollouts)} of {len(seeds)} samples of {prompt.uid}: {failures[0]}"
            if len(rollouts) < (len(seeds) if sampling.least is None else sampling.least):
                raise SamplesFailed(why)
            logger.warning("%s; the group continues without the others", why)
        return rollouts

    async def probe(self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> tuple[Rollout, ...]:
        """Sample for the sync probe, without admission: counts neither as work nor as finished load. Does not
        use environments.
        """
        ids = prompt.token_ids.tolist()
        most = min(sampling.max_new_tokens, self._spec.max_length - len(ids))
        sampling = sampling if self._spec.returns_masks else sampling.untruncated
        outputs = await asyncio.gather(*(self._generate(ids, seed, sampling, most) for seed in seeds))
        return tuple(stored(drawn(self._rollout(prompt.uid, i, o), sampling)) for i, o in enumerate(outputs))

    async def _sample_one(
        self, prompt: Prompt, sample: int, seed: int, sampling: Sampling, length: int | None
    ) -> Rollout | SamplesFailed:
        """Return the sample, or why it failed. Raises if the engine as a whole fails.

        A long prompt may leave fewer tokens (`model.max_length`) than ``sampling``, which still labels it.
        """
        room = self._spec.max_length - len(prompt.token_ids)
        bounded = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        try:
            if prompt.task is not None:
                assert self._episodes is not None, "the configuration has no environment"
                rollout = await self._episodes.sample(prompt, sample, seed, bounded, length)
            elif self._user_rollout is not None and length is None:  # only benchmarks set exact lengths
                rollout = await self._user_rollout.sample(
                    prompt, sample, seed, bounded, self._generate, self._tokenizer
                )
                self.meter.count("tokens", rollout.num_sampled)
            else:
                most, exact = length or bounded.max_new_tokens, length is not None
                ids, stop = prompt.token_ids.tolist(), () if exact else sampling.stop
                output = await self._generate(ids, seed, sampling, most, exact=exact, stop=stop)
                self.meter.count("tokens", len(output.token_ids))
                rollout = self._rollout(prompt.uid, sample, output)
            if prompt.prefill and prompt.task is None:  # an episode's turns include it
                rollout = replace(rollout, text=prompt.prefill + rollout.text)
            return self._label(rollout, sampling)
        except SamplesFailed as error:
            return error
        except RayTaskError as error:
            if prompt.task is None:  # raised by a user-supplied rollout function
                raise
            # Raised by one action in an environment worker. A lost worker would restart its episodes.
            return SamplesFailed(f"environment: {type(error.cause).__name__}: {reason(error)}")
        finally:
            self._count_finished(outstanding(prompt, 1, sampling))

    def _label(self, rollout: Rollout, sampling: Sampling) -> Rollout:
        """Return ``rollout`` for the driver: with its settings, and with routes only if it may be trained on,
        as routes would fill the object store.
        """
        labelled = drawn(rollout, sampling)
        needs_masks = self._needs_masks(sampling)
        has_masks = all(row.kept for row in rollout.rows if len(row.completion_ids))
        assert has_masks or not needs_masks, "a row lacks its sampling masks"
        return stored(labelled) if self._spec.trains else labelled.without_routes()

    def _needs_masks(self, sampling: Sampling) -> bool:
        return self._spec.returns_masks and sampling.is_truncated

    async def _generate(
        self,
        token_ids: list[int],
        seed: int,
        sampling: Sampling,
        max_tokens: int,
        *,
        exact: bool = False,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Return one finished completion: exactly ``max_tokens`` if ``exact``, else at most. It ends with the
        token that completes one of ``stop``.

        Each sample of a group is an engine request with a separate seed: vLLM's ``n`` would choose the seeds.
        The common prompt is still prefilled once: the prefix cache shares its blocks within an engine step.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        temperature, top_k = sampling.temperature, sampling.top_k
        if self._spec.returns_masks and device_type() == "cuda":
            # To return masks, vLLM needs a top_k and a temperature above 0. Greedy decoding equals top_k 1.
            temperature, top_k = (temperature, top_k or self._vocabulary) if temperature else (1.0, 1)
        params = SamplingParams(
            temperature=temperature,
            top_p=sampling.top_p,
            top_k=top_k,
            min_p=sampling.min_p,
            max_tokens=max_tokens,
            ignore_eos=True,  # ignores vLLM's end tokens; `SampleEnds` may have one more
            stop_token_ids=[] if exact else sorted(self._ends.ids),
            seed=seed,
            logprobs=0,  # only the sampled token's log-prob
            flat_logprobs=True,
            stop=list(stop),
            detokenize=bool(stop),  # detokenizing slows the engine's thread; only stop strings need it
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # so that a stop string may be a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._engine.generate(token_ids, params)
        generation = _generation(output, self._vocabulary if self._needs_masks(sampling) else None)
        assert not self._spec.router_replay or generation.routes is not None, "the engine records no routes"
        return generation

    def _rollout(self, uid: str, sample: int, output: Generation) -> Rollout:
        ids, text_ids = output.token_ids, self._ends.strip(output.token_ids)
        return Rollout(
            prompt_uid=uid,
            sample=sample,
            completion_ids=np.asarray(ids, dtype=np.int32),
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            text=self._tokenizer.decode(
                text_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            policy_versions=output.versions,
            routes=output.routes,
            kept=output.kept,
        )

    async def health(self) -> Health:  # type: ignore[override]  # on the event loop, like all the rest
        return Health(self._engine.work() if self._engine else None)

    async def calls(self) -> str:
        """Return where the pending calls wait."""
        return pending_calls()

    async def abandon(self) -> None:
        """Abort pending requests: the run resumes from a state before them."""
        if self._episodes is not None:
            self._episodes.abandon()  # first: episodes that wait for a tool would make more requests
        async with self._one_at_a_time:
            await self._end_old_update()
        await self._engine.abandon()

    async def sleep(self, keep_weights: bool) -> None:
        """Free the GPU memory. ``keep_weights``: keep the weights in host memory, else drop them."""
        await self._engine.sleep(level=1 if keep_weights else 2)
        self._weights_on_host = keep_weights

    async def wake_up(self, tags: list[str] | None) -> None:
        """Allocate memory again: for "weights", for "kv_cache", or for all that sleeps (None)."""
        await self._engine.wake_up(tags)
        if self._weights_on_host and device_type() == "cuda" and (tags is None or "weights" in tags):
            self._weights_on_host = False
            # torch would keep their pinned memory, rounded up to powers of two, for the whole run.
            await self._engine.in_workers(lambda worker: torch.accelerator.empty_host_cache())

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.shutdown()


def _generation(request: RequestOutput, vocabulary: int | None = None) -> Generation:
    """Return the finished completion of ``request``, with the weight version of each token. ``vocabulary``:
    the model's vocabulary size; None: sampling masks are not needed.
    """
    output = request.outputs[0]
    if output.finish_reason not in ("stop", "length"):
        raise SamplesFailed(f"rollout: the engine ended a request with {output.finish_reason!r}")
    logprobs, count = output.logprobs, len(output.token_ids)
    versions = np.empty(count, dtype=np.int32)
    for span in output.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return Generation(
        list(output.token_ids),
        np.asarray(logprobs.logprobs, dtype=np.float32)[logprobs.start_indices],
        versions,
        output.finish_reason,
        request.num_cached_tokens or 0,
        None if output.routed_experts is None else HeldRoutes(output.routed_experts),
        None if vocabulary is None else _kept_tokens(output, vocabulary),
    )


def _kept_tokens(output: CompletionOutput, vocabulary: int) -> KeptTokens:
    """Return the sampling masks of a completion. Raises SamplesFailed if a mask lacks its token."""
    mask, ids = output.sampling_mask, np.asarray(output.token_ids)
    assert mask is not None and len(mask.token_ids) == len(ids), "the engine returns no sampling masks"
    kept = KeptTokens.from_lists(mask.token_ids, vocabulary)
    if not (contained := kept.contain(ids)).all():
        raise SamplesFailed(f"rollout: the sampling mask of token {contained.argmin()} does not contain it")
    return kept


def _vocabulary_size(worker: Any) -> int:
    return int(worker.model_config.get_vocab_size())


def drawn(rollout: Rollout, sampling: Sampling) -> Rollout:
    """Return ``rollout`` labelled with its sampling settings."""
    return replace(rollout, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)


def outstanding(prompt: Prompt, sequences: int, sampling: Sampling) -> Load:
    """Return the maximum load of ``sequences`` samples of ``prompt``."""
    return Load(sequences, sequences * (len(prompt.token_ids) + sampling.max_new_tokens))


class RolloutPool:
    """Sends each group to the engine with the fewest outstanding tokens, or waits while all are full.

    A group is not split over engines: each would prefill the prompt again, and with many samples the engines
    finish together anyway. Outstanding load is the sent load minus the samples that the engine reports as
    finished: the last long sample of a group occupies one slot, not the slots of its whole group.
    """

    def __init__(
        self,
        spec: EngineSpec,
        actors: ActorSpec,
        *,
        environments: EnvironmentPool | None = None,
        worker: type = RolloutWorker,
        role: str = "rollout",
    ) -> None:
        """``environments``: None if no prompt has one."""
        actors = replace(actors, options={"max_concurrency": 10_000} | actors.options)
        self.role, self.tensor_parallel_size = role, spec.rollout.tensor_parallel_size
        self.team = self._make_team(role, spec, actors, ray.remote(worker))
        self.team.on_lost = self._forget
        self._environments = environments
        if environments is not None:
            environments.engines.append(self.team)
        self.workers, self._load_balancer = self.team.workers, self.team.load_balancer
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # see `Colocation`
        count, self._reserved = len(self.workers), spec.rollout.num_workers
        self._lines: dict[Any, Line] = {}  # by engine
        # An engine without a finished group reports after this many finished sequences.
        self._report_every = max(1, spec.max_num_seqs // 8)
        self._finished = [Load(0, 0)] * count
        # For speculation, which drafts from earlier samples: the engine that last sampled each prompt, by
        # uid.
        self._samples_of: dict[str, int] | None = {} if spec.rollout.speculation else None

    def _make_team(self, role: str, spec: EngineSpec, actors: ActorSpec, worker: Any) -> Team:
        makers = actors.makers(worker, spec.rollout.num_workers, spec)
        options: dict[str, Any] = {
            "start": lambda worker: worker.start.remote(*self._start_arguments()),
            "health": lambda worker: worker.health.remote(),  # on its event loop, in parallel to its work
            "capacity": QUEUE_DEPTH * spec.max_num_seqs,
        }
        if actors.guests is None:
            return Team(role, makers, actors, **options)
        joining = replace(spec, colocated=False)
        return ElasticTeam(role, makers, actors, guest=actors.guest_maker(worker, joining), **options)

    async def ready(self) -> None:
        await self.team.ready()

    def _start_arguments(self) -> tuple[EnvironmentAddresses, ...]:
        return (self._environments.addresses(),) if self._environments is not None else ()

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> StoredSamples:
        """Sample ``prompt``; return a reference to its finished samples, without fetching them."""
        async with self.turn():
            load = outstanding(prompt, len(seeds), sampling)
            while True:
                preferred = self._samples_of.get(prompt.uid) if self._samples_of else None
                index = await self._load_balancer.admit(load.sequences, load.tokens, prefer=preferred)
                worker = self.workers[index]
                if worker is None:  # the chosen guest was removed meanwhile, with its load
                    continue
                if self._samples_of is not None:
                    self._samples_of[prompt.uid] = index
                try:
                    samples: StoredSamples = await self._line(index, worker).ask((prompt, seeds, sampling))
                    return samples
                except LOST as error:
                    self.team.lost(index, worker, error)
                except RayTaskError:  # a refused request, too few samples, or a failed engine
                    if self._environments is not None:  # or no environment worker is left
                        self._environments.team.check()
                    if not await self.team.find_dead([worker]):
                        raise

    async def abandon(self) -> None:
        """Abort all pending requests on all engines."""
        await gather(self._abandon_one(worker) for worker in self.team.alive())

    async def _abandon_one(self, worker: Any) -> None:
        try:
            await worker.abandon.remote()
        except RayError:
            if not await self.team.find_dead([worker]):
                raise

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the GPUs of the reserved engines; engines that joined have dedicated GPUs."""
        await results(worker.sleep.remote(keep_weights) for worker in self.workers[: self._reserved])

    async def wake_up(self, *tags: str) -> None:
        await results(worker.wake_up.remote(list(tags) or None) for worker in self.workers[: self._reserved])

    async def shutdown(self) -> None:
        for line in self._lines.values():
            line.close()
        await self.team.shutdown()
        await end(self._present())

    def _present(self) -> list[Any]:
        return list(self.team.named().values())

    def _line(self, index: int, worker: Any) -> Line:
        """Return the line to an engine; cached, since every group needs it."""
        if (line := self._lines.get(worker)) is None:
            line = Line(worker.submit.remote, partial(self._collect, index, worker))
            self._lines[worker] = line
        return line

    async def _collect(self, index: int, worker: Any) -> list[tuple[int, Any]]:
        """Wait for an engine's groups, and release capacity as samples finish, even before their group."""
        report, stored = worker.collect.remote(self._finished[index].sequences + self._report_every)
        finished, numbers, failed = await report
        self._note_finished(index, worker, finished)
        groups = StoredGroups(stored)
        return [*((number, StoredSamples(groups, i)) for i, number in enumerate(numbers)), *failed]

    def _forget(self, index: int) -> None:
        """Reset a lost engine's counters and end its episodes; its replacement starts without samples."""
        if self._samples_of is not None:
            self._samples_of = {uid: other for uid, other in self._samples_of.items() if other != index}
        if self._environments is not None:
            self._environments.end_all(self.workers[index])
        self._finished[index] = Load(0, 0)

    def _note_finished(self, index: int, worker: Any, finished: Load) -> None:
        if not self.team.is_current(index, worker):
            return
        before = self._finished[index]
        if finished > before:  # replies may arrive out of order
            self._finished[index] = finished
            news = finished.minus(before)
            self._load_balancer.release(index, news.sequences, news.tokens)
