"""The `sample` stage: samples and scores completions of the training prompts, selects demonstrations, and
counts the reasons against the others.

    DIRECTORY/
      samples/part_00000.parquet   every sample of a chunk of prompts, written once all are scored
      sft.jsonl                    kept samples in the format of `sft.data`, written last
      report.json                  counts

A restart reuses finished parts and samples only the missing ones.

4 samples of a prompt    right, 9 tokens | wrong | right, 7 tokens | truncated
keep_per_prompt 1  ->  the third, the shortest
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.chat.ends import SampleEnds, ends_of
from grpo_dist.chat.template import ControlTokens, encode
from grpo_dist.config import Config, DataConfig, RejectionConfig
from grpo_dist.data.order import step_prompts
from grpo_dist.data.prompts import PromptFormat, plain_text, render_messages, user_content
from grpo_dist.data.readers import read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.evaluation.sampling import Draw
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.rewards.checks import asked_columns
from grpo_dist.runs.models import load_tokenizer, resolve_model
from grpo_dist.runs.prepare import check_rendering, train_prompts
from grpo_dist.runs.start_checks import check_length
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.seeds import derived_seed
from grpo_dist.tools.evaluate.run import sample_with_engines
from grpo_dist.types import Group, Prompt, Rollout

SFT_FILE = "sft.jsonl"
_CHUNK = 512  # prompts sampled between saves
_STAGE = -2  # stage number in request seeds; training steps count from 0, evaluations use -1

# Reasons to drop a sample, in order of the checks.
REASONS = (
    "unscored", "below_min_reward", "truncated", "stop_text", "other_prompt", "hidden_tokens", "no_text",
    "duplicate", "too_easy", "enough",
)  # fmt: skip


@dataclass
class Report:
    """Counts of a rejection sampling; `prompts` x samples per prompt = `samples` = `kept` + all `dropped`."""

    prompts: int = 0
    samples: int = 0
    kept: int = 0
    prompts_kept: int = 0
    passed: int = 0  # samples with at least `rejection.min_reward`
    scored: int = 0
    tokens_kept: int = 0
    respelled: int = 0  # kept samples whose text the tokenizer encodes differently from the policy
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Return the counts, the pass rate and the mean length of kept completions; None for 0 / 0."""
        return {
            "prompts": self.prompts,
            "prompts_kept": self.prompts_kept,
            "samples": self.samples,
            "kept": self.kept,
            "pass_rate": self.passed / self.scored if self.scored else None,
            "respelled": self.respelled,
            "length_tokens": self.tokens_kept / self.kept if self.kept else None,
            "dropped": {reason: self.dropped[reason] for reason in REASONS},
        }


