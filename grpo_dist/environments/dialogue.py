"""The token rows of one episode, token in, token out: no sampled token is ever decoded and tokenised again.

    row 0   prompt | action, sampled | observation, given | action, sampled | ...
    row 1   the conversation, given again | action, sampled | ...       where the template rewrote the history

An observation is rendered by the chat template behind the real conversation, and only the ids of the new tail
are appended. Where the text in front of the tail is not that of the row (templates that drop the thoughts of
earlier turns), the episode continues in a further row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_dist.environments.base import Message
from grpo_dist.environments.episode import Generation
from grpo_dist.environments.records import Action, Observed
from grpo_dist.environments.rendering import Rendered, Renderer, result_messages
from grpo_dist.types import FurtherRow, Prompt, Rollout, Routes, ToolCall, Turn


@dataclass(slots=True)
class _GrowingRow:
    """A row behind its context; ``end``: index behind its last sampled token."""

    context: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    end: int = 0
    routes: Routes | None = None  # of the last action's request: all tokens up to ``end`` but the last

    def add(self, sampled: Generation) -> None:
        self.ids.extend(sampled.token_ids)
        self.logprobs.extend(sampled.logprobs.tolist())
        self.versions.extend(sampled.versions.tolist())
        self.sampled.extend([True] * len(sampled.token_ids))
        self.end, self.routes = len(self.ids), sampled.routes

    def give(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))
        self.sampled.extend([False] * len(ids))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return ids, log-probs, versions and mask up to the last sampled token; None: all are sampled."""
        end = self.end
        sampled = None if all(self.sampled[:end]) else np.array(self.sampled[:end], dtype=bool)
        return (
            np.array(self.ids[:end], np.int32),
            np.array(self.logprobs[:end], np.float32),
            np.array(self.versions[:end], np.int32),
            sampled,
        )


