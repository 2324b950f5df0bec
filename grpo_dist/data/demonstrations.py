"""Reads the sources of an `sft` or a `demonstrations` section into tokenised (prompt, completion) pairs.

A row of a data file, such as JSON Lines or Parquet, is one of

    {"prompt": ..., "completion": ...}                                  user turn and the answer to it
    {"system": "Be brief.", "prompt": ..., "completion": ...}           with a system prompt
    {"chat_template": "none", "prompt": ..., "completion": ...}         plain text without turns
    {"messages": [{"role": ..., "content": ...}], "completion": ...}    a whole conversation, no `prompt`
    {"messages": [...]}                  a conversation that ends with the assistant's message: all of the
                                         assistant's are learned, those of `tool`, `user` and `system` given
    {"conversations": [{"from": "human", "value": ...}, ...]}           the same, as ShareGPT writes it

with optional `template_kwargs` for the chat template, e.g. {"tools": [...]}, `prefill`: text between the
prompt and a `completion`, which is read and never trained, as of `data.prefill`, and `special_tokens`: "keep"
where special tokens in messages are meant as such, as in a system prompt of the configuration. A `completion`
is text, or a list of segments of which some are given, such as a tool's output: they are read and never
trained. The token that ends a sample is added behind it, see `grpo_dist.chat.ends`.

    {"prompt": "347*58=", "completion": [{"text": "```calculator\n347*58\n```\n"},
                                         {"text": "```output\n20126\n```\n", "given": true},
                                         {"text": "\\boxed{20126}"}]}

Prompts are tokenised like those of GRPO, so a model is trained on the tokens it later samples from. Further
keys are ignored.

The tokens of a demonstration's completion, of which some are given: results of tools, other speakers.

A given token is read and never trained. Every segment is tokenised by itself, as in an episode: the boundary
between what the policy samples and what an environment puts in is a boundary of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from grpo_dist.chat.ends import SampleEnds, sample_ends
from grpo_dist.chat.template import REJECTED, ControlTokens, PartsCheck, encode
from grpo_dist.config import DataSourceConfig, DemonstrationsConfig, SFTConfig
from grpo_dist.config.data import data_ending
from grpo_dist.data import repeats
from grpo_dist.data.files import file_rows
from grpo_dist.data.made_problems import demonstrations
from grpo_dist.data.order import shuffled
from grpo_dist.data.prompts import PromptFormat, render_messages
from grpo_dist.data.readers import is_conversation, read_messages
from grpo_dist.data.sources import records
from grpo_dist.environments.base import Message
from grpo_dist.errors import expanded
from grpo_dist.runtime.model_files import fingerprint
from grpo_dist.types import Group, Prompt, Rollout


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


def tokenise_segments(prompt: list[int], segments: Sequence[Segment], tokenizer: Any) -> Pair:
    """Tokenise ``segments``, without an end behind them."""
    ids = [encode(s.text, tokenizer) for s in segments]
    sampled = [not s.given for s, segment_ids in zip(segments, ids, strict=True) for _ in segment_ids]
    return Pair(prompt, [token for segment_ids in ids for token in segment_ids], sampled)


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
        text, is_given = (
            (part.get("text"), part.get("given", False)) if isinstance(part, dict) else ("", False)
        )
        if not isinstance(text, str) or not text or not isinstance(is_given, bool):
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
        earlier = messages[:count]
        return render_messages(earlier, tokenizer, template_kwargs, day=day, open_turn=open_turn, keys=keys)

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
            end = next((candidate for candidate in end_texts if follows.startswith(candidate)), "")
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


EXAMPLES = 20_000  # demonstrations generated by default

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """Sources of demonstrations for the batches, with the run's seed and its longest sequence, tokens."""

    data: tuple[DemonstrationsConfig, ...]
    seed: int
    max_length: int
    section: ClassVar[str] = "demonstrations"


Sources = SFTConfig | Stream
_LIMITS = {SFTConfig.section: "sft.max_length", Stream.section: "model.max_length"}
_KEYS_OF_A_ROW = "the row's messages and `template_kwargs`"
_OPTIONAL: dict[str, type] = {
    "system": str, "template_kwargs": dict, "chat_template": str, "special_tokens": str,
    "prefill": str,
}  # fmt: skip


def _quiet(message: str) -> None:
    """Drop a warning that is given where the rows are trained on."""