class Selection:
    """Turns scored groups into records of `sft.jsonl`, and counts kept and dropped samples."""

    def __init__(self, settings: RejectionConfig, data: DataConfig, tokenizer: Any) -> None:
        self._settings, self._data, self._tokenizer = settings, data, tokenizer
        controls = ControlTokens(tokenizer)
        self._special, self._ends, self._as_text = controls.ids, ends_of(data, tokenizer), controls.as_text
        self._formats = PromptFormat.by_source(data)
        # Special tokens in the configuration are tokens; in a row they are text.
        self._keeps_special = {
            name: form.use_chat_template
            and bool(controls.find(f"{form.system_prompt}{form.template}{form.instruction}{form.few_shot}"))
            for name, form in self._formats.items()
        }
        self._seen_pairs: set[tuple[str, str]] = set()
        self.report = Report()

    def take(self, groups: Iterable[Group]) -> list[dict[str, Any]]:
        """Return the records of the kept samples: groups in order, a group's samples by preference."""
        return [record for group in groups for record in self._take(group)]

    def _take(self, group: Group) -> list[dict[str, Any]]:
        report, settings = self.report, self._settings
        passed, scored = group.rewards >= settings.min_reward, ~np.isnan(group.rewards)
        report.prompts += 1
        report.samples += len(group.rollouts)
        report.passed += int(passed.sum())
        report.scored += int(scored.sum())
        good = []
        for i, rollout in enumerate(group.rollouts):
            reason = self._objection(group.prompt, rollout, scored=scored[i], passed=passed[i])
            if reason:
                report.dropped[reason] += 1
            else:
                good.append(i)
        pass_rate = float(passed.sum() / scored.sum()) if scored.any() else 0.0
        if pass_rate > settings.max_pass_rate:
            report.dropped["too_easy"] += len(good)
            return []
        chosen = sorted(good, key=lambda i: len(group.rollouts[i].completion_ids))[: settings.keep_per_prompt]
        report.dropped["enough"] += len(good) - len(chosen)
        report.kept += len(chosen)
        report.prompts_kept += bool(chosen)
        report.tokens_kept += sum(len(group.rollouts[i].completion_ids) for i in chosen)
        report.respelled += sum(self._is_respelled(group.prompt, group.rollouts[i]) for i in chosen)
        return [self._record(group, i, pass_rate) for i in chosen]

    def _objection(self, prompt: Prompt, rollout: Rollout, *, scored: bool, passed: bool) -> str:
        """Return why this sample cannot be a demonstration, or ""."""
        if not scored:
            return "unscored"
        if not passed:
            return "below_min_reward"
        if rollout.finish_reason != "stop" or (rollout.turns and ends_unseen(rollout, self._ends)):
            return "truncated"  # training would teach an end that the model did not generate
        if not rollout.turns and not self._ends.ended(rollout.completion_ids):
            return "stop_text"  # same here: a demonstration ends with an end token
        if rollout.context_ids is not None:
            return "other_prompt"  # an agent sent a prompt that the row does not have
        if self._hides_tokens(rollout):
            return "hidden_tokens"
        text = "".join(part["text"] for part in self._segments(prompt, rollout))
        if not rollout.text or not text or "\N{REPLACEMENT CHARACTER}" in text:
            return "no_text"  # empty, or incomplete characters
        asked = f"{prompt.text}{prompt.messages or ''}"
        if (asked, text) in self._seen_pairs:
            return "duplicate"
        self._seen_pairs.add((asked, text))
        return ""

    def _segments(self, prompt: Prompt, rollout: Rollout) -> list[dict[str, Any]]:
        """Return the text of a completion, or an episode's actions and the given texts between them."""
        if rollout.turns:
            return episode_segments(rollout, self._tokenizer)
        return [{"text": rollout.text.removeprefix(prompt.prefill)}]

    def _hides_tokens(self, rollout: Rollout) -> bool:
        """Return whether the text lacks tokens: special tokens, or ids beyond the tokenizer.

        Model vocabularies are often padded beyond the tokenizer's.
        """
        ids = rollout.completion_ids[:-1].tolist()
        hidden = not rollout.turns and bool(self._special.intersection(ids))  # episodes keep them
        return hidden or max(ids, default=0) >= len(self._tokenizer)

    def _is_respelled(self, prompt: Prompt, rollout: Rollout) -> bool:
        """Return whether the tokenizer encodes the text of the sample differently from the policy."""
        texts = [part["text"] for part in self._segments(prompt, rollout)]
        ids = [token for text in texts for token in encode(text, self._tokenizer)]
        return ids != rollout.completion_ids[:-1].tolist()

    def _record(self, group: Group, index: int, pass_rate: float) -> dict[str, Any]:
        """Return a row for `data.demonstrations` with its origin."""
        prompt, rollout = group.prompt, group.rollouts[index]
        segments = self._segments(prompt, rollout)
        return self._question(prompt) | {
            "completion": segments if rollout.turns else segments[0]["text"],
            "problem": prompt.text,
            "answer": prompt.answer,
            "source": prompt.source,
            "uid": prompt.uid,
            "sample": rollout.sample,
            "reward": float(group.rewards[index]),
            "pass_rate": pass_rate,
        }

    def _question(self, prompt: Prompt) -> dict[str, Any]:
        data, form = self._data, self._formats[prompt.source]
        kept = {"special_tokens": "keep"} if self._keeps_special[prompt.source] else {}
        if prompt.task is not None:
            return episode_question(prompt, data, self._tokenizer) | kept
        problem, messages = prompt.text, prompt.messages
        if form.template is not None:  # filled, with its values already as text
            problem = next(m["content"] for m in reversed(messages) if m["role"] == "user")
        elif kept:
            problem, messages = self._as_text((problem, messages))
        if messages or form.few_shot:
            turns = form.messages(form.asked(problem, messages))
            key = "messages" if form.use_chat_template else "prompt"
            asked: dict[str, Any] = {key: turns if form.use_chat_template else plain_text(turns)}
        else:
            asked = {"prompt": user_content(problem, form.instruction)}
            if form.system_prompt:
                asked["system"] = form.system_prompt
        if form.prefill:
            asked["prefill"] = form.prefill
        if data.chat_template == "none":
            asked["chat_template"] = "none"
        if data.template_kwargs:
            asked["template_kwargs"] = dict(data.template_kwargs)
        return asked | kept


