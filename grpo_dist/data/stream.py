"""Order of prompts under dynamic sampling: a stream of concatenated epochs.

The rewards of a batch decide how many prompts it samples. So a batch takes as many as it may need when it is
launched, and returns those it did not sample when it is trained on:

    launched   takes 4 prompts and 12 spare ones: returned ones first, oldest first, then from the stream
    trained    returns the spare prompts that it did not sample

Every prompt of an epoch is sampled once, but for those that `data.order.drop_solved` leaves out: their turns
are passed over. With several batches in flight at the end of an epoch, one may start
the next epoch before another has returned prompts of this one. An order index is a position in the epochs.

# Mixtures

A mixture of sources by weight: `data.train[].weight`.

    weights math 3, code 1    draws math math code math math math math code ...

Draw m belongs to the source that the fraction of (m + 1) times the golden ratio falls to, the shares of the
sources laid end to end. Such fractions fill [0, 1) evenly, so the first n draws differ from the shares by a
few draws for every n (Steinhaus' three-gap theorem). The draws of a source go through its prompts in epochs,
each a permutation drawn from the seed.

# Solved prompts

Prompts that the policy solves are left out of all later epochs: `data.order.drop_solved`.

    drop_solved 0.9, 4 samples of each prompt; right samples of its group
    epoch 0    a 4   b 3   c 1   d 0
    epoch 1          b 4   c 2   d 1     a is left out
    epoch 2                c 3   d 2     b, too

ScaleRL's no-positive resampling, arXiv:2510.13786: a policy mostly keeps solving what it has solved, so the
prompt never returns, except in steps already in flight. The group of the latest epoch decides, and
not the mean over all epochs, which the first ones would hold down. A sample that could not be scored, or that
no engine gave, does not count as right: it is no reason to leave a prompt out for good.

# Tail batching

Tail batching: prompts with long answers share steps, so that few steps wait for a long answer.

    epoch, window of 2 steps    a b c d      expected tokens 900 80 100 700
    sorted, cut into steps      c b | a d    one step waits for 100 tokens, one for 900; as drawn both wait

The answers of a prompt have been about so long before: the expectation is the exponential mean over its
groups, and the mean of the known prompts where it was not sampled yet. Every prompt of an epoch is drawn
once. A window is `data.order.window` steps of the epoch's random permutation. So no prompt leaves its
window, whatever its length, and over each window the mean length is that of random steps. Which step of the
window gets the long prompts is drawn from the seed. Within a step the longest come first, so that none begins
when the others end. Lengths are those of steps that are trained, so the order is a function of seed
and samples, never of which sample is finished first.

Long prompts in steps of their own: RollPacker, arXiv:2509.21009, which finds them by sampling; here they are
predicted.
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
_ROUNDING = 1e-6  # in a share times a number of prompts: 0.07 * 100 is above 7


class Mixture:
    """An endless sequence of prompts.

    Args:
        sources: of each prompt.
        weights: of each source.
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], *, seed: int) -> None:
        names, source_names = list(weights), np.array(sources)
        self._members = [np.flatnonzero(source_names == name) for name in names]
        shares = np.array([weights[name] for name in names], np.float64)
        self._ends = np.cumsum(shares / shares.sum())[:-1]
        self._seeds = [seed + 1_000_003 * i for i in range(len(names))]
        self._source = np.empty(0, np.int64)  # the source of each draw so far
        self._number = np.empty(0, np.int64)  # how many draws of its source came before
        # The latest epoch of each source: sources take turns, and there may be many.
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
    """Return how many of ``prompts`` can be drawn and none of them twice: all, or with ``weights``, the share
    of each source, as many as the source allows that has the fewest for its share.

        4000 and 600 prompts, each source a half    1200
    """
    if not weights:
        return len(prompts)
    counts = Counter(sources_of(prompts))
    return math.floor(min(counts[name] / share for name, share in weights.items()) + _ROUNDING)


def check_weights(data: DataConfig, prompts: Sequence[Prompt], *, in_flight: int) -> None:
    """Check that every source can give its share. ``in_flight``: prompts of all steps in flight.

    Raises ValueError where the prompts of a source are fewer, so that it would be drawn twice at once.
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
    """Which of ``prompts`` are left out, and how often the turn of each was passed over.

    ``passed``: that count by uid, of a checkpoint; a prompt that is left out has one, 0 at first.
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
        """``share``: right samples of a group from which its prompt is left out; None: it never is.
        ``keep``: prompts that stay in any case, since the steps in flight hold as many. ``samples``: of a
        whole group.
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
        """How often the turn of each prompt that is left out was passed over, by uid."""
        return dict(self._passed)

    def observe(self, sampled: Sequence[Group]) -> None:
        """Leave out the prompts of the groups that reach the share, while more than ``keep`` are left."""
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
        """Count that a turn of prompt ``index``, which is left out, was passed over."""
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
    """Return the right samples of a group as a share of all, of ``samples`` at least: those that could
    not be scored or had are not right.
    """
    right = correctness(group)
    return int(np.count_nonzero(right == 1.0)) / max(len(right), samples)


class PromptStream:
    """Stream of order indices.

    All below ``position`` were taken or passed over, except those ``waiting``: returned or postponed, oldest
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
        """``per_batch`` is the number of prompts a batch takes, including spare ones. ``weights``: of each
        source, see `Mixture`; none: epochs of all prompts. ``solved``: those to leave out; None:
        those of ``state``, and no others.

        Raises ValueError if it exceeds the number of prompts.
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
        """As `_next`, without the prompts that are left out."""
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
            mean_tokens = self._lengths.get(group.prompt.uid, tokens)
            self._lengths[group.prompt.uid] = _LENGTH_KEPT * mean_tokens + (1 - _LENGTH_KEPT) * tokens
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
        lengths = [self._lengths.get(self._uid(index)) for index in indices.tolist()]
        seen = [tokens for tokens in lengths if tokens is not None]
        unseen = float(np.mean(seen)) if seen else 0.0
        return np.array([unseen if tokens is None else tokens for tokens in lengths])
