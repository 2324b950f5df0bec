#!/usr/bin/env bash
# torch 2.13.0 on a CPU. A row whose keys are all masked with the smallest finite number has a gradient as many times too large as it has keys.
# scaled_dot_product_attention gives the mean of the values there, in every backend. Its fused backward takes each weight as 1, for 1 / keys.
# One would guess that backends agree up to rounding, or that such a row has no gradient, as it has with -inf or a boolean mask.
# Seen: with 4, 16 and 64 keys that row gives the values 4, 16 and 64 times the gradient of the math backend, whose weights sum to 1.
# Masks of padding that add finfo.min are common; a loss that counts all positions (router balance, KL or entropy over padding) meets it.
set -euo pipefail
packages=(torch==2.13.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)


def gradient(backend, keys, masked):
    """Return output and gradient with respect to the values of one query whose keys are all masked."""
    query, key, value = torch.randn(1, 1, 1, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8, requires_grad=True)
    query.requires_grad_()
    mask = torch.full((1, 1, 1, keys), masked)
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return output, torch.autograd.grad(output.sum(), value)[0].mean().item() * keys


smallest = torch.finfo(torch.float32).min
seen = {
    keys: [round(gradient(backend, keys, smallest)[1], 4) for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)]
    for keys in (4, 16, 64)
}
print(f"sum of the weights by keys, math and fused: {seen}; with -inf: {gradient(SDPBackend.FLASH_ATTENTION, 4, -torch.inf)[1]}")
assert all(math == 1.0 and fused == keys for keys, (math, fused) in seen.items()), "the backends agree"
PYTHON