@dataclass(frozen=True, slots=True)
class Demonstration(Prompt):
    """A prompt with the completion to learn. ``uid`` is a hash of both, ``text`` the row's file and line."""

    completion_ids: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int32)
    )  # int32 [C], with its end
    sampled: np.ndarray | None = None  # bool [C], which tokens are learned; None: all
    row_uid: str = ""  # hash of the row, which depends on no tokenizer

    def to_group(self) -> Group:
        """Return the form in which a batch of the loop is made, recorded and kept: one sample of reward 1,
        without log-probs.
        """
        size = len(self.completion_ids)
        unknown, learned = np.zeros(size, np.float32), self.sampled
        versions = np.zeros(size, np.int32) if learned is None else np.where(learned, 0, -1).astype(np.int32)
        rollout = Rollout(self.uid, 0, self.completion_ids, unknown, "stop", "", versions, learned)
        return Group(self, (rollout,), np.ones(1, np.float32), {}, ("",))


def load_pairs(
    settings: SFTConfig, tokenizer: Any, *, day: date | None = None, say: Say = _quiet
) -> list[Pair]:
    """Tokenise prompt and completion of every row of every source, in order.

    Args:
        day: what chat templates write as today's date; None: today.
        say: gets warnings on special tokens that nobody asked for, with their rows.

    Raises ValueError for a missing file, a malformed or overlong row, a row of which the chat template drops
    a part, or a source without rows.
    """
    return [
        pair
        for source in settings.data
        for pair in source_pairs(source, settings, tokenizer, day=day, say=say)
    ]


def load_demonstrations(
    settings: Sources, tokenizer: Any, *, day: date | None = None, say: Say = _quiet
) -> list[Demonstration]:
    """Load the rows of `load_pairs`."""
    shown: list[Demonstration] = []
    for source in settings.data:
        made: dict[int, Demonstration] = {}  # rows that are the same share a pair
        for where, record, pair in _rows(source, settings, tokenizer, day, say):
            if id(pair) not in made:
                made[id(pair)] = _demonstration(source.path, where, record, pair)
            shown.append(replace(made[id(pair)], text=where))
    return shown


def count_rows(settings: SFTConfig) -> int:
    """Return how many rows all sources have, without tokenising them. Raises ValueError as `load_pairs`."""
    return sum(1 for source in settings.data for _ in _records(source, settings))


def count_held_out(settings: SFTConfig, rows: int) -> int:
    """Return how many of the ``rows`` are held out: at least one where `sft.validation_share` is above 0.

    Raises ValueError where none would be left to train on.
    """
    share = settings.validation_share
    count = max(1, round(share * rows)) if share else 0
    if count >= rows:
        raise ValueError(
            f"sft.validation_share = {share:g} holds out {count} of {rows} demonstrations; lower it, or add "
            "data"
        )
    return count


def split(found: Sequence[T], settings: SFTConfig) -> tuple[list[T], list[T]]:
    """Return what is trained on and what is held out, drawn by `sft.seed`, each in the order of ``found``."""
    chosen = set(shuffled(len(found), settings.seed, 0)[: count_held_out(settings, len(found))].tolist())
    held_out = [row for i, row in enumerate(found) if i in chosen]
    return [row for i, row in enumerate(found) if i not in chosen], held_out


def source_pairs(
    source: DemonstrationsConfig,
    settings: SFTConfig,
    tokenizer: Any,
    *,
    day: date | None = None,
    say: Say = _quiet,
) -> list[Pair]:
    """Load one source; see `load_pairs`."""
    return [pair for _, _, pair in _rows(source, settings, tokenizer, day, say)]


def _rows(
    source: DemonstrationsConfig, settings: Sources, tokenizer: Any, day: date | None, say: Say
) -> list[tuple[str, Mapping[str, Any], Pair]]:
    """Return file and line of each row, the row, and its tokens."""
    tokeniser = _Tokeniser(tokenizer, settings, day)
    rows = [(where, record, tokeniser.pair(record, where)) for where, record in _records(source, settings)]
    if not rows:
        raise ValueError(f"{source.path}: no rows; expected objects with `prompt` and `completion`")
    for warning in tokeniser.warnings(len(rows)):
        say(f"{source.path}: {warning}")
    return rows


