"""A file that repeats its rows gives the prompts, order and messages that one call per row gave."""

import hashlib
import json
import os
import random
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, RewardsConfig, SFTConfig
from grpo_dist.data import readers
from grpo_dist.data.columns import ByUid, occurrences, record_hash, uids_of
from grpo_dist.data.demonstrations import count_rows, load_demonstrations
from grpo_dist.data.files import json_lines
from grpo_dist.data.order import EpochOrder, OrderState
from grpo_dist.data.prompts import build_prompts
from grpo_dist.data.readers import DataRow, read, read_all
from grpo_dist.data.stream import PromptStream
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs.identity import columns_digest, data_digest
from grpo_dist.runs.prepare import prepare_eval, train_prompts
from tests.data.test_public_shapes import SHAPES

SAME = [DataRow("1+1=", "2", "set", f"set.jsonl:{i}", {"level": i}) for i in range(3)]
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+3?"}]
ROWS = [
    {"problem": "What is 2+3?", "answer": "5", "level": 1},
    {"problem": "What is 2+3?", "answer": "5", "level": 2},  # another column
    {"problem": "What is 2+3? ", "answer": "6", "level": 1},  # white space, and another answer
    {"problem": "What is 2+3?", "answer": 5, "level": 1},  # the same as the first
    {"problem": "Add <|end|> and 2.", "answer": ["5", "five"], "level": None},
    {"problem": "2 < 3? " * 40, "answer": "yes", "level": 1},  # overlong
    {"problem": SYSTEM, "answer": "5", "level": 1},
    {"problem": [*SYSTEM, {"role": "assistant", "content": "It is 5."}], "answer": "5", "level": 1},
    {"problem": "Look at <image> and <think>", "answer": "proof", "level": {"a": [1.0, 2]}},
    {"problem": "Was ist 2+3? ÄÖ", "answer": "x is } (", "level": True},
]


