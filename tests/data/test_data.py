"""From files to tokenised prompts in a fixed order. Unusable rows are rejected with file and row."""

import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grpo_dist.config import DataSourceConfig, SFTConfig
from grpo_dist.data.order import step_prompts
from grpo_dist.data.prompts import PromptFormat, build_prompts, check_overlap, number_uids
from grpo_dist.data.readers import DataRow, read
from grpo_dist.runtime.seeds import derived_seed, request_seed, request_seeds
from tests.support.made_groups import load_pairs
from tests.support.tiers import slow_after

GOOD = {"problem": "1+1=", "answer": "2"}


def jsonl(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def rows(*problems, source="set"):
    return [DataRow(p, "1", source, f"set.jsonl:{i}", {}) for i, p in enumerate(problems, 1)]


def prompts_of(rows, tokenizer, *, max_prompt_tokens=99, **prompt_format):
    return build_prompts(
        rows, tokenizer, PromptFormat(**prompt_format), max_prompt_tokens=max_prompt_tokens
    ).prompts


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


# Order


def test_every_prompt_occurs_once_per_epoch_even_if_steps_do_not_divide_it():
    indices = [i for step in range(70) for i in step_prompts(70, 16, 3, step)]
    for epoch in range(16):
        assert sorted(indices[70 * epoch : 70 * (epoch + 1)]) == list(range(70))
    assert indices[:70] != indices[70:140]


@settings(max_examples=30)
@given(st.data())
def test_no_prompt_occurs_twice_in_a_step_and_epochs_are_complete(data):
    n = data.draw(st.integers(1, 16))
    per_step = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**31 - 1))
    steps = [step_prompts(n, per_step, seed, step) for step in range(3 * n)]
    assert all(len(set(step)) == per_step for step in steps)
    indices = [i for step in steps for i in step]
    counts = [Counter(indices[n * e : n * (e + 1)]) for e in range(len(indices) // n)]
    assert all(count == Counter(range(n)) for count in counts)


def test_a_step_is_a_function_of_seed_and_number_alone():
    forward = [step_prompts(100, 7, 5, k) for k in range(60)]
    backward = [step_prompts(100, 7, 5, k) for k in reversed(range(60))][::-1]
    assert forward == backward
    assert forward != [step_prompts(100, 7, 6, k) for k in range(60)]


def test_short_epochs_do_not_depend_on_the_order_of_access():
    forward = [step_prompts(5, 4, 2, step) for step in range(200)]
    steps = [150, 3, 199, 198, 0, 70, 71, 70]
    assert [step_prompts(5, 4, 2, step) for step in steps] == [forward[step] for step in steps]


def test_more_prompts_per_step_than_prompts_is_rejected():
    with pytest.raises(ValueError, match="5 prompts a step cannot be drawn from 4"):
        step_prompts(4, 5, 0, 0)


def test_request_seeds_differ_in_every_argument_and_never_change():
    assert request_seed(0, 0, "a", 0) == 3314364817658374458
    assert request_seeds(0, 7, "a", range(-1, 12)) == [request_seed(0, 7, "a", i) for i in range(-1, 12)]
    arguments = itertools.product((0, 1), (-1, 0, 1), "ab", (0, 1))  # run, step, uid, sample
    seeds = {request_seed(*one) for one in arguments}
    assert len(seeds) == 24
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed(0, "a") not in seeds


# Readers


def test_jsonl_parquet_saved_sets_and_directories_give_the_same_rows(tmp_path):
    import datasets

    records = [{"q": f"{i}+1=", "a": i + 1, "level": "easy"} for i in range(5)]
    jsonl(tmp_path / "set.jsonl", *records)
    data_set = datasets.Dataset.from_list(records)
    data_set.to_parquet(tmp_path / "set.parquet")
    data_set.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data_set}).save_to_disk(tmp_path / "saved_splits")
    (tmp_path / "directory").mkdir()
    jsonl(tmp_path / "directory" / "train.jsonl", *records)
    forms = {
        "set.jsonl": "set.jsonl:3", "set.parquet": "set.parquet:3", "saved": "saved:3",
        "saved_splits": "saved_splits/train:3", "directory": "directory/train.jsonl:3",
    }  # fmt: skip
    for name, third in forms.items():
        loaded = read(
            DataSourceConfig(
                path=str(tmp_path / name), problem_column="q", answer_column="a", columns=("level",), name="n"
            )
        )
        values = [(r.problem, r.answer, r.source, r.columns) for r in loaded]
        assert values == [(f"{i}+1=", str(i + 1), "n", {"level": "easy"}) for i in range(5)], name
        assert loaded[2].location == str(tmp_path / third)


