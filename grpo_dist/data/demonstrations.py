"""Reads the sources of an `sft` or a `demonstrations` section into tokenised (prompt, completion) pairs.

A row of a data file, such as JSON Lines or Parquet, is one of

    {"prompt": ..., "completion": ...}                                  user turn and the answer to it
    {"system": "Be brief.", "prompt": ..., "completion": ...}           with a system prompt
    {"chat_template": "none", "prompt": ..., "completion": ...}         plain text without turns
    {"messages": [{"role": ..., "content": ...}], "completion": ...}    a whole conversation, no `prompt`
    {"messages": [...]}                  a conversation that ends with the assistant's message: messages of
                                         the assistant are learned, `tool`, `user` and `system` are given
    {"conversations": [{"from": "human", "value": ...}, ...]}           the same in ShareGPT's format
    {"prompt": [{"role": ..., ...}, ...], "completion": [{"role": ..., ...}, ...]}       the same in TRL's:
                                         only the assistant's messages in `completion` are learned

with a system prompt in `system`, and optional keys: `template_kwargs`, or TRL's `chat_template_kwargs`, for
the chat template, e.g. {"enable_thinking": false}; `tools`, a list of JSON schemas or its JSON text;
`prefill`: untrained text before a `completion`, like `data.prefill`; and `special_tokens`: "keep" where
messages contain intended special tokens, as a configured system prompt may. A `completion` is text, or a list
of segments. Given segments, such as a tool's output, are read and never trained. The token that ends a sample
is appended, see `grpo_dist.chat.ends`.

    {"prompt": "347*58=", "completion": [{"text": "```calculator\n347*58\n```\n"},
                                         {"text": "```output\n20126\n```\n", "given": true},
                                         {"text": "\\boxed{20126}"}]}

Prompts are tokenised as in GRPO, so a model is trained on the tokens it later samples from. Other keys are
ignored.

Every segment is tokenised separately, as in an episode: no token spans the boundary between sampled and given
text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import islice, repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from grpo_dist.chat.batches import BatchEncoder, as_bytes, tokenizer_state
from grpo_dist.chat.ends import SampleEnds, named_ends, sample_ends
from grpo_dist.chat.template import ControlTokens, PartsCheck, added_ids
from grpo_dist.config import DataSourceConfig, DemonstrationsConfig, SFTConfig
from grpo_dist.config.data import data_ending
from grpo_dist.data.columns import (
    STORED_FROM,
    Column,
    Computed,
    Numbers,
    Repeated,
    Table,
    Texts,
    TokenIds,
    files_digest,
    files_state,
    hex_texts,
    load,
    record_hash,
    save,
    store_key,
)
from grpo_dist.data.files import OtherValues, file_rows, text_columns
from grpo_dist.data.made_problems import demonstrations
from grpo_dist.data.order import shuffled
from grpo_dist.data.prompts import PromptFormat, render_messages
from grpo_dist.data.readers import (
    LARGE,
    Locations,
    drop_none,
    hash_of,
    hashes_of,
    is_conversation,
    join_location,
    read_messages,
)
from grpo_dist.data.sources import records, source_files
from grpo_dist.environments.base import Message
from grpo_dist.errors import expanded
from grpo_dist.runtime.model_files import fingerprint
from grpo_dist.types import Group, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a completion: text that is learned, or ``given``."""

    text: str
    given: bool = False


def read_completion(completion: Any) -> list[Segment]:
    """Read the key `completion`: text, or a list of {"text", "given"}. Raises ValueError for other values."""
    if isinstance(completion, str) and completion:
        return [Segment(completion)]
    segments = []
    if not isinstance(completion, list) or not completion:
        raise ValueError(
            "`completion` is missing or neither text nor a list of segments; expected an object with "
            "`prompt` and `completion`"
        )
    for number, part in enumerate(completion):
        segment = part if isinstance(part, dict) else {}
        text, is_given = segment.get("text"), segment.get("given", False)
        if not isinstance(text, str) or not text or not isinstance(is_given, bool):
            raise ValueError(
                f'`completion`: segment {number} must be an object like {{"text": "...", "given": true}}, '
                "where `text` is not empty; `given` marks output of a tool or an environment"
            )
        segments.append(Segment(text, is_given))
    if segments[-1].given:
        raise ValueError(
            "`completion`: the last segment is given; expected the answer, which the model learns, at the end"
        )
    return segments


