"""Helpers to write tensors worked by hand, and to compare with them."""

import math

import torch

from grpo_dist.policy.logprobs import selected_logprobs
from grpo_dist.policy.loss import add_stats, batch_loss, divergence_from_teacher, finish_stats
from grpo_dist.policy.packing import padded

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


# The smallest causal model with the loss, for tests of invariance to how rows are split.

VOCABULARY = 108  # as in `made_groups`


class Tiny(torch.nn.Module):
    """A causal model of two matrices: hidden states are running means of embeddings. The temperature is 0.9
    for rows without one.
    """

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.embedding, self.head = (
            torch.nn.Parameter(torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64).to(dtype))
            for _ in range(2)
        )

    def forward(self, batch):
        """Return log-probs and entropies, and the inputs of `divergence_from_teacher`."""
        steps = torch.arange(1, batch.tokens.shape[1] + 1)[:, None]
        hidden = torch.tanh(self.embedding[batch.tokens].cumsum(dim=1) / steps)
        layout = padded(batch.tokens, batch.wanted, batch.temperatures, teacher=batch.teacher)
        values, entropies, candidates = selected_logprobs(
            hidden.flatten(0, 1)[layout.sources], self.head, layout.targets, layout.candidates,
            temperature=0.9 if layout.temperature is None else layout.temperature, chunk_tokens=64,
            with_entropy=True,
        )  # fmt: skip
        return layout.unpack_rows(values), layout.unpack_rows(entropies), (candidates, layout)

    def gradient(self, parts, settings):
        """Return flat gradient and metrics for ``parts`` processed in sequence."""
        self.zero_grad()
        total = None
        for part in parts:
            logprobs, entropy, candidates = self(part)
            from_teacher = divergence_from_teacher(*candidates, settings.distillation)
            loss, stats = batch_loss(logprobs, part, settings, entropy=entropy, from_teacher=from_teacher)
            loss.backward()
            total = stats if total is None else add_stats(total, stats)
        return torch.cat([p.grad.double().flatten() for p in self.parameters()]), finish_stats(total)
