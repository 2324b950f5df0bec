#!/usr/bin/env bash
# transformers 5.19.0, templates of Qwen3, Qwen3.8, gpt-oss and Qwen2.5 as TRL 1.16.0 ships them. continue_final_message=True ends the thought
# of a message that has only a thought so far, or leaves the thought out; a tool call behind the content is cut off.
# One would guess that the message is continued where it ends. True continues its `content`, whatever else it has; no error, no warning.
# Seen: after {"reasoning_content": "Let me", "content": ""} the prompt ends with "Let me\n</think>\n\n" (Qwen3), "Let me\n</think>" (3.8),
# and has no thought at all with gpt-oss; a message with a call is continued as if it had none.
# A partial rollout that is resumed from messages starts its answer in the middle of a thought: other tokens than those it was sampled with.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 trl==1.16.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
from pathlib import Path

import trl
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
call = {"type": "function", "function": {"name": "double", "arguments": {"a": 4}}}


def prompt(name, **message):
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", **message}]
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, continue_final_message=True)


thoughts = {name: prompt(name, reasoning_content="Let me", content="") for name in ("qwen3", "qwen3_8", "gptoss")}
calls = {name: prompt(name, content="", tool_calls=[call]) for name in ("qwen3", "qwen2_5")}
print({name: text[-40:] for name, text in (thoughts | calls).items()})
assert thoughts["qwen3"].endswith("Let me\n</think>\n\n") and thoughts["qwen3_8"].endswith("Let me\n</think>"), "a thought stays open"
assert "Let me" not in thoughts["gptoss"] and not any("double" in text for text in calls.values()), "nothing is left out"
PYTHON
