"""Attention over rows packed end to end in one stream, as an attention function of transformers.

A `Kernel` is chosen once from device, dtype and settings. It turns the rows of a micro-batch into `Spans`,
which every attention layer gets as a keyword argument and which compute the attention:

    VarlenSpans   one call of a variable-length kernel, torch's or flash-attention's: queries stay in place,
                  keys and values of shared tokens are repeated
    BlockSpans    rows of similar length side by side, each block through torch's
                  scaled_dot_product_attention

Samples with a long prompt and short completions repeat mostly the prompt. On CPUs a block then has the whole
group as one row, with a mask that separates its samples, where that compares no more pairs of tokens:

    rows     7 8 9 4    the group   7 8 9 4 6 2     4 sees 7 8 9 4; 2 sees 7 8 9 6 2
             7 8 9 6 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_dist.runtime.hardware import sent

NAME = "grpo_dist_packed"  # in transformers' registry of attention functions
ATTENTION = {"full_attention", "sliding_attention"}  # layer types in transformers
_SPREAD = 0.8  # shortest row of a block as a share of its longest, at least
_LONGEST_GROUP = 2048  # tokens of a group with a mask, at most: its memory grows with their square


@dataclass(frozen=True, slots=True)
class Segments:
    """Row boundaries for a variable-length kernel: ``ends``, int32 [rows + 1], where each row begins and the
    last ends; ``longest``: tokens of the longest row.
    """

    ends: Int[Tensor, " E"]
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        ends = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        return cls(sent(ends, device), max(lengths))


# (q [N, H, D], k [L, H', D], v, segments of q, segments of k and v, scale, tokens to the left that a token
# sees or -1 for all, dropout) -> [N, H, D]. The last query of a row is aligned with its last key.
VarlenFunction = Callable[[Tensor, Tensor, Tensor, Segments, Segments, float, int, float], Tensor]


@dataclass(frozen=True, slots=True)
class VarlenSpans:
    """``queries``: each row's tokens that no earlier row has, in place. ``keys``: all of each row's tokens,
    for keys and values; ``indices`` int64 [L] of the keys in the stream, None: the stream itself.

        stream   7 8 9 4 5 2 6 2        queries 7 8 9 4 5 2 | 6 2
                                        keys    7 8 9 4 5 2 | 7 8 9 6 2
    """

    function: VarlenFunction
    queries: Segments
    keys: Segments
    indices: Int[Tensor, " L"] | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        if self.indices is not None:
            k, v = (_Repeated.apply(t, self.indices) for t in (k, v))
        left = -1 if window is None else window - 1
        return self.function(q, k, v, self.queries, self.keys, scale, left, dropout)


class _Repeated(torch.autograd.Function):
    """``index_select`` of rows. Gradients are added up in float32 at least: many samples share a prompt."""

    @staticmethod
    def forward(ctx: Any, rows: Float[Tensor, "N H D"], indices: Int[Tensor, " L"]) -> Float[Tensor, "L H D"]:
        ctx.save_for_backward(indices)
        ctx.count = len(rows)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "L H D"]) -> tuple[Float[Tensor, "N H D"], None]:
        (indices,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.count, *grad.shape[1:], dtype=exact)
        return total.index_add_(0, indices, grad.to(exact)).to(grad.dtype), None


def varlen_spans(
    function: VarlenFunction,
    rows: Sequence[np.ndarray],
    groups: Sequence[int],
    size: int,
    device: torch.device,
) -> VarlenSpans:
    """Make the spans for half precision on GPUs. ``function``: `torch_varlen` or `flash_varlen`. ``groups``
    are unused; other arguments as for `Kernel`.

    Each row's unshared tokens follow the unshared tokens of the row before it, as `packed` lays rows out. A
    row whose tokens are all in another row has nothing to compute: attention there sees the same tokens.
    """
    filler = np.arange(max(int(row[-1]) for row in rows) + 1, size)
    new_lengths: list[int] = []
    whole: list[np.ndarray] = []
    end = 0
    for row in sorted([*rows, *([filler] if len(filler) else [])], key=lambda row: int(row[-1])):
        if (new := int(row[-1]) + 1 - end) > 0:
            assert row[-new] == end, "a row's unshared tokens come last, after the tokens of earlier rows"
            new_lengths.append(new)
            whole.append(row)
            end += new
    lengths = [len(row) for row in whole]
    indices = sent(torch.from_numpy(np.concatenate(whole)), device) if sum(lengths) != size else None
    queries, keys = (Segments.from_lengths(each, device) for each in (new_lengths, lengths))
    return VarlenSpans(function, queries, keys, indices)


def torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    left: int,
    dropout: float,
) -> Tensor:
    """Call torch's kernel. Raises ValueError for dropout, which it does not support."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(
            f"attention dropout {dropout}: set the model's attention_dropout to 0, or model.packing=false"
        )
    gqa = q.shape[1] != k.shape[1]
    out: Any = varlen_attn(
        q, k, v, queries.ends, keys.ends, queries.longest, keys.longest,
        scale=scale, window_size=(left, 0), enable_gqa=gqa,
    )  # fmt: skip
    return out


