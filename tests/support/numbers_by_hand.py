"""Short ways to write tensors worked by hand, and to compare with them."""

import math

import torch

NAN, INF = math.nan, math.inf


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def row(*values):
    return tensor(*values, dtype=torch.float64)[None]


def close(actual, expected, tolerance=1e-7):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def mask_of(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


def one_row(loss, ratios, advantages, *, logprobs=None, **settings):
    """Return losses, gradients and statistics of tokens with these ratios; log-probs are -1 unless given."""
    new = row(*([-1.0] * len(ratios) if logprobs is None else logprobs)).requires_grad_()
    old = new.detach() - torch.log(row(*ratios))
    losses, stats = loss(new, old, row(*advantages), torch.ones(1, len(ratios), dtype=torch.bool), **settings)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    return losses.detach(), gradient, {name: float(value) for name, value in stats.items()}
