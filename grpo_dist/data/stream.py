"""Order of prompts under dynamic sampling: a stream of concatenated epochs.

The rewards of a batch decide how many prompts it samples. So a batch takes as many as it may need at launch,
and returns the unsampled ones when it is trained on:

    launched   takes 4 prompts and 12 spare ones: returned ones first, oldest first, then from the stream
    trained    returns the spare prompts that it did not sample

Every prompt of an epoch is sampled once, except prompts that `data.order.drop_solved` drops: the stream skips
them. With several batches in flight at the end of an epoch, one may start the next epoch before another has
returned prompts of this one. An order index is a position in the epochs.

# Mixtures

A mixture of sources by weight: `data.train[].weight`.

    weights math 3, code 1    draws math math code math math math math code ...

The shares of the sources divide [0, 1). Draw m belongs to the source whose part holds the fraction of (m + 1)
times the golden ratio. These fractions fill [0, 1) evenly, so for every n the first n draws differ from the
shares by a few draws (Steinhaus' three-gap theorem). The draws of a source go through its prompts in epochs,
each a permutation drawn from the seed.

# Solved prompts

Prompts that the policy solves are dropped from all later epochs: `data.order.drop_solved`.

    drop_solved 0.9, 4 samples of each prompt; right samples of its group
    epoch 0    a 4   b 3   c 1   d 0
    epoch 1          b 4   c 2   d 1     a is dropped
    epoch 2                c 3   d 2     b, too

ScaleRL's no-positive resampling, arXiv:2510.13786: a policy mostly keeps solving what it has solved, so the
prompt never returns, except in steps already in flight. The group of the latest epoch decides, not the mean
over all epochs, which early failures would lower. An unscored or missing sample counts as wrong, so it never
drops a prompt for good.

# Tail batching

Tail batching: prompts with long answers share steps, so that few steps wait for a long answer.

    epoch, window of 2 steps    a b c d      expected tokens 900 80 100 700
    sorted, cut into steps      c b | a d    one step waits for 100 tokens, one for 900; unsorted, both wait

The expected length of a prompt's answers is the exponential mean over its earlier groups. An unsampled prompt
gets the mean of the sampled ones. Every prompt of an epoch is drawn once. A window is `data.order.window`
steps of the epoch's random permutation. No prompt leaves its window, whatever its length, so the mean length
over a window equals the mean over random steps. The seed decides which step of a window gets the long
prompts. Within a step the longest prompts come first, so none starts when the others end. Lengths come from
trained steps, so the order is a function of seed and samples, never of which sample finishes first.

Separate steps for long prompts: RollPacker, arXiv:2509.21009, which finds them by sampling; this order
predicts them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_dist.config import DataConfig
from grpo_dist.data.columns import sources_of, uids_of
from grpo_dist.data.order import OrderState, shuffled
from grpo_dist.types import Group, Prompt, correctness

_GOLDEN = (5**0.5 - 1) / 2
_BLOCK = 4096  # draws computed at once
_ROUNDING = 1e-6  # tolerance for a share times a number of prompts: 0.07 * 100 is above 7


class Mixture:
    """An endless sequence of prompts.

    Args:
        sources: the source of each prompt.
        weights: the weight of each source.
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], *, seed: int) -> None:
        names, source_names = list(weights), np.array(sources)
        self._members = [np.flatnonzero(source_names == name) for name in names]
        shares = np.array([weights[name] for name in names], np.float64)
        self._ends = np.cumsum(shares / shares.sum())[:-1]
        self._seeds = [seed + 1_000_003 * i for i in range(len(names))]
        self._source = np.empty(0, np.int64)  # the source of each draw so far
        self._number = np.empty(0, np.int64)  # how many draws of its source came before
        # The latest epoch of each source: draws alternate between sources, and there may be many.
        self._epochs: list[tuple[int, np.ndarray]] = [(-1, np.empty(0, np.int64))] * len(names)

    def prompt(self, draw: int) -> int:
        """Return the prompt, 0..n-1, of a draw."""
        while draw >= len(self._source):
            self._extend()
        source = int(self._source[draw])
        members = self._members[source]
        epoch, at = divmod(int(self._number[draw]), len(members))
        if self._epochs[source][0] != epoch:
            self._epochs[source] = epoch, shuffled(len(members), self._seeds[source], epoch)
        return int(members[self._epochs[source][1][at]])

    def _extend(self) -> None:
        begin = len(self._source)
        fractions = (np.arange(begin + 1, begin + _BLOCK + 1) * _GOLDEN) % 1.0
        drawn_sources = np.searchsorted(self._ends, fractions, side="right")
        number = np.empty(_BLOCK, np.int64)
        for source in range(len(self._members)):
            is_drawn = drawn_sources == source
            number[is_drawn] = np.count_nonzero(self._source == source) + np.arange(
                np.count_nonzero(is_drawn)
            )
        self._source = np.concatenate([self._source, drawn_sources])
        self._number = np.concatenate([self._number, number])