def flash_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Segments,
    keys: Segments,
    scale: float,
    left: int,
    dropout: float,
) -> Tensor:
    """Call the flash-attn package's kernel."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k, v, queries.ends, keys.ends, queries.longest, keys.longest,
        dropout_p=dropout, softmax_scale=scale, causal=True, window_size=(left, 0),
    )  # fmt: skip


class NotCausal(ValueError):
    """A model whose attention does not fit `Spans`."""


@runtime_checkable
class Spans(Protocol):
    """The rows of one stream. ``attend``: causal attention within each row, queries [N, H, D] and keys and
    values [N, H', D] (H a multiple of H') to outputs [N, H, D]. ``window``: how many tokens back a token
    sees, itself included; None: all.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
    ) -> Tensor: ...


# (stream indices of each row's tokens, group of each row (rows of a group share the most tokens), number of
# tokens in the stream, device) -> spans of the rows
Kernel = Callable[[Sequence[np.ndarray], Sequence[int], int, torch.device], Spans]


@dataclass(frozen=True, slots=True)
class _Mask:
    """``bias``: 0 where a token sees another, -inf elsewhere. ``positions``: of each token in its row."""

    bias: Float[Tensor, "R 1 W W"]  # float32
    positions: Int[Tensor, "R W"]

    def limit(self, window: int | None) -> Float[Tensor, "R 1 W W"]:
        """Return the mask of tokens that see ``window`` tokens back, themselves included; None: all."""
        if window is None or window >= self.bias.shape[-1]:
            return self.bias
        age = self.positions[:, :, None] - self.positions[:, None]
        return self.bias.masked_fill((age >= window)[:, None], -torch.inf)


@dataclass(frozen=True, slots=True)
class _Block:
    """``rows`` rows of at most ``longest`` tokens. ``indices`` [rows * longest] in the stream; arbitrary
    after a row's end. ``mask``: which tokens of a row see which; None: causal.
    """

    indices: Int[Tensor, " L"]
    rows: int
    longest: int
    mask: _Mask | None = None


@dataclass(frozen=True, slots=True)
class BlockSpans:
    blocks: tuple[_Block, ...]
    back: Int[Tensor, " N"]  # index of each stream token in the concatenated outputs of the blocks

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
    ) -> Tensor:
        outputs = []
        for block in self.blocks:
            heads = (_heads_first(t.index_select(0, block.indices), block) for t in (q, k, v))
            if block.mask is None:
                out = _causal(*heads, scale=scale, window=window, dropout=dropout)
            else:
                out = _masked(*heads, bias=block.mask.limit(window), scale=scale, dropout=dropout)
            outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
        return torch.cat(outputs).index_select(0, self.back)


