"""How the actors of one role are created and supervised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_dist.config import RestartsConfig


@dataclass(frozen=True)
class GuestSpec:
    """Further actors of a role, which join while the cluster has room, and leave again.

    Attributes:
        most: how many there may be at once.
        cpus, gpus: what each takes, on one node.
    """

    most: int
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ActorSpec:
    """Ray options, placement, restarts and deadlines of the actors of one role.

    Attributes:
        options: Ray options of every actor.
        actor_options: Ray options of each actor, such as its bundle, which override ``options``; None: none.
        restarts: None: no actor is watched or replaced, and a lost one ends the run.
        start_s: deadline of one restart, seconds.
        irreplaceable: why a lost actor cannot be replaced alone; None: it can.
        generation: number of times that all actors of this role were created before.
        on_gpu: they compute on GPUs.
        guests: actors beyond those that are reserved; None: there are none.
    """

    options: dict[str, Any] = field(default_factory=dict)
    actor_options: Sequence[dict[str, Any]] | None = None
    restarts: RestartsConfig | None = None
    start_s: float = 600.0
    irreplaceable: str | None = None
    generation: int = 0
    on_gpu: bool = False
    guests: GuestSpec | None = None

    @property
    def hang_s(self) -> float:
        """Seconds without an answer or progress after which an actor has hung; one that is not watched is
        given those of a start.
        """
        return self.restarts.hangs_after(on_gpu=self.on_gpu) if self.restarts else self.start_s

    def makers(self, actor: Any, count: int, *arguments: Any, **keywords: Any) -> list[Callable[[str], Any]]:
        """Return one function for each of ``count`` actors, which creates it under the name that it is given.

        ``actor``: a Ray actor class; ``arguments``, ``keywords``: those of its constructor.
        """
        own = [{}] * count if self.actor_options is None else list(self.actor_options)
        assert len(own) == count, f"{len(own)} placements for {count} workers"

        def make(options: dict[str, Any], name: str) -> Any:
            if self.generation:  # the name of the actor before may still be taken
                name = f"{name}.{self.generation}"
            return actor.options(name=name, **self.options | options).remote(*arguments, **keywords)

        return [partial(make, options) for options in own]

    def guest_maker(self, actor: Any, *arguments: Any) -> Callable[[str, str], Any]:
        """Return the function that creates a guest under a name on a node, given by Ray's node id."""

        def make(name: str, node: str) -> Any:
            assert self.guests is not None
            place = {
                "num_cpus": self.guests.cpus,
                "num_gpus": self.guests.gpus,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            return actor.options(name=name, **self.options | place).remote(*arguments)

        return make