def test_reading_writes_no_files_and_sees_every_change(tmp_path):
    import datasets

    path = tmp_path / "set.parquet"
    for answer in ("1", "2"):
        datasets.Dataset.from_list([{"problem": "p", "answer": answer}]).to_parquet(path)
        os.utime(path, (0, 0))
        assert read(DataSourceConfig(path=str(path)))[0].answer == answer
        assert os.listdir(tmp_path) == ["set.parquet"]


def test_lines_are_counted_as_an_editor_does(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n" + json.dumps(GOOD).encode())
    assert [r.location for r in read(DataSourceConfig(path=str(path)))] == [f"{path}:1", f"{path}:3"]


@pytest.mark.parametrize(("value", "text"), [(8, "8"), (8.0, "8"), (0.5, "0.5"), (-3, "-3"), (" 7 ", "7")])
def test_numbers_are_answers(tmp_path, value, text):
    path = jsonl(tmp_path / "set.jsonl", {"problem": "p", "answer": value})
    assert read(DataSourceConfig(path=str(path)))[0].answer == text


def test_answer_pattern_extracts_group_one(tmp_path):
    path = jsonl(tmp_path / "set.jsonl", {"problem": "p", "answer": "6*7 = 42\n#### 42"})
    assert read(DataSourceConfig(path=str(path), answer_pattern=r"#### (.+)"))[0].answer == "42"


@pytest.mark.parametrize(
    ("line", "settings", "words"),
    [
        ('{"problem": "p", "answer": 1', {}, ["not valid JSON"]),
        ("[1, 2]", {}, ["a JSON list", "object"]),
        ("null", {}, ["a null", "object"]),
        ({"problem": "p", "anwser": "1"}, {},
         ["no column `answer`", "did you mean `anwser`?", "problem, anwser"]),
        ({"problem": "p", "answer": None}, {}, ["`answer` is empty", "remove the row"]),
        ({"problem": "p", "answer": "  "}, {}, ["`answer` is empty"]),
        ({"problem": "p", "answer": float("nan")}, {}, ["`answer` is empty"]),
        ({"problem": " ", "answer": "1"}, {}, ["`problem` is empty"]),
        ({"problem": "p", "answer": [["1"]]}, {}, ["`answer` is a list", "text or a number"]),
        ({"problem": ["p"], "answer": "1"}, {}, ["`problem` is a list", "(answer)", "`problem_template`"]),
        ({"problem": [{"role": "user"}], "answer": "1"}, {}, ["`problem`: message 0 has the content 'None'"]),
        (GOOD, {"answer_pattern": "#### (.+)"}, ["does not match answer_pattern '#### (.+)'"]),
        (GOOD, {"columns": ["level"]}, ["no column `level`"]),
        ('{"problem": "\ud800"', {}, ["not UTF-8"]),
        ("[" * 100_000, {}, ["not valid JSON"]),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_file_and_line(tmp_path, line, settings, words):
    path = tmp_path / "set.jsonl"
    first = GOOD | ({"answer": "#### 2"} if "answer_pattern" in settings else {})
    first |= {"level": 1} if "columns" in settings else {}
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes((json.dumps(first) + "\n" + text + "\n").encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError) as refusal:
        read(DataSourceConfig(path=str(path), **settings))
    message = str(refusal.value)
    assert message.startswith(f"{path}:2: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, ["no such file"]),
        ("none.parquet", None, ["no such file"]),
        ("empty.jsonl", b"", ["no rows", "`problem`"]),
        ("set.docx", b"a,b\n", ["unknown file type '.docx'", ".parquet"]),
        ("set.parquet", b"PAR1 no more", ["cannot be loaded"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as refusal:
        read(DataSourceConfig(path=str(path)))
    message = str(refusal.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_split_is_rejected_with_the_available_ones(tmp_path):
    import datasets

    data_set = datasets.Dataset.from_list([GOOD])
    datasets.DatasetDict({"train": data_set, "dev": data_set}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="no split `test`; it has train, dev"):
        read(DataSourceConfig(path=str(tmp_path / "saved"), split="test"))


CONFIGURATIONS = """---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train.jsonl}]
---
"""


def test_a_directory_is_read_by_its_configuration(tmp_path):
    """As in a clone of openai/gsm8k."""
    (tmp_path / "README.md").write_text(CONFIGURATIONS)
    for name in ("main", "socratic"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "train.jsonl", {"problem": name, "answer": 1})
    for name in ("main", "socratic"):
        (row,) = read(DataSourceConfig(path=str(tmp_path), subset=name))
        assert row.problem == name
    with pytest.raises(ValueError, match="`subset` = other"):
        read(DataSourceConfig(path=str(tmp_path), subset="other"))


def test_a_configuration_of_what_has_none_is_refused(tmp_path):
    import datasets

    data_set = datasets.Dataset.from_list([GOOD])
    data_set.save_to_disk(tmp_path / "saved")
    data_set.to_parquet(tmp_path / "set.parquet")
    jsonl(tmp_path / "set.jsonl", GOOD)
    kinds = {"saved": "saved data set", "set.parquet": "single file", "set.jsonl": "single file"}
    for name, kind in kinds.items():
        with pytest.raises(ValueError, match=f"{name}: `subset` = main, but a {kind} has no configurations"):
            read(DataSourceConfig(path=str(tmp_path / name), subset="main"))


def test_an_unreachable_hub_id_is_rejected_with_a_remedy(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"nobody/nothing: the data set cannot be loaded .*check the path or hub id"
    ):
        read(DataSourceConfig(path="nobody/nothing"))


def test_real_problem_sets_read_without_loss(shared_data):
    for name, count in (("gsm8k_train", 7473), ("gsm8k_test", 1319), ("math500", 500), ("svamp", 1000)):
        source = DataSourceConfig(path=str(shared_data / f"{name}.jsonl"))
        assert (source.label, len(read(source))) == (name, count)
    assert len(read(DataSourceConfig(path=str(shared_data / "gsm8k_train.jsonl"), max_rows=10))) == 10


# Prompts


def test_prompt_is_the_tokenised_chat_template(tokenizer):
    (prompt,) = prompts_of(rows("1+1="), tokenizer, system_prompt="Add.", instruction="Now.")
    assert tokenizer.decode(prompt.token_ids) == "<|system|>Add.<|user|>1+1=\nNow.<|assistant|>"
    assert prompt.token_ids.dtype == np.int32
    (plain,) = prompts_of(rows("1+1="), tokenizer, use_chat_template=False)
    assert tokenizer.decode(plain.token_ids) == "1+1="
    assert (plain.text, plain.answer, plain.source) == ("1+1=", "1", "set")


def test_uids_are_stable_distinct_and_not_the_text(tokenizer):
    def uids(*problems):
        return [p.uid for p in prompts_of(rows(*problems), tokenizer)]

    first = uids("1+1=", "2+2=", "1+1=")
    assert len(set(first)) == 3
    assert uids("2+2=", "1+1=", "1+1=") == [first[1], first[0], first[2]]
    assert not any("1+1" in uid for uid in first)
    one = build_prompts(rows("1+1="), tokenizer, max_prompt_tokens=99)
    other = build_prompts(rows("2+2=", "1+1="), tokenizer, max_prompt_tokens=99)
    number_uids([one.prompts, other.prompts])
    assert [prompt.uid for prompt in other.prompts] == [first[1], f"{one.prompts[0].uid}-2"]


def test_overlong_prompts_are_refused_by_line_or_listed_as_dropped(tokenizer):
    three = rows("1+1=", "1" * 40, "2+2=")
    with pytest.raises(ValueError) as refusal:
        build_prompts(three, tokenizer, max_prompt_tokens=20)
    for word in ("set.jsonl:2", "42 tokens", "data.max_prompt_tokens = 20", "data.overlong=drop"):
        assert word in str(refusal.value)
    built = build_prompts(three, tokenizer, max_prompt_tokens=20, overlong="drop")
    assert [p.text for p in built.prompts] == ["1+1=", "2+2="]
    assert [d.location for d in built.dropped] == ["set.jsonl:2"]
    assert "42 tokens" in built.dropped[0].reason
    with pytest.raises(ValueError, match="every one of the 3 prompts"):
        build_prompts(three, tokenizer, max_prompt_tokens=2, overlong="drop")


@pytest.mark.parametrize("overlong", ["refuse", "drop"])
def test_a_prompt_without_tokens_is_refused_with_its_line(tiny_model, overlong):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[-1]['content'] if '+' in messages[-1]['content'] else '' }}"
    three = rows("1+1=", "2+2=", "what?")
    with pytest.raises(ValueError, match=f"{three[2].location}: the prompt 'what.' has no tokens"):
        build_prompts(three, tokenizer, max_prompt_tokens=20, overlong=overlong)


def test_a_tokenizer_without_a_usable_chat_template_is_refused_with_the_remedy(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ValueError, match=r"rejects the system and user .*System role not supported.*system_prompt"
    ):
        prompts_of(rows("1+1="), tokenizer, system_prompt="Add.")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*data\.chat_template=none"):
        build_prompts(rows("1+1="), tokenizer, max_prompt_tokens=99)


def test_template_arguments_reach_the_template(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0].content }}{% if thinking %}<think>{% endif %}"
    (prompt,) = prompts_of(rows("1+1="), tokenizer, template_kwargs={"thinking": True})
    assert tokenizer.decode(prompt.token_ids) == "1+1=<think>"


@pytest.mark.parametrize("arguments", [{"tools": "x"}, {"thinking": 1}, {"tokenize": True}])
def test_template_arguments_that_cannot_be_used_are_refused_by_key(tiny_model, arguments):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0].content + (thinking or '') }}"
    message = r"\w:\d+: the model's chat template rejects .*check .* data\.template_kwargs"
    with pytest.raises(ValueError, match=message):
        prompts_of(rows("1+1="), tokenizer, template_kwargs=arguments)


