"""Episodes of an environment as demonstrations: the prompt's messages, and segments, some of them given."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_dist.chat.ends import SampleEnds
from grpo_dist.chat.template import encode
from grpo_dist.config import DataConfig
from grpo_dist.data.prompts import tokenise_messages
from grpo_dist.types import Prompt, Rollout


def segments_of(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the episode as `completion` of a demonstration, without the token that ends it."""
    ids = rollout.completion_ids[:-1]
    sampled = np.ones(len(ids), bool) if rollout.sampled is None else rollout.sampled[:-1]
    parts = np.split(ids, np.flatnonzero(np.diff(sampled)) + 1)
    starts = np.cumsum([0, *map(len, parts[:-1])])
    texts = [
        tokenizer.decode(part.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for part in parts
    ]
    return [
        {"text": text} if sampled[start] else {"text": text, "given": True}
        for text, start in zip(texts, starts, strict=True)
        if text
    ]


def cannot_be_shown(rollout: Rollout, ends: SampleEnds) -> bool:
    """Return whether an episode is no single row that ends after an action, with a token that ends it."""
    whole = not rollout.further_rows and len(rollout.completion_ids) > 1
    return not whole or not ends.ended(rollout.completion_ids)


def is_respelled(rollout: Rollout, segments: list[dict[str, Any]], tokenizer: Any) -> bool:
    """Return whether the tokenizer encodes ``segments`` differently from the episode."""
    ids = [token for part in segments for token in encode(part["text"], tokenizer)]
    return ids != rollout.completion_ids[:-1].tolist()


def question_of(prompt: Prompt, data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the keys of a demonstration that give the policy's exact prompt, with its tools where the
    template shows them.
    """
    assert prompt.task is not None, "an episode has a task"
    if not prompt.task.messages:
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return {"prompt": text, "chat_template": "none"}
    messages, plain = [dict(m) for m in prompt.task.messages], dict(data.template_kwargs)
    with_tools = plain | {"tools": [dict(tool) for tool in prompt.task.tools]}
    for arguments in (plain, with_tools):
        if tokenise_messages(messages, tokenizer, arguments, day=data.day) == prompt.token_ids.tolist():
            break
    return {"messages": messages} | ({"template_kwargs": arguments} if arguments else {})
