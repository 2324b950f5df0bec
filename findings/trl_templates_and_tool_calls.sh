#!/usr/bin/env bash
# TRL 1.16.0, transformers 5.19.0. Training templates without tools render a tool call as an empty turn, and its end alone is trained.
# One would guess an error, or the call as text. The mask of assistant tokens of llama3, phi3, qwen2_5_vl and lfm2 has the end of turn only.
# Of other families it has tokens that the model is never asked for: "\n" after the role (qwen2_5, glm4moe), <｜Assistant｜> (deepseek).
# Seen: the texts below, for a conversation of question, call of a tool, its result and answer, with the tools given.
# SFT or a distillation on tool use teaches such a model to end its turn where it should call, and to do so from the first token.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 trl==1.16.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import itertools
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
rust = Tokenizer(models.BPE(vocab=letters, merges=[]))
rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
tools = [{"type": "function", "function": {"name": "double", "description": "Double.", "parameters": parameters}}]
call = {"type": "function", "function": {"name": "double", "arguments": {"a": 4}}}
conversation = [
    {"role": "user", "content": "Twice four?"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "name": "double", "content": "8"},
    {"role": "assistant", "content": "8"},
]


def trained(name, messages, tools):
    """Return the texts that the template's mask marks."""
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}_training.jinja").read_text()
    arguments = dict(chat_template=template, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    encoded = tokenizer.apply_chat_template(messages, **arguments)
    pairs = itertools.groupby(zip(encoded["assistant_masks"], encoded["input_ids"]), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for marked, run in pairs if marked]


empty = {name: trained(name, conversation, tools)[0] for name in ("llama3", "phi3", "qwen2_5_vl", "lfm2")}
plain = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
given = {name: trained(name, plain, None)[0] for name in ("qwen2_5", "glm4moe", "deepseekv3")}
print(f"trained for the call: {empty}\ntrained for the answer: {given}")
ends = {"llama3": "<|eot_id|>", "phi3": "<|end|>\n", "qwen2_5_vl": "<|im_end|>\n", "lfm2": "<|im_end|>\n"}
assert empty == ends, "a call is rendered"
assert given["qwen2_5"].startswith("\n") and given["glm4moe"].startswith("\n"), "the prompt's newline is not trained"
assert given["deepseekv3"].startswith("<｜Assistant｜>")
PYTHON
