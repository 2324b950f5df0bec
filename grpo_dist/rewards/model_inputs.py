"""Inputs of reward models: token ids of a problem with a completion, and the positions of its scores.

format         input                                                        a step's score is read at
classifier     problem  step 1 <mark>  step 2 <mark> ...                    the last token of its mark
qwen           system, problem; answer: step 1<extra_0>step 2<extra_0>      <extra_0>
math_shepherd  problem Step 1: ... ки (line break) Step 2: ... ки           ки
rlhflow        user: problem step 1, assistant: +, user: step 2, ...        the token before the +
skywork        problem (line break) step 1 <line break> step 2 <line break> the line break
prefixes       a conversation for each step, which ends with that step      its end
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_dist.config import RewardModelConfig

# Of Qwen2.5-Math-PRM's model card, which was trained with it.
QWEN_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_MARKS = {"qwen": "<extra_0>", "math_shepherd": "ки", "skywork": "\n"}  # where `step_mark` is null
_GOOD = "+"  # earlier steps in the conversation of `rlhflow`
_NUMBERED = re.compile(r"step\s*\d", re.IGNORECASE)

Steps = Sequence[tuple[str, int]]  # as `split_steps` returns them


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One row of a reward model."""

    token_ids: list[int]
    read_at: list[int]  # positions of the scores of steps; []: a classifier finds the end of the row


def conversation(tokenizer: Any, problem: str, completion: str) -> ModelInput:
    """Return problem and completion in the chat template, or as plain text where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return ModelInput(tokenizer(f"{problem}\n{completion}")["input_ids"], [])
    turns = [{"role": "user", "content": problem}, {"role": "assistant", "content": completion}]
    return ModelInput(_encode(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False)), [])


def process_inputs(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Return the rows that score ``steps`` of ``completion``, in `settings.format`.

    All rows together have one score for each step, in order: one row with S positions, or S rows with none.

    Raises:
        ValueError: the tokenizer does not fit the format.
    """
    return _FORMATS[settings.format](settings, tokenizer, problem, completion, steps)


def _classifier(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Join the steps with marks.

    Steps and marks are tokenised separately, so that a mark has the same tokens after any step, as in
    training (e.g. by TRL's PRMTrainer).
    """
    mark = _encode(tokenizer, settings.step_separator if settings.step_mark is None else settings.step_mark)
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": problem}]
        head = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = _encode(tokenizer, head)
    else:
        ids = list(tokenizer(f"{problem}\n")["input_ids"])
    return [_joined(ids, [_encode(tokenizer, step) for step, _ in steps], mark)]


def _qwen(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    mark = _mark(settings)
    # A completion that writes the mark itself would have more scores than steps.
    problem, *texts = (text.replace(mark, " ") for text in (problem, *(step for step, _ in steps)))
    turns = [
        {"role": "system", "content": QWEN_SYSTEM_PROMPT},
        {"role": "user", "content": problem},
        {"role": "assistant", "content": "".join(text + mark for text in texts)},
    ]
    ids = _encode(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False))
    (wanted,) = _encode(tokenizer, mark)
    return [ModelInput(ids, [i for i, token in enumerate(ids) if token == wanted])]


def _math_shepherd(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Number the steps, as in the model's training data, and read at our marks alone: ки is also a part of
    Russian words.
    """
    text, ends = f"{problem} ", []
    for i, (step, _) in enumerate(steps):
        numbered = step if _NUMBERED.match(step) else f"Step {i + 1}: {step}"
        text += f"{chr(10) if i else ''}{numbered} {_mark(settings)}"
        ends.append(len(text))
    encoded = tokenizer(text, return_offsets_mapping=True)
    return [ModelInput(encoded["input_ids"], _tokens_before(ends, encoded["offset_mapping"]))]


def _rlhflow(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Render the whole conversation once: a causal model's score of a step does not see what follows, so it
    is that of the conversation up to the step.
    """
    turns, ends = [], []
    for i, (step, _) in enumerate(steps):
        turns.append({"role": "user", "content": step if i else f"{problem} {step}"})
        asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        turns.append({"role": "assistant", "content": _GOOD})
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if not text.startswith(asked + _GOOD):
            raise ValueError(
                "its chat template does not continue a generation prompt with the reply, so the place of a "
                "verdict is unknown; use the model's own tokenizer"
            )
        ends.append(len(asked))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [ModelInput(encoded["input_ids"], _tokens_before(ends, encoded["offset_mapping"]))]


def _skywork(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    ids = _encode(tokenizer, f"{tokenizer.bos_token or ''}{problem}\n")
    mark = _encode(tokenizer, _mark(settings))[-1:]
    return [_joined(ids, [_encode(tokenizer, step) for step, _ in steps], mark)]


def _prefixes(
    settings: RewardModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """The last prefix is the whole completion, so its score is that of `kind: outcome`."""
    prefixes = [completion[:end].rstrip() for _, end in steps[:-1]]
    return [conversation(tokenizer, problem, text) for text in (*prefixes, completion)]


_FORMATS: dict[str, Callable[[RewardModelConfig, Any, str, str, Steps], list[ModelInput]]] = {
    "classifier": _classifier,
    "qwen": _qwen,
    "math_shepherd": _math_shepherd,
    "rlhflow": _rlhflow,
    "skywork": _skywork,
    "prefixes": _prefixes,
}


def check_inputs(settings: RewardModelConfig, tokenizer: Any) -> None:
    """Raise ValueError where ``tokenizer`` cannot write the format of a process model."""
    if settings.format == "qwen" and len(_encode(tokenizer, _mark(settings))) != 1:
        raise ValueError(f"its tokenizer has no single token {_mark(settings)!r}; set step_mark to its own")
    if settings.format in ("qwen", "rlhflow") and not getattr(tokenizer, "chat_template", None):
        raise ValueError("its tokenizer has no chat template; use the model's own tokenizer")
    steps = [("a", 3), ("b", 4)]
    rows = process_inputs(settings, tokenizer, "1+1", "a\n\nb", steps)
    if sum(max(1, len(row.read_at)) for row in rows) != len(steps):
        raise ValueError("its tokenizer does not keep the marks of steps apart; set step_mark")


def _mark(settings: RewardModelConfig) -> str:
    return STEP_MARKS[settings.format] if settings.step_mark is None else settings.step_mark


def _joined(head: list[int], steps: Sequence[list[int]], mark: list[int]) -> ModelInput:
    ids, read_at = list(head), []
    for step in steps:
        ids += step + mark
        read_at.append(len(ids) - 1)
    return ModelInput(ids, read_at)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_before(ends: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each of ``ends`` the last token that holds the character before it."""
    holder = {char: i for i, (begin, end) in enumerate(offsets) for char in range(begin, end)}
    return [holder[end - 1] for end in ends]