class Dialogue:
    """One episode. `add_action` and `observe` alternate; after an unfinished action comes another."""

    def __init__(self, renderer: Renderer, prompt: Prompt) -> None:
        assert prompt.task is not None, "a prompt without a task has no turns"
        self._renderer, self._prompt, self._task = renderer, prompt, prompt.task
        self._rows = [_GrowingRow(prompt.token_ids.tolist())]
        self._turns: list[Turn] = []
        self._history: list[Message] = list(prompt.task.messages)
        self._action_ids: list[int] = []
        self._action: Action | None = None  # not observed yet
        self._content = ""  # of the assistant message that is being written, before the action
        self._behind = ""  # text of the row behind the rendered prompt, before that message's content
        self._lead: str | None = None  # what the prompt already holds of that content, such as <think>

    @property
    def context(self) -> list[int]:
        """Token ids that the next action is sampled behind."""
        row = self._rows[-1]
        return row.context + row.ids

    @property
    def used(self) -> int:
        """Tokens of the episode behind its prompt, sampled and given."""
        row = self._rows[-1]
        length = len(row.context) + len(row.ids) - len(self._prompt.token_ids)
        return max(length, sum(len(row.ids) for row in self._rows))

    def add_action(self, sampled: Generation) -> Action:
        """Append what the policy sampled, and read it. The next call continues an unfinished action."""
        self._rows[-1].add(sampled)
        self._action_ids.extend(sampled.token_ids)
        text = self._renderer.text(self._action_ids)
        self._action = self._renderer.parse(text, self._action_ids, self._task, self._prompt.thought)
        return self._action

    def observe(self, observed: Observed) -> None:
        """Append the environment's answer to the last action as given tokens; none with ``done``."""
        calls = tuple(replace(call, result=self._renderer.cut(call.result)) for call in observed.calls)
        own_messages = self._observation_messages(observed)
        shown = "\n".join([*(call.result for call in calls), *(_text(m) for m in own_messages)])
        # A failure is shown, but the policy does not read it.
        self._end_turn(observed.failed or shown, calls, observed.reward)
        if not (observed.done or observed.failed):
            self._give(calls, own_messages)
        self._action_ids = []

    def rollout(self, sample: int, finish_reason: str) -> Rollout:
        """Return the finished episode, without tokens that were given behind the last action."""
        if self._action is not None:
            self._end_turn("", (), None)
        first, *others = (row for row in self._rows if row.end)
        ids, logprobs, versions, sampled = first.arrays()
        return Rollout(
            prompt_uid=self._prompt.uid,
            sample=sample,
            completion_ids=ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            text=self._turns[-1].text,
            policy_versions=versions,
            sampled=sampled,
            turns=tuple(self._turns),
            further_rows=tuple(
                FurtherRow(np.array(r.context, np.int32), *r.arrays(), routes=r.routes) for r in others
            ),
            routes=first.routes,
        )

    def _observation_messages(self, observed: Observed) -> list[Message]:
        """Return the environment's own observation as messages that hold no control token."""
        given = observed.observation
        if isinstance(given, str):
            given = [{"role": "user", "content": given}] if given else []
        return [{**message, "content": self._renderer.controls.as_text(_text(message))} for message in given]

    def _end_turn(self, observation: str, calls: tuple[ToolCall, ...], reward: float | None) -> None:
        assert self._action is not None, "an observation without an action"
        row = len(self._rows) - 1
        text, end = self._action.text, self._rows[-1].end
        self._turns.append(Turn(row, end, text, observation, calls, reward))
        self._action = None

    def _give(self, calls: Sequence[ToolCall], own_messages: list[Message]) -> None:
        ids, written = self._action_ids, self._renderer.raw(self._action_ids)
        results = [call.result for call in calls]
        if self._renderer.in_place and calls and not own_messages and not self._renderer.ended(ids):
            blocks = "".join(f"```output\n{result.rstrip()}\n```\n" for result in results)
            given = blocks if written.endswith("\n") else f"\n{blocks}"
            self._content += written + given
            self._rows[-1].give(self._renderer.ids(given))
            return
        if not self._task.messages:
            parts = [*results, *(_text(message) for message in own_messages)]
            self._rows[-1].give(self._renderer.ids("".join(f"\n{part}\n" for part in parts)))
            return
        if self._renderer.in_place:  # a template without tools may not support their messages
            messages = [*({"role": "user", "content": text} for text in results), *own_messages]
        else:
            messages = [*result_messages([call.name for call in calls], results), *own_messages]
        self._continue(self._content + written, messages or [{"role": "user", "content": ""}])

    def _continue(self, content: str, messages: Sequence[Message]) -> None:
        """Append the tail that the template writes behind ``content``, or begin a row of the whole text."""
        prompt = self._renderer.prompt(self._task)
        if self._lead is None:
            bare = self._renderer.conversation(self._task, self._history, content, messages)
            self._lead = prompt.removeprefix(bare.before) if prompt.startswith(bare.before) else ""
        whole = self._lead + content
        rendered = self._renderer.conversation(self._task, self._history, whole, messages)
        self._history += [{"role": "assistant", "content": whole}, *messages]
        self._content = ""
        if self._is_kept(prompt, content, rendered):
            self._rows[-1].give(self._tail_ids(rendered.tail))
            self._behind += content + rendered.tail
        else:
            self._rows.append(_GrowingRow(self._renderer.ids(rendered.text)))
            self._behind = rendered.text.removeprefix(prompt)

    def _is_kept(self, prompt: str, content: str, rendered: Rendered) -> bool:
        """Return whether the tail still follows the row's text, up to white space."""
        if not rendered.text.endswith(rendered.tail):
            return False
        before = rendered.text[: len(rendered.text) - len(rendered.tail)]
        return _squashed(before) == _squashed(prompt + self._behind + content)

    def _tail_ids(self, tail: str) -> list[int]:
        """Tokenise the tail; the token that ends the turn is left out where the policy has sampled one."""
        ids = self._renderer.ids(tail)
        if not self._renderer.ended(self._action_ids):
            return ids
        for index, token in enumerate(ids[:3]):
            if token in self._renderer.ends.ids:
                return ids[index + 1 :]
            if self._renderer.text([token]).strip():
                break
        return ids


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else str(content)


def _squashed(text: str) -> str:
    return "".join(text.split())
