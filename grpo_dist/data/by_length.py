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

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.data.solved import SolvedPrompts
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
        solved: SolvedPrompts | None = None,
    ) -> None:
        """``per_step``: prompts that share a step. ``window``: steps. ``solved``, and what it raises: as of
        `PromptStream`.
        """
        super().__init__(prompts, per_batch, seed=seed, state=state, solved=solved)
        self._per_step, self._window = per_step, window
        self._lengths = {uid: float(tokens) for uid, tokens in state.lengths.items()}

    @property
    def state(self) -> OrderState:
        return replace(super().state, lengths=dict(self._lengths))

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Observe the lengths of these groups; prompts of ``indices`` without a group come next."""
        self._solved.observe(sampled)
        for group in sampled:
            tokens = float(np.mean([rollout.num_tokens for rollout in group.rollouts]))
            known = self._lengths.get(group.prompt.uid, tokens)
            self._lengths[group.prompt.uid] = _KEEP * known + (1 - _KEEP) * tokens
        uids = {group.prompt.uid for group in sampled}
        self._waiting.extendleft(reversed([index for index in indices if self._uid(index) not in uids]))

    def _next(self, taken: int) -> int:
        while not self._waiting:  # a window is empty where the rest of its epoch is left out
            self._waiting = deque(self._next_window(taken % self._per_step))
        return self._waiting.popleft()

    def _next_window(self, started: int) -> list[int]:
        """Return the order indices of the next window in the order of their steps. ``started``: prompts that
        the first step has already.
        """
        first, indices = self._position, self._window_indices()
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

    def _window_indices(self) -> np.ndarray:
        """Go to the end of the next window; return its order indices, int64, in the epoch's permutation."""
        first, count = self._position, len(self._prompts)
        epoch, at = divmod(first, count)
        is_out = self._solved.is_out[shuffled(count, self._seed, epoch)[at:]]
        left = first + np.flatnonzero(~is_out)
        size = self._window * self._per_step
        is_last = len(left) - size < self._per_step  # too few for a window of their own
        indices = left if is_last else left[:size]
        self._position = (epoch + 1) * count if is_last else int(indices[-1]) + 1
        for index in first + np.flatnonzero(is_out[: self._position - first]):
            self._solved.pass_over(self.prompt(int(index)))
        return indices

    def _expected(self, indices: np.ndarray) -> np.ndarray:
        """Return the expected tokens of a completion, float64 [indices]."""
        known = [self._lengths.get(self._uid(index)) for index in indices.tolist()]
        seen = [tokens for tokens in known if tokens is not None]
        unseen = float(np.mean(seen)) if seen else 0.0
        return np.array([unseen if tokens is None else tokens for tokens in known])
