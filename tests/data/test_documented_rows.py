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
from tests.support.chat_templates import real_tokenizer
from tests.support.made_groups import load_pairs

README = Path(__file__).resolve().parents[2] / "grpo_dist/data/README.md"


def load_marked(path, rows, tokenizer):
    """Return prompt and completion of each row, with the learned parts in brackets."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = []
    for pair in load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer):
        runs = groupby(zip(pair.sampled, pair.completion, strict=True), lambda token: token[0])
        parts = [(is_sampled, tokenizer.decode([token for _, token in run])) for is_sampled, run in runs]
        texts.append((tokenizer.decode(pair.prompt), "".join(f"[{t}]" if s else t for s, t in parts)))
    return texts


def test_every_documented_form_of_a_row_is_read_and_its_given_parts_are_marked(tmp_path):
    (block,) = re.findall(r"```\n({.*?)\n```\n\n", README.read_text(), re.DOTALL)
    rows = [json.loads(line) for line in block.splitlines()]
    assert len(rows) == 8
    assert load_marked(tmp_path / "sft.jsonl", rows, character_tokenizer()) == [
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
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
    ]


ASKED, ANSWERED = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
GIVEN_TWICE = "<|user|>1<|assistant|>2<|end|><|user|>1<|assistant|>"


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        (
            {
                "conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}],
                "system": "s",
            },
            ("<|system|>s<|user|>1<|assistant|>", "[2<|end|>]"),
        ),
        (
            {"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "prompt": "1", "prompt_id": "a"},
            ("<|user|>1<|assistant|>", "[2<|end|>]<|user|>1<|assistant|>[2<|end|>]"),
        ),
        (
            {
                "prompt": [ASKED, ANSWERED, ASKED],
                "completion": [ANSWERED, {"role": "tool", "content": "3"}, ANSWERED],
            },
            (GIVEN_TWICE, "[2<|end|>]<|tool|>3<|assistant|>[2<|end|>]"),
        ),
        ({"prompt": [ASKED, ANSWERED, ASKED], "completion": "2"}, (GIVEN_TWICE, "[2<|end|>]")),
    ],
    ids=["ShareGPT with a system prompt", "UltraChat", "TRL", "messages and text"],
)
def test_layouts_of_public_data_sets_are_read(tmp_path, row, texts):
    assert load_marked(tmp_path / "sft.jsonl", [row], character_tokenizer()) == [texts]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"conversations": [{"from": "human", "value": "1"}]},
            "`conversations` must end",
        ),
        (
            {"conversations": [{"role": "system", "content": "s"}, ASKED, ANSWERED], "system": "t"},
            "`conversations` and `system` exclude each other",
        ),
        (
            {"prompt": "1", "completion": "2", "tools": "add"},
            "`tools` = 'add'; expected a list of JSON schemas",
        ),
        ({"prompt": "1", "completion": "2", "tools": 3}, "`tools` = '3'"),
        ({"prompt": "1", "completion": "2", "tools": ["add"]}, "rename the column if it is something else"),
        ({"prompt": [ASKED], "completion": [ANSWERED, ASKED]}, "`completion` must end"),
        ({"prompt": "1", "completion": "2", "chat_template_kwargs": "x"}, "`chat_template_kwargs` is a str"),
    ],
)
def test_a_refusal_names_the_key_that_the_row_has(tmp_path, row, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        load_marked(tmp_path / "sft.jsonl", [row], character_tokenizer())


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"default": None}}}]


@pytest.mark.parametrize(
    "keys",
    [
        {"tools": json.dumps(TOOLS), "chat_template_kwargs": {"mode": "x"}},
        {"tools": json.dumps(TOOLS), "chat_template_kwargs": {"mode": "y"}, "template_kwargs": {"mode": "x"}},
        {"tools": [], "template_kwargs": {"tools": TOOLS, "mode": "x"}},
    ],
)
@pytest.mark.parametrize(
    "row", [{"prompt": "1", "completion": "2"}, {"prompt": [ASKED], "completion": [ANSWERED]}]
)
def test_a_row_has_the_tools_and_the_arguments_of_the_template_that_trl_reads(tmp_path, row, keys):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | map(attribute='function') | map(attribute='name') | list | tojson }}{{ mode }}"
        + tokenizer.chat_template
    )
    [(prompt, _)] = load_marked(tmp_path / "sft.jsonl", [row | keys], tokenizer)
    assert prompt == '["add"]x<|user|>1<|assistant|>'


def test_a_table_has_the_rows_of_a_file_without_the_keys_of_other_rows(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% if a is defined %}a{{ a }}{% endif %}{% if b is defined %}b{{ b }}{% endif %}{{ tools | tojson }}"
        + tokenizer.chat_template
    )
    parameters = [{"x": {"type": "int"}}, {"y": {"type": "int"}}]
    rows = [
        {
            "prompt": "1",
            "completion": [{"text": "2"}, {"text": "3", "given": True}, {"text": "4"}],
            "template_kwargs": {name: 1},
            "tools": [{"name": "f", "parameters": types} for types in parameters],
        }
        for name in ("a", "b")
    ]
    loaded = [load_marked(tmp_path / name, rows, tokenizer) for name in ("sft.jsonl", "sft.parquet")]
    assert loaded[0] == loaded[1]
    assert [prompt[:2] for prompt, _ in loaded[0]] == ["a1", "b1"]
    assert [completion for _, completion in loaded[0]] == ["[2]3[4<|end|>]"] * 2


@pytest.mark.parametrize("wrapped", [lambda call: call, lambda call: {"type": "function", "function": call}])
def test_arguments_of_a_tool_call_may_be_json_text(tmp_path, wrapped):
    rows = []
    for arguments in ({"x": "é"}, '{"x":"\\u00e9"}'):
        calls = [wrapped({"name": "f", "arguments": arguments})]
        call = {"role": "assistant", "content": "", "tool_calls": calls}
        rows.append({"messages": [ASKED, call, {"role": "tool", "content": "3"}, ANSWERED]})
    first, second = load_marked(tmp_path / "sft.jsonl", rows, real_tokenizer("qwen2.5"))
    assert first == second and '"arguments": {"x": "é"}' in first[1]


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