def _demonstration(source: str, where: str, record: Mapping[str, Any], pair: Pair) -> Demonstration:
    asked, answered = np.array(pair.prompt, np.int32), np.array(pair.completion, np.int32)
    sampled = None if all(pair.sampled) else np.array(pair.sampled, bool)
    mask = b"" if sampled is None else b"|" + sampled.tobytes()
    digest = blake2b(asked.tobytes() + b"|" + answered.tobytes() + mask, digest_size=8).hexdigest()
    row = blake2b(json.dumps(record, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return Demonstration(
        digest, asked, "", source, where, completion_ids=answered, sampled=sampled, row_uid=row
    )


def contents(settings: SFTConfig) -> list[Any]:
    """Return all that determines the rows: settings, and a fingerprint of each file."""
    return [
        [
            source.path if _is_made(source) else fingerprint(data_file(source, settings)),
            source.examples,
            source.noise,
        ]
        for source in settings.data
    ]


def data_file(source: DemonstrationsConfig, settings: Sources) -> Path:
    path = expanded(source.path)
    if not path.exists():
        raise ValueError(
            f"{settings.section}.data = {source.path}: no such file; expected a .jsonl file or another data "
            "file, a directory of these, demo:add3 or demo:products"
        )
    return path


def _is_made(source: DemonstrationsConfig) -> bool:
    return source.path.startswith("demo:")


def _records(source: DemonstrationsConfig, settings: Sources) -> Iterator[tuple[str, Mapping[str, Any]]]:
    examples = source.examples
    if _is_made(source):
        name = source.path.removeprefix("demo:")
        generated = demonstrations(name, examples or EXAMPLES, noise=source.noise, seed=settings.seed)
        yield from ((f"{source.path}:{i}", record) for i, record in enumerate(generated, 1))
        return
    path = data_file(source, settings)
    is_listed = path.is_dir() or data_ending(path)  # any other file is read as JSON Lines
    rows = records(DataSourceConfig(path=str(path))) if is_listed else file_rows(path)
    yield from ((where, _checked(record, where)) for where, record in islice(rows, examples))


def _checked(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a row without keys that are None, which a table has. Raises ValueError for one that has none of
    the module's forms.
    """
    record = {key: value for key, value in record.items() if value is not None}
    if "messages" not in record and is_conversation(record.get("conversations")):
        record["messages"] = record.pop("conversations")
    if "messages" not in record and (not isinstance(record.get("prompt"), str) or not record["prompt"]):
        raise ValueError(
            f"{where}: `prompt` is missing or not text; expected an object with `prompt` and `completion`, "
            "or with `messages`"
        )
    try:
        if "messages" in record:
            record["messages"] = read_messages(record["messages"], "messages")
            if "completion" not in record:
                check_answered(record["messages"])
        if "messages" not in record or "completion" in record:
            read_completion(record.get("completion"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    for key, kind in _OPTIONAL.items():
        if not isinstance(record.get(key), kind | None):
            raise ValueError(f"{where}: `{key}` is a {type(record[key]).__name__}; expected {kind.__name__}")
    if record.get("prefill") and "completion" not in record:
        raise ValueError(
            f"{where}: `prefill` without a `completion` that goes on behind it; write the last answer there"
        )
    if record.get("chat_template") not in (None, "model", "none"):
        raise ValueError(
            f"{where}: `chat_template` = {record['chat_template']!r}; expected model (the default) or none"
        )
    if record.get("special_tokens") not in (None, "text", "keep"):
        raise ValueError(
            f"{where}: `special_tokens` = {record['special_tokens']!r}; expected text (the default) or keep"
        )
    doubled = [key for key in ("prompt", "system") if record.get(key)]
    if "messages" in record and (doubled or record.get("chat_template") == "none"):
        raise ValueError(
            f"{where}: `messages` and `{(doubled or ['chat_template'])[0]}` exclude each other; give "
            "the conversation once"
        )
    return record


class _Tokeniser:
    """Makes pairs of the rows of one source.

    A completion ends with the token that ends a sample, which is trained, too: the chat template's, or for
    plain text the tokenizer's EOS.
    """

    def __init__(self, tokenizer: Any, settings: Sources, day: date | None) -> None:
        self._tokenizer, self._settings, self._day = tokenizer, settings, day
        self._controls, self._parts = ControlTokens(tokenizer), PartsCheck(tokenizer, day=day)
        self._ends: dict[bool, SampleEnds] = {}  # by whether prompts are rendered
        self._written: list[str] = []  # rows with control tokens in the text of a prompt
        self._passed: list[str] = []  # rows that go on behind an end
        self._pairs: dict[bytes, tuple[Pair, list[list[str]]]] = {}  # and which lists have the row

    def pair(self, record: Mapping[str, Any], where: str) -> Pair:
        """Tokenise one row. Raises ValueError that names it for one that cannot be used."""
        content = repeats.content(record)
        if content is None or content not in self._pairs:
            pair = self._bounded_pair(record, where)
            if content is not None and len(self._pairs) < repeats.REMEMBERED:
                lists = [rows for rows in (self._written, self._passed) if rows[-1:] == [where]]
                self._pairs[content] = pair, lists
            return pair
        pair, lists = self._pairs[content]
        for rows in lists:
            rows.append(where)
        return pair

    def _bounded_pair(self, record: Mapping[str, Any], where: str) -> Pair:
        try:
            pair = self._pair(record, where)
        except ValueError as error:  # the chat template rejects the conversation
            raise ValueError(f"{where}: {error}") from error
        if len(pair) > self._settings.max_length:
            raise ValueError(
                f"{where}: prompt and completion have {len(pair)} tokens, "
                f"{_LIMITS[self._settings.section]} = {self._settings.max_length}; raise the limit or "
                "remove the row"
            )
        return pair

    def warnings(self, rows: int) -> Iterator[str]:
        """Yield what to tell the user of ``rows`` rows."""
        if self._written:
            yield (
                f"warning: {len(self._written)} of {rows} rows have special tokens of the tokenizer in the "
                f"text of a message, e.g. {self._written[0]}; each is broken by a space and stays text"
            )
        if self._passed:
            yield (
                f"warning: the completions of {len(self._passed)} of {rows} rows go on behind a token that "
                f"ends a sample, e.g. {self._passed[0]}; remove it, or mark what follows as given"
            )

    def _pair(self, record: Mapping[str, Any], where: str) -> Pair:
        templated = record.get("chat_template") != "none"
        ends, arguments = self._ends_of(templated), record.get("template_kwargs") or {}
        if templated:
            record = self._break_controls(record, where)
            self._check_parts(record, arguments)
        if "completion" not in record:
            text, segments = conversation(
                record["messages"], self._tokenizer, arguments, ends, day=self._day, keys=_KEYS_OF_A_ROW
            )
            return tokenise_segments(encode(text, self._tokenizer), segments, self._tokenizer)
        prompt = self._prompt_ids(record, arguments, templated)
        pair = tokenise_segments(prompt, read_completion(record["completion"]), self._tokenizer)
        completion_ids = ends.strip(pair.completion)  # the file may have it
        learned = pair.sampled[: len(completion_ids)]
        if any(
            t in ends.ids and a and b
            for t, a, b in zip(completion_ids, learned, [*learned[1:], True], strict=True)
        ):
            self._passed.append(where)
        assert ends.learned is not None, "`SampleEnds.check` has passed"
        return Pair(pair.prompt, [*completion_ids, ends.learned], [*learned, True])

    def _ends_of(self, templated: bool) -> SampleEnds:
        if templated not in self._ends:
            self._ends[templated] = sample_ends(self._tokenizer, templated=templated, day=self._day)
            self._ends[templated].check()
        return self._ends[templated]

    def _break_controls(self, record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        texts = {key: record[key] for key in ("prompt", "system", "messages") if record.get(key)}
        if record.get("special_tokens") == "keep" or not self._controls.find(str(texts)):
            return record
        self._written.append(where)
        return {**record, **self._controls.as_text(texts)}

    def _check_parts(self, record: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        messages, open_turn = record.get("messages"), "completion" in record
        if messages is None:
            messages = PromptFormat(record.get("system")).messages(record["prompt"])
        try:
            dropped = self._parts.dropped(messages, arguments, open_turn=open_turn)
        except REJECTED:  # so it does the row itself, which is reported with the row's own text
            return
        if dropped:
            raise ValueError(
                f"the model's chat template does not show {dropped}: the model would never read it; remove "
                "it from the row, or use a model whose chat template has it"
            )

    def _prompt_ids(
        self, record: Mapping[str, Any], arguments: Mapping[str, Any], templated: bool
    ) -> list[int]:
        prompt_format = PromptFormat(
            record.get("system"), None, templated, arguments, _KEYS_OF_A_ROW, day=self._day,
            prefill=record.get("prefill") or "",
        )  # fmt: skip
        asked = record["messages"] if "messages" in record else record["prompt"]
        return prompt_format.encode([prompt_format.text(asked, self._tokenizer)], self._tokenizer)[0]
