"""A file that repeats its rows gives the prompts, order and messages that one call per row gave."""

import hashlib
import json
import random
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, RewardsConfig
from grpo_dist.data import readers
from grpo_dist.data.files import json_lines
from grpo_dist.data.order import EpochOrder, OrderState
from grpo_dist.data.prompts import build_prompts
from grpo_dist.data.readers import DataRow, read, read_all
from grpo_dist.data.repeats import ByUid, content, occurrences, uids_of
from grpo_dist.data.stream import PromptStream
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs.identity import columns_digest, data_digest
from grpo_dist.runs.prepare import PromptSections, prepare_eval, train_prompts
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
    """Write the rows in an order in which equal ones are neither together nor evenly spaced."""
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
    sections, said = PromptSections(data, RewardsConfig(), EnvironmentsConfig()), []
    tokenizer = character_tokenizer()
    built = train_prompts(sections, read_all(sources), tokenizer, said.append)
    (held_out,) = prepare_eval(sections, read_all(sources[:1]), tokenizer, built.prompts, said.append)
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
        "said": said,
        "resume": data_digest(built.prompts) + columns_digest(built.prompts),
    }


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # locations are in what is said
    for kind in SOURCES:
        write(tmp_path / f"rows.{kind}", kind)
    return tuple(
        DataSourceConfig(path=f"rows.{kind}", name=kind, **settings) for kind, settings in SOURCES.items()
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Store all that is read, however few rows."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    for module in ("grpo_dist.data.repeats", "grpo_dist.runs.prepare"):
        monkeypatch.setattr(f"{module}.STORED_FROM", 1)
    # Which golds parse is asked of processes, and is not what differs here.
    monkeypatch.setattr("grpo_dist.runs.prepare.find_unreadable", lambda golds, settings: ([], len(golds)))
    return tmp_path / "cache" / "rows"


# Of each case: hashes of its parts as one call per row gave them, in the order of `outcome`.
RECORDED = {
    "as_they_are": (
        "75bdf70e 479b446b 3f0f0023 7a527a78 fc121af9 e32f4601 6b2d1e00 5d336393 353fc1c1 51cc378c"
    ),
    "deduplicated": (
        "5659cbb2 f84454ac deae2d40 5decf758 b79efa96 c6c188d1 914caeb4 c1f9475f ec659558 d8198fce"
    ),
    "plain": ("75bdf70e 31096676 14711b4f 7a527a78 04264552 e32f4601 6b2d1e00 0f8ceddc ba97786a adccbb00"),
    "weighted": ("75bdf70e 479b446b 3f0f0023 7a527a78 fc121af9 4a0b86e6 6b2d1e00 5d336393 353fc1c1 51cc378c"),
}
SETTINGS = {
    "as_they_are": {},
    "deduplicated": {"deduplicate": True, "instruction": "Box it.", "system_prompt": "Hi <|end|>"},
    "plain": {"chat_template": "none"},
    "weighted": {},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_prompts_are_those_of_one_call_per_row_also_when_they_are_read_back(sources, cache, case):
    if case == "weighted":
        sources = [source.model_copy(update={"weight": i}) for i, source in enumerate(sources, 1)]
    first = outcome(tuple(sources), **SETTINGS[case])
    hashes = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:8] for part in first.values()]
    assert dict(zip(first, hashes, strict=True)) == dict(zip(first, RECORDED[case].split(), strict=True))
    assert outcome(tuple(sources), **SETTINGS[case]) == first


def test_a_stored_file_is_read_again_where_it_its_settings_or_the_store_have_changed(sources, cache):
    source = sources[0]
    rows = list(read(source))
    (stored,) = cache.glob("*.npz")
    assert read(source) == rows  # from the store
    whole = stored.read_bytes()
    places = range(0, len(whole), len(whole) // 9)
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for damage in (whole[:-40], b"", *changed):
        stored.write_bytes(damage)
        assert read(source) == rows
    assert [stored] == list(cache.glob("*.npz"))
    assert len(read(source.model_copy(update={"max_rows": 3}))) == 3
    with open("rows.jsonl", "a") as file:
        file.write('\n{"problem": "1+1", "answer": "2", "level": 0}')
    assert [row.problem for row in read(source)] == [*(row.problem for row in rows), "1+1"]


def test_rows_of_a_file_that_is_written_meanwhile_are_stored_under_no_name(sources, cache, monkeypatch):
    def read_columns(*arguments):
        text = text_file.read_text()
        text_file.write_text(text.replace("2+3", "3+2"))  # after it was hashed
        return kept(*arguments)

    kept, text_file = readers._read_columns, Path("rows.jsonl")
    before = list(read(sources[0]))
    assert readers.read(sources[0]).key
    for stored in cache.glob("*.npz"):
        stored.unlink()
    monkeypatch.setattr(readers, "_read_columns", read_columns)
    changed = read(sources[0])
    assert changed != before and not changed.key and not list(cache.glob("*.npz"))


def test_the_first_rows_of_a_large_file_are_read_without_hashing_it(sources, monkeypatch):
    monkeypatch.setattr("grpo_dist.data.repeats.files_digest", None)
    assert len(read(sources[0].model_copy(update={"max_rows": 3}))) == 3


def test_a_store_that_cannot_be_written_is_none(sources, cache):
    cache.parent.write_text("a file")
    assert read(sources[0]) == list(read(sources[0]))


def test_values_that_json_would_change_are_not_stored(tmp_path, cache):
    for kind, levels in (("dates", [date(2026, 1, 1)] * 2), ("texts", ["a"] * 2)):
        path = tmp_path / f"{kind}.parquet"
        pq.write_table(pa.table({"problem": ["1+1"] * 2, "answer": ["2"] * 2, "level": levels}), path)
        for _ in range(2):
            assert read(DataSourceConfig(path=str(path), columns=("level",)))[1].columns == {
                "level": levels[1]
            }
    assert len(list(cache.glob("*.npz"))) == 1


def test_a_prompt_that_occurs_again_is_found_by_its_uid():
    built = build_prompts([*SAME, *SAME[:1]], character_tokenizer(), max_prompt_tokens=99)
    assert uids_of(built.prompts) == [prompt.uid for prompt in built.prompts]
    by_uid = ByUid(built.prompts)
    assert all(by_uid[prompt.uid] == prompt for prompt in built.prompts) and "other" not in by_uid
    assert occurrences(np.array([0, 1, 0, 0]), np.array([2, 0])).tolist() == [3, 1, 4, 5]


def test_what_is_remembered_of_rows_does_not_grow_with_their_length(tmp_path, monkeypatch):
    solution = "x" * 100_000
    assert len(content({"problem": "1+1", "solution": solution})) == 16
    assert content({"level": 1}) != content({"level": True}) != content({"level": 1.0})
    path = tmp_path / "long.jsonl"
    lines = [json.dumps({"problem": f"{i}+1", "solution": solution}) for i in (0, 1, 1, 2, 2, 1)]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("grpo_dist.data.files._REMEMBERED", 150_000)  # bytes: one line
    records = [record for _, record in json_lines(path)]
    assert [records[2] is records[1], records[4] is records[3], records[5] is records[1]] == [
        True, False, True,
    ]  # fmt: skip
    assert records[4] == records[3]
