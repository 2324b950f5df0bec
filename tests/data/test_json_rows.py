"""Rows of a JSON file are the same whether it has one list of objects, or one object per line."""

import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import DataSourceConfig
from grpo_dist.data.readers import read

ROWS = [
    {"problem": "1", "answer": "yes", "meta": {"t": ["x"]}},
    {"problem": "2", "answer": 3, "meta": {"u": 1}},
    {"problem": "3", "answer": 9007199254740993, "meta": None},
    {"problem": "4", "answer": 12345678901234567890, "meta": {}},
    {"problem": "5", "answer": 0.5, "meta": "text"},
    {"problem": "6", "answer": "\\frac{1}{2}", "meta": 1},
    {"problem": "7", "answer": "2021-01-01", "meta": "2021-01-02"},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FORMS = {
    "list.json": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2),
    "marked.json": "\ufeff" + json.dumps(ROWS),
    "blank_first.json": "\n \n" + json.dumps(ROWS),
    "lines.json": LINES,
    "lines.jsonl": LINES,
}


@pytest.mark.parametrize("name", FORMS)
def test_mixed_columns_keep_their_values_in_every_form(tmp_path, name):
    path = tmp_path / name
    path.write_text(FORMS[name], encoding="utf-8")
    found = read(DataSourceConfig(path=str(path), columns=("meta",)))
    answers = ["yes", "3", "9007199254740993", "12345678901234567890", "0.5", "\\frac{1}{2}", "2021-01-01"]
    assert [row.answer for row in found] == answers
    assert [row.columns["meta"] for row in found] == [row["meta"] for row in ROWS]
    assert found[2].location == f"{path}:3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ": no rows; expected at least one"),
        ("[]", ": no rows; expected at least one"),
        (
            '[{"problem": "1", "answer": 1},\n {"problem": "2" "answer"',
            "at line 2, column 18); expected one list",
        ),
        ("[1]", ":1: a JSON int; expected one list of objects"),
        ('{"problem": "1", "answer": 1}\n7\n', ":2: a JSON int; expected one list of objects"),
        ('[{"problem": "\\ud800", "answer": 1}]', ":1: not valid JSON (`problem`: has the character U+D800"),
        ('{"problem": "1", "answer": 1}\n\n{"problem": }', "at line 3, column 13); expected one list"),
        ('{"problem": "1", "answer": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "expected one list of objects"),
    ],
)
def test_a_file_that_is_neither_is_refused_with_its_place(tmp_path, text, words):
    path = tmp_path / "set.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        read(DataSourceConfig(path=str(path)))
    assert str(refusal.value).startswith(str(path)) and words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        '[{"problem": "1", "answer": 2, "level": 3}, {"problem": "2", "answer": 4}]',
        '{"problem": "1", "answer": 2, "level": 3}\n{"problem": "2", "answer": 4}',
        '{\n "problem": "1",\n "answer": 2, "level": 3}\n{"problem": "2",\n "answer": 4}',
        '{"problem": "1", "answer": 2, "level": 3}{"problem": "2", "answer": 4}',
    ],
)
def test_objects_may_lack_a_column_and_stand_anywhere(tmp_path, text):
    path = tmp_path / "set.json"
    path.write_text(text)
    found = read(DataSourceConfig(path=str(path), columns=("level",)))
    assert [(row.answer, row.columns["level"]) for row in found] == [("2", 3), ("4", None)]


def test_decimals_of_parquet_are_numbers(tmp_path):
    values = [Decimal("1.50"), Decimal("100.00"), Decimal("0.25")]
    table = pa.table({"problem": ["1", "2", "3"], "answer": pa.array(values, pa.decimal128(9, 2))})
    pq.write_table(table, tmp_path / "set.parquet")
    found = read(DataSourceConfig(path=str(tmp_path / "set.parquet")))
    assert [row.answer for row in found] == ["1.5", "100", "0.25"]


def test_a_date_that_a_directory_gives_is_refused_with_its_cause(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "1", "answer": "2021-01-01"}\n')
    with pytest.raises(ValueError, match="text that looks like a date as one: name the file itself"):
        read(DataSourceConfig(path=str(tmp_path)))


def test_a_file_without_rows_and_a_path_that_is_too_long_are_refused_as_such(tmp_path):
    empty, none = tmp_path / "set.parquet", pa.array([], pa.string())
    pq.write_table(pa.table({"problem": none, "answer": none}), empty)
    with pytest.raises(ValueError, match=r"set\.parquet: no rows; expected at least one"):
        read(DataSourceConfig(path=str(empty)))
    for ending in (".jsonl", ""):
        with pytest.raises(ValueError, match="no such file or directory"):
            read(DataSourceConfig(path=f"/{'a' * 300}{ending}"))
