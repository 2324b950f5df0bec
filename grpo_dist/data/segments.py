"""The tokens of a demonstration's completion, of which some are given: results of tools, other speakers.

A given token is read and never trained. Every segment is tokenised by itself, as in an episode: the boundary
between what the policy samples and what an environment puts in is a boundary of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from grpo_dist.chat.ends import SampleEnds
from grpo_dist.chat.template import encode
from grpo_dist.data.prompts import render_messages
from grpo_dist.environments.base import Message


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of a prompt and of the completion to learn.

    ``sampled``: for each token of the completion, whether it is learned; the others are given.
    """

    prompt: list[int]
    completion: list[int]
    sampled: list[bool]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a completion: text that is learned, or ``given``."""

    text: str
    given: bool = False


def pair_of(prompt: list[int], segments: Sequence[Segment], tokenizer: Any) -> Pair:
    """Tokenise ``segments``, without an end behind them."""
    ids = [encode(s.text, tokenizer) for s in segments]
    sampled = [not s.given for s, own in zip(segments, ids, strict=True) for _ in own]
    return Pair(prompt, [token for own in ids for token in own], sampled)


def read_completion(completion: Any) -> list[Segment]:
    """Read the key `completion`: text, or a list of {"text", "given"}. Raises ValueError for others."""
    if isinstance(completion, str) and completion:
        return [Segment(completion)]
    if not isinstance(completion, list) or not completion:
        raise ValueError(
            "`completion` is missing or neither text nor a list of segments; expected an object with "
            "`prompt` and `completion`"
        )
    for number, part in enumerate(completion):
        text, given = (part.get("text"), part.get("given", False)) if isinstance(part, dict) else ("", False)
        if not isinstance(text, str) or not text or not isinstance(given, bool):
            raise ValueError(
                f'`completion`: segment {number} must be an object like {{"text": "...", "given": true}}, '
                "where `text` is not empty; `given` marks what a tool or an environment put in"
            )
    segments = [Segment(part["text"], part.get("given", False)) for part in completion]
    if segments[-1].given:
        raise ValueError(
            "`completion`: the last segment is given; expected the answer, which the model learns, at the end"
        )
    return segments


def check_answered(messages: Sequence[Message]) -> None:
    """Raise ValueError for a conversation without answers to learn, those of the assistant, at its end."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            "`messages` without `completion` must end with the assistant's message after others; the "
            f"assistant's messages are learned, and the last message has the role {messages[-1]['role']!r}"
        )


def conversation(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    ends: SampleEnds,
    *,
    day: date | None,
    keys: str,
) -> tuple[str, list[Segment]]:
    """Return the text before the assistant's first message, and the segments from there on: those of the
    assistant, each with the token that ends it, and what the chat template puts between them, given.

    ``day``: as `render` takes it. Raises ValueError for a template that rewrites earlier messages, or ends a
    message otherwise; and for one that rejects them, as `render_messages`.
    """

    def rendered(count: int, *, open_turn: bool) -> str:
        own = messages[:count]
        return render_messages(own, tokenizer, template_kwargs, day=day, open_turn=open_turn, keys=keys)

    end_texts = [tokenizer.decode([token]) for token in sorted(ends.ids, key=lambda t: t != ends.learned)]

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = done = rendered(answers[0], open_turn=True)
    segments: list[Segment] = []
    for index in answers:
        before, after = rendered(index, open_turn=True), rendered(index + 1, open_turn=False)
        if not before.startswith(done) or not after.startswith(before):
            raise ValueError(
                f"the chat template renders what comes before message {index} otherwise once that message "
                "follows; write a row for each answer, with the earlier messages in `messages` and the "
                "answer in `completion`"
            )
        text, end = _ended(after[len(before) :], end_texts)
        if not end:  # some templates have no end but what begins the next message
            further = messages[index + 1 :]
            follows = rendered(index + 2, open_turn=False)[len(after) :] if further else end_texts[0]
            end = next((found for found in end_texts if follows.startswith(found)), "")
        if not end:
            raise ValueError(
                f"the chat template does not end the assistant's message {index} with a token that ends a "
                f"sample ({', '.join(map(repr, end_texts))}); give the answer in `completion`"
            )
        if before != done:
            segments.append(Segment(before[len(done) :], given=True))
        segments.append(Segment(text + end))
        done = before + text + end
    return prompt, segments


def _ended(rendered: str, end_texts: Sequence[str]) -> tuple[str, str]:
    """Return what stands before the first end in ``rendered``, and that end; "" where it has none."""
    places = [(rendered.find(end), end) for end in end_texts if end in rendered]
    place, end = min(places, default=(len(rendered), ""))
    return rendered[:place], end
