"""The environment interface. One instance serves one episode, in a separate process.

start(problem) -> what is asked
step(action)   -> observation, reward, done        once per turn of the policy
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

# A chat message with "role" and "content".
Message = Mapping[str, Any]
Messages = Sequence[Message]
Tool = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """An episode's problem: a row of the data source."""

    text: str
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to an action.

    Attributes:
        observation: text, or chat messages, each with text or text parts; None with ``done``.
        reward: turn reward; None: the turn has none. NaN: it could not be scored.
        done: the episode is over.
    """

    observation: str | Messages | None = None
    reward: float | None = None
    done: bool = False


class Environment:
    """Base class of environments. Methods may be asynchronous.

    ``tools``: functions or methods with typed parameters and a docstring that the policy may call. The chat
    template gets their schema. An action with calls is answered with their results, and `step` is not called.

    ``stop``: texts at which an action ends, such as "</search>". The token that completes one belongs to the
    action, with all its characters. A text from `step` then follows verbatim in the same message. Messages,
    and any answer to an action that the policy ended itself, begin a new message.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    stop: ClassVar[Sequence[str]] = ()

    def start(self, problem: Problem) -> str | Messages | Awaitable[str | Messages]:
        """Return the user's message, or all messages. Must depend on ``problem`` alone, because the samples
        of a group share their prompt.
        """
        return problem.text

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer an action without tool calls. By default, end the episode."""
        return Step(done=True)

    @classmethod
    def step_batch(
        cls, episodes: Sequence[Any], actions: Sequence[str]
    ) -> Sequence[Step] | Awaitable[Sequence[Step]]:
        """Answer the actions of several episodes at once. Define it instead of `step` if batching is cheaper,
        e.g. for requests to a model.

        All episodes of a worker then share one process. A call takes the actions that arrived during the
        previous call, so batches differ between runs; no answer may depend on them.

        Args:
            episodes: instances of this class, each once.
            actions: one per episode, in the same order, which is also the order of the answers.
        """
        raise NotImplementedError

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Load data that all episodes share, such as a file. Called once, in the process that the episodes'
        processes are forked from. It must leave no threads or connections open.

        Args:
            kwargs: the arguments of the environment.
        """

    def close(self) -> Awaitable[None] | None:
        """Release the episode's resources at its end. Not called if its process was killed or failed."""

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterable[Mapping[str, Any]]:
        """Yield rows with `problem`, `answer` and further columns, for a data source without a `path`.

        Args:
            count: number of rows; None: all.
            kwargs: the arguments of the environment.
        """
        raise NotImplementedError
