"""Rows are what the file says, however it is read: plain, packed, in a directory, from the hub."""

import gzip
import json
import os
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import DataSourceConfig
from grpo_dist.data.readers import read
from tests.support.patience import HANG_S
from tests.support.services import hub_with

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
    "list.json": json.dumps(ROWS), "indented.json": json.dumps(ROWS, indent=2),
    "marked.json": "\ufeff" + json.dumps(ROWS), "blank_first.json": "\n \n" + json.dumps(ROWS),
    "lines.json": LINES, "lines.jsonl": LINES,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_mixed_columns_keep_their_values_in_every_form(tmp_path, name):
    path = tmp_path / name
    path.write_text(FORMS[name], encoding="utf-8")
    rows = read(DataSourceConfig(path=str(path), columns=("meta",)))
    answers = ["yes", "3", "9007199254740993", "12345678901234567890", "0.5", "\\frac{1}{2}", "2021-01-01"]
    assert [row.answer for row in rows] == answers
    assert [row.columns["meta"] for row in rows] == [row["meta"] for row in ROWS]
    assert rows[2].location == f"{path}:3"


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
    rows = read(DataSourceConfig(path=str(path), columns=("level",)))
    assert [(row.answer, row.columns["level"]) for row in rows] == [("2", 3), ("4", None)]


def test_decimals_of_parquet_are_numbers(tmp_path):
    values = [Decimal("1.50"), Decimal("100.00"), Decimal("0.25")]
    table = pa.table({"problem": ["1", "2", "3"], "answer": pa.array(values, pa.decimal128(9, 2))})
    pq.write_table(table, tmp_path / "set.parquet")
    rows = read(DataSourceConfig(path=str(tmp_path / "set.parquet")))
    assert [row.answer for row in rows] == ["1.5", "100", "0.25"]


def test_a_file_without_rows_and_a_path_that_is_too_long_are_refused_as_such(tmp_path):
    empty, none = tmp_path / "set.parquet", pa.array([], pa.string())
    pq.write_table(pa.table({"problem": none, "answer": none}), empty)
    with pytest.raises(ValueError, match=r"set\.parquet: no rows; expected at least one"):
        read(DataSourceConfig(path=str(empty)))
    for ending in (".jsonl", ""):
        with pytest.raises(ValueError, match="no such file or directory"):
            read(DataSourceConfig(path=f"/{'a' * 300}{ending}"))


GOLDS = ["007", "1e3", "12345678901234567891", "null", "2021-01-01", "0.10", "9007199254740993", "true", "3"]
MIXED = [{"problem": f"p{i}", "answer": gold} for i, gold in enumerate(GOLDS)]
MIXED += [{"problem": "n", "answer": 3}, {"problem": "t", "answer": "x y"}, {"problem": "b", "answer": 2**70}]
AS_TEXT = [str(row["answer"]) for row in MIXED]
MIXED_LINES = "".join(json.dumps(row) + "\n" for row in MIXED)


def golds(path, **settings):
    return [row.answer for row in read(DataSourceConfig(path=str(path), **settings))]


def test_golds_in_a_column_of_mixed_kinds_are_what_the_file_says(tmp_path):
    """`datasets` 5.2 reads 007 as 7, 1e3 as 1000, "null" as None, and rounds whole numbers beyond 2^63."""
    plain = tmp_path / "set.jsonl"
    plain.write_text(MIXED_LINES)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(content := gzip.compress(MIXED_LINES.encode(), mtime=0))
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory/train.jsonl").write_text(MIXED_LINES)
    (tmp_path / "directory_of_packed").mkdir()
    (tmp_path / "directory_of_packed/train.jsonl.gz").write_bytes(content)
    table = "problem,answer\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in MIXED)
    (tmp_path / "set.csv").write_text(table)
    (tmp_path / "set.tsv").write_text(table.replace(",", "\t"))
    (tmp_path / "directory_of_csv").mkdir()
    (tmp_path / "directory_of_csv/train.csv").write_text(table)
    assert golds(plain) == AS_TEXT
    names = ("packed.jsonl.gz", "directory", "directory_of_packed", "set.csv", "set.tsv", "directory_of_csv")
    for name in names:
        assert golds(tmp_path / name) == AS_TEXT, name
    for path in (plain, packed, tmp_path / "directory"):
        rows = read(DataSourceConfig(path=str(path), columns=("answer",)))
        assert [row.columns["answer"] for row in rows] == [row["answer"] for row in MIXED]


def test_golds_that_datasets_stored_as_json_are_texts_again(tmp_path):
    """It keeps such a column as JSON, also in Parquet and in what `save_to_disk` writes."""
    import datasets

    datasets.disable_progress_bars()
    kinds = datasets.Features({"problem": datasets.Value("string"), "answer": datasets.Json()})
    storable = [row for row in MIXED if row["answer"] != "true"]  # which cannot be told from a boolean
    stored = datasets.Dataset.from_list(storable, features=kinds)
    assert stored[0]["answer"] == 7
    stored.save_to_disk(tmp_path / "saved")
    stored.to_parquet(tmp_path / "set.parquet")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path in (tmp_path / "saved", tmp_path / "set.parquet", arrow):
        assert golds(path) == [str(row["answer"]) for row in storable], path