def episode_segments(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the episode as a demonstration's `completion`, without its end token."""
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


def ends_unseen(rollout: Rollout, ends: SampleEnds) -> bool:
    """Return whether an episode has several rows, or does not end with an action and its end token."""
    whole = not rollout.further_rows and len(rollout.completion_ids) > 1
    return not whole or not ends.ended(rollout.completion_ids)


def episode_question(prompt: Prompt, data: DataConfig, tokenizer: Any) -> dict[str, Any]:
    """Return a demonstration's keys for the policy's exact prompt, with tools if the template has them."""
    assert prompt.task is not None, "an episode has a task"
    if not prompt.task.messages:
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return {"prompt": text, "chat_template": "none"}
    messages, plain = [dict(m) for m in prompt.task.messages], dict(data.template_kwargs)
    with_tools = plain | {"tools": [dict(tool) for tool in prompt.task.tools]}
    prefill = prompt.task.prefill
    for arguments in (plain, with_tools):
        text = render_messages(messages, tokenizer, arguments, day=data.day) + prefill
        if encode(text, tokenizer) == prompt.token_ids.tolist():
            break
    asked = {"messages": messages} | ({"template_kwargs": arguments} if arguments else {})
    return asked | ({"prefill": prefill} if prefill else {})


def run_sampling(config: Config, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Fill ``directory`` and return the contents of its report.json.

    Raises UserError for invalid input, or if no sample is kept.
    """
    with as_user_errors():
        model_dir = resolve_model(
            config.model, config.sft, config.seed, say, trains=False, day=config.data.day
        )
        check_length(config.model, model_dir, config.max_length)
        tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
        check_rendering(config, tokenizer, say)
        problems = environment_problems(config.data, config.environments)
        sources = config.data.resolve_prompts(config.data.train)
        read = read_all(sources, own=problems, asked=asked_columns(config.rewards))
        prompts = list(train_prompts(config, read, tokenizer, say).prompts)
        prompts = _draw_prompts(prompts, config.rejection.max_prompts, config.seed)
        chunks = [prompts[first : first + _CHUNK] for first in range(0, len(prompts), _CHUNK)]

    async def finished(number: int, groups: list[Group]) -> None:
        write_groups(_part(directory, number), groups)
        samples = sum(len(group.rollouts) for group in groups)
        chunk = f"chunk {number + 1} of {len(chunks)}"
        say(f"rejection sampling: {chunk}: {samples} samples of {len(groups)} prompts")

    if missing := {i: chunk for i, chunk in enumerate(chunks) if not _part(directory, i).exists()}:
        draw = Draw.from_config(config, config.rejection)
        what = "rejection sampling"
        sample_with_engines(config, model_dir, draw, missing, finished, number=_STAGE, what=what)
    selection = Selection(config.rejection, config.data, tokenizer)
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n"
        for number, chunk in enumerate(chunks)
        for record in selection.take(read_groups(_part(directory, number), {p.uid: p for p in chunk}))
    ]
    report = selection.report.summary()
    write_text(directory / "report.json", json.dumps(report, indent=1) + "\n")
    if not lines:
        raise UserError(
            f"{directory}: none of {report['samples']} samples was kept ({_reasons(report)}); lower "
            f"`rejection.min_reward` = {config.rejection.min_reward:g}, sample more, or use a better model"
        )
    write_text(directory / SFT_FILE, "".join(lines))
    say(f"kept {report['kept']} of {report['samples']} samples; not kept: {_reasons(report) or 'none'}")
    return report


def _reasons(report: dict[str, Any]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in report["dropped"].items() if count)


def _draw_prompts(prompts: list[Prompt], count: int | None, seed: int) -> list[Prompt]:
    """Return ``count`` of the prompts, drawn by seed; None: all."""
    if count is None or count >= len(prompts):
        return prompts
    chosen = step_prompts(len(prompts), count, derived_seed(seed, "rejection prompts"), 0)
    return [prompts[i] for i in chosen]


def _part(directory: Path, number: int) -> Path:
    return directory / "samples" / f"part_{number:05d}.parquet"
