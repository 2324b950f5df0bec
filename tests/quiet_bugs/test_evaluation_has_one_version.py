"""prime-rl#3385, "align evals with applied policies": evaluation ran on engines whose weights were replaced
meanwhile, or under a version that they did not hold yet, so its accuracy belonged to no version of the
policy. NeMo-RL#1798 shows the motive: "Async validation takes too long in some envs".
"""

import asyncio

import pytest

from grpo_dist.evaluation.sampling import EvalSet
from tests.support import fakes
from tests.support.fakes import train

EVERY, STEPS = 2, 6
HELD_OUT = [EvalSet("held", [prompt for prompt in fakes.prompts(60) if int(prompt.uid[1:]) >= 40])]


class World(fakes.World):
    """Records the versions that evaluate. ``seen``: versions at begin and end of each evaluation sample, by
    the logged step.
    """

    def __init__(self):
        super().__init__(jitter=False)
        self.seen, self._now = {}, set()

    async def sample(self, prompt, **request):
        is_held_out = int(prompt.uid[1:]) >= 40
        before = self.version
        for _ in range(10 * is_held_out):
            await asyncio.sleep(0)
        rollouts = await super().sample(prompt, **request)
        if is_held_out:
            self._now |= {before, self.version}
        return rollouts

    def log(self, step, metrics):
        super().log(step, metrics)
        if "eval/held/pass@1" in metrics:
            self.seen[step], self._now = self._now, set()


def test_the_bug_mixes_versions_where_an_evaluation_does_not_hold_the_next_sync():
    world = World()

    async def together():
        async def trains():
            for version in (1, 2):
                await asyncio.sleep(0)
                await world.push(version)

        sampling = fakes.config().sampling
        seeds = {"seeds": [1], "sampling": sampling}
        await asyncio.gather(trains(), *(world.sample(p, **seeds) for p in HELD_OUT[0].prompts[:3]))

    asyncio.run(together())
    assert len(world._now) > 1


@pytest.mark.parametrize("mode", ["drain", "keep"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_evaluation_is_of_the_version_it_is_logged_under(staleness, mode):
    evaluation = {"before": True, "after": False, "every": EVERY, "samples_per_prompt": 1}
    settings = {"steps": STEPS, "max_staleness": staleness, "weight_sync": {"mode": mode}}
    config = fakes.config(**settings, evaluation=evaluation)
    world = train(World(), config, fakes.prompts(40), eval_sets=HELD_OUT)
    assert world.seen == {step: {step} for step in range(0, STEPS + 1, EVERY)}
