"""How the rows of a micro-batch are laid out for the model, and where each wanted log-prob comes from.

    rows        7 8 9 4 5 2     one prompt (7 8 9) and two completions
                7 8 9 6 2
    padded      7 8 9 4 5 2     one row each; causal attention never sees the padding after a row
                7 8 9 6 2 .
    packed      7 8 9 4 5 2 6 2     one stream: no padding, and the prompt once
    positions   0 1 2 3 4 5 3 4
    read by       row 0: 0 1 2 3 4 5    row 1: 0 1 2 6 7     stream indices that attention puts together

Token-wise operations (embedding, projections, MLP: all but attention) run once for each token of the stream.
A prompt's hidden states are the same for all of its samples, and a shared prefix's for all of its prompts;
sharing them changes no result, and their gradient is the sum over the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from grpo_dist.batch.shared_prefixes import Prefixes, shared_prefixes
from grpo_dist.policy.attention import Kernel, Spans
from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.router_replay import fetched, lay_out_routes
from grpo_dist.runtime.hardware import sent
from grpo_dist.types import Routes, Rows, TeacherStream

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Layout:
    """``sources``: index into the flattened ``tokens`` of the hidden state that predicts each wanted token,
    in the order of the rows; ``targets``: those tokens; ``places``: where they are in the flattened rows of
    ``shape``. ``spans``: how attention finds the rows; None: each row of ``tokens`` is one.
    """

    tokens: Int[Tensor, "R W"]  # int64
    positions: Int[Tensor, "R W"] | None
    spans: Spans | None
    sources: Int[Tensor, " M"]
    targets: Int[Tensor, " M"]
    places: Int[Tensor, " A"]  # of all wanted tokens, even in one rank's slice of a shared stream
    shape: tuple[int, int]
    temperature: float | Float[Tensor, " M"] | None = None  # per wanted token; None: the model's
    # int16, the experts of each of ``tokens`` in each layer, -1: the model chooses; None: it always does
    routes: Int[Tensor, "N L K"] | None = None
    # int64, further tokens whose log-probs are wanted at each target, and the teacher's log-probs of them;
    # None: there are none
    candidates: Int[Tensor, "M K"] | None = None
    candidates_at_teacher: Float[Tensor, "M K"] | None = None
    mask: LogitMask | None = None  # sampling masks of the wanted tokens; None: the full vocabulary

    def unpack_rows(self, values: Shaped[Tensor, "M ..."]) -> Shaped[Tensor, "B T ..."]:
        """Return the values of the wanted tokens at their positions in the rows, 0 elsewhere."""
        (rows, width), size = self.shape, values.shape[1:]
        flat = values.new_zeros(rows * width, *size)
        return flat.index_copy(0, self.places, values).view(rows, width, *size)


def padded(
    tokens: Int[Tensor, "B T"],
    wanted: Bool[Tensor, "B T"],
    temperatures: Float[Tensor, " B"] | None = None,
    routes: Sequence[Routes | None] | None = None,
    teacher: TeacherStream | None = None,
    *,
    device: torch.device | None = None,
) -> Layout:
    """Lay out padded rows on ``device``; None: the device of ``tokens``.

    Args:
        wanted: tokens whose log-probs are wanted; never the first of a row, which nothing predicts.
        teacher: of the same rows; its likeliest tokens are the candidates.
    """
    size, device = tokens.numel(), device or tokens.device
    indices = torch.arange(size, device=tokens.device).view(tokens.shape)
    shape = np.arange(size).reshape(tokens.shape)
    experts = None if routes is None else lay_out_routes(fetched(routes), shape, size, device)
    sources = _select_wanted(tokens, indices, wanted, temperatures, device)
    candidates = _candidates(teacher, wanted, device)
    return Layout(sent(tokens, device), None, None, *sources, experts, *candidates)


def packed(
    rows: Rows,
    wanted: Bool[Tensor, "B T"],
    kernel: Kernel,
    teacher: TeacherStream | None = None,
    *,
    multiple: int = 1,
    device: torch.device = CPU,
) -> Layout:
    """Lay out rows of host memory end to end on ``device``, without the prefix that a row shares with earlier
    rows (`shared_prefixes`).

    Tokens that no row reads fill the stream up to a ``multiple`` of tokens. ``wanted``, ``teacher``: as for
    `padded`.
    """
    lengths = rows.lengths.tolist()
    prefixes = shared_prefixes(rows)
    experts = None if rows.routes is None else fetched(rows.routes)
    indices = _stream_indices(lengths, prefixes)
    columns = np.broadcast_to(np.arange(rows.tokens.shape[1]), indices.shape)
    inside = columns < np.asarray(lengths)[:, None]
    size = -(-(int(indices[inside].max()) + 1) // multiple) * multiple
    stream, positions = np.zeros((2, 1, size), np.int64)
    stream[0, indices[inside]] = rows.tokens.numpy()[inside]
    positions[0, indices[inside]] = columns[inside]
    spans = kernel(
        [row_indices[:length] for row_indices, length in zip(indices, lengths, strict=True)],
        prefixes.groups,
        size,
        device,
    )
    tokens, position_ids = (sent(torch.from_numpy(a), device) for a in (stream, positions))
    routes = None if experts is None else lay_out_routes(experts, indices, size, device)
    sources = _select_wanted(rows.tokens, torch.from_numpy(indices), wanted, rows.temperatures, device)
    candidates = _candidates(teacher, wanted, device)
    return Layout(tokens, position_ids, spans, *sources, routes, *candidates)


def _select_wanted(
    tokens: Tensor,
    indices: Int[Tensor, "B T"],
    mask: Tensor,
    temperatures: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, tuple[int, int], float | Tensor | None]:
    """Return the `Layout` fields of the tokens in ``mask``, on ``device``: sources, targets, places, shape
    and temperature. ``indices``: of ``tokens`` in the stream.

    The only place where logits are shifted: the hidden state at t - 1 predicts the token at t.
    """
    wanted = mask[:, 1:]
    shifted = torch.cat([torch.zeros_like(mask[:, :1]), wanted], dim=1)
    places = shifted.flatten().nonzero()[:, 0]
    sources, targets = indices[:, :-1][wanted], tokens[:, 1:][wanted]
    temperature = _spread_over_tokens(temperatures, shifted)
    if isinstance(temperature, Tensor):
        temperature = sent(temperature, device)
    sources, targets, places = (sent(t, device) for t in (sources, targets, places))
    return sources, targets, places, (mask.shape[0], mask.shape[1]), temperature


def _candidates(
    teacher: TeacherStream | None, wanted: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return ids, int64, and log-probs of the teacher's likeliest tokens at the wanted tokens, [M, K]."""
    if teacher is None or teacher.top_ids is None or teacher.top_logprobs is None:
        return None, None
    ids, logprobs = (values[:, 1:][wanted[:, 1:]] for values in (teacher.top_ids, teacher.top_logprobs))
    return sent(ids.long(), device), sent(logprobs, device)


