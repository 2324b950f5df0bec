"""From the sources of an `sft` section to tokenised (prompt, completion) pairs.

A row of a JSONL file is

    {"prompt": ..., "completion": ...}                                  the user's turn and the answer to it
    {"system": "Be brief.", "prompt": ..., "completion": ...}           with a system prompt
    {"chat_template": "none", "prompt": ..., "completion": ...}         no turns: the text as it is
    {"messages": [{"role": ..., "content": ...}], "completion": ...}    a whole conversation, no `prompt`

with `template_kwargs` for the chat template where it takes any. A prompt is tokenised by what tokenises those
of the policy, so that a model is taught on the very tokens it is asked with. Further keys are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.config import DemonstrationsConfig, SFTConfig
from grpo_dist.data.prompts import PromptFormat, tokenise_messages
from grpo_dist.data.readers import json_lines
from grpo_dist.runtime.cache import fingerprint

EXAMPLES = 20_000  # demonstrations generated when nothing says how many

Pair = tuple[list[int], list[int]]
_OPTIONAL: dict[str, type] = {"system": str, "template_kwargs": dict, "chat_template": str}


def load_pairs(settings: SFTConfig, tokenizer: Any) -> list[Pair]:
    """Token ids of prompt and completion of every row of every source, in order.

    Raises ValueError for a missing file, a malformed or overlong row, and a source without rows, naming file
    and row.
    """
    return [pair for source in settings.data for pair in source_pairs(source, settings, tokenizer)]


def source_pairs(source: DemonstrationsConfig, settings: SFTConfig, tokenizer: Any) -> list[Pair]:
    """As `load_pairs`, of one source."""
    pairs = [
        _tokenise(record, tokenizer, settings.max_length, where)
        for where, record in _records(source, settings)
    ]
    if not pairs:
        raise ValueError(f"{source.path}: no rows; expected objects with `prompt` and `completion`")
    return pairs


def contents(settings: SFTConfig) -> list[Any]:
    """What decides the rows of every source: settings, and the bytes of a file."""
    return [
        [source.path if _is_made(source) else fingerprint(data_file(source)), source.examples, source.noise]
        for source in settings.data
    ]


def data_file(source: DemonstrationsConfig) -> Path:
    path = Path(source.path).expanduser()
    if not path.is_file():
        raise ValueError(f"sft.data = {source.path}: no such file; expected a .jsonl file or demo:add3")
    return path


def _is_made(source: DemonstrationsConfig) -> bool:
    return source.path.startswith("demo:")


def _records(source: DemonstrationsConfig, settings: SFTConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    examples = source.examples or settings.examples
    if _is_made(source):
        from grpo_dist.data.made_problems import demonstrations

        noise = settings.noise if source.noise is None else source.noise
        name = source.path.removeprefix("demo:")
        made = demonstrations(name, examples or EXAMPLES, noise=noise, seed=settings.seed)
        yield from ((f"{source.path}:{i}", record) for i, record in enumerate(made, 1))
        return
    for where, record in islice(json_lines(data_file(source)), examples):
        _check(record, where)
        yield where, record


def _check(record: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a row that is none of the module's four forms."""
    for key in ("completion",) if "messages" in record else ("prompt", "completion"):
        if not isinstance(record.get(key), str) or not record[key]:
            raise ValueError(
                f"{where}: `{key}` is missing or not text; expected an object with `prompt` and `completion`"
            )
    for key, kind in _OPTIONAL.items():
        if not isinstance(record.get(key), kind | None):
            raise ValueError(f"{where}: `{key}` is a {type(record[key]).__name__}; expected {kind.__name__}")
    if record.get("chat_template") not in (None, "model", "none"):
        raise ValueError(
            f"{where}: `chat_template` = {record['chat_template']!r}; expected model (the default) or none"
        )
    if "messages" in record:
        _check_messages(record, where)


def _check_messages(record: Mapping[str, Any], where: str) -> None:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(
            f"{where}: `messages` must be a list of objects with `role` and `content`, both text; the answer "
            "itself goes into `completion`"
        )
    doubled = [key for key in ("prompt", "system") if record.get(key)]
    if doubled or record.get("chat_template") == "none":
        raise ValueError(
            f"{where}: `messages` and `{(doubled or ['chat_template'])[0]}` exclude each other; say the "
            "conversation once"
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def _tokenise(record: Mapping[str, Any], tokenizer: Any, max_length: int, where: str) -> Pair:
    """The completion ends with the EOS token, which is trained too."""
    try:
        prompt = _prompt_ids(record, tokenizer)
    except ValueError as error:  # a chat template that refuses the conversation
        raise ValueError(f"{where}: {error}") from error
    completion = [
        *tokenizer(record["completion"], add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    if len(prompt) + len(completion) > max_length:
        raise ValueError(
            f"{where}: prompt and completion have {len(prompt) + len(completion)} tokens, sft.max_length = "
            f"{max_length}; raise the limit or remove the row"
        )
    return prompt, completion


def _prompt_ids(record: Mapping[str, Any], tokenizer: Any) -> list[int]:
    arguments = record.get("template_kwargs") or {}
    if "messages" in record:
        return tokenise_messages(record["messages"], tokenizer, arguments)
    templated = record.get("chat_template") != "none"
    prompt_format = PromptFormat(record.get("system"), None, templated, arguments)
    return prompt_format.token_ids(record["prompt"], tokenizer)