def block_spans(
    rows: Sequence[np.ndarray], groups: Sequence[int], size: int, device: torch.device
) -> BlockSpans:
    """Make the spans for any device and dtype. Arguments as for `Kernel`."""
    longest = _LONGEST_GROUP if device.type == "cpu" else 0
    together, alone = _split_masked_groups(rows, groups, longest=longest)
    blocks, back, end = [], np.zeros(size, np.int64), 0
    for indices_of_rows, masked in ((alone, False), ([tokens for _, tokens in together], True)):
        for members in _group_similar_lengths([len(row) for row in indices_of_rows]):
            longest = len(indices_of_rows[members[0]])
            indices = np.zeros((len(members), longest), np.int64)
            for i, member in enumerate(members):
                row = indices_of_rows[member]
                indices[i, : len(row)] = row
                back[row] = np.arange(end, end + len(row))
                end += longest
            mask = _mask([together[m] for m in members], longest, device) if masked else None
            index = sent(torch.from_numpy(indices.ravel()), device)
            blocks.append(_Block(index, len(members), longest, mask))
    return BlockSpans(tuple(blocks), sent(torch.from_numpy(back), device))


def _split_masked_groups(
    rows: Sequence[np.ndarray], groups: Sequence[int], *, longest: int
) -> tuple[list[tuple[list[np.ndarray], np.ndarray]], list[np.ndarray]]:
    """Return (rows, tokens) of each group that shares tokens, has at most ``longest`` tokens, and compares no
    more pairs together than row by row; and the other rows in order.
    """
    sharing: dict[tuple[int, int], list[int]] = {}
    for i, (row, group) in enumerate(zip(rows, groups, strict=True)):
        sharing.setdefault((group, int(row[0])), []).append(i)
    together: list[tuple[list[np.ndarray], np.ndarray]] = []
    alone = set(range(len(rows)))
    for members in sharing.values():
        member_rows = [rows[i] for i in members]
        if len(member_rows) == 1 or max(map(len, member_rows)) > longest:
            continue
        union = np.unique(np.concatenate(member_rows))
        if len(union) <= longest and len(union) ** 2 <= sum(len(row) ** 2 for row in member_rows):
            together.append((member_rows, union))
            alone.difference_update(members)
    return together, [rows[i] for i in sorted(alone)]


def _mask(
    groups: Sequence[tuple[Sequence[np.ndarray], np.ndarray]], longest: int, device: torch.device
) -> _Mask:
    """Return the mask of a block. ``groups``: rows and tokens of each group, as stream indices."""
    visible = np.zeros((len(groups), 1, longest, longest), bool)
    positions = np.zeros((len(groups), longest), np.int64)
    for i, (rows, tokens) in enumerate(groups):
        for row in rows:
            places = np.searchsorted(tokens, row)
            positions[i, places] = np.arange(len(row))
            visible[i, 0][np.ix_(places, places)] = np.tri(len(row), dtype=bool)
        visible[i, 0, len(tokens) :] = True  # padding must see something: a softmax over nothing is NaN
    bias = torch.zeros(visible.shape).masked_fill(torch.from_numpy(~visible), -torch.inf)
    return _Mask(sent(bias, device), sent(torch.from_numpy(positions), device))