def check_answered(messages: Sequence[Message], key: str) -> None:
    """Raise ValueError for a conversation that does not end with an answer of the assistant. ``key``: of the
    row.
    """
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"`{key}` must end with the assistant's message after others; the "
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
    first: int = 0,
) -> tuple[str, list[Segment]]:
    """Return the text before the assistant's first message, and the segments after it: the assistant's
    messages, each with its end token, and the given text of the chat template between them.

    ``day``: see `render`. ``first``: number of the first message of these; the text before it has earlier
    ones. Raises ValueError for a template that rewrites earlier messages, ends a message with another token,
    or rejects the messages.
    """

    def rendered(count: int, *, open_turn: bool) -> str:
        earlier = messages[:count]
        return render_messages(earlier, tokenizer, template_kwargs, day=day, open_turn=open_turn, keys=keys)

    end_texts = [tokenizer.decode([token]) for token in sorted(ends.ids, key=lambda t: t != ends.learned)]

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    prompt = prefix = rendered(answers[0], open_turn=True)
    segments: list[Segment] = []
    for index in answers:
        before, after = rendered(index, open_turn=True), rendered(index + 1, open_turn=False)
        if not before.startswith(prefix) or not after.startswith(before):
            raise ValueError(
                f"the chat template renders what comes before message {index} otherwise once that message "
                "follows; write a row for each answer, with the earlier messages in `messages` and the "
                "answer in `completion`"
            )
        text, end = _ended(after[len(before) :], end_texts)
        if not end:  # in some templates only the start of the next message ends one
            further = messages[index + 1 :]
            follows = rendered(index + 2, open_turn=False)[len(after) :] if further else end_texts[0]
            end = next((candidate for candidate in end_texts if follows.startswith(candidate)), "")
        if not end:
            raise ValueError(
                f"the chat template does not end the assistant's message {index} with a token that ends a "
                f"sample ({', '.join(map(repr, end_texts))}); give the answer in `completion`"
            )
        if before != prefix:
            segments.append(Segment(before[len(prefix) :], given=True))
        segments.append(Segment(text + end))
        prefix = before + text + end
    return prompt, segments


