"""Rows that repeat a problem, and rows that refer to an image, are counted and named."""

from types import SimpleNamespace

import pytest

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, RewardsConfig
from grpo_dist.data.readers import DataRow, find_duplicates, media_problem
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs.prepare import prepare_eval, train_prompts

ONE, TWO = (DataSourceConfig(path=f"{name}.jsonl") for name in ("one", "two"))


def rows(name, *pairs, messages=()):
    return [
        DataRow(problem, answer, name, f"{name}.jsonl:{i}", {}, messages)
        for i, (problem, answer) in enumerate(pairs, 1)
    ]


def sections(**data):
    config = DataConfig(train=(ONE, TWO), max_prompt_tokens=99, **data)
    return SimpleNamespace(data=config, rewards=RewardsConfig(), environments=EnvironmentsConfig())


SOURCES = [
    (ONE, rows("one", ("1+1=", "2"), ("2+2=", "4"), ("1+1=", "2"))),
    (TWO, rows("two", (" 1+1=\n", "3"), ("3+3=", "6"), ("1+1=", "2"))),
]
COUNTED = "warning: data.train: 3 of 6 rows repeat the problem of an earlier row (3 distinct), e.g. "
EXAMPLE = "one.jsonl:3 repeats one.jsonl:1; "
DISAGREE = (
    "warning: data.train: 1 problems have rows with different answers, e.g. '2' at one.jsonl:1 and '3' at "
    "two.jsonl:1; remove the wrong rows"
)


def test_problems_repeated_in_other_sources_or_with_other_answers_are_named():
    warnings = []
    built = train_prompts(sections(), SOURCES, character_tokenizer(), warnings.append)
    remedy = "data.deduplicate=true keeps only the first of each"
    assert warnings == [COUNTED + EXAMPLE + remedy, DISAGREE]
    assert len(built.prompts) == 6  # nothing is left out unasked, and every uid differs
    assert len({prompt.uid for prompt in built.prompts}) == 6


def test_one_key_keeps_the_first_row_of_each_problem():
    warnings = []
    built = train_prompts(sections(deduplicate=True), SOURCES, character_tokenizer(), warnings.append)
    assert warnings == [COUNTED + EXAMPLE + "only the first of each is kept", DISAGREE]
    kept = [(prompt.text, prompt.answer, prompt.source) for prompt in built.prompts]
    assert kept == [("1+1=", "2", "one"), ("2+2=", "4", "one"), ("3+3=", "6", "two")]
    plain = train_prompts(sections(), SOURCES, character_tokenizer(), warnings.append).prompts
    assert [prompt.uid for prompt in built.prompts] == [plain[i].uid for i in (0, 1, 4)]


def test_rows_that_a_template_fills_with_other_columns_are_other_problems():
    choice_rows = [
        DataRow("Which is prime?", "A", "one", f"one.jsonl:{i}", {}, values={"choices": choices})
        for i, choices in enumerate(["2, 4", "3, 6", "2, 4"], 1)
    ]
    duplicates = find_duplicates(sections().data, [(ONE, choice_rows)])
    assert duplicates.repeats == 1
    assert [row.location for row in duplicates.first[0][1]] == ["one.jsonl:1", "one.jsonl:2"]


@pytest.mark.parametrize("deduplicate", [False, True])
def test_each_evaluation_set_is_checked_separately(deduplicate):
    warnings, settings = [], sections(deduplicate=deduplicate)
    sets = prepare_eval(settings, SOURCES, character_tokenizer(), [], warnings.append)
    assert [len(eval_set.prompts) for eval_set in sets] == ([2, 2] if deduplicate else [3, 3])
    counts = [text.partition(" rows")[0] for text in warnings if "repeat" in text]
    assert counts == ["warning: data.eval one: 1 of 3", "warning: data.eval two: 1 of 3"]


def test_problems_differ_by_their_conversation_and_by_the_environment_that_asks_them():
    turns = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="})
    others = ({"role": "system", "content": "Be kind."}, turns[1])
    plain = (ONE, rows("one", ("1+1=", "2")))
    in_chat = [(TWO, rows("two", ("1+1=", "2"), messages=chat)) for chat in (turns, others, turns)]
    in_environment = (TWO.model_copy(update={"environment": "python"}), rows("two", ("1+1=", "2")))
    duplicates = find_duplicates(sections().data, [plain, *in_chat, in_environment])
    assert (duplicates.rows, duplicates.repeats) == (5, 1)


def image_rows(*problems):
    return [DataRow(problem, "1", "geo", f"geo.jsonl:{i + 1}", {}) for i, problem in enumerate(problems)]


@pytest.mark.parametrize(
    "placeholder",
    ["<image>", "<image_1>", "<image1>", "<video>", "<audio>", "<|image_pad|>", "<|image|>",
     "<|vision_start|>", "<start_of_image>", "<image_soft_token>", "[IMG]"],
)  # fmt: skip
def test_placeholders_are_counted_and_the_first_row_is_named(placeholder):
    message = media_problem(image_rows("1 + 1", f"{placeholder}Find x.", f"In {placeholder}, find y."))
    assert message.startswith("2 of 3 problems have a placeholder")
    assert f"(the first is geo.jsonl:2, {placeholder})" in message


def test_other_text_is_text():
    assert media_problem(image_rows("Let <x> be the image of f.", "a<b>c", "image>1", "[IMGS]")) == ""
