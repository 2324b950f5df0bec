"""The interface of an environment. One instance serves one episode, in a process of its own.

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
    """What an episode is about: a row of the data source."""

    text: str
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers to an action.

    Attributes:
        observation: text, or chat messages; None with ``done``.
        reward: of this turn; None: the turn has none. NaN: it could not be scored.
        done: the episode is over.
    """

    observation: str | Messages | None = None
    reward: float | None = None
    done: bool = False


class Environment:
    """Base class of environments. Methods may be asynchronous.

    ``tools``: functions with typed parameters and a docstring, which the policy may call; their schema goes
    into the chat template. An action with calls is answered with their results, and `step` is not called.

    ``stop``: texts at which an action ends, such as "</search>". The token that completes one belongs to the
    action, with all its characters. What `step` returns as text then follows in the same message, as it is;
    messages, and any answer to an action that the policy ended itself, begin a message.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    stop: ClassVar[Sequence[str]] = ()

    def start(self, problem: Problem) -> str | Messages | Awaitable[str | Messages]:
        """Return what is asked: the user's message, or all messages. A function of ``problem`` alone, because
        the samples of a group share their prompt.
        """
        return problem.text

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer an action without tool calls. An environment of tools alone is then done."""
        return Step(done=True)

    @classmethod
    def step_batch(
        cls, episodes: Sequence[Any], actions: Sequence[str]
    ) -> Sequence[Step] | Awaitable[Sequence[Step]]:
        """Answer an action of each of several episodes at once. Define it instead of `step` where one call
        for many is cheaper, such as a request to a model.

        All episodes of a worker then live in one process. The call takes the actions that came during the
        one before it, so which of them share a call differs between runs; no answer may depend on that.

        Args:
            episodes: instances of this class, each once.
            actions: one for each of them, in the same order. So are the answers.
        """
        raise NotImplementedError

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Load what all episodes share, such as a file. Called once, in the process that those of the
        episodes are forked from: they find it in memory. It must leave no threads and no connections behind.

        Args:
            kwargs: the arguments of the environment.
        """

    def close(self) -> Awaitable[None] | None:
        """Release what the episode held, at its end. Not called where its process is killed or has failed."""

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterable[Mapping[str, Any]]:
        """Yield rows with `problem`, `answer` and further columns, for a data source without a `path`.

        Args:
            count: rows that the source takes; None: as many as there are.
            kwargs: the arguments of the environment.
        """
        raise NotImplementedError
