"""How the rows of a micro-batch lie before the model, and where each wanted log-prob comes from.

    rows        7 8 9 4 5 2     one prompt (7 8 9) and two completions
                7 8 9 6 2
    padded      7 8 9 4 5 2     one row each; causal attention never looks at what stands behind a row
                7 8 9 6 2 .
    packed      7 8 9 4 5 2 6 2     one stream: no padding, and the prompt once
    positions   0 1 2 3 4 5 3 4
    read by       row 0: 0 1 2 3 4 5    row 1: 0 1 2 6 7     places in the stream that attention puts together

What a model does to single tokens (embedding, projections, MLP: all but attention) is done once for each
token of the stream. A prompt's hidden states are the same for all of its samples, so sharing them changes no
result, and its gradient is the sum over the samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_dist.policy.attention import Kernel, Spans
from grpo_dist.types import Rows


@dataclass(frozen=True, slots=True)
class Layout:
    """``sources``: index into the flattened ``tokens`` of the hidden state that predicts each wanted token,
    in the order of ``mask``; ``targets``: those tokens. ``spans``: how attention finds the rows; None: they
    stand as they are.
    """

    tokens: Int[Tensor, "R W"]  # int64
    positions: Int[Tensor, "R W"] | None
    spans: Spans | None
    sources: Int[Tensor, " M"]
    targets: Int[Tensor, " M"]
    mask: Bool[Tensor, "B T"]  # the wanted tokens, as rows

    def as_rows(self, values: Float[Tensor, " M"]) -> Float[Tensor, "B T"]:
        """Values of the wanted tokens in their places, 0 elsewhere."""
        return torch.zeros(self.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
            self.mask, values
        )


def padded(tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Layout:
    """Rows as they stand. The first token of a row is never wanted: nothing predicts it."""
    places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    return _layout(tokens, None, None, tokens, places, mask)


def packed(rows: Rows, kernel: Kernel, *, multiple: int = 1) -> Layout:
    """The rows end to end, those of one group behind one prompt. Lies where ``rows.tokens`` lies.

    The stream is filled up to a ``multiple`` of tokens with some that no row reads.
    """
    device, lengths = rows.tokens.device, rows.lengths.tolist()
    places = _places(lengths, rows.group_ids.tolist(), rows.prompt_lengths.tolist())
    columns = np.broadcast_to(np.arange(rows.tokens.shape[1]), places.shape)
    inside = columns < np.asarray(lengths)[:, None]
    size = -(-(int(places[inside].max()) + 1) // multiple) * multiple
    stream, positions = np.zeros((2, 1, size), np.int64)
    stream[0, places[inside]] = rows.tokens.cpu().numpy()[inside]
    positions[0, places[inside]] = columns[inside]
    spans = kernel.spans([own[:length] for own, length in zip(places, lengths, strict=True)], size, device)
    tokens, at, where = (torch.from_numpy(array).to(device) for array in (stream, positions, places))
    return _layout(tokens, at, spans, rows.tokens, where, rows.wanted)


def _layout(
    stream: Tensor,
    positions: Tensor | None,
    spans: Spans | None,
    tokens: Tensor,
    places: Int[Tensor, "B T"],
    mask: Tensor,
) -> Layout:
    """The one place where logits are shifted: the token at t is predicted by the hidden state at t - 1."""
    wanted = mask[:, 1:]
    shifted = torch.cat([torch.zeros_like(mask[:, :1]), wanted], dim=1)
    return Layout(stream, positions, spans, places[:, :-1][wanted], tokens[:, 1:][wanted], shifted)


def _places(lengths: list[int], groups: list[int], prompts: list[int]) -> np.ndarray:
    """int64 [B, T]: where in the stream each token of each row lies; 0 behind a row's end."""
    places = np.zeros((len(lengths), max(lengths)), np.int64)
    first: dict[int, int] = {}
    end = 0
    for row, (length, group, prompt) in enumerate(zip(lengths, groups, prompts, strict=True)):
        shared = prompt if group in first else 0
        places[row, :shared] = places[first.setdefault(group, row), :shared]
        places[row, shared:length] = np.arange(end, end + length - shared)
        end += length - shared
    return places
