"""The rows of demonstrations that the documentation shows are read as it says."""

import json
import re
from itertools import groupby
from pathlib import Path

from grpo_dist.config import SFTConfig
from grpo_dist.data.demonstrations import load_pairs
from grpo_dist.demo.tokenizer import character_tokenizer

README = Path(__file__).resolve().parents[2] / "grpo_dist/data/README.md"


def test_every_documented_form_of_a_row_is_read_and_its_given_parts_are_marked(tmp_path):
    (block,) = re.findall(r"```\n({.*?)\n```\n\n", README.read_text(), re.DOTALL)
    assert len([json.loads(line) for line in block.splitlines()]) == 6
    path, tokenizer = tmp_path / "sft.jsonl", character_tokenizer()
    path.write_text(block)
    shown = []
    for pair in load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer):
        runs = groupby(zip(pair.sampled, pair.completion, strict=True), lambda token: token[0])
        parts = [(own, tokenizer.decode([token for _, token in run])) for own, run in runs]
        shown.append((tokenizer.decode(pair.prompt), "".join(f"[{t}]" if own else t for own, t in parts)))
    assert shown == [
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        ("<|system|>Be brief.<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        ("2+2=", "[4<|end|>]"),
        ("<|user|>2+2=<|assistant|>", "[4<|end|>]"),
        (
            "<|user|>347*58=<|assistant|>",
            "[```calculator\n347*58\n```\n]```output\n20126\n```\n[\\boxed{20126}<|end|>]",
        ),
        ("<|user|>2+2=<|assistant|>", "[add(2, 2)<|end|>]<|tool|>4<|assistant|>[4<|end|>]"),
    ]
