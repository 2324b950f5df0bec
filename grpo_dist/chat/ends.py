"""Which tokens end a sample. Engines, finish reasons, episodes, demonstrations and selections all use this.

    tokenizer's EOS    generation_config.json    end of a turn in the chat template
    <|endoftext|>      <|endoftext|>             <|im_end|>              a base model with a chat template
    <|eot_id|>         <|eot_id|>, <|eom_id|>    <|eot_id|>              an instruction-tuned model
    <eos>              <eos>, <end_of_turn>      <end_of_turn>           Gemma 3

A sample ends at any of them. A demonstration ends with the token of the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.chat.template import REJECTED, ControlTokens, encode, render
from grpo_dist.config import DataConfig
from grpo_dist.runtime.files import read_json

_QUESTION, _ANSWER, _NEXT = "0question0", "0answer0", "0next0"


@dataclass(frozen=True, slots=True)
class SampleEnds:
    """The tokens that end a sample.

    Attributes:
        ids: an engine stops at each.
        learned: the token that ends a demonstration; None: there is none.
        text: the end of an answer in the chat template, if it is not a single token; else "".
        note: for the user, if neither the tokenizer nor the generation config names the token with which the
            chat template ends an answer; else "".
    """

    ids: frozenset[int]
    learned: int | None
    text: str = ""
    note: str = ""

    def check(self, stop: Sequence[str] | None = None) -> None:
        """Raise ValueError where neither a token nor a text of ``stop`` (`sampling.stop`) ends a sample.

        ``stop``: None for messages of episodes and for demonstrations, which must end with a token.
        """
        if self.text and not any(stopping in self.text for stopping in stop or ()):
            raise ValueError(
                f"the model's chat template ends an answer with {self.text!r}, which is no single token of "
                "its tokenizer, so that samples would not end there; use one that has it as one token"
                + ("" if stop is None else f", or set sampling.stop=[{self.text!r}]")
            )
        if not self.ids and not stop:
            raise ValueError(
                "no token ends a sample: the model's tokenizer has no EOS token, its generation_config.json "
                "names none, and the chat template ends an answer with none; set `eos_token` in "
                f"tokenizer_config.json{'' if stop is None else ', or `sampling.stop`'}"
            )

    def ended(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Return whether ``ids`` end with one of these tokens."""
        return len(ids) > 0 and int(ids[-1]) in self.ids

    def strip(self, ids: Sequence[int]) -> list[int]:
        """Return ``ids`` without the token that ends them."""
        return list(ids[:-1]) if self.ended(ids) else list(ids)


def sample_ends(
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    templated: bool,
    day: date | None = None,
) -> SampleEnds:
    """Return what ends a sample of the model whose directory ``tokenizer`` was loaded from.

    Args:
        template_kwargs, day: as `render` takes them.
        templated: prompts are rendered with the chat template; False: they are plain text.
    """
    named = named_ends(tokenizer)
    token, text = _turn_end(tokenizer, template_kwargs or {}, day) if templated else (None, "")
    learned = token if token is not None else next(iter(named), None)
    if token is None or token in named:
        return SampleEnds(frozenset(named), learned, text)
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token_id)) for token_id in named) or "none"
    note = (
        f"note: the model's chat template ends an answer with {tokenizer.convert_ids_to_tokens(token)!r} (id "
        f"{token}), which its tokenizer and generation_config.json do not name as an end of text (they name "
        f"{names}): samples end there, too, and demonstrations end with it"
    )
    return SampleEnds(frozenset({token, *named}), learned, note=note)


def ends_of(data: DataConfig | None, tokenizer: Any) -> SampleEnds:
    """Return what ends a sample whose prompt section ``data`` defines; None: a prompt of plain text."""
    if data is None:
        return sample_ends(tokenizer, templated=False)
    templated = data.chat_template == "model"
    return sample_ends(tokenizer, data.template_kwargs, templated=templated, day=data.day)


def named_ends(tokenizer: Any) -> list[int]:
    """Return the tokenizer's EOS, and the end tokens in the model's directory, looked up as vLLM does."""
    end_ids = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        file = Path(getattr(tokenizer, "name_or_path", "") or "") / name
        if file.is_file():
            ends = _read_eos(read_json(file))
            end_ids += ends if isinstance(ends, list) else [ends]
            break
    return [int(token) for token in dict.fromkeys(end_ids) if token is not None]


def _read_eos(settings: Mapping[str, Any]) -> Any:
    eos_ids = settings.get("eos_token_id")
    return eos_ids if eos_ids is not None else (settings.get("text_config") or {}).get("eos_token_id")


def _turn_end(tokenizer: Any, template_kwargs: Mapping[str, Any], day: date | None) -> tuple[int | None, str]:
    """Return the token with which the chat template ends an answer, or its text if that is not a token.

    It is the token that follows the answer both at the end of a conversation and before the next question;
    else the one at the end; else, for templates such as GLM's, the token that begins the next question.
    """
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    last = _render_after_answer(tokenizer, messages, template_kwargs, day)
    if last is None:
        return None, ""
    further = [*messages, {"role": "user", "content": _NEXT}]
    between = (_render_after_answer(tokenizer, further, template_kwargs, day) or "").partition(_NEXT)[0]
    controls = ControlTokens(tokenizer).ids - {tokenizer.bos_token_id}
    last_ids, between_ids = encode(last, tokenizer), encode(between, tokenizer)
    pairs = zip(last_ids, between_ids, strict=False)
    common = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    added = tokenizer.added_tokens_decoder  # which may have an end of turns that is not special
    for ids, ends in ((common[::-1], controls), (common[::-1], added), (last_ids, controls)):
        if (token := next((i for i in ids if i in ends), None)) is not None:
            return token, ""
    if text := last.strip():
        ids = encode(text, tokenizer)
        return (ids[0], "") if len(ids) == 1 else (None, text)
    return next((i for i in between_ids if i in controls), None), ""


def _render_after_answer(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    day: date | None,
) -> str | None:
    """Return what the template writes after the answer; None where it rejects or drops the answer."""
    try:
        text = render(tokenizer, messages, template_kwargs, day=day, open_turn=False)
    except REJECTED:
        return None
    _, mark, rest = text.rpartition(_ANSWER)
    return rest if mark else None
