"""Turns rows of data sources into tokenised prompts."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np

from grpo_dist.chat.batches import BatchEncoder
from grpo_dist.chat.template import (
    REJECTED,
    ControlTokens,
    PartsCheck,
    added_ids,
    encode,
    encode_prompts,
    is_of_library,
    render,
    render_all,
    writes_text_as_it_is,
)
from grpo_dist.config import DataConfig, DataSourceConfig
from grpo_dist.config.text import fill
from grpo_dist.data.columns import (
    Column,
    Computed,
    Prompts,
    Repeated,
    Table,
    Texts,
    TokenIds,
    column,
    load,
    occurrences,
    save,
    sorted_distinct,
    store_key,
)
from grpo_dist.data.readers import DataRow, DataRows, RowTable, hashes_of
from grpo_dist.data.tasks import SourceTasks
from grpo_dist.environments.base import Message
from grpo_dist.types import Prompt, Task, Thought

# Opening tag -> closing tag of well-known models; other tags are set in the configuration.
_THOUGHT_TAGS = {
    "<think>": "</think>",
    "<THINK>": "</THINK>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "[THINK]": "[/THINK]",
}
_TAGS = "|".join(map(re.escape, _THOUGHT_TAGS))
_MENTIONED = re.compile(_TAGS)
_EITHER = (*_THOUGHT_TAGS, *_THOUGHT_TAGS.values())
_TAG_WORDS = ("think", "THINK", "thought", "reasoning")  # every tag contains one
_OPENED = re.compile(rf"({_TAGS})\s*$")
_CLOSED = re.compile("|".join(rf"(?:{re.escape(a)}\s*)?{re.escape(b)}\s*$" for a, b in _THOUGHT_TAGS.items()))
_OPENING = {closing: opening for opening, closing in _THOUGHT_TAGS.items()}
_END = 200  # last characters of a prompt that are searched for tags


def detect_thought(prompt: str, template: str = "", tags: tuple[str, str] | None = None) -> Thought:
    """Return the thought that a completion of ``prompt`` begins or continues.

    Its tags are ``tags`` or a well-known model's tags if ``prompt`` ends with them, else the first that the
    prompt or its chat ``template`` mentions, else ``<think>`` and ``</think>``.

        "...<|im_start|>assistant\\n<think>\\n"                    <think>, the prompt opens it
        "...<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"       <think>, the prompt opens and closes it
        "...<|Assistant|></think>"                               <think>, the prompt closes it
        "Reason in <reasoning> tags. What is 2+2?"               <reasoning>, the completion opens it
    """
    end = prompt[-_END:]
    if tags and end.rstrip().endswith(tags):
        return Thought(*tags, "opens" if end.rstrip().endswith(tags[0]) else "closes")
    if opened := _OPENED.search(end):
        return Thought(opened[1], _THOUGHT_TAGS[opened[1]], "opens")
    if closed := _CLOSED.search(end):
        opening = next(tag for closing, tag in _OPENING.items() if closed.group().rstrip().endswith(closing))
        return Thought(opening, _THOUGHT_TAGS[opening], "closes")
    mentioned = _MENTIONED.search(prompt) or _MENTIONED.search(template)
    opening = mentioned.group() if mentioned else "<think>"
    return Thought(opening, _THOUGHT_TAGS[opening])


def is_kept(tag: str, tokenizer: Any) -> bool:
    """Return whether ``tag`` survives decoding, which drops special tokens."""
    ids = tokenizer(tag, add_special_tokens=False)["input_ids"]
    return tag in tokenizer.decode(ids, skip_special_tokens=True)


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# Two problems differ if these parts differ: numbers, factorials, primes, and all but space and punctuation.
_PARTS = re.compile(
    r"""
    (?:(?<![^\s(\[{$=+*/^-])\.)?\d+(?:\.\d+)*!*        # 15, 1.5, .5, 5!
    | (?<![^\W\d_])[^\W\d_](?:!+|'+(?![^\W\d_]))      # n!, f', but not the end of a word: "it's", "Look!"
    | [)\]}][!']+
    | [^\s.,;:!?"'`$]
    """,
    re.VERBOSE,
)


_SEPARATORS = b".,;:!?\"'`$" + bytes(code for code in range(128) if chr(code).isspace())
_BATCH = 4096  # rows tokenised at once
_MARK = "\t\v 0question0 \v\t"  # placeholder for a question, with white space that no template writes

KEYS_OF_DATA = "data.system_prompt and data.template_kwargs"


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a problem becomes the text of a prompt.

    Attributes:
        instruction: text on a separate line after the question.
        use_chat_template: False for the plain text.
        template_kwargs: further arguments of the chat template.
        keys: configuration keys that an error names where the template fails.
        day: today's date for the chat template; None: today.
        template: text of the question with {problem} and other columns; None: the problem.
        few_shot: examples between the system prompt and the question.
        prefill: start of the answer, at the end of the prompt.
        scored_prefill: ``prefill`` where rewards read it as the start of the completion, else "".
        thought_tags: configured tags that a prompt may end with; None: the tags of well-known models.
    """

    system_prompt: str | None = None
    instruction: str | None = None
    use_chat_template: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keys: str = KEYS_OF_DATA
    day: date | None = None
    template: str | None = None
    few_shot: tuple[Message, ...] = ()
    prefill: str = ""
    scored_prefill: str = ""
    thought_tags: tuple[str, str] | None = None

    @classmethod
    def from_config(cls, data: DataConfig, source: DataSourceConfig | None = None) -> PromptFormat:
        """Read the prompt format of ``source`` from section `data` of the configuration; None: the format of
        a source that sets none of these keys.
        """
        keys = data if source is None else data.resolve_prompts([source])[0]
        prefill = keys.prefill or ""
        return cls(
            keys.system_prompt,
            keys.instruction,
            data.chat_template == "model",
            data.template_kwargs,
            day=data.day,
            template=keys.template or None,
            few_shot=tuple(message.model_dump() for message in keys.few_shot or ()),
            prefill=prefill,
            scored_prefill=prefill if data.prefill_as == "completion" else "",
        )

    @classmethod
    def by_source(cls, data: DataConfig) -> dict[str, PromptFormat]:
        """Return the formats of all training sources, by label."""
        return {source.label: cls.from_config(data, source) for source in data.train}

    def question(self, problem: str, values: Mapping[str, str] = {}) -> str:
        """Return the template with ``problem`` and the ``values`` of other columns, or ``problem``."""
        if self.template is None:
            return problem
        return fill(self.template, {**values, "problem": problem}.__getitem__)

    def asked(self, question: str, messages: Sequence[Message] = ()) -> str | Sequence[Message]:
        """Return ``question``, or the row's ``messages`` with ``question`` and the instruction as the last
        user message.
        """
        if not messages:
            return question
        return append_question(messages, user_content(question, self.instruction))

    def text(self, asked: str | Sequence[Message], tokenizer: Any) -> str:
        """Render the prompt for ``asked``, ending with the prefill, which the policy continues."""
        messages = self.messages(asked)
        if not self.use_chat_template:
            return plain_text(messages) + self.prefill
        text = render_messages(messages, tokenizer, self.template_kwargs, day=self.day, keys=self.keys)
        return text + self.prefill

    def messages(self, asked: str | Sequence[Message]) -> list[Message]:
        """Return the messages of a prompt. ``asked``: the problem, or messages, to which no instruction is
        added; a system prompt among them replaces the configured one.
        """
        if isinstance(asked, str):
            asked = [{"role": "user", "content": user_content(asked, self.instruction)}]
        front = list(asked[:1]) if asked and asked[0]["role"] == "system" else []
        rest = asked[len(front) :]
        if self.system_prompt and all(message["role"] != "system" for message in asked):
            front = [{"role": "system", "content": self.system_prompt}]
        return [*front, *self.few_shot, *rest]

    def texts(self, problems: Sequence[str], tokenizer: Any) -> list[str]:
        """Render ``problems`` as `text` does; [] where the chat template rejects one."""
        if not self.use_chat_template:
            return [self.text(problem, tokenizer) for problem in problems]
        try:
            if frame := self._frame(tokenizer):
                front, back, read = frame
                back += self.prefill
                return [
                    f"{front}{read(user_content(problem, self.instruction))}{back}" for problem in problems
                ]
            conversations = [self.messages(problem) for problem in problems]
            texts = render_all(tokenizer, conversations, self.template_kwargs, day=self.day)
        except REJECTED:
            return []
        return [text + self.prefill for text in texts]

    def _frame(self, tokenizer: Any) -> tuple[str, str, Callable[[str], str]] | None:
        """Return the template's text before and after a question, and how it changes the question; None where
        these may depend on the question.
        """
        if not is_of_library(tokenizer):  # it may render without its template
            return None
        template = tokenizer.get_chat_template(tools=self.template_kwargs.get("tools"))
        if not writes_text_as_it_is(template):
            return None
        rendered = render(tokenizer, self.messages(_MARK), self.template_kwargs, day=self.day)
        if rendered.count(_MARK.strip()) != 1:
            return None
        for read in (str, str.strip):
            marked = read(user_content(_MARK, self.instruction))
            if rendered.count(marked) == 1:
                front, _, back = rendered.partition(marked)
                return front, back, read
        return None

    def token_ids(self, question: str, tokenizer: Any, messages: Sequence[Message] = ()) -> list[int]:
        """Tokenise the prompt of a row, as `asked` takes it, up to where the policy continues."""
        if self.use_chat_template:
            question, messages = ControlTokens(tokenizer).as_text((question, messages))
        text = self.text(self.asked(question, messages), tokenizer)
        # A chat template has written its special tokens already.
        return encode(text, tokenizer) if self.use_chat_template else encode_prompts([text], tokenizer)[0]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that became no prompt, and why."""

    location: str
    reason: str


@dataclass(eq=False)
class EncodedRows(Table):
    """The distinct rows of a source as prompts, in order.

    Attributes:
        messages: JSON of each prompt's messages; "": the prompt has none.
        tasks: tasks of the rows' environment; (): they have no environment.
        warnings: warnings about unexpected special tokens, with their rows.
    """

    token_ids: TokenIds
    thoughts: Repeated[Thought]
    messages: Texts
    tasks: Sequence[Task | None] = ()
    warnings: Sequence[str] = ()


def encode_rows(
    rows: DataRows, tokenizer: Any, prompt_format: PromptFormat, tasks: SourceTasks | None = None
) -> EncodedRows:
    """Render and tokenise the distinct ``rows``. Arguments and errors: see `build_prompts`."""
    if prompt_format.use_chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "data.chat_template = model, but the model's tokenizer has no chat template; use an "
            "instruction-tuned model or set data.chat_template=none"
        )
    token_ids, all_messages = Column(), Column()
    thoughts: dict[Thought, int] = {}
    thought_codes = array("i")
    asks: list[Task | None] = []
    encoder, detector = BatchEncoder(tokenizer), _Thoughts(tokenizer, prompt_format)
    parts, specials = PartsCheck(tokenizer, day=prompt_format.day), _SpecialTokens(tokenizer, prompt_format)
    front = np.array([] if prompt_format.use_chat_template else added_ids(tokenizer)[0], np.int32)
    is_plain = rows.distinct.is_plain and tasks is None and prompt_format.template is None
    for begin in range(0, len(rows.distinct), _BATCH):
        end, texts, questions = min(begin + _BATCH, len(rows.distinct)), list[str](), list[Any]()
        problems = rows.distinct.problems[begin:end] if is_plain else []
        if is_plain and not specials.any_in(problems):
            texts, questions = prompt_format.texts(problems, tokenizer), problems
        all_messages.extend([b""] * len(texts))
        for index in range(begin, end) if not texts else ():
            row = rows.distinct[index]
            # Before adding the instruction: the configuration may contain special tokens, a row may not.
            messages: Sequence[Message] = row.messages
            if tasks is not None and tasks.questions:
                if prompt_format.template is not None:
                    raise ValueError(
                        f"{row.location}: the environment writes the question, so `data.template` has no "
                        "effect; remove it, or set the source's `template` to empty"
                    )
                asked = specials.as_text(tasks.questions[index], index)
            else:
                problem, messages, values = specials.as_text((row.problem, row.messages, row.values), index)
                question = prompt_format.question(problem, values)
                asked = prompt_format.asked(question, messages)
                if prompt_format.template is not None:
                    messages = append_question(messages or [{"role": "user", "content": ""}], question)
            all_messages.append_text(json.dumps(list(messages)) if messages else "")
            task, text = _task_and_text(row, asked, prompt_format, tokenizer, tasks)
            texts.append(text)
            questions.append(asked)
            asks += [] if task is None else [task]
        kinds = [thoughts.setdefault(thought, len(thoughts)) for thought in detector.detect_all(texts)]
        thought_codes.extend(kinds if len(kinds) == len(texts) else kinds * len(texts))
        ids, ends = encoder.encode(texts)
        if len(front):
            ids, ends = _put_in_front(front, ids, ends)
        lengths = np.diff(ends, prepend=0)
        if not lengths.all():
            row = rows.distinct[begin + int(np.argmin(lengths))]
            raise ValueError(
                f"{row.location}: the prompt {row.problem[:80]!r} has no tokens, expected at least one; "
                "check the model's tokenizer and chat template (`data.chat_template`), or remove the row"
            )
        specials.count_ends(ids[ends - 1], begin)
        for index, asked in enumerate(questions, begin) if prompt_format.use_chat_template else ():
            if is_plain and parts.passed:  # all rows have one shape
                break
            _check_parts(parts, prompt_format, asked, rows.distinct[index])
        token_ids.extend_packed(ids.data, ends * ids.itemsize)
    return EncodedRows(
        token_ids.token_ids(),
        Repeated(list(thoughts), np.array(thought_codes, np.int32)),
        all_messages.texts(),
        asks,
        list(specials.warnings(rows)),
    )


def _put_in_front(front: np.ndarray, ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``ids`` and ``ends`` with ``front`` before each text that does not begin with it."""
    parts = np.split(ids, ends[:-1])
    parts = [p if np.array_equal(p[: len(front)], front) else np.concatenate([front, p]) for p in parts]
    return np.concatenate(parts), np.cumsum(list(map(len, parts)), dtype=np.int64)


class PromptTable(Computed[Prompt]):
    """Prompts as columns; access builds a `Prompt`. ``rows`` and ``encoded`` have the same length."""

    def __init__(self, rows: RowTable, encoded: EncodedRows, prefill: str) -> None:
        self.rows, self._encoded, self._prefill = rows, encoded, prefill

    def __len__(self) -> int:
        return len(self.rows)

    def _get(self, number: int) -> Prompt:
        row, encoded = self.rows[number], self._encoded
        messages = encoded.messages[number]
        return Prompt(
            self.rows.uid(number), encoded.token_ids[number], row.answer, row.source, row.problem,
            dict(row.columns), encoded.thoughts[number], encoded.tasks[number] if encoded.tasks else None,
            messages=tuple(json.loads(messages)) if messages else (), prefill=self._prefill,
        )  # fmt: skip

    def column(self, name: str) -> Iterable[Any]:
        """Return an attribute of all prompts."""
        if name == "token_ids":
            return self._encoded.token_ids
        if name == "teacher_ids":
            return repeat({}, len(self))
        return self.rows.column({"text": "problem"}.get(name, name))


def number_uids(parts: Sequence[Prompts]) -> None:
    """Number the prompts of all ``parts`` (from `build_prompts`) by how often their uid has occurred so far:
    "set-1f", "set-1f-2", ...
    """
    tables = [part.distinct.rows for part in parts if isinstance(part.distinct, PromptTable)]
    pairs = list(zip(tables, parts, strict=True))
    uids = np.concatenate([rows.uids[part.codes] for rows, part in pairs])
    sources = Repeated.join([rows.sources.select(part.codes) for rows, part in pairs])
    labels = np.array(list(sources.distinct))
    numbers = np.ones(len(uids), np.int32)
    for label in dict.fromkeys(labels.tolist()):
        has_label = (labels == label)[sources.codes]
        uids_of_source = uids[has_label]
        hashes = sorted_distinct(uids_of_source)
        if len(hashes) < len(uids_of_source):
            numbers[has_label] = occurrences(np.searchsorted(hashes, uids_of_source))
    ends = np.cumsum(list(map(len, parts)))[:-1]
    for part, part_numbers in zip(parts, np.split(numbers, ends), strict=True):
        part.numbers = part_numbers


@dataclass(frozen=True, slots=True)
class BuiltPrompts:
    """Prompts in row order, and the rows dropped.

    Attributes:
        rows: rows of each source, with the dropped ones.
        warnings: warnings about unexpected special tokens, with their rows.
    """

    prompts: Prompts
    dropped: list[Dropped]
    rows: tuple[DataRows, ...] = ()
    warnings: Sequence[str] = ()

    @property
    def row_uids(self) -> Iterator[str]:
        """Yield the uid of every row, dropped ones included."""
        return chain.from_iterable(rows.uids() for rows in self.rows)


def build_prompts(
    rows: Sequence[DataRow],
    tokenizer: Any,
    prompt_format: PromptFormat = PromptFormat(),
    *,
    max_prompt_tokens: int,
    overlong: Literal["refuse", "drop"] = "refuse",
    tasks: SourceTasks | None = None,
    encoded: EncodedRows | None = None,
    key: str = "",
) -> BuiltPrompts:
    """Tokenise ``rows`` into prompts with distinct uids; see `number_uids` for uids across calls.

    Args:
        overlong: whether a prompt of more than ``max_prompt_tokens`` tokens is an error or is dropped.
        tasks: tasks of the rows' environment; None: the rows have no environment.
        encoded: the result of `encode_rows` for ``rows``; None: `encode_rows` is called.
        key: cache key of rows and settings, see `columns.store_key`; "": unknown.

    Raises:
        ValueError: the tokenizer lacks the chat template; the template rejects or drops messages; a prompt
            has no tokens; a prompt is overlong with ``overlong="refuse"``; or every prompt is dropped.
    """
    rows = DataRows.from_rows(rows)
    encoded = encoded or encode_rows(rows, tokenizer, prompt_format, tasks)
    lengths = encoded.token_ids.lengths
    is_kept = (lengths <= max_prompt_tokens)[rows.codes]
    dropped = []
    for place in np.flatnonzero(~is_kept).tolist():
        reason = (
            f"{rows.location(place)}: the prompt has {lengths[rows.codes[place]]} tokens, "
            f"data.max_prompt_tokens = {max_prompt_tokens}"
        )
        if overlong == "refuse":
            raise ValueError(f"{reason}; raise the limit, remove the row, or set data.overlong=drop")
        dropped.append(Dropped(rows.location(place), reason))
    if dropped and not is_kept.any():
        raise ValueError(
            f"{dropped[0].reason}, and so has every one of the {len(dropped)} prompts; raise the limit"
        )
    table, index = rows.distinct, rows.codes[is_kept]
    if dropped:  # keep only the distinct prompts that still occur
        used, index = np.unique(index, return_inverse=True)
        index = index.astype(np.int32)
        table = table.select(used)
        tasks_used = [encoded.tasks[i] for i in used.tolist()] if encoded.tasks else ()
        encoded = replace(encoded.select(used), tasks=tasks_used)
    prompts = Prompts(PromptTable(table, encoded, prompt_format.scored_prefill), index, key=key)
    number_uids([prompts])
    return BuiltPrompts(prompts, dropped, (rows,), encoded.warnings)


def append_question(messages: Sequence[Message], question: str) -> list[Message]:
    """Return ``messages`` with ``question`` as the content of the last user message."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    return [*messages[:last], {**messages[last], "content": question}, *messages[last + 1 :]]


def plain_text(messages: Sequence[Message]) -> str:
    """Return the text of ``messages`` where there is no chat template."""
    return "\n".join(str(message["content"]) for message in messages)


def _check_parts(
    parts: PartsCheck, prompt_format: PromptFormat, asked: str | Sequence[Message], row: DataRow
) -> None:
    """Raise ValueError where the chat template drops a part of the prompt, on the first row of each shape."""
    if dropped := parts.dropped(prompt_format.messages(asked), prompt_format.template_kwargs):
        keys = {"the system prompt": " (`data.system_prompt`, or the row's own)"}
        raise ValueError(
            f"{row.location}: the model's chat template does not show {dropped}{keys.get(dropped, '')}: the "
            "policy would never read it; write that text into the problem (`data.instruction`), use a model "
            "whose chat template has it, or set data.chat_template=none"
        )


class _SpecialTokens:
    """Counts unexpected special tokens in the prompts of one source, by row.

    With a chat template or `data.template`, control tokens in the text of a row are broken, so they stay
    text. Without either, the row's text is the prompt, possibly already rendered, and control tokens stay.
    """

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat) -> None:
        self._tokenizer, self._templated = tokenizer, prompt_format.use_chat_template
        self._breaks = self._templated or prompt_format.template is not None
        self._controls, end = ControlTokens(tokenizer), tokenizer.eos_token_id
        self._eos = -1 if end is None else end
        self._written: dict[int, set[str]] = {}  # control tokens in a row's text, by row number
        self._ended: list[int] = []  # rows whose prompts end with EOS

    def any_in(self, texts: Sequence[str]) -> bool:
        """Return whether ``texts`` contain special tokens."""
        return self._controls.any_in("\0".join(texts))

    def as_text(self, asked: Any, number: int) -> Any:
        """Return ``asked`` of distinct row ``number`` as it is rendered; record its control tokens."""
        if controls := set(self._controls.find(str(asked))):
            self._written[number] = controls
        return self._controls.as_text(asked) if self._breaks else asked

    def count_ends(self, last_ids: np.ndarray, first: int) -> None:
        """Record prompts that end with EOS. ``last_ids``: last token of each; ``first``: number of the first
        row.
        """
        self._ended += (first + np.flatnonzero(last_ids == self._eos)).tolist()

    def warnings(self, rows: DataRows) -> Iterator[str]:
        """Yield the warnings about ``rows``."""
        times, places = rows.counts(), Counter[str]()
        for number, controls in self._written.items():
            places.update(dict.fromkeys(controls, int(times[number])))
        if self._written:
            names = ", ".join(repr(name) for name, _ in places.most_common(3))
            treated = (
                "each is broken by a space, so that it stays text" if self._breaks else
                "`data.chat_template` = none takes a row as the rendered prompt, so they are read as tokens"
            )  # fmt: skip
            yield (
                f"warning: the text of {times[list(self._written)].sum()} of {len(rows)} rows has special "
                f"tokens of the tokenizer ({names}), e.g. {rows.distinct[min(self._written)].location}; "
                f"{treated}"
            )
        if self._ended:
            yield (
                f"warning: {times[self._ended].sum()} of {len(rows)} prompts end with the EOS token "
                f"{self._tokenizer.eos_token!r}, e.g. {rows.distinct[self._ended[0]].location}; the policy "
                "would continue an ended text: remove the token from the row, or use a chat template that "
                "begins the answer"
            )
        if not self._templated and (added := added_ids(self._tokenizer)[1]):
            names = ", ".join(map(repr, self._tokenizer.convert_ids_to_tokens(added)))
            yield f"note: the tokenizer appends {names} to every text (`add_eos_token`); prompts omit it"


def _task_and_text(
    row: DataRow,
    asked: str | Sequence[Message],
    prompt_format: PromptFormat,
    tokenizer: Any,
    tasks: SourceTasks | None,
) -> tuple[Task | None, str]:
    if tasks is None or not prompt_format.use_chat_template:
        try:
            return None if tasks is None else tasks.task, prompt_format.text(asked, tokenizer)
        except ValueError as error:
            raise ValueError(f"{row.location}: {error}") from error
    task = tasks.task_of(prompt_format.messages(asked))
    try:
        return task, tasks.renderer.prompt(task)
    except REJECTED as error:
        raise ValueError(
            f"{row.location}: the model's chat template rejects the messages that environment "
            f"{task.environment} asks with ({error}); change what `start` returns, or data.template_kwargs"
        ) from error


class _Thoughts:
    """Detects the thought that each prompt of one tokenizer begins."""

    def __init__(self, tokenizer: Any, prompt_format: PromptFormat) -> None:
        template = getattr(tokenizer, "chat_template", None) if prompt_format.use_chat_template else None
        mentioned = _MENTIONED.search(template) if isinstance(template, str) else None
        self._tokenizer, self._mentioned = tokenizer, mentioned.group() if mentioned else ""
        self._scored, self._tags = prompt_format.scored_prefill, prompt_format.thought_tags
        tags = "|".join(map(re.escape, (*_EITHER, *(self._tags or ()))))
        self._words = re.split(tags, prompt_format.prefill)[-1]  # they continue a thought opened before them
        self._kept: dict[str, bool] = {}

    def detect_all(self, texts: Sequence[str]) -> list[Thought]:
        """Return the thought of a completion of each of ``texts``; one for all where only the template
        decides it.
        """
        joined = "\0".join(texts)
        may_have_tags = any(word in joined for word in _TAG_WORDS)  # faster than searching for each tag
        if not (may_have_tags and any(tag in joined for tag in _EITHER)) and not any(
            tag in joined for tag in self._tags or ()
        ):
            return [self.detect(text) for text in texts[:1]]
        return [self.detect(text) for text in texts]

    def detect(self, text: str) -> Thought:
        """Return the thought of a completion of ``text``.

        ``text`` ends with the prefill. If decoding drops the closing tag, the end of a thought is invisible,
        so the prompt counts as opening no thought.
        """
        thought = detect_thought(text.removesuffix(self._words), self._mentioned, self._tags)
        if self._scored:  # rewards see a completion that begins with the prefill
            before = detect_thought(text.removesuffix(self._scored), self._mentioned, self._tags)
            thought = Thought(thought.opening, thought.closing, before.prompt)
        if self._tags:
            thought = Thought(*self._tags, thought.prompt)
        if not thought.prompt:
            return thought
        if thought.closing not in self._kept:
            self._kept[thought.closing] = is_kept(thought.closing, self._tokenizer)
        return thought if self._kept[thought.closing] else Thought(thought.opening, thought.closing)


def user_content(problem: str, instruction: str | None) -> str:
    """Return the user message: the problem, then the instruction on the next line."""
    return f"{problem}\n{instruction}" if instruction else problem


def doubled_prefills(data: DataConfig, tokenizer: Any) -> Iterator[str]:
    """Warn about each prefill that opens a thought right after the chat template opened or closed one."""
    sources = [source for source in data.resolve_prompts((*data.train, *data.eval)) if source.prefill]
    if not sources or data.chat_template != "model" or not getattr(tokenizer, "chat_template", None):
        return
    asked = [{"role": "user", "content": "?"}]
    try:
        text = render(tokenizer, asked, data.template_kwargs, day=data.day)
    except REJECTED:  # the template rejects the rows too, and that error names the row
        return
    thought = detect_thought(text)
    for source in sources:
        if thought.prompt and str(source.prefill).lstrip().startswith(thought.opening):
            yield (
                f"warning: the model's chat template ends every prompt with {text[-30:]!r}, and the prefill "
                f"{source.prefill!r} of source {source.label} opens {thought.opening} again; remove `prefill`"
            )


def render_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    *,
    day: date | None,
    open_turn: bool = True,
    keys: str = KEYS_OF_DATA,
) -> str:
    """Render a conversation, see `render`.

    Raises ValueError, which names ``keys``, for messages or arguments that the chat template rejects.
    """
    try:
        return render(tokenizer, messages, template_kwargs, day=day, open_turn=open_turn)
    except REJECTED as error:
        raise ValueError(
            f"the model's chat template rejects the {' and '.join(m['role'] for m in messages)} messages "
            f"({error}); check {keys}"
        ) from error


def check_overlap(
    train: Sequence[Prompt], held_out: Sequence[Prompt], whole: Collection[str] = frozenset()
) -> str:
    """Report how many held-out problems are also in ``train``; "" for none. Ignores case and punctuation.

    ``whole``: sources whose template adds other columns, so that problems with equal text may differ.
    """

    rows, others = Prompts.join([held_out]), Prompts.join([train])
    held_out_hashes, train_hashes = _outlines(rows, whole), _outlines(others, whole)
    near = np.flatnonzero(np.isin(train_hashes, held_out_hashes)).tolist()
    readings = {reading for n in near for reading in _plain(_asked_text(others.distinct[n], whole))}
    is_shared = np.zeros(len(held_out_hashes), bool)
    for number in np.flatnonzero(np.isin(held_out_hashes, train_hashes)).tolist():
        is_shared[number] = not readings.isdisjoint(_plain(_asked_text(rows.distinct[number], whole)))
    shared = np.flatnonzero(is_shared[rows.codes])
    if not len(shared):
        return ""
    example = _asked_text(rows[int(shared[0])], whole)
    return f"{len(shared)} of {len(held_out)} problems are also in the training set, e.g. {example[:80]!r}"


def _asked_text(prompt: Prompt, whole: Container[str]) -> str:
    asked = [m["content"] for m in prompt.messages if m["role"] == "user"]
    return str(asked[-1]) if asked and prompt.source in whole else prompt.text


def _outlines(prompts: Prompts, whole: Collection[str]) -> np.ndarray:
    """Return a hash of the outline of each distinct prompt, uint64; stored if ``prompts`` have a key."""
    key = prompts.key and store_key(["outlines", sorted(whole), prompts.key])
    if key and (stored := load(key)) is not None:
        return stored[0]["outlines"]
    distinct = prompts.distinct
    texts = (_asked_text(prompt, whole) for prompt in distinct) if whole else column(distinct, "text")
    hashes = hashes_of(map(_outline, texts))
    if key:
        save(key, {"outlines": hashes}, None)
    return hashes


def _outline(text: str) -> bytes:
    """Return ``text`` without separators and case. Texts with different outlines differ in `_plain`, which
    takes a hundred times as long.
    """
    outline = text.casefold()
    if not outline.isascii():
        outline = "".join(outline.split())
    return outline.encode("utf-8", "surrogatepass").translate(None, _SEPARATORS)


def _plain(text: str) -> set[str]:
    """Reduce a problem to numbers, letters and operators in lower case, for comparison: once with commas as
    thousands separators, once as list separators.

    "5! + f'(2)" -> "5! + f' ( 2 )";  "{100,200}" -> "{ 100200 }" and "{ 100 200 }"
    """
    lower = text.casefold()
    return {" ".join(_PARTS.findall(reading)) for reading in (_THOUSANDS.sub("", lower), lower)}
