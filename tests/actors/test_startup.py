"""What the log says about actors that start."""

import asyncio
from contextlib import suppress

from ray.exceptions import RayActorError

from actors.lifecycle.probe import Health, Probeable
from actors.startup import StartProgress

A_MOMENT_S = 0.05  # of following actors, which continues until they are up


class FakeTeam:
    """Actors by name; each answers with its phases, or with an error."""

    def __init__(self, **answers):
        self.answers, self.starting = answers, set(answers)

    def named(self):
        return {name: name for name in self.answers}

    async def ask(self, worker):
        answer = self.answers[worker]
        if isinstance(answer, Exception):
            raise answer
        return Health(phases=answer)


def followed(team, seconds=0.0):
    """Return how far ``team`` is, as it is told ``seconds`` after its actors were asked."""
    now = 100.0
    progress = StartProgress([team], clock=lambda: now)

    async def asked():
        for name in team.answers:
            with suppress(TimeoutError):
                await asyncio.wait_for(progress.follow(team, name, name), A_MOMENT_S)

    asyncio.run(asked())
    now += seconds
    return progress


def test_actors_in_the_same_phase_are_named_together_with_the_longest_time():
    team = FakeTeam(
        **{
            "rollout-0": (("imports", 5.0), ("compilation", 14.0)),
            "rollout-1": (("imports", 6.0), ("compilation", 11.0)),
            "rollout-2": (("imports", 6.0), ("compilation", 9.0), ("first request", 0.5)),
            "rollout-3": (),
        }
    )
    progress = followed(team, seconds=2.0)
    assert progress.current() == (
        "rollout-0, rollout-1: compilation 16.0 s, rollout-2: first request 2.5 s, rollout-3"
    )
    team.starting = {"rollout-2"}
    assert progress.current() == "rollout-2: first request 2.5 s"


def test_an_actor_that_is_lost_while_it_starts_does_not_hide_the_others():
    team = FakeTeam(**{"rollout-0": RayActorError(), "rollout-1": (("model", 1.0),)})
    assert followed(team, seconds=2.0).current() == "rollout-0: process 2.0 s, rollout-1: model 3.0 s"


def test_phases_have_the_seconds_between_their_begins():
    worker = Probeable()
    assert worker.phases() == ()
    worker.begin("imports", 10.0)
    worker.begin("model", 12.5)
    worker.begin("compilation", 14.0)
    worker.begin("", 20.0)
    worker.rename("compilation", "compilation (cached)")
    assert worker.health().phases == (("imports", 2.5), ("model", 1.5), ("compilation (cached)", 6.0))
