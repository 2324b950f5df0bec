"""The smallest causal model with the loss behind it, for tests of what no split of the rows changes."""

import torch

from grpo_dist.policy.logprobs import logprobs_with_others
from grpo_dist.policy.loss import add_stats, batch_loss, finish_stats
from grpo_dist.policy.packing import padded

VOCABULARY = 108  # as in `made_groups`


class Tiny(torch.nn.Module):
    """A causal model of two matrices: hidden states are running means of embeddings. The temperature is 0.9
    where rows have none of their own.
    """

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.embedding, self.head = (
            torch.nn.Parameter(torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64).to(dtype))
            for _ in range(2)
        )

    def forward(self, batch):
        """Return log-probs and entropies, and the log-probs of a teacher's likeliest tokens."""
        steps = torch.arange(1, batch.tokens.shape[1] + 1)[:, None]
        hidden = torch.tanh(self.embedding[batch.tokens].cumsum(dim=1) / steps)
        layout = padded(batch.tokens, batch.wanted, batch.temperatures, others=batch.top_ids)
        values, entropies, others = logprobs_with_others(
            hidden.flatten(0, 1)[layout.sources],
            self.head,
            layout.targets,
            layout.others,
            temperature=0.9 if layout.temperature is None else layout.temperature,
            chunk_tokens=16,
            with_entropy=True,
        )
        return tuple(None if own is None else layout.as_rows(own) for own in (values, entropies, others))

    def gradient(self, parts, settings):
        """Return flat gradient and metrics for ``parts`` processed in sequence."""
        self.zero_grad()
        total = None
        for part in parts:
            logprobs, entropy, others = self(part)
            loss, stats = batch_loss(logprobs, part, settings, entropy=entropy, top_logprobs=others)
            loss.backward()
            total = stats if total is None else add_stats(total, stats)
        return torch.cat([p.grad.double().flatten() for p in self.parameters()]), finish_stats(total)
