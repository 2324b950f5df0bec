"""Triton kernels on a CPU, in Triton's interpreter: ``python -m tests.support.interpreted_kernels``.

Prints one JSON object: the largest errors against float64, by case.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined

import torch

from grpo_dist.policy import logit_kernels, logit_rows, logprobs
from grpo_dist.policy.logit_kernels import _BLOCK
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform


def exact(outputs, targets, temperature, grad, entropy_grad, transform=IDENTITY):
    """Return log-probs, entropies and the gradient of the head's outputs by the definition, float64."""
    leaf = outputs.double().requires_grad_()
    logits = leaf * transform.slope
    if transform.cap is not None:
        logits = torch.tanh(logits / transform.cap) * transform.cap
    temperature = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logp = (logits / temperature).log_softmax(-1)
    values = logp.gather(1, targets[:, None])[:, 0]
    entropies = -(logp.exp() * logp).sum(-1)
    total = sum(
        (a * g.double()).sum() for a, g in ((values, grad), (entropies, entropy_grad)) if g is not None
    )
    total.backward()
    return values.detach(), entropies.detach(), leaf.grad


def problem(vocabulary, scale, order=None, rows=6):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    if order is not None:
        logits = logits.sort(dim=1, descending=order == "falling").values
    return logits, torch.randint(vocabulary, (rows,), generator=generator), generator


def errors(
    vocabulary, scale, temperature, grad, entropy_grad, dtype=torch.float32, order=None, transform=IDENTITY
):
    logits, targets, generator = problem(vocabulary, scale, order)
    rows = len(logits)
    if temperature == "each":
        temperature = torch.rand(rows, generator=generator) + 0.5
    grad = torch.randn(rows, generator=generator) if grad else None
    entropy_grad = torch.randn(rows, generator=generator) if entropy_grad else None
    expected = exact(logits, targets, temperature, grad, entropy_grad, transform)
    logits = transform.apply_(logits)
    *values, d = results(logits, targets, temperature, grad, entropy_grad, dtype, transform)
    assert d.dtype == dtype
    return largest([*values, d], expected)


def largest(ours, expected):
    """Return the largest errors as shares of the largest expected value."""
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True)]


def results(logits, targets, temperature, grad, entropy_grad, dtype=torch.float32, transform=IDENTITY):
    values, sums = logit_kernels.logprobs(logits, targets, temperature, with_entropy=True)
    return (
        values,
        sums.entropies,
        logit_kernels.gradient(
            logits, targets, temperature, sums, grad, entropy_grad, dtype, transform=transform
        ),
    )


def masked_errors(where):
    """Return the errors of rows where some logits are -inf, against rows without these logits."""
    vocabulary, ones = 2 * _BLOCK + 9, torch.ones(6)
    logits, targets, _ = problem(vocabulary, 3.0)
    finite = torch.ones(vocabulary, dtype=torch.bool)
    finite[where] = False
    logits[:, ~finite] = -torch.inf
    targets = finite.nonzero()[targets % int(finite.sum()), 0]
    position = finite.cumsum(0) - 1
    actual = results(logits, targets, 1.0, ones, ones)
    short = exact(logits[:, finite], position[targets], 1.0, ones, ones)
    assert not actual[2][:, ~finite].any()
    return largest([*actual[:2], actual[2][:, finite]], short)


def nan_rows(value):
    """Return which rows have NaN in any result if one logit of the second row is ``value``."""
    logits, targets, _ = problem(100, 3.0)
    logits[1, 7] = value
    ones = torch.ones(6)
    outputs = results(logits, targets, 1.0, ones, ones)
    return [float(any(t[row].isnan().any() for t in outputs)) for row in range(6)]


def invalid_targets():
    """Return which log-probs are NaN if two targets are not tokens."""
    logits, targets, _ = problem(100, 3.0)
    targets[1], targets[4] = -100, 100
    return [float(v) for v in logit_kernels.logprobs(logits, targets, 1.0, with_entropy=True)[0].isnan()]


def layout_errors():
    """Return the errors with strided logits and with strided int32 targets, against contiguous ones."""
    logits, targets, _ = problem(100, 3.0)
    ones = torch.ones(6)
    plain = results(logits, targets, 1.0, ones, ones)
    twice = torch.stack([targets, targets + 1], dim=1)[:, 0].to(torch.int32)
    views = results(logits.T.contiguous().T, twice, torch.ones(12)[::2], ones.expand(6), torch.ones(12)[::2])
    return [float((a - b).abs().max()) for a, b in zip(views, plain, strict=True)]


def chunked_results(use_kernels, transform=IDENTITY):
    """Return values, and gradients of rows, weight and bias, of `selected_logprobs` in blocks."""
    logprobs.choose_logit_rows = lambda values: logit_kernels if use_kernels else logit_rows
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((7, 8), (50, 8), (50,))
    )
    targets, upstream = torch.arange(7), torch.randn(2, 7, generator=generator)
    candidates, candidate_grads = torch.randperm(50, generator=generator)[:21].view(7, 3), torch.arange(21.0)
    candidate_grads = candidate_grads.view(7, 3)
    candidates[::2, 0] = targets[::2]
    values, entropies, logps = logprobs.selected_logprobs(
        rows, weight, targets, candidates, temperature=0.8, chunk_tokens=3, bias=bias, with_entropy=True,
        transform=transform,
    )  # fmt: skip
    ((values * upstream[0] + entropies * upstream[1]).sum() + (logps * candidate_grads).sum()).backward()
    return [values.detach(), entropies.detach(), logps.detach(), rows.grad, weight.grad, bias.grad]


def main():
    report = {
        "one block": errors(37, 3.0, 1.0, True, True),
        "no gradient of entropies": errors(37, 3.0, 0.7, True, False),
        "no gradient of log-probs": errors(37, 3.0, 2, False, True),
        "three blocks": errors(2 * _BLOCK + 5, 3.0, "each", True, True),
        "the largest logits first": errors(2 * _BLOCK, 5.0, 1.0, True, True, order="falling"),
        "the largest logits last": errors(2 * _BLOCK, 5.0, 1.0, True, True, order="rising"),
        "certain": errors(300, 100.0, 1.0, True, False),
        "scaled": errors(300, 3.0, 0.7, True, True, transform=LogitTransform(slope=0.25)),
        "capped": errors(300, 3.0, "each", True, True, transform=LogitTransform(0.5, cap=1.5)),
        "bfloat16": errors(_BLOCK + 1, 3.0, 1.0, True, True, torch.bfloat16),
    }
    for name, transform in (("whole", IDENTITY), ("whole, capped", LogitTransform(0.5, cap=1.5))):
        torchs, kernels = chunked_results(False, transform), chunked_results(True, transform)
        report[name] = [float((a - b).norm() / b.norm()) for a, b in zip(kernels, torchs, strict=True)]
    report |= {
        "a masked logit": masked_errors([5]), "a masked block": masked_errors(slice(0, _BLOCK)),
        "a masked end": masked_errors(slice(_BLOCK, None)), "nan": nan_rows(torch.nan),
        "infinity": nan_rows(torch.inf), "no tokens": invalid_targets(), "layouts": layout_errors(),
    }  # fmt: skip
    no_row = torch.empty(0, 5), torch.empty(0, dtype=torch.int64), 1.0, torch.empty(0), torch.empty(0)
    report["no rows"] = [list(t.shape) for t in results(*no_row)]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
