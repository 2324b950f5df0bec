"""Tail batching: prompts with long answers share steps, so that few steps wait for a long answer.

    epoch, window of 2 steps    a b c d      expected tokens 900 80 100 700
    sorted, cut into steps      c b | a d    one step waits for 100 tokens, one for 900; as drawn both wait

The answers of a prompt have been about so long before: the expectation is the exponential mean over its
groups, and the mean of the known prompts where it was not sampled yet. Every prompt of an epoch is drawn
once. A window is `data.length_window` steps of the epoch's random permutation. So no prompt leaves its
window, whatever its length, and over each window the mean length is that of random steps. Which step of the
window gets the long prompts is drawn from the seed. Within a step the longest come first, so that none begins
when the others end. Lengths are those of steps that are trained, so the order is a function of seed
and samples, never of which sample is finished first.

Long prompts in steps of their own: RollPacker, arXiv:2509.21009, which finds them by sampling; here they are
predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_dist.data.order import OrderState
from grpo_dist.data.stream import PromptStream
from grpo_dist.types import Group, Prompt

_KEEP = 0.5  # weight of earlier lengths when a prompt is sampled again


class LengthOrder(PromptStream):
    """A stream of order indices, see `PromptStream`: ``waiting`` has the rest of the window in its order."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        *,
        per_step: int,
        window: int,
        seed: int,
        state: OrderState,
    ) -> None:
        """``per_step``: prompts that share a step. ``window``: steps. Raises as `PromptStream` does."""
        super().__init__(prompts, per_batch, seed=seed, state=state)
        self._per_step, self._window = per_step, window
        self._lengths = {uid: float(tokens) for uid, tokens in state.lengths.items()}

    @property
    def state(self) -> OrderState:
        return replace(super().state, lengths=dict(self._lengths))

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Observe the lengths of these groups; prompts of ``indices`` without a group come next."""
        for group in sampled:
            tokens = float(np.mean([rollout.num_tokens for rollout in group.rollouts]))
            known = self._lengths.get(group.prompt.uid, tokens)
            self._lengths[group.prompt.uid] = _KEEP * known + (1 - _KEEP) * tokens
        uids = {group.prompt.uid for group in sampled}
        self._waiting[:0] = [index for index in indices if self._uid(index) not in uids]

    def _next(self, taken: int) -> int:
        if not self._waiting:
            self._waiting = self._next_window(taken % self._per_step)
        return self._waiting.pop(0)

    def _next_window(self, started: int) -> list[int]:
        """Return the order indices of the next window in the order of their steps. ``started``: prompts that
        the first step has already.
        """
        first, count = self._position, len(self._prompts)
        end = min((first // count + 1) * count, first + self._window * self._per_step)
        rest = -end % count  # of the epoch
        if rest < self._per_step:  # too few for a window of their own
            end += rest
        self._position = end
        indices = np.arange(first, end)
        ranked = indices[np.argsort(self._expected(indices), kind="stable")]
        sizes = [self._per_step - started]
        while sum(sizes) < len(indices):
            sizes.append(self._per_step)
        sizes[-1] -= sum(sizes) - len(indices)
        steps: list[np.ndarray] = [indices[:0]] * len(sizes)
        begin = 0
        for step in np.random.default_rng((self._seed, first, 4)).permutation(len(sizes)):
            steps[step] = ranked[begin : begin + sizes[step]][::-1]
            begin += sizes[step]
        return [int(index) for step in steps for index in step]

    def _expected(self, indices: np.ndarray) -> np.ndarray:
        """Return the expected tokens of a completion, float64 [indices]."""
        known = [self._lengths.get(self._uid(index)) for index in indices.tolist()]
        seen = [tokens for tokens in known if tokens is not None]
        unseen = float(np.mean(seen)) if seen else 0.0
        return np.array([unseen if tokens is None else tokens for tokens in known])
