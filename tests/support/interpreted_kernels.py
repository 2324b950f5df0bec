"""Triton's kernels on a CPU, by Triton's interpreter: ``python -m tests.support.interpreted_kernels``.

Prints one JSON object: the largest errors against float64, by case.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

import torch

from grpo_dist.policy import logprobs
from grpo_dist.policy.logit_kernels import _BLOCK, KernelLogitRows


def exact(logits, targets, temperature, grad, entropy_grad):
    """Log-probs, entropies and the gradient of the logits by the definition, float64."""
    leaf = logits.double().requires_grad_()
    temperature = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logp = (leaf / temperature).log_softmax(-1)
    values = logp.gather(1, targets[:, None])[:, 0]
    entropies = -(logp.exp() * logp).sum(-1)
    total = sum(
        (a * g.double()).sum() for a, g in ((values, grad), (entropies, entropy_grad)) if g is not None
    )
    total.backward()
    return values.detach(), entropies.detach(), leaf.grad


def errors(vocabulary, scale, temperature, grad, entropy_grad, dtype=torch.float32, order=None):
    rows = 6
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    if order is not None:
        logits = logits.sort(dim=1, descending=order == "falling").values
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    if temperature == "each":
        temperature = torch.rand(rows, generator=generator) + 0.5
    grad = torch.randn(rows, generator=generator) if grad else None
    entropy_grad = torch.randn(rows, generator=generator) if entropy_grad else None
    kernels, expected = KernelLogitRows(), exact(logits, targets, temperature, grad, entropy_grad)
    own = kernels.results(logits.clone(), targets, temperature, with_entropy=True)
    d = kernels.gradient(logits.clone(), targets, temperature, own, grad, entropy_grad, dtype)
    assert d.dtype == dtype
    found = (own.values, own.entropies, d)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


def whole(use_kernels):
    """The gradients of rows, weight and bias through `selected_logprobs`, in blocks."""
    logprobs.rows_for = (lambda values: KernelLogitRows()) if use_kernels else logprobs.rows_for
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((7, 8), (50, 8), (50,))
    )
    targets, upstream = torch.arange(7), torch.randn(2, 7, generator=generator)
    values, entropies = logprobs.selected_logprobs(
        rows, weight, targets, temperature=0.8, chunk_tokens=3, bias=bias, with_entropy=True
    )
    (values * upstream[0] + entropies * upstream[1]).sum().backward()
    return [values.detach(), entropies.detach(), rows.grad, weight.grad, bias.grad]


def main():
    found = {
        "one block": errors(37, 3.0, 1.0, True, True),
        "no gradient of entropies": errors(37, 3.0, 0.7, True, False),
        "no gradient of log-probs": errors(37, 3.0, 2, False, True),
        "three blocks": errors(2 * _BLOCK + 5, 3.0, "each", True, True),
        "the largest logits first": errors(2 * _BLOCK, 5.0, 1.0, True, True, order="falling"),
        "the largest logits last": errors(2 * _BLOCK, 5.0, 1.0, True, True, order="rising"),
        "certain": errors(300, 100.0, 1.0, True, False),
        "bfloat16": errors(_BLOCK + 1, 3.0, 1.0, True, True, torch.bfloat16),
    }
    torchs, kernels = whole(False), whole(True)
    found["whole"] = [float((a - b).norm() / b.norm()) for a, b in zip(kernels, torchs, strict=True)]
    empty = KernelLogitRows().results(
        torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 1.0, with_entropy=True
    )
    found["no rows"] = [float(len(empty.values))]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
