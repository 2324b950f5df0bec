"""Run many episodes at once on one engine: each alternates between the engine and an environment worker.

episode 0   sample | tool ........ | sample | tool ... | sample
episode 1   sample | tool .. | sample | tool ............ | sample
engine      batches the episodes that sample now, and waits for no tool
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import ActorDiedError

from actors.lifecycle.calls import LOST, reason
from actors.workers.engine_settings import EngineSpec
from actors.workers.environment import Act, ActingEpisode, EnvironmentAddresses, EnvironmentCalls
from actors.workers.tool_calls import call_parser
from grpo_dist.config import EnvironmentsConfig
from grpo_dist.config.environments import AGENT
from grpo_dist.environments.agent_rows import AgentRows, play_agent
from grpo_dist.environments.base import Problem
from grpo_dist.environments.dialogue import Budgets, Dialogue, Renderer, play, template_text
from grpo_dist.environments.episode import Action, Generation, Observed
from grpo_dist.environments.tools import resolve_format
from grpo_dist.runtime.metering import Meter
from grpo_dist.types import Prompt, Rollout, Sampling

# Samples from a context with a seed: exactly, or at most, a number of tokens, until a stop string.
Generate = Callable[..., Coroutine[Any, Any, Generation]]

# Wait before retrying workers that did not answer, unless new addresses arrive first: the network may have
# failed, not the workers.
_RETRY_S = 1.0
# An episode fails after this many lost workers: one may be bad luck, but an episode that kills three would
# kill them all.
_WORKERS = 3


class EpisodeSampler:
    """Samples episodes. ``generate``: samples on the engine."""

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        settings: EnvironmentsConfig,
        meter: Meter,
        max_length: int,
    ) -> None:
        """``max_length``: the engine's maximum row length, tokens."""
        self._generate, self._renderer, self._settings, self._meter = generate, renderer, settings, meter
        self._max_length = max_length
        self.workers = WorkersOfEpisodes()
        # Weak: an entry lives as long as an episode or call uses it, since workers come and go.
        self._calls: WeakValueDictionary[Any, EnvironmentCalls] = WeakValueDictionary()
        self._name, self._numbers = ray.get_runtime_context().get_actor_id(), count()
        self._running: set[asyncio.Task[Rollout]] = set()

    async def sample(
        self, prompt: Prompt, sample: int, seed: int, sampling: Sampling, length: int | None
    ) -> Rollout:
        """Sample one episode. ``length``: exact tokens of each action; None: actions end by themselves.

        If its environment worker is lost, the episode restarts with the same seed; it fails after three lost
        workers. Raises RuntimeError if it is abandoned, or if no worker is left.
        """
        work = self._until_finished(prompt, sample, seed, sampling, length)
        task = asyncio.create_task(work, name=f"episode of {prompt.uid}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise RuntimeError("rollout: the episode was abandoned") from None

    def abandon(self) -> None:
        """End all running episodes, including those that wait for their environment."""
        for task in self._running:
            task.cancel()

    async def _until_finished(
        self, prompt: Prompt, sample: int, seed: int, sampling: Sampling, length: int | None
    ) -> Rollout:
        is_agent = prompt.task is not None and prompt.task.environment.startswith(AGENT)
        lost: set[Any] = set()  # distinct workers: a worker's second failure does not count
        while True:
            worker = await self.workers.take()
            name = f"{self._name}:{next(self._numbers)}"
            rows = None if is_agent else Dialogue(self._renderer, prompt)  # an agent has other rows
            calls = self._calls.setdefault(worker, EnvironmentCalls(worker))
            ends = _Ends(self, calls, name, prompt, sampling, length)
            ends.begin()
            try:
                tokens = sampling.max_new_tokens
                budgets = Budgets.from_config(self._settings, tokens=tokens)
                if rows is None:
                    agent_rows = AgentRows(
                        self._renderer, prompt, sampling, max_length=self._max_length, tokens=tokens
                    )
                    return await play_agent(agent_rows, ends, budgets, seed=seed, sample=sample)
                finish_reason = await play(rows, ends, budgets, seed=seed)
                return rows.rollout(sample, finish_reason)
            except LOST as error:
                self.workers.suspect(worker, dead=isinstance(error, ActorDiedError))
                lost.add(worker)
                if len(lost) == _WORKERS:
                    why = f"{_WORKERS} environment workers were lost with this episode ({reason(error)})"
                    if rows is None:
                        return agent_rows.rollout(sample, "error", failed=why)
                    rows.observe(Observed(failed=why))
                    return rows.rollout(sample, "error")
            finally:
                self.workers.give_back(worker)
                calls.end(name)


def episode_sampler(spec: EngineSpec, tokenizer: Any, generate: Generate, meter: Meter) -> EpisodeSampler:
    """Make the sampler of an engine whose prompts have environments. Raises ValueError for an unknown or
    unsuitable tool-call format.
    """
    assert spec.environments is not None and spec.data is not None, "no prompt has an environment"
    call_format = resolve_format(spec.environments.call_format, template_text(tokenizer, spec.data))
    parser = call_parser(call_format, tokenizer)
    renderer = Renderer(tokenizer, spec.data, spec.environments, parser)
    return EpisodeSampler(generate, renderer, spec.environments, meter, spec.max_length)


class _Ends:
    """Both ends of one episode: the engine and the environment."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        calls: EnvironmentCalls,
        name: str,
        prompt: Prompt,
        sampling: Sampling,
        length: int | None,
    ) -> None:
        self._sampler, self._calls = sampler, calls
        self._sampling, self._length = sampling, length
        assert prompt.task is not None, "a prompt without a task has no turns"
        problem = Problem(prompt.text, prompt.answer, prompt.columns)
        self._episode = ActingEpisode(name, prompt.task, problem)
        self._requests = 0

    def begin(self) -> None:
        """Start the environment's process while the first action is sampled."""
        self._calls.begin(self._episode)

    async def generate(
        self, token_ids: list[int], seed: int, max_tokens: int, stop: Sequence[str] = ()
    ) -> Generation:
        exact, meter = self._length is not None, self._sampler._meter
        task_stop = self._sampler._renderer.stop(self._episode.task)
        output = await self._sampler._generate(
            token_ids,
            seed,
            self._sampling,
            min(self._length or max_tokens, max_tokens),
            exact=exact,
            stop=() if exact else (*task_stop, *self._sampling.stop, *stop),
        )
        meter.count("tokens", len(output.token_ids))
        if self._requests:
            meter.count("later_prompt_tokens", len(token_ids))
            meter.count("later_cached_tokens", output.cached)
        self._requests += 1
        return output

    async def act(self, action: Action, turn: int) -> Observed:
        begin = time.perf_counter()
        observed = await self._calls.act(Act(self._episode, action, turn))
        self._sampler._meter.count("turns", 1)
        self._sampler._meter.count("tool_wait_s", time.perf_counter() - begin)
        return observed


class WorkersOfEpisodes:
    """Assigns each episode the responsive environment worker with the fewest episodes of this engine."""

    def __init__(self) -> None:
        self._addresses = EnvironmentAddresses(0, ())
        self._suspected: set[Any] = set()
        self._dead: set[Any] = set()
        self._episodes: Counter[Any] = Counter()
        self._changed = asyncio.Event()

    def use(self, addresses: EnvironmentAddresses) -> None:
        """Use ``addresses`` from now on, unless they are outdated."""
        if addresses.number > self._addresses.number:
            self._addresses = addresses
            self._suspected.clear()
            self._dead.intersection_update(addresses.workers)  # the driver may not have noticed some yet
            self._changed.set()

    async def take(self) -> Any:
        """Return a worker for a new episode. Waits for a serving one: the driver replaces lost workers, and
        its call for these samples has a deadline. Raises RuntimeError if no worker will be replaced.
        """
        while True:
            if self._addresses.failure:
                raise RuntimeError(f"environments: {self._addresses.failure}")
            unusable = self._suspected | self._dead
            serving = [worker for worker in self._addresses.workers if worker not in unusable]
            if serving:
                worker = min(serving, key=self._episodes.__getitem__)
                self._episodes[worker] += 1
                return worker
            self._changed.clear()
            try:
                async with asyncio.timeout(_RETRY_S):
                    await self._changed.wait()
            except TimeoutError:
                self._suspected.clear()

    def give_back(self, worker: Any) -> None:
        """Note that an episode of ``worker`` has ended."""
        self._episodes[worker] -= 1
        if not self._episodes[worker]:
            del self._episodes[worker]

    def suspect(self, worker: Any, *, dead: bool = False) -> None:
        """Note that ``worker`` did not answer. ``dead``: it never will."""
        (self._dead if dead else self._suspected).add(worker)
