#!/usr/bin/env bash
# peft 0.21.2. With init_lora_weights "pissa" or "olora", disable_adapter() does not give the model that training began with.
# These initialisations take the adapter's first value out of the base weights, so that the sum is unchanged; disabled, the base lacks it.
# One would guess, as for the default initialisation, that the disabled adapter is the reference policy.
# Seen: at step 0 the adapted model has the base model's log-probs (1e-5), the disabled one is off by more than 0.1; default init: exact.
# A KL penalty against disable_adapter() then pulls to a model that nobody has: the base without its largest singular directions.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 peft==0.21.2)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, initializer_range=0.2)
base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
tokens = torch.randint(0, 64, (2, 16))


@torch.no_grad()
def errors(init):
    """Return how far the log-probs of the adapted model, and of the disabled one, are from the base's."""
    expected = torch.log_softmax(base(tokens).logits, -1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=init)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    adapted = (torch.log_softmax(model(tokens).logits, -1) - expected).abs().max().item()
    with model.disable_adapter():
        return adapted, (torch.log_softmax(model(tokens).logits, -1) - expected).abs().max().item()


seen = {init: errors(init) for init in (True, "orthogonal", "pissa", "olora")}
print(seen)
assert all(adapted < 1e-3 for adapted, _ in seen.values())
assert seen[True][1] == 0.0 and min(seen["pissa"][1], seen["olora"][1]) > 0.1, "the disabled adapter is the base"
PYTHON