def test_overlap_sees_through_case_space_and_punctuation_but_not_through_numbers(tokenizer):
    def prompts(*problems):
        return prompts_of(rows(*problems), tokenizer)

    train = prompts("Tom has 3 apples.", "What is $2-1$?")
    assert check_overlap(
        train, prompts("tom  has 3 apples", "Tom has 4 apples.", "What is 2 - 1")
    ).startswith("2 of 3 problems are also in the training set")
    assert check_overlap(train, prompts("Tom has 31 apples.", "What is $2+1$?")) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 1.5% of 200?", "What is 15% of 200?"), ("What is .5 + 1?", "What is 5 + 1?"),
        ("Compute 5! + 1", "Compute 5 + 1"), ("Compute (n-1)! + n!", "Compute (n-1) + n"),
        ("Find f'(2)", "Find f(2)"), ("Find f''(2)", "Find f'(2)"), ("Sum of 1, 2, 3", "Sum of 12, 3"),
        ("Sum of 1 234", "Sum of 1234"),
    ],
)  # fmt: skip
def test_overlap_keeps_apart_what_a_mark_makes_another_problem(tokenizer, one, other):
    assert check_overlap(prompts_of(rows(one), tokenizer), prompts_of(rows(other), tokenizer)) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 + 2?", "what is 2+2"), ("Look! It's $1,000$, isn't it?", "look its 1000 isnt it"),
        ("Sum of 1,2,3.", 'sum of "1, 2, 3"'), ("A bus (no. 7) stops.", "a bus (no 7) stops!"),
        ("Let A = {100,200,300}.", "Let A={100, 200, 300}."), ("(1,200),(3,4)", "(1, 200), (3, 4)"),
    ],
)  # fmt: skip
def test_overlap_ignores_punctuation_and_space(tokenizer, one, other):
    assert check_overlap(prompts_of(rows(one), tokenizer), prompts_of(rows(other), tokenizer))


