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
