#!/usr/bin/env bash
# transformers 5.19.0, torch 2.13.0. Rows packed by position_ids attend across their boundary unless use_cache=False.
# A model that gets position_ids which start again at 0, and no mask, separates the packed sequences. It does so only where no cache is made.
# `use_cache` is true by default, in train() as well: then the second sequence sees the first, without a warning. A mask of ones does the same.
# Seen: log-probs of the second sequence off by 0.1 and more; with use_cache=False they equal the unpacked sequence's up to rounding.
# A trainer that packs rows trains each completion on the text of a stranger's, and its ratios to the rollout are not 1.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).train()
first, second = torch.randint(0, 64, (1, 7)), torch.randint(0, 64, (1, 5))
packed = torch.cat([first, second], 1)
positions = torch.cat([torch.arange(7), torch.arange(5)])[None]


def log_probs(ids, **arguments):
    return torch.log_softmax(model(ids, **arguments).logits, -1)


alone = log_probs(second)


def difference(**arguments):
    return (log_probs(packed, position_ids=positions, **arguments)[:, 7:] - alone).abs().max().item()


default = difference()
ones = difference(use_cache=False, attention_mask=torch.ones_like(packed))
separate = difference(use_cache=False)
print(f"off by {default:.3f} as called by default, {ones:.3f} with a mask of ones, {separate:.1e} with use_cache=False")
assert default > 0.1 and ones > 0.1, "packed sequences no longer see each other"
assert separate < 1e-5, "use_cache=False no longer separates them"
PYTHON
