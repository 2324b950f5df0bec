"""The environments of data sources: their questions, tools and built-in problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig
from grpo_dist.data.files import Located
from grpo_dist.data.readers import DataRow
from grpo_dist.data.sources import EnvironmentProblems
from grpo_dist.environments.base import Message, Problem
from grpo_dist.environments.dialogue import Renderer, result_messages
from grpo_dist.environments.runner import Description, EnvironmentProbe, StartFailed
from grpo_dist.environments.tools import missing_tokens
from grpo_dist.errors import raised
from grpo_dist.plugins.inputs import SourceInputs
from grpo_dist.plugins.user_code import SOURCE, call, check_signature, load
from grpo_dist.types import Task

_RESULT = "7361927"  # a template that supports tool messages renders it


@dataclass(frozen=True, slots=True)
class SourceTasks:
    """The task and the questions of a source's rows.

    Attributes:
        questions: the environment's questions without control tokens: text, to which the instruction and the
            system prompt are added, or messages; (): it asks the problem as it is.
    """

    task: Task
    questions: Sequence[str | Sequence[Message]]
    renderer: Renderer

    def task_of(self, messages: Sequence[Message]) -> Task:
        return replace(self.task, messages=tuple(messages))


def environment_problems(data: DataConfig, environments: EnvironmentsConfig) -> EnvironmentProblems:
    """Return a reader of user-supplied sources, and of sources without a `path`, whose environment brings the
    problems.
    """

    def records(source: DataSourceConfig) -> Iterator[Located]:
        if source.is_own:
            yield from _rows_of_function(source, environments.code_paths)
            return
        name = data.environment_of(source)
        if name is None:
            raise ValueError(
                "a data source has neither `path` nor an environment; set its `path`, or `environment` to "
                "one that provides problems"
            )
        probe = EnvironmentProbe(name, source.environment_kwargs, environments)
        rows = probe.environment_problems(source.split, source.max_rows)
        yield from ((f"{name}/{source.split}:{number}", row) for number, row in enumerate(rows, 1))

    return records


def _rows_of_function(source: DataSourceConfig, code_paths: Sequence[str]) -> Iterator[Located]:
    """Yield location and columns of every row. Raises ValueError for a function that cannot be loaded, fails,
    or yields something else.
    """
    name = str(source.path)
    function = load(SOURCE, name, code_paths)
    check_signature(function, SourceInputs, source.kwargs, f"{SOURCE.title} {name}", "data.train.N.kwargs")
    number = 0
    try:
        for number, row in enumerate(
            call(function, SourceInputs(source.split, source.max_rows), source.kwargs), 1
        ):
            if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
                raise TypeError(f"{row!r} is no mapping of column names to values")
            yield f"{name}/{source.split}:{number}", row
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{SOURCE.title} {name} failed after row {number} ({raised(error)}); expected it "
            "to yield a mapping of column names to values for each row"
        ) from error


def source_tasks(
    data: DataConfig,
    environments: EnvironmentsConfig,
    source: DataSourceConfig,
    rows: Sequence[DataRow],
    tokenizer: Any,
) -> SourceTasks | None:
    """Ask the environment of ``source`` about its rows; None where it has no environment.

    Raises ValueError for an environment that cannot be used, or that the chat template does not support.
    """
    name = data.environment_of(source)
    if name is None:
        return None
    probe = EnvironmentProbe(name, source.environment_kwargs, environments)
    problems = [Problem(row.problem, row.answer, row.columns) for row in rows]
    try:
        described, questions = probe.questions(problems)
    except StartFailed as failure:
        raise ValueError(
            f"{rows[failure.index].location}: {failure.reason}; `start` must answer every row of the source"
        ) from failure
    renderer = Renderer(tokenizer, data, environments)
    task = Task(
        name,
        dict(source.environment_kwargs),
        tools=described.tools,
        batched=described.batched,
        stop=tuple(described.stop),
        prefill=data.resolve_prompts([source])[0].prefill or "",
    )
    has_calls = described.tools and not renderer.is_in_place
    if has_calls and (absent := missing_tokens(renderer.call_format, tokenizer.get_vocab())):
        raise ValueError(
            f"environment {name}: `environments.call_format` = {renderer.call_format} needs the token "
            f"{absent}, which the model's tokenizer lacks; use code, or the form of its chat template"
        )
    if renderer.has_template:
        _check_template(renderer, replace(task, messages=({"role": "user", "content": "1+1?"},)), described)
    if not described.asks:
        return SourceTasks(task, (), renderer)
    if row := next((row for row in rows if row.messages), None):
        raise ValueError(
            f"{row.location}: environment {name} writes the question, which would drop the system prompt "
            "and earlier turns of the row's messages; name a column of text in `problem_column`, such as "
            f"{source.problem_column}.-1.content"
        )
    return SourceTasks(task, [renderer.controls.as_text(question) for question in questions], renderer)


def _check_template(renderer: Renderer, task: Task, described: Description) -> None:
    """Raise ValueError where the chat template drops tools, their results or observations."""
    names = [tool["function"]["name"] for tool in task.tools]
    remedy = "set `environments.call_format` to code, or use a model whose chat template knows tools"
    try:
        prompt = renderer.prompt(task)
        if names and not renderer.is_in_place:
            if absent := [name for name in names if name not in prompt]:
                raise ValueError(
                    f"the model's chat template does not show the tool `{absent[0]}` of environment "
                    f"{task.environment}; {remedy}"
                )
            results = result_messages(names[:1], [_RESULT])
            if _RESULT not in renderer.conversation(task, task.messages, "?", results).tail:
                raise ValueError(f"the model's chat template does not show results of tools; {remedy}")
        observation = [{"role": "user", "content": _RESULT}]
        if (
            not described.stateless
            and _RESULT not in renderer.conversation(task, task.messages, "?", observation).tail
        ):
            raise ValueError(
                "the model's chat template does not show a second user message, in which environment "
                f"{task.environment} answers; set `data.chat_template` to none, or use another model"
            )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the model's chat template rejects turns of environment {task.environment} ({error}); check "
            f"`data.template_kwargs`, or {remedy}"
        ) from error