def _ended(rendered: str, end_texts: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first end token in ``rendered``, and that token; "" if there is none."""
    places = [(rendered.find(end), end) for end in end_texts if end in rendered]
    place, end = min(places, default=(len(rendered), ""))
    return rendered[:place], end


EXAMPLES = 20_000  # demonstrations generated by default

_BATCH = 1000  # rows tokenised at once
_ID_BYTES = 4  # bytes per token id, int32
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """Sources of demonstrations for training batches. ``max_length``: tokens of prompt and completion."""

    data: tuple[DemonstrationsConfig, ...]
    seed: int
    max_length: int
    section: ClassVar[str] = "demonstrations"


Sources = SFTConfig | Stream
_dumped = json.encoder.encode_basestring_ascii  # encodes text as `json.dumps` does
_DUMPED = '{{"completion": {}, "prompt": {}}}'  # `json.dumps` of a row with only these keys
_LIMITS = {SFTConfig.section: "sft.max_length", Stream.section: "model.max_length"}
_KEYS_OF_A_ROW = "the row's messages and `template_kwargs`"
_GIVEN = "given_messages"  # key of a checked row: how many messages precede those of its completion
# Optional keys of a row: their type, or their values, the default first.
_OPTIONAL: dict[str, type | tuple[str, str]] = {
    "system": str, "template_kwargs": dict, "chat_template_kwargs": dict, "prefill": str,
    "chat_template": ("model", "none"), "special_tokens": ("text", "keep"),
}  # fmt: skip


def _quiet(message: str) -> None:
    """Drop a warning: it is reported when the rows are trained on."""


@dataclass(frozen=True, slots=True)
class Demonstration(Prompt):
    """A prompt with the completion to learn. ``uid``: hash of both; ``text``: file and line of the row."""

    completion_ids: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int32)
    )  # int32 [C], end token included
    sampled: np.ndarray | None = None  # bool [C], which tokens are learned; None: all
    row_uid: str = ""  # hash of the row, independent of the tokenizer

    def to_group(self) -> Group:
        """Return a group of one sample with reward 1 and zero log-probs, which training batches need."""
        size = len(self.completion_ids)
        logprobs, learned = np.zeros(size, np.float32), self.sampled
        versions = np.zeros(size, np.int32) if learned is None else np.where(learned, 0, -1).astype(np.int32)
        rollout = Rollout(self.uid, 0, self.completion_ids, logprobs, "stop", "", versions, learned)
        return Group(self, (rollout,), np.ones(1, np.float32), {}, ("",))


@dataclass(eq=False)
class RowTokens(Table):
    """Tokens of rows.

    Attributes:
        learned: uint8, 1 for each learned token of a completion; empty: all tokens are learned.
        uids, row_uids: uint64.
    """

    prompts: TokenIds
    completions: TokenIds
    learned: Texts
    uids: np.ndarray
    row_uids: np.ndarray


@dataclass(eq=False)
class DemonstrationTable(RowTokens, Computed[Demonstration]):
    """Demonstrations as columns; access builds a `Demonstration`. Equal rows share their tokens.

    Attributes:
        sources, files, lines: source, and location, of each row.
        key: cache key of the rows, see `columns.store_key`; "": unknown.
    """

    sources: Repeated[str]
    files: Repeated[str]
    lines: np.ndarray
    key: str = ""

    @classmethod
    def from_stored(
        cls, arrays: Mapping[str, np.ndarray], source: str, files: Sequence[str], key: str
    ) -> DemonstrationTable:
        """Return the rows of a source. ``arrays``: the `RowTokens` of its distinct rows; and for each row
        `codes` (the number of its distinct row), `lines` and `files`.
        """
        tokens = RowTokens.from_store(arrays, {}).select(arrays["codes"])
        sources = Repeated([source], np.zeros(len(tokens.uids), np.int32))
        return cls(
            **vars(tokens),
            sources=sources,
            files=Repeated(files, arrays["files"]),
            lines=arrays["lines"],
            key=key,
        )

    def select(self, numbers: np.ndarray) -> Self:
        return replace(super().select(numbers), key="")

    def __len__(self) -> int:
        return len(self.uids)

    def _get(self, number: int) -> Demonstration:
        begin, end = int(self.learned.begins[number]), int(self.learned.ends[number])
        learned = self.learned.values[begin:end].astype(bool) if end > begin else None
        uid, row_uid = f"{self.uids[number]:016x}", f"{self.row_uids[number]:016x}"
        where = join_location(self.files[number], self.lines[number])
        return Demonstration(
            uid, self.prompts[number], "", self.sources[number], where,
            completion_ids=self.completions[number], sampled=learned, row_uid=row_uid,
        )  # fmt: skip

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of prompt plus completion for each row, int64."""
        return self.prompts.lengths + self.completions.lengths

    def column(self, name: str) -> Iterable[Any]:
        """Return an attribute of all demonstrations."""
        if name in ("uid", "row_uid"):
            return hex_texts(self.uids if name == "uid" else self.row_uids)
        if name in ("token_ids", "source"):
            return self.prompts if name == "token_ids" else self.sources
        if name in ("columns", "teacher_ids"):
            return repeat({}, len(self))
        return map(attrgetter(name), self)


def load_demonstrations(
    settings: Sources, tokenizer: Any, *, day: date | None = None, say: Say = _quiet
) -> DemonstrationTable:
    """Tokenise prompt and completion of every row of every source, in order.

    Args:
        day: today's date for chat templates; None: today.
        say: receives warnings about unexpected special tokens, with their rows.

    Raises ValueError for a missing file, a malformed or overlong row, a chat template that drops a part of a
    row, or a source without rows.
    """
    first, *others = [load_source(source, settings, tokenizer, day=day, say=say) for source in settings.data]
    table = first.join(*others)
    return replace(table, key="") if others else table


def count_rows(settings: SFTConfig) -> int:
    """Count the rows of all sources without tokenising them. Raises ValueError as `load_demonstrations`."""
    return sum(_count(source, settings) for source in settings.data)


def _count(source: DemonstrationsConfig, settings: SFTConfig) -> int:
    try:
        path = None if _is_made(source) else data_file(source, settings)
        return sum(len(prompts) for _, prompts, _ in _plain_parts(path, source))
    except OtherValues:
        return sum(1 for _ in _records(source, settings))


def count_held_out(settings: SFTConfig, rows: int) -> int:
    """Return how many of the ``rows`` are held out: at least one where `sft.validation_share` is above 0.

    Raises ValueError where no row would remain for training.
    """
    share = settings.validation_share
    count = max(1, round(share * rows)) if share else 0
    if count >= rows:
        raise ValueError(
            f"sft.validation_share = {share:g} holds out {count} of {rows} demonstrations; lower it, or add "
            "data"
        )
    return count


def split(rows: DemonstrationTable, settings: SFTConfig) -> tuple[DemonstrationTable, DemonstrationTable]:
    """Split ``rows`` into training and held-out rows, drawn by `sft.seed`, each in the order of ``rows``."""
    is_held_out = np.zeros(len(rows), bool)
    is_held_out[shuffled(len(rows), settings.seed, 0)[: count_held_out(settings, len(rows))]] = True
    return rows.select(np.flatnonzero(~is_held_out)), rows.select(np.flatnonzero(is_held_out))


def load_source(
    source: DemonstrationsConfig,
    settings: Sources,
    tokenizer: Any,
    *,
    day: date | None = None,
    say: Say = _quiet,
) -> DemonstrationTable:
    """Load one source; see `load_demonstrations`. Large sources are cached for the next start."""
    path = None if _is_made(source) else data_file(source, settings)
    paths = [] if path is None else [path] if path.is_file() else source_files(_as_source(path))
    state = files_state(paths)
    key = _stored_name(source, settings, tokenizer, day, paths)
    if key and (stored := load(key)) is not None:
        arrays, (files, warnings) = stored
    else:
        tokeniser, writer = _Tokeniser(tokenizer, settings, day), _Writer()
        try:
            _read_plain(path, source, tokeniser, writer)
        except OtherValues:
            tokeniser, writer = _Tokeniser(tokenizer, settings, day), _Writer()
            _read_records(_records(source, settings), tokeniser, writer)
        if not writer.numbers.count:
            raise ValueError(f"{source.path}: no rows; expected objects with `prompt` and `completion`")
        arrays, files = writer.arrays()
        warnings = list(tokeniser.warnings(np.bincount(arrays["codes"])))
        if len(arrays["codes"]) < STORED_FROM or files_state(paths) != state:
            key = ""
        if key:
            save(key, arrays, [files, warnings])
    for warning in warnings:
        say(f"{source.path}: {warning}")
    return DemonstrationTable.from_stored(arrays, source.path, files, key)


def _plain_parts(
    path: Path | None, source: DemonstrationsConfig
) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield, for each part of a large file, the line of its first row, its prompts and its completions.
    Raises OtherValues for other files, and for rows with other keys or values that are not text.
    """
    if path is None or not path.is_file() or path.stat().st_size <= LARGE:
        raise OtherValues
    left = source.examples
    for first, (prompts, completions) in text_columns(path, str(path), ("prompt", "completion"), alone=True):
        if left is not None:
            prompts, completions = prompts[:left], completions[:left]
            left -= len(prompts)
        if not all(prompts) or not all(completions):
            raise OtherValues
        yield first, prompts, completions
        if left == 0:
            break


def _read_plain(
    path: Path | None, source: DemonstrationsConfig, tokeniser: _Tokeniser, writer: _Writer
) -> None:
    """Read rows as `_read_records` does, without an object per row. Raises OtherValues as `_plain_parts`."""
    for first, prompts, completions in _plain_parts(path, source):
        dumped = map(_DUMPED.format, map(_dumped, completions), map(_dumped, prompts))
        row_uids = hashes_of(map(str.encode, dumped))
        before = writer.numbers.count
        new = writer.numbers.extend(row_uids)
        new_prompts = [prompts[row] for row in new]
        answers = [completions[row] for row in new]
        tokens = tokeniser.encode_plain(new_prompts, answers) if new else None
        if tokens is not None:
            writer.extend_tokens(row_uids[new], *tokens)
        else:
            records = [{"prompt": a, "completion": b} for a, b in zip(new_prompts, answers, strict=True)]
            begun = [
                tokeniser.begin(record, f"{path}:{first + row}", before + number)
                for number, (record, row) in enumerate(zip(records, new, strict=True))
            ]
            for row_tokens in tokeniser.finish(begun):
                writer.append_tokens(*row_tokens)
        writer.locations.extend(str(path), range(first, first + len(prompts)))


def _read_records(
    rows: Iterator[tuple[str, Mapping[str, Any]]], tokeniser: _Tokeniser, writer: _Writer
) -> None:
    numbers = writer.numbers
    failure: ValueError | None = None
    while failure is None:
        begun: list[_Begun] = []
        before = len(numbers.codes)
        try:
            for where, record in islice(rows, _BATCH):
                if numbers.add(record_hash(record) if numbers.finds_repeats else None):
                    begun.append(tokeniser.begin(record, where, numbers.count - 1))
                writer.locations.append(where)
        except ValueError as error:  # an earlier row may fail in `finish`, and comes first
            failure = error
        for tokens in tokeniser.finish(begun):
            writer.append_tokens(*tokens)
        if len(numbers.codes) == before:
            break
    if failure is not None:
        raise failure


def _stored_name(
    source: DemonstrationsConfig, settings: Sources, tokenizer: Any, day: date | None, files: Sequence[Path]
) -> str:
    """Return the cache key of the tokens of a source in ``files``; "": unknown, or the source is small."""
    is_small = source.examples is not None and source.examples < STORED_FROM
    state = None if not files or is_small else tokenizer_state(tokenizer, day)
    if state is None:
        return ""
    limits = [settings.section, settings.max_length]
    read_by = [state, named_ends(tokenizer)]  # files beside the tokenizer's files may name ends, too
    inputs = [source.model_dump(mode="json"), limits, read_by, files_digest(files), list(map(str, files))]
    return store_key(["demonstrations", inputs])


class _Writer:
    """Collects the rows of a source as columns. ``numbers``: the distinct row of each row."""

    def __init__(self) -> None:
        self._prompts, self._completions, self._learned = Column(), Column(), Column()
        self._uids, self._row_uids = array("Q"), array("Q")
        self.numbers, self.locations = Numbers(), Locations()

    def extend_tokens(self, row_uids: np.ndarray, prompts: TokenIds, completions: TokenIds) -> None:
        """Append distinct rows whose whole completions are learned."""
        contents = zip(*(map(np.ndarray.tobytes, column) for column in (prompts, completions)), strict=True)
        self._uids.frombytes(hashes_of(map(b"|".join, contents)).tobytes())
        self._row_uids.frombytes(row_uids.tobytes())
        for column, tokens in ((self._prompts, prompts), (self._completions, completions)):
            values, ends = tokens.packed()
            column.extend_packed(values.data, ends * values.itemsize)
        self._learned.extend([b""] * len(row_uids))

    def append_tokens(
        self, record: Mapping[str, Any], prompt: bytes, completion: bytes, learned: bytes
    ) -> None:
        """Append a distinct row. ``learned``: a byte per token, or empty."""
        self._prompts.append(prompt)
        self._completions.append(completion)
        self._learned.append(learned)
        mask = b"|" + learned if learned else b""
        self._uids.append(hash_of(prompt + b"|" + completion + mask))
        self._row_uids.append(hash_of(json.dumps(record, sort_keys=True, default=str).encode()))

    def arrays(self) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return the ``arrays`` and ``files`` of `DemonstrationTable.from_stored`."""
        tokens = RowTokens(
            self._prompts.token_ids(),
            self._completions.token_ids(),
            self._learned.texts(),
            np.array(self._uids),
            np.array(self._row_uids),
        )
        files, lines = self.locations.columns()
        rows = {"codes": np.array(self.numbers.codes), "lines": lines, "files": files.codes}
        return tokens.stored()[0] | rows, list(files.distinct)


def contents(settings: SFTConfig) -> list[Any]:
    """Return the inputs that determine the rows: settings, and a fingerprint of each file."""
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
    rows = records(_as_source(path)) if is_listed else file_rows(path)
    yield from ((where, _checked(record, where)) for where, record in islice(rows, examples))


def _as_source(path: Path) -> DataSourceConfig:
    return DataSourceConfig(path=str(path))


def _checked(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a row without keys that are None, as tables have them. Raises ValueError for a row in none of
    the forms above.
    """
    record = {key: value for key, value in record.items() if value is not None and key != _GIVEN}
    listed = ["messages"] if "messages" in record else []
    listed += [key for key in ("conversations", "prompt") if is_conversation(record.get(key))]
    name = listed[0] if listed else ""
    if not name and (not isinstance(record.get("prompt"), str) or not record["prompt"]):
        raise ValueError(
            f"{where}: `prompt` is missing or not text; expected an object with `prompt` and `completion`, "
            "or with `messages`"
        )
    for key, expected in _OPTIONAL.items():
        value = record.get(key)
        if isinstance(expected, type) and not isinstance(value, expected | None):
            raise ValueError(f"{where}: `{key}` is a {type(value).__name__}; expected {expected.__name__}")
        if isinstance(expected, tuple) and value is not None and value not in expected:
            default, other = expected
            raise ValueError(f"{where}: `{key}` = {value!r}; expected {default} (the default) or {other}")
    try:
        if name:
            _read_conversation(record, name)
        if not name or "completion" in record:
            record["completion"] = drop_none(record.get("completion"))
            read_completion(record["completion"])
        arguments = _read_tools(record.pop("tools", None))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    arguments |= drop_none(record.pop("chat_template_kwargs", {}) | record.get("template_kwargs", {}))
    if arguments or "template_kwargs" in record:
        record["template_kwargs"] = arguments
    if record.get("prefill") and "completion" not in record:
        raise ValueError(
            f"{where}: `prefill` without a `completion` that continues it; write the last answer there"
        )
    doubled = [key for key in ("prompt", "system") if record.get(key)]
    if "messages" in record and (doubled or record.get("chat_template") == "none"):
        raise ValueError(
            f"{where}: `{name}` and `{(doubled or ['chat_template'])[0]}` exclude each other; give "
            "the conversation once"
        )
    return record


def _read_conversation(record: dict[str, Any], name: str) -> None:
    """Replace the messages in the key ``name``, the row's system prompt and messages of its completion by
    `messages`.
    """
    messages = read_messages(record.pop(name), name)
    if record.get("system") and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": record.pop("system")}, *messages]
    if is_conversation(record.get("completion")):
        record[_GIVEN], name = len(messages), "completion"
        messages += read_messages(record.pop("completion"), "completion")
    if "completion" not in record:
        check_answered(messages, name)
        record.pop("prompt", None)  # in UltraChat it repeats the first message
    record["messages"] = messages


def _read_tools(tools: Any) -> dict[str, Any]:
    """Return the key `tools` of a row, a list or its JSON text, as arguments of the chat template."""
    schemas = drop_none(tools)
    if isinstance(tools, str):
        with suppress(ValueError):
            schemas = json.loads(tools or "[]")
    if not isinstance(schemas, list | None) or not all(isinstance(each, Mapping) for each in schemas or ()):
        raise ValueError(
            f"`tools` = {str(tools)[:60]!r}; expected a list of JSON schemas, or its JSON text; rename the "
            "column if it is something else"
        )
    return {"tools": schemas} if schemas else {}


class _Begun(NamedTuple):
    """A row to tokenise. ``texts``: the prompt, then each segment."""

    record: Mapping[str, Any]
    where: str
    number: int
    texts: list[str]
    given: list[bool]  # whether each segment is given
    ends: SampleEnds | None  # end tokens of the completion; None: the segments contain them


class _Tokeniser:
    """Tokenises the rows of one source.

    A completion ends with the token that ends a sample, which is trained, too: the chat template's token, or
    EOS for plain text.
    """

    def __init__(self, tokenizer: Any, settings: Sources, day: date | None) -> None:
        self._tokenizer, self._settings, self._day = tokenizer, settings, day
        self._encoder, self._controls = BatchEncoder(tokenizer), ControlTokens(tokenizer)
        self._parts = PartsCheck(tokenizer, day=day)
        self._ends: dict[bool, SampleEnds] = {}  # by whether prompts are rendered
        # (number, location) of distinct rows: with control tokens in a prompt, with text after an end token.
        self._written: list[tuple[int, str]] = []
        self._passed: list[tuple[int, str]] = []

    def begin(self, record: Mapping[str, Any], where: str, number: int) -> _Begun:
        """Render a row. Raises ValueError, which names the row, if it cannot be used."""
        try:
            templated = record.get("chat_template") != "none"
            ends, arguments = self._ends_of(templated), record.get("template_kwargs") or {}
            row = record
            if templated:
                row = self._break_controls(record, where, number)
                self._check_parts(row, arguments)
            if "completion" not in row:
                prompt, segments = conversation(
                    row["messages"], self._tokenizer, arguments, ends,
                    day=self._day, keys=_KEYS_OF_A_ROW, first=row.get(_GIVEN, 0),
                )  # fmt: skip
            else:
                prompt, segments = self._prompt(row, arguments, templated), read_completion(row["completion"])
        except ValueError as error:  # the chat template rejects the conversation
            raise ValueError(f"{where}: {error}") from error
        texts, given = [prompt, *(s.text for s in segments)], [s.given for s in segments]
        return _Begun(record, where, number, texts, given, ends if "completion" in row else None)

    def encode_plain(
        self, prompts: Sequence[str], answers: Sequence[str]
    ) -> tuple[TokenIds, TokenIds] | None:
        """Return the tokens of rows with only a text prompt and completion, as `begin` and `finish` do; None
        where these may warn about a row or refuse it.
        """
        if self._controls.any_in("\0".join(prompts)):
            return None
        prompt_format = PromptFormat(keys=_KEYS_OF_A_ROW, day=self._day)
        texts = prompt_format.texts(prompts, self._tokenizer)
        try:
            ends = self._ends_of(True)
            self._check_parts({"prompt": prompts[0], "completion": answers[0]}, {})
        except ValueError:
            return None
        if not self._parts.passed:  # the template depends on the text, so each row needs a check
            return None
        encoded = TokenIds.from_ends(*self._encoder.encode(texts))
        ids, id_ends = self._encoder.encode(answers)
        if len(texts) < len(prompts) or ends.learned is None or np.isin(ids, list(ends.ids)).any():
            return None
        ended = TokenIds.from_ends(
            np.insert(ids, id_ends, ends.learned), id_ends + np.arange(1, len(id_ends) + 1)
        )
        is_long = encoded.lengths + ended.lengths > self._settings.max_length
        return None if is_long.any() else (encoded, ended)

    def finish(self, rows: Sequence[_Begun]) -> Iterator[tuple[Mapping[str, Any], bytes, bytes, bytes]]:
        """Yield each row, its prompt and completion, int32, and which tokens are learned: a byte per token,
        or empty where all are. Raises ValueError for a row that is too long.
        """
        ids, ends = self._encoder.encode([text for row in rows for text in row.texts])
        all_ids = (part.tobytes() for part in np.split(ids, ends[:-1]))
        for row in rows:
            prompt, *segments = islice(all_ids, len(row.texts))
            if row.record.get("chat_template") == "none":
                front = as_bytes(added_ids(self._tokenizer)[0])
                prompt = prompt if prompt.startswith(front) else front + prompt
            completion = b"".join(segments)
            sizes = [len(ids) // _ID_BYTES for ids in segments]
            learned = b"".join(bytes([not given]) * n for given, n in zip(row.given, sizes, strict=True))
            if row.ends is not None:
                completion, learned = self._ended(completion, learned, row)
            tokens = (len(prompt) + len(completion)) // _ID_BYTES
            if tokens > self._settings.max_length:
                raise ValueError(
                    f"{row.where}: prompt and completion have {tokens} tokens, "
                    f"{_LIMITS[self._settings.section]} = {self._settings.max_length}; raise the limit or "
                    "remove the row"
                )
            yield row.record, prompt, completion, b"" if all(learned) else learned

    def warnings(self, counts: np.ndarray) -> Iterator[str]:
        """Yield the warnings about the rows. ``counts``: how often each distinct row occurs."""
        rows = counts.sum()
        if self._written:
            yield (
                f"warning: {counts[[n for n, _ in self._written]].sum()} of {rows} rows have special tokens "
                f"of the tokenizer in the text of a message, e.g. {self._written[0][1]}; each is broken by a "
                "space and stays text"
            )
        if self._passed:
            yield (
                f"warning: the completions of {counts[[n for n, _ in self._passed]].sum()} of {rows} rows "
                f"continue after a token that ends a sample, e.g. {self._passed[0][1]}; remove it, or mark "
                "what follows as given"
            )

    def _ended(self, completion: bytes, learned: bytes, row: _Begun) -> tuple[bytes, bytes]:
        """Return the completion with exactly one end token: the file may already have it."""
        assert row.ends is not None and row.ends.learned is not None, "`SampleEnds.check` has passed"
        ids = row.ends.strip(np.frombuffer(completion, np.int32).tolist())
        learned = learned[: len(ids)]
        if any(
            t in row.ends.ids and a and b for t, a, b in zip(ids, learned, [*learned[1:], True], strict=True)
        ):
            self._passed.append((row.number, row.where))
        return as_bytes([*ids, row.ends.learned]), learned + b"\x01"

    def _ends_of(self, templated: bool) -> SampleEnds:
        if templated not in self._ends:
            self._ends[templated] = sample_ends(self._tokenizer, templated=templated, day=self._day)
            self._ends[templated].check()
        return self._ends[templated]

    def _break_controls(self, record: Mapping[str, Any], where: str, number: int) -> Mapping[str, Any]:
        texts = {key: record[key] for key in ("prompt", "system", "messages") if record.get(key)}
        if record.get("special_tokens") == "keep" or not self._controls.find(str(texts)):
            return record
        self._written.append((number, where))
        return {**record, **self._controls.as_text(texts)}

    def _check_parts(self, record: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        messages, open_turn = record.get("messages"), "completion" in record
        if messages is None:
            messages = PromptFormat(record.get("system")).messages(record["prompt"])
        if dropped := self._parts.dropped(messages, arguments, open_turn=open_turn):
            raise ValueError(
                f"the model's chat template does not show {dropped}: the model would never read it; remove "
                "it from the row, or use a model whose chat template has it"
            )

    def _prompt(self, record: Mapping[str, Any], arguments: Mapping[str, Any], templated: bool) -> str:
        prompt_format = PromptFormat(
            record.get("system"), None, templated, arguments, _KEYS_OF_A_ROW, day=self._day,
            prefill=record.get("prefill") or "",
        )  # fmt: skip
        asked = record["messages"] if "messages" in record else record["prompt"]
        return prompt_format.text(asked, self._tokenizer)