@pytest.mark.slow  # their files are read whole
def test_test_sets_do_not_overlap_their_training_sets(shared_data, tokenizer):
    files = [shared_data / f"gsm8k_{split}.jsonl" for split in ("train", "test")]
    sets = [read(DataSourceConfig(path=str(file))) for file in files]
    plain = {"use_chat_template": False, "max_prompt_tokens": 5000}
    assert check_overlap(*(prompts_of(rows, tokenizer, **plain) for rows in sets)) == ""


@pytest.mark.parametrize("pattern", slow_after([r"((a+)+)b", r"((?:a|aa)+)c", r"(a*a*a*a*a*a*a*)[bc]"], 1))
def test_a_pattern_that_hangs_is_rejected_with_its_row(tmp_path, monkeypatch, pattern):
    monkeypatch.setattr("grpo_dist.data.readers.PATTERN_S", 1.0)
    path = tmp_path / "rows.jsonl"
    rows = [{"problem": "p", "answer": "aabaac"}, {"problem": "p", "answer": "a" * 5000}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: answer_pattern .* within 1 s"):
        read(DataSourceConfig(path=str(path), answer_pattern=pattern))


def test_a_pattern_is_searched_in_long_and_odd_texts(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = ["x" * 1_000_000 + "#### 5", "\u2028\u200b\n#### 6", "#### 7\n"]
    path.write_text("\n".join(json.dumps({"problem": "p", "answer": text}) for text in texts))
    loaded = read(DataSourceConfig(path=str(path), answer_pattern="#### (.+)"))
    assert [row.answer for row in loaded] == ["5", "6", "7"]


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "true", "1e999"])
def test_a_value_that_is_no_finite_number_is_no_answer(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "p", "answer": ' + value + "}")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: `answer` is"):
        read(DataSourceConfig(path=str(path)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "completion": "2"},
        {"messages": [{"role": "user", "content": "1+1="}], "completion": "2"},
        {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]},
    ],
)
def test_a_demonstration_that_the_chat_template_rejects_is_named_with_its_line_and_its_own_keys(
    tiny_model, tmp_path, row
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ raise_exception('no ' + tone) }}"
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps(row | {"template_kwargs": {"tone": "jokes"}}) + "\n")
    message = r"shown\.jsonl:1: .*no jokes.*the row's messages and `template_kwargs`"
    with pytest.raises(ValueError, match=message):
        load_pairs(SFTConfig(model="demo:tiny", data=str(file)), tokenizer)


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("owner/gsm8k-v1.5", "gsm8k-v1.5"),
        ("data/gsm8k.train.jsonl", "gsm8k.train"),
        ("gsm8k.parquet", "gsm8k"),
        ("demo:add3", "add3"),
    ],
)
def test_the_label_of_a_source_is_its_name_without_the_ending_of_a_file(path, label):
    assert DataSourceConfig(path=path).label == label
