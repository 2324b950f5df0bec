"""The rows of demonstrations that the documentation shows are read as it says."""

import csv
import gzip
import json
import re
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import SFTConfig
from grpo_dist.demo.tokenizer import character_tokenizer
from tests.support.made_groups import load_pairs

README = Path(__file__).resolve().parents[2] / "grpo_dist/data/README.md"


def test_every_documented_form_of_a_row_is_read_and_its_given_parts_are_marked(tmp_path):
    (block,) = re.findall(r"```\n({.*?)\n```\n\n", README.read_text(), re.DOTALL)
    assert len([json.loads(line) for line in block.splitlines()]) == 7
    path, tokenizer = tmp_path / "sft.jsonl", character_tokenizer()
    path.write_text(block)
    texts = []
    for pair in load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer):
        runs = groupby(zip(pair.sampled, pair.completion, strict=True), lambda token: token[0])
        parts = [(is_sampled, tokenizer.decode([token for _, token in run])) for is_sampled, run in runs]
        texts.append((tokenizer.decode(pair.prompt), "".join(f"[{t}]" if s else t for s, t in parts)))
    assert texts == [
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        ("<|system|>Be brief.<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        ("2+2=", "[4<|end|>]"),
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        (
            "<|user|>347*58=<|assistant|>",
            "[```calculator\n347*58\n```\n]```output\n20126\n```\n[\\boxed{20126}<|end|>]",
        ),
        ("<|user|>2+2=<|assistant|>", "[add(2, 2)<|end|>]<|tool|>4<|assistant|>[4<|end|>]"),
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
    ]


ROWS = [
    {"system": "Be brief.", "prompt": "2+2=", "completion": "4"},
    {"system": None, "prompt": "007+1=", "completion": "008"},
]


@pytest.mark.parametrize(
    "name", ["sft.jsonl", "sft.jsonl.gz", "sft.json", "sft.parquet", "sft.csv", "directory"]
)
def test_demonstrations_are_read_from_data_files_of_every_kind(tmp_path, name):
    path, tokenizer = tmp_path / name, character_tokenizer()
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    rows = [row | {"system": row["system"] or ""} for row in ROWS]  # CSV has no null
    if name == "directory":
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    elif name == "sft.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif name == "sft.csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = json.dumps(ROWS) if name == "sft.json" else lines
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    pairs = load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer)
    assert [(tokenizer.decode(pair.prompt), tokenizer.decode(pair.completion)) for pair in pairs] == [
        ("<|system|>Be brief.<|user|>2+2=<|assistant|>", "4<|end|>"),
        ("<|user|>007+1=<|assistant|>", "008<|end|>"),
    ]


def test_a_conversation_in_a_table_is_learned_like_one_in_a_file(tmp_path):
    """A table has the keys of all messages in each, None where it lacks one; ShareGPT has other names."""
    tokenizer = character_tokenizer()
    turns = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "add", "name": "adder"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    shared = [
        {"from": f, "value": m["content"]}
        for f, m in zip(("human", "gpt", "observation", "gpt"), turns, strict=True)
    ]
    (tmp_path / "plain.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "shared.jsonl").write_text(json.dumps({"messages": shared}) + "\n")
    pq.write_table(pa.Table.from_pylist([{"messages": turns, "prompt": None}]), tmp_path / "table.parquet")
    loaded = [
        load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer)
        for path in sorted(tmp_path.iterdir())
    ]
    assert loaded[0] == loaded[1] == loaded[2]
    (pair,) = loaded[0]
    tokens = [token for token, sampled in zip(pair.completion, pair.sampled, strict=True) if not sampled]
    assert tokenizer.decode(tokens) == "<|tool|>4<|assistant|>"
