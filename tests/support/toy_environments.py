"""Environments whose answers depend only on the action, in workers that a test can block and kill. Imports
little, so that its actors start fast.
"""

import asyncio
import os
import signal
from collections import Counter

from actors.workers.environment import EnvironmentWorker
from grpo_dist.environments.episode import Observed


class ToyRunner:
    """Replaces `EpisodeRunner`. Arguments of the task: ``turns`` of an episode; ``failing``: turn in which
    the environment fails; ``seconds`` per answer; ``kills``: the environment kills its worker.
    """

    def __init__(self):
        self.episodes = Counter()  # turns so far, by running episode
        self.open = asyncio.Event()
        self.open.set()

    async def start(self):
        return ["toys, which nothing confines"]

    async def begin(self, episode, task, problem):
        assert not self.episodes[episode], "an episode must begin once, before it acts"

    async def act(self, episode, task, problem, action, *, turn):
        assert self.episodes[episode] == turn, "a turn is missing, or repeated"
        if task.kwargs.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        self.episodes[episode] += 1
        await asyncio.sleep(task.kwargs.get("seconds", 0.0))
        await self.open.wait()
        if turn == task.kwargs.get("failing"):
            return Observed(failed="the toy is broken")
        if turn + 1 == task.kwargs["turns"]:
            return Observed(done=True, reward=float(len(action.text) % 2))
        text = f"{problem.text}{turn}:{len(action.text)}"
        return Observed(text)

    async def end(self, episode):
        self.episodes.pop(episode, None)

    async def close(self):
        self.open.set()


class ToyWorker(EnvironmentWorker):
    async def start(self):
        self._runner = ToyRunner()
        self._notes = await self._runner.start()

    async def process(self):
        return os.getpid()

    async def hold(self, held):
        """Block answers until the hold ends."""
        (self._runner.open.clear if held else self._runner.open.set)()

    async def running(self):
        """Return the turns of the running episodes."""
        return dict(self._runner.episodes)