def _spread_over_tokens(temperatures: Tensor | None, wanted: Bool[Tensor, "B T"]) -> float | Tensor | None:
    """Return one number if all rows have the same temperature, for a cheaper division; else one per token.

    Raises ValueError for a temperature that is not positive: nothing on a GPU checks it again.
    """
    if temperatures is None:
        return None
    distinct = temperatures.unique().tolist()
    if not distinct[0] > 0:
        raise ValueError(f"temperature = {distinct[0]}: expected temperatures above 0")
    if len(distinct) == 1:
        return float(distinct[0])
    return temperatures.to(wanted.device)[:, None].expand(wanted.shape)[wanted]


def _stream_indices(lengths: list[int], prefixes: Prefixes) -> np.ndarray:
    """Return int64 [B, T]: the stream index of each token of each row; 0 after a row's end."""
    groups, prompts, begun = prefixes.groups, prefixes.prompts, prefixes.begun
    indices = np.zeros((len(lengths), max(lengths)), np.int64)
    first: dict[tuple[int, int], int] = {}
    before = end = 0
    for row in sorted(range(len(lengths)), key=groups.__getitem__):
        prefix = groups[row], prompts[row]
        owner, shared = (first[prefix], prompts[row]) if prefix in first else (before, begun[row])
        indices[row, :shared] = indices[owner, :shared]
        indices[row, shared : lengths[row]] = np.arange(end, end + lengths[row] - shared)
        end += lengths[row] - shared
        first.setdefault(prefix, row)
        before = row
    return indices