def write(path, kind):
    """Write the rows; equal ones are neither adjacent nor evenly spaced."""
    rows = random.Random(0).choices(ROWS, k=70)
    if kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row, ensure_ascii=i % 2) for i, row in enumerate(rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        plain = [row for row in rows if isinstance(row["problem"], str)]
        lines = [f'"{row["problem"]}","{row["answer"]}","{row["level"]}"' for row in plain]
        path.write_text("\n".join(["problem,answer,level", *lines]))
    else:
        verl = [
            {
                "prompt": SHAPES["verl"][0]["prompt"],
                "reward_model": {"ground_truth": str(i % 3)},
                "level": [i % 2],
            }
            for i in range(50)
        ]
        pq.write_table(pa.Table.from_pylist(verl), path)


SOURCES = {
    "jsonl": {"columns": ("level",)},
    "json": {"columns": ("level",), "max_rows": 55},
    "csv": {"columns": ("level",)},
    "parquet": {
        "problem_column": "prompt", "answer_column": "reward_model.ground_truth", "columns": ("level",)
    },
}  # fmt: skip


def outcome(sources, **settings):
    """Return all that a run has of ``sources``."""
    data = DataConfig(
        train=sources, eval=sources[:1], max_prompt_tokens=120, overlong="drop", overlap="warn", **settings
    )
    sections = SimpleNamespace(data=data, rewards=RewardsConfig(), environments=EnvironmentsConfig())
    messages = []
    tokenizer = character_tokenizer()
    built = train_prompts(sections, read_all(sources), tokenizer, messages.append)
    (held_out,) = prepare_eval(sections, read_all(sources[:1]), tokenizer, built.prompts, messages.append)
    prompts, orders = list(built.prompts), []
    epochs = EpochOrder(len(built.prompts), 3, seed=3)
    stream = PromptStream(built.prompts, 3, seed=3, state=OrderState(), weights=data.weights)
    for order in (epochs, stream):
        orders += [built.prompts[order.prompt(i)].uid for batch in range(40) for i in order.take(batch)]
    return {
        "uids": [p.uid for p in prompts],
        "held_out": [[p.uid, p.token_ids.tolist()] for p in held_out.prompts],
        "tokens": [p.token_ids.tolist() for p in prompts],
        "golds": [[p.answer, p.text, p.source, p.columns, p.messages] for p in prompts],
        "thoughts": [str(p.thought) for p in prompts],
        "order": orders,
        "rows": list(built.row_uids),
        "dropped": [str(row) for row in built.dropped],
        "said": messages,
        "resume": data_digest(built.prompts) + columns_digest(built.prompts),
    }


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # messages name locations
    for kind in SOURCES:
        write(tmp_path / f"rows.{kind}", kind)
    return tuple(
        DataSourceConfig(path=f"rows.{kind}", name=kind, **settings) for kind, settings in SOURCES.items()
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Store all that is read, also few rows."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    for module in ("grpo_dist.data.readers", "grpo_dist.runs.prepare"):
        monkeypatch.setattr(f"{module}.STORED_FROM", 1)
    # Processes parse the golds, and their results do not differ here.
    monkeypatch.setattr("grpo_dist.runs.prepare.find_unreadable", lambda golds, settings: ([], len(golds)))
    return tmp_path / "cache" / "rows"


# Per case: hashes of its parts as one call per row gave them, in the order of `outcome`.
RECORDED = {
    "as_they_are": (
        "75bdf70e 479b446b 3f0f0023 7a527a78 fc121af9 e32f4601 6b2d1e00 5d336393 4ae7c27a 51cc378c"
    ),
    "deduplicated": (
        "5659cbb2 f84454ac deae2d40 5decf758 b79efa96 c6c188d1 914caeb4 c1f9475f 2dfddbfd d8198fce"
    ),
    "plain": ("75bdf70e 31096676 14711b4f 7a527a78 04264552 e32f4601 6b2d1e00 0f8ceddc 7f2741a0 adccbb00"),
    "weighted": ("75bdf70e 479b446b 3f0f0023 7a527a78 fc121af9 4a0b86e6 6b2d1e00 5d336393 4ae7c27a 51cc378c"),
}
SETTINGS = {
    "as_they_are": {},
    "deduplicated": {"deduplicate": True, "instruction": "Box it.", "system_prompt": "Hi <|end|>"},
    "plain": {"chat_template": "none"},
    "weighted": {},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_prompts_equal_one_call_per_row_also_when_they_are_read_back(sources, cache, case):
    if case == "weighted":
        sources = [source.model_copy(update={"weight": i}) for i, source in enumerate(sources, 1)]
    first = outcome(tuple(sources), **SETTINGS[case])
    hashes = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:8] for part in first.values()]
    assert dict(zip(first, hashes, strict=True)) == dict(zip(first, RECORDED[case].split(), strict=True))
    assert outcome(tuple(sources), **SETTINGS[case]) == first


PLAIN = [{"problem": f"{i % 7} + \u00e9\n 😀?", "answer": f" {i % 5} ", "other": i} for i in range(60)]
OTHER = {
    "a list": {"problem": "1+1", "answer": ["2", "two"]}, "a number": {"problem": "1+1", "answer": 2},
    "nothing": {"problem": "1+1", "answer": "2", "other": None},
    "several golds": {"problem": "1+1", "answer": '["2", "two"]'},
    "messages": {"problem": json.dumps(SYSTEM), "answer": "5"},
    "an empty answer": {"problem": "1+1", "answer": " "}, "no answer": {"problem": "1+1"},
    "NUL": {"problem": "1+1", "answer": "2\0"}, "a surrogate": {"problem": "1+1\ud800", "answer": "2"},
}  # fmt: skip
BROKEN = {
    "a blank line": '{"problem": "1", "answer": "2"}\n\n{"problem": "3", "answer": "4"}\n',
    "two on a line": '{"problem": "1", "answer": "2"}{"problem": "3", "answer": "4"}\n',
    "one on two lines": '{"problem": "1",\n"answer": "2"}\n',
    "twice": '{"problem": "1", "answer": "2", "problem": "3"}\n',
    "a torn line": '{"problem": "1", "answer": "2"}\n{"problem": "1", "answ',
    "no UTF-8": b'{"problem": "1", "answer": "2", "other": "\xff"}\n',
    "a mark": b'\xef\xbb\xbf{"problem": "1", "answer": "2"}\n',
    "no end": '{"problem": "1", "answer": "2"}',
    "Windows": '{"problem": "1", "answer": "2"}\r\n{"problem": "3", "answer": "4"}\r\n',
}


@pytest.mark.parametrize("name", ["plain", "parquet", "at most", *OTHER, *BROKEN])
def test_a_large_file_is_read_as_one_row_after_another(tmp_path, monkeypatch, name):
    def outcome():
        try:
            rows = read(source)
        except ValueError as error:
            return str(error)
        return (
            list(rows),
            [rows.distinct[int(i)].location for i in rows.codes],
            list(rows.distinct.column("uid")),
        )

    path = tmp_path / ("rows.parquet" if name == "parquet" else "rows.jsonl")
    rows = [*PLAIN, OTHER[name]] if name in OTHER else PLAIN
    if name == "parquet":
        pq.write_table(pa.Table.from_pylist(PLAIN), path)
    elif name in BROKEN:
        path.write_bytes(BROKEN[name] if isinstance(BROKEN[name], bytes) else BROKEN[name].encode())
    else:
        lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
        path.write_text("\n".join([*lines, ""]))
    source = DataSourceConfig(path=str(path), max_rows=23 if name == "at most" else None)
    monkeypatch.setattr("grpo_dist.data.readers.STORED_FROM", 1)
    monkeypatch.setattr("grpo_dist.data.readers.load", lambda key: None)
    monkeypatch.setattr("grpo_dist.data.readers.save", lambda *_: None)
    expected = outcome()
    monkeypatch.setattr("grpo_dist.data.readers.LARGE", 0)
    monkeypatch.setattr("grpo_dist.data.files._PART_BYTES", 200)
    if name in ("plain", "parquet", "at most", "no end", "nothing"):
        monkeypatch.setattr("grpo_dist.data.readers._read_columns", None)
    actual = outcome()
    if isinstance(expected, str):
        assert actual == expected
    else:
        assert actual[0] == expected[0]
        assert set(actual[1]) <= set(expected[1]) and set(actual[2]) == set(expected[2])


def test_a_stored_file_is_read_again_where_it_its_settings_or_the_store_have_changed(sources, cache):
    source = sources[0]
    rows = list(read(source))
    (stored,) = cache.glob("*.columns")
    assert read(source) == rows  # from the store
    whole = stored.read_bytes()
    places = range(0, len(whole), len(whole) // 9)
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for damage in (whole[:-40], b"", *changed):
        stored.write_bytes(damage)
        assert read(source) == rows
    assert [stored] == list(cache.glob("*.columns"))
    assert len(read(source.model_copy(update={"max_rows": 3}))) == 3
    with open("rows.jsonl", "a") as file:
        file.write('\n{"problem": "1+1", "answer": "2", "level": 0}')
    assert [row.problem for row in read(source)] == [*(row.problem for row in rows), "1+1"]


def test_rows_of_a_file_that_is_written_meanwhile_are_stored_under_no_name(sources, cache, monkeypatch):
    def read_columns(*arguments):
        text = text_file.read_text()
        text_file.write_text(text.replace("2+3", "3+2"))  # after it was hashed
        return original(*arguments)

    original, text_file = readers._read_columns, Path("rows.jsonl")
    before = list(read(sources[0]))
    assert readers.read(sources[0]).key
    for stored in cache.glob("*.columns"):
        stored.unlink()
    monkeypatch.setattr(readers, "_read_columns", read_columns)
    changed = read(sources[0])
    assert changed != before and not changed.key and not list(cache.glob("*.columns"))


def test_the_first_rows_of_a_large_file_are_read_without_hashing_it(sources, monkeypatch):
    monkeypatch.setattr("grpo_dist.data.readers.files_digest", None)
    assert len(read(sources[0].model_copy(update={"max_rows": 3}))) == 3


def test_stored_files_that_no_start_reads_are_deleted(sources, cache, monkeypatch):
    first, later = sources[0], sources[0].model_copy(update={"max_rows": 60})
    read(first)
    (stored,) = cache.glob("*.columns")
    os.utime(stored, (0, 0))
    read(first)  # what a start reads is not old
    read(later)
    assert len(list(cache.iterdir())) == 2
    os.utime(stored, (0, 0))
    read(later.model_copy(update={"max_rows": 59}))
    assert len(list(cache.iterdir())) == 2 and not stored.exists()
    monkeypatch.setattr("grpo_dist.data.columns._KEPT_BYTES", 1)
    read(later.model_copy(update={"max_rows": 58}))
    assert len(list(cache.iterdir())) == 1  # the newest


def test_a_store_that_cannot_be_written_is_none(sources, cache):
    cache.parent.write_text("a file")
    assert read(sources[0]) == list(read(sources[0]))


def test_a_store_of_another_user_is_read(sources, cache, monkeypatch):
    def refuse(*_):
        raise PermissionError

    rows = list(read(sources[0]))
    monkeypatch.setattr("grpo_dist.data.columns.os.utime", refuse)
    monkeypatch.setattr(readers, "_read_columns", None)
    assert read(sources[0]) == rows


def test_values_that_json_would_change_are_not_stored(tmp_path, cache):
    for kind, levels in (("dates", [date(2026, 1, 1)] * 2), ("texts", ["a"] * 2)):
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table({"problem": ["1+1"] * 2, "answer": ["2"] * 2, "level": levels}), path)
        for _ in range(2):
            assert read(DataSourceConfig(path=str(path), columns=("level",)))[1].columns == {
                "level": levels[1]
            }
    assert len(list(cache.glob("*.columns"))) == 1


def test_a_prompt_that_occurs_again_is_found_by_its_uid():
    built = build_prompts([*SAME, *SAME[:1]], character_tokenizer(), max_prompt_tokens=99)
    assert uids_of(built.prompts) == [prompt.uid for prompt in built.prompts]
    by_uid = ByUid(built.prompts)
    assert [by_uid[uid].uid for uid in by_uid] == uids_of(built.prompts) and "other" not in by_uid
    assert occurrences(np.array([0, 1, 0, 0])).tolist() == [1, 1, 2, 3]


def test_the_memory_for_repeated_rows_does_not_grow_with_their_length(tmp_path, monkeypatch):
    solution = "x" * 100_000
    assert len(record_hash({"problem": "1+1", "solution": solution})) == 16
    assert record_hash({"level": 1}) != record_hash({"level": True}) != record_hash({"level": 1.0})
    path = tmp_path / "long.jsonl"
    lines = [json.dumps({"problem": f"{i}+1", "solution": solution}) for i in (0, 1, 1, 2, 2, 1)]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("grpo_dist.data.files._REMEMBERED", 150_000)  # bytes: one line
    records = [record for _, record in json_lines(path)]
    assert [records[2] is records[1], records[4] is records[3], records[5] is records[1]] == [
        True, False, True,
    ]  # fmt: skip
    assert records[4] == records[3]


DEMONSTRATIONS = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": "<|end|>1+2=", "completion": "3<|end|>"},
    {"prompt": "2+2=", "completion": [{"text": "4"}, {"text": "5", "given": True}, {"text": "6"}]},
    {"messages": [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]},
    {"chat_template": "none", "prompt": "3+3=", "completion": "6"},
]