def most_at_once(weights: Mapping[str, float], prompts: Sequence[Prompt]) -> int:
    """Return how many of ``prompts`` can be drawn without a repeat. Without ``weights``, the share of each
    source, that is all; else the source with the fewest prompts for its share limits it.

        4000 and 600 prompts, each source a half    1200
    """
    if not weights:
        return len(prompts)
    counts = Counter(sources_of(prompts))
    return math.floor(min(counts[name] / share for name, share in weights.items()) + _ROUNDING)


def check_weights(data: DataConfig, prompts: Sequence[Prompt], *, in_flight: int) -> None:
    """Check that every source can supply its share. ``in_flight``: prompts of all steps in flight.

    Raises ValueError where a source has too few prompts, so that one would be in flight twice.
    """
    counts = Counter(sources_of(prompts) if data.weights else ())
    for name, share in data.weights.items():
        if share * in_flight > counts[name] + _ROUNDING:
            raise ValueError(
                f"data.train: source {name} has {counts[name]} prompts, but with its `weight` it gives "
                f"{share:.0%} of the {in_flight} prompts in flight; lower its weight, "
                "`batch.prompts_per_step` or `max_staleness`, or give it more prompts"
            )


logger = logging.getLogger("grpo_dist")


class SolvedPrompts:
    """Tracks which of ``prompts`` are dropped, and how often each was skipped.

    ``passed``: skips by uid, from a checkpoint; every dropped prompt has an entry, 0 at first.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        passed: Mapping[str, int],
        *,
        share: float | None = None,
        keep: int = 1,
        samples: int = 1,
    ) -> None:
        """``share``: share of right samples in a group from which its prompt is dropped; None: never.
        ``keep``: prompts that always stay, since the steps in flight need this many. ``samples``: size of a
        full group.
        """
        self._prompts, self._share, self._keep, self._samples = prompts, share, keep, samples
        tracked = share is not None or passed
        self._index = {uid: i for i, uid in enumerate(uids_of(prompts))} if tracked else {}
        self.is_out = np.zeros(len(prompts), bool)
        self._passed: dict[str, int] = {}
        for uid, times in passed.items():
            self.is_out[self._index[uid]] = True
            self._passed[uid] = int(times)
        self._has_warned = False

    @property
    def passed(self) -> dict[str, int]:
        """How often each dropped prompt was skipped, by uid."""
        return dict(self._passed)

    def observe(self, sampled: Sequence[Group]) -> None:
        """Drop the prompts whose groups reach the share, while more than ``keep`` remain."""
        if self._share is None:
            return
        for group in sampled:
            uid, index = group.prompt.uid, self._index[group.prompt.uid]
            if self.is_out[index] or right_share(group, self._samples) < self._share:
                continue
            if len(self._prompts) - len(self._passed) <= self._keep:
                self._warn()
                return
            self.is_out[index], self._passed[uid] = True, 0

    def pass_over(self, index: int) -> None:
        """Count a skip of the dropped prompt ``index``."""
        self._passed[self._prompts[index].uid] += 1

    def _warn(self) -> None:
        """Warn once that solved prompts are sampled again."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "data.order.drop_solved = %g: %d of %d prompts are solved and left out; the other %d stay, "
            "solved or not, since the steps in flight hold %d. The run continues with them; end it, or "
            "start one with further prompts",
            self._share, len(self._passed), len(self._prompts), len(self._prompts) - len(self._passed),
            self._keep,
        )  # fmt: skip


def right_share(group: Group, samples: int = 1) -> float:
    """Return right samples / max(group size, ``samples``); unscored and missing samples are wrong."""
    right = correctness(group)
    return int(np.count_nonzero(right == 1.0)) / max(len(right), samples)