def test_an_interval_that_datasets_stored_as_json_is_no_list_of_golds(tmp_path):
    import datasets

    kinds = datasets.Features({"problem": datasets.Value("string"), "answer": datasets.Json()})
    rows = [{"problem": "1", "answer": "[0, 1]"}, {"problem": "2", "answer": [0, 1]}]
    datasets.Dataset.from_list(rows, features=kinds).to_parquet(tmp_path / "set.parquet")
    assert golds(tmp_path / "set.parquet") == ["[0, 1]", '["0", "1"]']


def test_a_table_of_arrow_is_read_in_both_of_its_forms(tmp_path):
    table = pa.table({"problem": ["1", "2"], "answer": ["007", "1e3"], "more": [[1, 2], None]})
    for name, writer in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(tmp_path / name), "wb") as out, writer(out, table.schema) as file:
            file.write_table(table, max_chunksize=1)
        rows = read(DataSourceConfig(path=str(tmp_path / name), columns=("more",)))
        assert [(row.answer, row.columns["more"]) for row in rows] == [("007", [1, 2]), ("1e3", None)]
        assert rows[1].location == f"{tmp_path / name}:2"


def test_a_csv_file_may_quote_and_its_lines_are_counted_as_an_editor_does(tmp_path):
    path = tmp_path / "set.csv"
    path.write_text('\ufeffquestion,answer\n"1, ""one""\nor 2?",7\n\n"3", 8 \n', encoding="utf-8")
    rows = read(DataSourceConfig(path=str(path), problem_column="question"))
    assert [(row.problem, row.answer, row.location) for row in rows] == [
        ('1, "one"\nor 2?', "7", f"{path}:2"),
        ("3", "8", f"{path}:5"),
    ]
    long = "x" * 200_000  # the csv module's own limit is 131,072
    path.write_text(f"question,answer\n{long},1\n")
    assert read(DataSourceConfig(path=str(path), problem_column="question"))[0].problem == long


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("set.json", "", ": no rows; expected at least one"),
        ("set.json", "[]", ": no rows; expected at least one"),
        ("set.json", '[{"problem": "1", "answer": 1},\n {"problem": "2" "answer"',
         "at line 2, column 18); expected one list"),
        ("set.json", "[1]", ":1: a JSON int; expected one list of objects"),
        ("set.json", '{"problem": "1", "answer": 1}\n7\n', ":2: a JSON int; expected one list of objects"),
        ("set.json", '[{"problem": "\\ud800", "answer": 1}]',
         ":1: not valid JSON (`problem`: has the character U+D800"),
        ("set.json", '{"problem": "1", "answer": 1}\n\n{"problem": }',
         "at line 3, column 13); expected one list"),
        ("set.json", '{"problem": "1", "answer": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("set.json", "[" * 100_000, "expected one list of objects"),
        ("set.csv", b"problem,answer\np,1,2\n", ":2: 3 fields, and the header has 2; put a field"),
        ("set.csv", b"problem,problem\np,1\n", ":1: the header has the column `problem` twice"),
        ("set.csv", b'problem,answer\n"p" q,1\n', ":2: not valid CSV ("),
        ("set.csv", b'problem,answer\np,1\n"q,1\n', ": not valid CSV (unexpected end of data)"),
        ("set.csv", b"problem,answer\n\xff,1\n", ": not UTF-8 ("),
        ("set.csv", b"problem;answer\np;1\n", ":1: the header is one field, `problem;answer`"),
        ("set.tsv", b"problem,answer\np,1\n", "separated by tabs: save the file with them instead of `,`"),
        ("set.csv", b"", ": no rows; expected at least one"),
        ("set.csv", b"problem,answer\n", ": no rows; expected at least one"),
        ("set.jsonl.gz", b"no gzip", ": the file cannot be loaded (Not a gzipped file"),
        ("set.jsonl.gz", gzip.compress(MIXED_LINES.encode(), mtime=0)[:-9], ": the file cannot be loaded ("),
        ("set.json.gz", gzip.compress(b"[1]", mtime=0), ":1: a JSON int; expected one list of objects"),
        ("set.arrow", b"ARROW1 no more", ": the file cannot be loaded ("),
        ("set.parquet.gz", b"", ": unknown file type '.gz'; expected .jsonl"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_its_place(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as refusal:
        read(DataSourceConfig(path=str(path)))
    assert str(refusal.value).startswith(str(path)) and words in str(refusal.value)
    assert "\n" not in str(refusal.value)


ALL = [str(i) for i in range(50)]
PARTS = {
    "train": ALL,
    "train[:5%]": ALL[:2],  # 2.5 rows, rounded as `datasets` does
    "train[10:20]": ALL[10:20],
    "train[-3:]": ALL[-3:],
    "train[:10]+train[-10:]": [*ALL[:10], *ALL[-10:]],
    "train[99:]": None,
}


@pytest.mark.parametrize("spec", PARTS)
@pytest.mark.parametrize(
    "kind",
    ["set.jsonl", "set.json", "set.jsonl.gz", "set.csv", "set.parquet", "saved", "splits", "directory"],
)
def test_a_part_of_a_split_is_read_from_every_kind_of_source(tmp_path, kind, spec):
    import datasets

    datasets.disable_progress_bars()
    rows = [{"problem": f"p{gold}", "answer": gold} for gold in ALL]
    lines, path = "".join(json.dumps(row) + "\n" for row in rows), tmp_path / kind
    if kind == "directory":
        path.mkdir()
        (path / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
        (path / "train-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    elif kind == "set.csv":
        path.write_text("problem,answer\n" + "".join(f"p{gold},{gold}\n" for gold in ALL))
    elif kind.startswith("set.json"):
        text = json.dumps(rows) if kind == "set.json" else lines
        path.write_bytes(gzip.compress(text.encode(), mtime=0) if kind.endswith(".gz") else text.encode())
    else:
        stored = datasets.Dataset.from_list(rows)
        if kind == "set.parquet":
            stored.to_parquet(path)
        else:
            saved = stored if kind == "saved" else datasets.DatasetDict({"train": stored, "test": stored})
            saved.save_to_disk(path)
    if PARTS[spec] is None:
        with pytest.raises(ValueError, match="no rows; expected at least one"):
            golds(path, split=spec)
    else:
        assert golds(path, split=spec) == PARTS[spec]
    with pytest.raises(ValueError, match=r"`split` = train\[5\] names no part of a split .* train\[:5%\]"):
        golds(path, split="train[5]")
    with pytest.raises(ValueError, match=r"no split `dev`; it has|has no splits; expected a part such as"):
        golds(path, split="train[:3]+dev")


def test_a_part_of_generated_problems_is_read_or_refused():
    whole = golds("demo:add3", split="test")
    assert golds("demo:add3", split="test[:10]+train[:1]") == [*whole[:10], *golds("demo:add3")[:1]]
    with pytest.raises(ValueError, match="demo:add3: no split `dev`; it has train, test"):
        golds("demo:add3", split="dev[:3]")
    generated = {"path": "reasoning_gym:chain_sum"}, {"path": "my_rows:rows"}, {"environment": "riddle:A"}
    for settings in generated:
        with pytest.raises(ValueError, match=r"split = train\[:5%\] takes a part of a file or data set"):
            DataSourceConfig(split="train[:5%]", **settings)


CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train*}, {split: test, path: main/test*}]
---
"""
READ = """
import sys
from grpo_dist.config import DataSourceConfig
from grpo_dist.data.readers import read

for split in ("train", "train[1:3]+test", "dev"):
    try:
        rows = read(DataSourceConfig(path="me/sums", subset="main", split=split))
        print([row.answer for row in rows], rows[-1].location, rows[0].source)
    except ValueError as error:
        print(error)
"""


def test_a_data_set_of_the_hub_is_listed_once(tmp_path, monkeypatch):
    def list_files(name, subset, *, keep):
        calls.append((name, subset, keep))
        return {"train": [str(tmp_path / "set.jsonl")]}, "json"

    calls = []
    (tmp_path / "set.jsonl").write_text(LINES)
    monkeypatch.setattr("grpo_dist.data.sources._list_files", list_files)
    monkeypatch.setattr("grpo_dist.data.sources.find_hub_failure", str)
    for _ in range(2):
        assert len(read(DataSourceConfig(path="me/listed_once"))) == len(ROWS)
    assert calls == [("me/listed_once", None, True)]


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_like_its_files_also_later_without_a_network(tmp_path):
    files = {
        "README.md": CARD,
        "main/train.jsonl": MIXED_LINES.encode(),
        "main/test.jsonl.gz": gzip.compress(b'{"problem": "p", "answer": "007"}\n', mtime=0),
    }
    caches = {"HF_HOME": str(tmp_path / "hf"), "GRPO_DIST_CACHE": str(tmp_path / "cache")}
    with hub_with("me/sums", files) as address:
        online = _read_from_hub(caches | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0"})
    assert online == [
        f"{AS_TEXT} me/sums/main/train.jsonl:12 sums",
        f"{[*AS_TEXT[1:3], '007']} me/sums/main/test.jsonl.gz:1 sums",
        "me/sums: no split `dev`; it has train, test",
    ]
    assert _read_from_hub(caches | {"HF_HUB_OFFLINE": "1"}) == online
    unreachable = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert _read_from_hub(caches | unreachable) == online
    (absent, *_) = _read_from_hub({name: f"{path}_empty" for name, path in caches.items()} | unreachable)
    assert absent.startswith("me/sums: the data set cannot be loaded (http://127.0.0.1:1 cannot be reached: ")
    assert "and the data set is not in the cache" in absent and absent.endswith("and the network")


def _read_from_hub(environment):
    """Read in a new process: the address of the hub is read on import."""
    command, environ = [sys.executable, "-c", READ], os.environ | environment
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