def test_repeated_demonstrations_equal_single_rows_also_when_they_are_read_back(tmp_path, cache, monkeypatch):
    def outcome(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        messages = []
        table = load_demonstrations(settings, tokenizer, say=messages.append)
        assert not table.select(np.arange(1)).key
        return [
            [d.uid, d.row_uid, d.text, d.token_ids.tolist(), d.completion_ids.tolist(), str(d.sampled)]
            for d in table
        ], messages

    monkeypatch.setattr("grpo_dist.data.demonstrations.STORED_FROM", 1)
    monkeypatch.setattr("grpo_dist.data.demonstrations._BATCH", 4)
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer()
    settings = SFTConfig.model_validate({"model": "demo:tiny", "data": "rows.jsonl"})
    alone = [outcome([row])[0][0] for row in DEMONSTRATIONS]
    order = random.Random(0).choices(range(len(DEMONSTRATIONS)), k=30)
    rows, messages = outcome([DEMONSTRATIONS[i] for i in order])
    assert [row[:2] + row[3:] for row in rows] == [alone[i][:2] + alone[i][3:] for i in order]
    assert [row[2] for row in rows] == [f"rows.jsonl:{i}" for i in range(1, 31)]
    assert f"{order.count(1)} of 30 rows have special tokens" in messages[0]
    assert f", e.g. rows.jsonl:{order.index(1) + 1};" in messages[0]
    monkeypatch.setattr("grpo_dist.data.demonstrations._Tokeniser.begin", None)
    assert outcome([DEMONSTRATIONS[i] for i in order]) == (rows, messages)


MANY = [{"prompt": f"{i % 7}+\u00e9\n=", "completion": f"{i % 5} \U0001f600"} for i in range(50)]
ODD = {
    "plain": None, "at most": None, "parquet": None,
    "a special token": {"prompt": "<|end|>1=", "completion": "2"},
    "an end": {"prompt": "1=", "completion": "2<|end|>"},
    "an end within": {"prompt": "1=", "completion": "2<|end|>3"},
    "a system prompt": {"prompt": "1=", "completion": "2", "system": "Be brief."},
    "another column": {"prompt": "1=", "completion": "2", "level": 1},
    "nothing": {"prompt": "1=", "completion": "2", "system": None},
    "no completion": {"prompt": "1=", "completion": ""}, "no prompt": {"completion": "1"},
    "too long": {"prompt": "1=", "completion": "2" * 200},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_large_file_of_demonstrations_is_read_as_one_row_after_another(tmp_path, monkeypatch, name):
    def outcome():
        messages = []
        try:
            count = count_rows(settings)
            table = load_demonstrations(settings, tokenizer, say=messages.append)
        except ValueError as error:
            return str(error)
        assert count == len(table)
        rows = [(row.uid, row.row_uid, row.source, row.text, str(row.sampled)) for row in table]
        return rows, [[d.token_ids.tolist(), d.completion_ids.tolist()] for d in table], messages

    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("grpo_dist.chat.batches._FEW", 1)
    monkeypatch.setattr("grpo_dist.data.files._PART_BYTES", 400)
    path = tmp_path / ("rows.parquet" if name == "parquet" else "rows.jsonl")
    if name == "parquet":
        pq.write_table(pa.Table.from_pylist(MANY), path)
    else:
        rows = [*MANY[:20], ODD[name], *MANY[20:]] if ODD[name] else MANY
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(path), "examples": 23 if name == "at most" else None}
    settings = SFTConfig.model_validate({"model": "demo:tiny", "data": [source], "max_length": 100})
    tokenizer = character_tokenizer()
    expected = outcome()
    monkeypatch.setattr("grpo_dist.data.demonstrations.LARGE", 0)
    if name in ("plain", "at most", "parquet", "a special token", "an end", "an end within"):
        monkeypatch.setattr("grpo_dist.data.demonstrations._records", None)
    assert outcome() == expected


def test_a_large_file_is_refused_for_the_row_that_its_template_cuts_off(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_dist.data.demonstrations.LARGE", 0)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'][:12]")
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": prompt, "completion": "2"} for prompt in ("1+1=", "one and one =")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SFTConfig.model_validate({"model": "demo:tiny", "data": [{"path": str(path)}]})
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .* does not show the end of the user message"):
        load_demonstrations(settings, tokenizer)


def test_demonstrations_are_stored_with_what_ends_them(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("grpo_dist.data.demonstrations.STORED_FROM", 1)
    (tmp_path / "model").mkdir()
    character_tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    row = {"chat_template": "none", "prompt": "3+3=", "completion": "6;"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = SFTConfig.model_validate({"model": "demo:tiny", "data": str(tmp_path / "rows.jsonl")})
    before = load_demonstrations(settings, tokenizer)[0].completion_ids.tolist()
    (end,) = tokenizer(";", add_special_tokens=False)["input_ids"]
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    after = load_demonstrations(settings, tokenizer)[0].completion_ids.tolist()
    assert after == [before[0], before[-1]] != before  # ";" ends a text, and does so once


def test_of_two_wrong_demonstrations_the_first_is_named(tmp_path):
    path, tokenizer = tmp_path / "rows.jsonl", character_tokenizer()
    rows = [{"prompt": "1+1=", "completion": text} for text in ("2", "2" * 99, "")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = SFTConfig.model_validate({"model": "demo:tiny", "data": str(path), "max_length": 40})
    with pytest.raises(ValueError, match=r"rows.jsonl:2: prompt and completion have \d+ tokens"):
        load_demonstrations(settings, tokenizer)