class PromptStream:
    """Stream of order indices.

    All below ``position`` were taken or skipped, except the returned or postponed ones, ``waiting``, oldest
    first.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        *,
        seed: int,
        state: OrderState,
        weights: Mapping[str, float] | None = None,
        solved: SolvedPrompts | None = None,
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including spare ones. ``weights``: the weight
        of each source, see `Mixture`; empty: epochs of all prompts. ``solved``: prompts to drop; None: only
        the ones dropped in ``state``.

        Raises ValueError if ``per_batch`` exceeds the number of prompts.
        """
        if per_batch > (n := len(prompts)):
            raise ValueError(f"{per_batch} prompts a batch cannot be drawn from {n} without repetition")
        self._prompts, self._per_batch, self._seed = prompts, per_batch, seed
        self._position, self._waiting = state.position, deque(state.waiting)
        self._solved = solved or SolvedPrompts(prompts, state.left_out)
        sources = sources_of(prompts) if weights else []
        self._mixture = Mixture(sources, weights, seed=seed) if weights else None

    @property
    def state(self) -> OrderState:
        return OrderState(self._position, tuple(self._waiting), left_out=self._solved.passed)

    def take(self, batch: int) -> list[int]:
        """Return the next order indices; a repeated prompt is postponed to the next batch."""
        taken: dict[int, int] = {}  # order index by prompt
        postponed = []
        while len(taken) < self._per_batch:
            index = self._next_left(len(taken))
            if taken.setdefault(self.prompt(index), index) != index:
                postponed.append(index)
        self._waiting.extendleft(reversed(postponed))  # they are older than the rest
        return list(taken.values())

    def prompt(self, index: int) -> int:
        if self._mixture is not None:
            return self._mixture.prompt(index)
        epoch, at = divmod(index, len(self._prompts))
        return int(shuffled(len(self._prompts), self._seed, epoch)[at])

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        self._solved.observe(sampled)
        uids = {group.prompt.uid for group in sampled}
        if returned := [index for index in indices if self._uid(index) not in uids]:
            self._waiting = deque(sorted([*self._waiting, *returned]))

    def sampled(self, in_flight: Iterable[int] = ()) -> Counter[str]:
        """Count how often each uid was sampled, except by batches ``in_flight`` (order indices)."""
        pending = {*self._waiting, *in_flight}
        turns = Counter(self._uid(index) for index in range(self._position) if index not in pending)
        turns.subtract(self._solved.passed)
        return turns

    def _uid(self, index: int) -> str:
        return self._prompts[self.prompt(index)].uid

    def _next_left(self, taken: int) -> int:
        """Return `_next` after skipping dropped prompts."""
        while self._solved.is_out[prompt := self.prompt(index := self._next(taken))]:
            self._solved.pass_over(prompt)
        return index

    def _next(self, taken: int) -> int:
        """Return the next order index of a batch that has ``taken`` prompts."""
        if self._waiting:
            return self._waiting.popleft()
        self._position += 1
        return self._position - 1


_LENGTH_KEPT = 0.5  # weight of earlier lengths when a prompt is sampled again


class LengthOrder(PromptStream):
    """A stream of order indices, see `PromptStream`: ``waiting`` has the rest of the window, in order."""

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
        """``per_step``: prompts that share a step. ``window``: steps. ``solved`` and errors: see
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
            mean_tokens = self._lengths.get(group.prompt.uid, tokens)
            self._lengths[group.prompt.uid] = _LENGTH_KEPT * mean_tokens + (1 - _LENGTH_KEPT) * tokens
        uids = {group.prompt.uid for group in sampled}
        self._waiting.extendleft(reversed([index for index in indices if self._uid(index) not in uids]))

    def _next(self, taken: int) -> int:
        while not self._waiting:  # a window is empty where the rest of its epoch is dropped
            self._waiting = deque(self._next_window(taken % self._per_step))
        return self._waiting.popleft()

    def _next_window(self, started: int) -> list[int]:
        """Return the order indices of the next window, step by step. ``started``: prompts that the first
        step already has.
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
        """Advance to the end of the next window; return its order indices, int64, in the epoch's order."""
        first, count = self._position, len(self._prompts)
        epoch, at = divmod(first, count)
        is_out = self._solved.is_out[shuffled(count, self._seed, epoch)[at:]]
        left = first + np.flatnonzero(~is_out)
        size = self._window * self._per_step
        is_last = len(left) - size < self._per_step  # the rest is too small for another window
        indices = left if is_last else left[:size]
        self._position = (epoch + 1) * count if is_last else int(indices[-1]) + 1
        for index in first + np.flatnonzero(is_out[: self._position - first]):
            self._solved.pass_over(self.prompt(int(index)))
        return indices

    def _expected(self, indices: np.ndarray) -> np.ndarray:
        """Return the expected tokens of a completion, float64 [indices]."""
        lengths = [self._lengths.get(self._uid(index)) for index in indices.tolist()]
        observed = [tokens for tokens in lengths if tokens is not None]
        default = float(np.mean(observed)) if observed else 0.0
        return np.array([default if tokens is None else tokens for tokens in lengths])