def choose_kernel(attention: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Choose the kernel of `model.attention`. Raises ValueError for kernels that read no packed stream."""
    half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if attention == "flash_attention_2":
        if not half:
            raise ValueError(
                f"model.attention = flash_attention_2 on {device.type} in {dtype}: it takes bfloat16 on "
                "GPUs; use model.attention=auto"
            )
        return partial(varlen_spans, flash_varlen)
    if attention == "eager":
        raise ValueError(
            "model.attention = eager reads no packed rows; use model.attention=auto, or model.packing=false"
        )
    return partial(varlen_spans, torch_varlen) if half and attention == "auto" else block_spans


def register() -> None:
    """Register `NAME` with transformers, without a mask function: spans separate the rows."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Not a decorator: that would import torch's compiler, two seconds, in processes without a model.
    ALL_ATTENTION_FUNCTIONS.register(NAME, torch.compiler.disable(_attention))


def attention_layers(config: Any) -> int:
    """Return the number of attention layers. ``config``: of a text model."""
    kinds = getattr(config, "layer_types", None)
    return sum(kind in ATTENTION for kind in kinds) if kinds else int(config.num_hidden_layers)


def _attention(
    module: Any,
    query: Float[Tensor, "1 H N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    spans: Spans | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Float[Tensor, "1 N H D"], None]:
    """Attend, with the signature that transformers requires."""
    if spans is None or attention_mask is not None or s_aux is not None:
        raise NotCausal(
            "this model's attention does not get the boundaries of packed rows, or needs more than causal "
            "attention; set model.packing=false"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return spans.attend(q, k, v, scale=scale, window=sliding_window, dropout=dropout)[None], None


def _group_similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of each block, longest first, no row much shorter than the longest of its block."""
    blocks: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if blocks and lengths[row] >= _SPREAD * lengths[blocks[-1][0]]:
            blocks[-1].append(row)
        else:
            blocks.append([row])
    return blocks


def _heads_first(rows: Tensor, block: _Block) -> Tensor:
    return rows.view(block.rows, block.longest, *rows.shape[1:]).transpose(1, 2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, dropout: float
) -> Float[Tensor, "R H T D"]:
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    length = q.shape[2]
    if window is None or window >= length:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, dropout_p=dropout)
    age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    visible = (age >= 0) & (age < window)
    return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, dropout_p=dropout)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor, scale: float, dropout: float
) -> Float[Tensor, "R H T D"]:
    return scaled_dot_product_attention(
        q, k, v, attn_mask=bias.to(q.dtype), scale=scale, dropout_p=dropout, enable_gqa=True
    )


def packing_problem(model: Any) -> str | None:
    """Return why ``model`` (transformers, with or without weights) cannot read a packed stream; None: it can.

    Its attention must go through transformers' registry as plain causal attention, and nothing else in it may
    mix tokens.
    """
    config = model.config.get_text_config()
    if mixing := mixing_layers(config):
        return f"it has layers of type {', '.join(mixing)}"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' registry"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps attention logits (attn_logit_softcapping)"
    return _first_attention(model)


def mixing_layers(config: Any) -> list[str]:
    """Return the layer types, sorted, that mix tokens by anything but causal attention, full or sliding.
    ``config``: transformers' configuration of a decoder.
    """
    return sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION)


def recurrent_layers(config: Any) -> list[str]:
    """Return the layer types, sorted, that carry a state from token to token: linear attention, Mamba,
    convolutions. ``config``: transformers' configuration of a decoder.
    """
    return [k for k in mixing_layers(config) if k == "linear_attention" or not k.endswith("attention")]


class _Reached(Exception):
    """The attention function was called as packed rows need it."""


class _Probe:
    """Stands in for the spans of a stream."""

    def attend(self, *_: Any, **__: Any) -> torch.Tensor:
        raise _Reached


def _first_attention(model: Any) -> str | None:
    """Return why the first attention layer cannot read a stream. None: it can, or the model needs weights
    before it attends; then a problem raises `NotCausal` when it attends.
    """
    register()
    try:
        with torch.device("meta"):  # no memory, and complete even if ranks shard the weights
            empty = type(model)(deepcopy(model.config)).eval()
            empty.set_attn_implementation(NAME)
            tokens = torch.zeros(1, 2, dtype=torch.long)
            positions = torch.arange(2)[None]
            empty.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False, spans=_Probe())
    except (_Reached, RuntimeError):  # RuntimeError: a meta tensor has no values to read
        return None
    except NotCausal:
        return "it needs more than causal attention, such as sinks, or does not pass on row boundaries"
    return "its attention does not go through transformers' registry"
