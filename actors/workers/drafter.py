"""Draft tokens for stragglers, once a batch has drained, from texts that the engine sampled before.

vLLM makes a `Drafter` by its name in ``speculative_config.model`` and calls it after every step. It predicts
the next tokens from a `History` of texts:

    texts     [ oldest ....... | ......... | newest ....... ]      positions count the tokens ever remembered
    heads     bucket of an n-gram -> position of its newest n-gram
    back      position            -> distance to the bucket's previous n-gram; 0: there is none

A lookup follows these links from newest to oldest until it reaches a forgotten position, so forgetting a text
costs nothing. It skips other n-grams in the same bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from actors.workers.exact_sampler import DraftCounts


_GRAM = 4  # tokens that must match before a continuation is considered
_PLACES = 8  # newest occurrences of an n-gram that are considered
_LONGEST = 32  # tokens: longer matches count as equal
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; the golden ratio of 2^64 spreads consecutive values
_LOW = np.uint64(32)  # bits of the index in a text, packed below the bucket


class History:
    """Token sequences with an n-gram index. Forgets the oldest ones beyond ``capacity`` tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._next = capacity, 1  # position 0 is never used
        self._texts: list[NDArray[np.int32]] = []
        self._starts: list[int] = []  # position of each text's first token
        self._forgotten = 0  # number of leading texts that are forgotten
        self._bits = _bucket_bits(capacity)
        # Untouched zeros take no memory.
        self._heads = np.zeros(1 << self._bits, dtype=np.int64)
        self._back = np.zeros(capacity, dtype=np.int32)

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Remember a sequence. ``tokens``: int32 [T], copied.

        Runs between two engine steps: no Python loop over tokens.
        """
        if len(tokens) <= _GRAM:
            return
        self._forget(len(tokens))
        if len(tokens) > self._capacity:
            return
        text, start = np.array(tokens, dtype=np.int32), self._next
        self._texts.append(text)
        self._starts.append(start)
        self._next += len(text)
        self._link(self._buckets(text), start)

    def continuation(self, tokens: NDArray[np.int32], count: int) -> list[int]:
        """Predict at most ``count`` next tokens; [] if the last n-gram of ``tokens`` is new.

        Continues the occurrence of that n-gram, here or in a remembered text, with the longest backward
        match. Ties go to the text with the longest common prefix, most often a sample of the same prompt.
        """
        if len(tokens) <= _GRAM:
            return []
        best, prediction = (0, -1), tokens[:0]
        occurrences = list(self._find_in_history(tokens[-_GRAM:]))
        occurrences += [(tokens, end) for end in _find_in_tokens(tokens)]
        for text, end in occurrences:
            following = text[end : end + count]
            score = (
                _prefix_match(text[:end][::-1], tokens[::-1], _LONGEST),
                _prefix_match(text, tokens, len(tokens)),
            )
            if len(following) and score > best:
                best, prediction = score, following
        return [int(token) for token in prediction]

    def _forget(self, new: int) -> None:
        """Forget the oldest texts until ``new`` more tokens fit."""
        while self._forgotten < len(self._texts) and self._next + new - self._oldest > self._capacity:
            self._texts[self._forgotten] = self._texts[self._forgotten][:0]
            self._forgotten += 1
        if 2 * self._forgotten > len(self._texts):
            del self._texts[: self._forgotten], self._starts[: self._forgotten]
            self._forgotten = 0

    @property
    def _oldest(self) -> int:
        """The oldest remembered position."""
        return self._starts[self._forgotten] if self._forgotten < len(self._starts) else self._next

    def _buckets(self, text: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the bucket of each n-gram of ``text`` [T] by its first token, [T - 3]."""
        wide, count = text.astype(np.uint64), len(text) - _GRAM + 1
        mixed = wide[:count].copy()
        for offset in range(1, _GRAM):
            mixed *= _FACTOR
            mixed ^= mixed >> _LOW
            mixed += wide[offset : offset + count]
        mixed *= _FACTOR
        return mixed >> np.uint64(64 - self._bits)

    def _link(self, buckets: NDArray[np.uint64], start: int) -> None:
        """Link each n-gram from ``start`` on to the previous n-gram of its bucket."""
        # Sorting numbers is much faster than an argsort.
        ordered = np.sort((buckets << _LOW) | np.arange(len(buckets), dtype=np.uint64))
        bucket = (ordered >> _LOW).astype(np.int64)
        position = start + (ordered & np.uint64((1 << 32) - 1)).astype(np.int64)
        is_first = np.ones(len(ordered), dtype=bool)  # whether it is the bucket's first in this text
        is_first[1:] = bucket[1:] != bucket[:-1]
        back = np.empty(len(ordered), dtype=np.int64)
        back[1:] = position[1:] - position[:-1]
        back[is_first] = position[is_first] - self._heads[bucket[is_first]]
        back[back >= self._capacity] = 0  # that position is forgotten
        self._back[position % self._capacity] = back
        is_last = np.append(is_first[1:], True)
        self._heads[bucket[is_last]] = position[is_last]

    def _find_in_history(self, gram: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the newest texts with ``gram``, and the index after it."""
        position, oldest, matches = int(self._heads[self._buckets(gram)[0]]), self._oldest, 0
        gram_tokens = gram.tolist()
        while position >= oldest and matches < _PLACES:
            number = bisect_right(self._starts, position, lo=self._forgotten) - 1
            text, end = self._texts[number], position - self._starts[number] + _GRAM
            if text[end - _GRAM : end].tolist() == gram_tokens:
                matches += 1
                yield text, end
            back = int(self._back[position % self._capacity])
            if not back:
                return
            position -= back


def history_bytes(capacity: int) -> int:
    """Return the host memory of a full `History`, bytes."""
    return capacity * 2 * np.dtype(np.int32).itemsize + (8 << _bucket_bits(capacity))


def _bucket_bits(capacity: int) -> int:
    """Return log2 of the number of buckets: one per token, rounded up to a power of two."""
    return max(1, (capacity - 1).bit_length())


def _find_in_tokens(tokens: NDArray[np.int32]) -> list[int]:
    """Return the last few positions after the final n-gram of ``tokens``, without the end itself."""
    starts = len(tokens) - _GRAM
    same = np.ones(starts, dtype=bool)
    for offset in range(_GRAM):
        same &= tokens[offset : offset + starts] == tokens[starts + offset]
    return [int(start) + _GRAM for start in np.flatnonzero(same)[-_PLACES:]]


def _prefix_match(one: NDArray[np.int32], other: NDArray[np.int32], most: int) -> int:
    """Return the length of the common prefix, at most ``most``."""
    count = min(len(one), len(other), most)
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


METHOD, NAME = "custom_class", "actors.workers.drafter.Drafter"
MAX_SEQUENCES = "grpo_dist_speculation_max_sequences"  # in vLLM's ``additional_config``
HISTORY_TOKENS = 16_000_000  # newest tokens of earlier samples that each engine process remembers
# Verifying a token costs part of a step: below this acceptance rate, draft only every `_TRIAL` steps.
_WORTH, _TRIAL = 0.3, 16
_TOLD_BY = 4  # last tokens that must match for a row to continue the previous step's text
_MEMORY = 0.9  # decay of the running acceptance rate


class Drafter:
    """Drafts for at most `rollout.speculation.max_sequences` at once; larger batches keep the cores busy
    without drafts.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        use_exact_sampler()
        settings: Any = vllm_config.speculative_config
        self._tokens: int = settings.num_speculative_tokens
        self._most_sequences: int = vllm_config.additional_config[MAX_SEQUENCES]
        self._history = History(HISTORY_TOKENS)
        self._texts = np.zeros((0, 0), dtype=np.int32)  # text of each row after the last step
        self._lengths = np.zeros(0, dtype=np.int64)
        self._pending = 0  # drafted tokens that the next step verifies
        self._share = 1.0  # running acceptance rate
        self._skipped = 0

    def load_model(self, model: Any) -> None:
        """Do nothing: there is no draft model. vLLM calls this on every drafter."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """Return the drafts of each row, [] for none. ``sampled_token_ids``: the last step's tokens;
        ``num_tokens_no_spec`` [rows], ``token_ids_cpu`` [rows, longest]: each row's text including them.
        """
        self._update_share(sampled_token_ids)
        rows = len(sampled_token_ids)
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, rows)
        self._remember(sampled, np.array(num_tokens_no_spec[:rows]), token_ids_cpu)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        self._pending = 0
        if rows <= self._most_sequences and self._is_worth_it():
            for i in range(rows):
                if sampled_token_ids[i]:  # else its prefill is not finished
                    text = self._texts[i, : self._lengths[i]]
                    drafts[i] = self._history.continuation(text, self._tokens)
            self._pending = sum(map(len, drafts))
        return drafts

    def _update_share(self, sampled: list[list[int]]) -> None:
        if not self._pending:
            return
        accepted = min(sum(max(len(tokens) - 1, 0) for tokens in sampled), self._pending)
        self._share = _MEMORY * self._share + (1 - _MEMORY) * accepted / self._pending

    def _is_worth_it(self) -> bool:
        if self._share >= _WORTH:
            return True
        self._skipped = (self._skipped + 1) % _TRIAL
        return self._skipped == 0

    def _remember(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> None:
        """Remember the texts of finished rows, which hold another text now. If a row has only moved, a
        partial text is remembered, which does no harm.

        This runs in every step, even without drafts: no Python loop over continuing rows.
        """
        continuing = self._find_continuing(sampled, lengths, texts)
        for i in np.flatnonzero(~continuing[: len(self._lengths)]).tolist():
            self._history.add(self._texts[i, : self._lengths[i]])
        before = np.where(continuing[: len(sampled)], lengths - sampled, 0)
        self._grow(len(sampled), texts.shape[1])
        rows = np.flatnonzero(continuing[: len(sampled)])
        for token in range(int(sampled[rows].max(initial=0))):
            rows = rows[sampled[rows] > token]
            columns = before[rows] + token
            self._texts[rows, columns] = texts[rows, columns]
        for i in np.flatnonzero(~continuing[: len(sampled)]).tolist():
            self._texts[i, : lengths[i]] = texts[i, : lengths[i]]
        self._lengths = lengths

    def _find_continuing(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return which rows, old or new, hold the previous step's text plus the tokens sampled since."""
        rows = min(len(self._lengths), len(sampled))
        old, index = self._lengths[:rows], np.arange(rows)
        same = lengths[:rows] == old + sampled[:rows]
        for back in range(1, _TOLD_BY + 1):
            position = np.maximum(old - back, 0)
            same &= texts[index, position] == self._texts[index, position]
        continuing = np.zeros(max(len(self._lengths), len(sampled)), dtype=bool)
        continuing[:rows] = same
        return continuing

    def _grow(self, rows: int, width: int) -> None:
        shape = self._texts.shape
        if rows > shape[0] or width > shape[1]:
            grown = np.zeros((max(rows, shape[0]), max(width, shape[1])), dtype=np.int32)
            grown[: shape[0], : shape[1]] = self._texts
            self._texts = grown


def use_exact_sampler() -> None:
    """Make vLLM's model runner verify drafts with `ExactSampler`. The runner makes its drafter first, then
    its rejection sampler by the name that is set here.
    """
    from vllm.v1.worker import gpu_model_runner

    from actors.workers.exact_sampler import ExactSampler  # imports vLLM

    gpu_model_runner.RejectionSampler = ExactSampler


def require_exact_sampler(worker: Any) -> None:
    """Raise RuntimeError unless an engine's worker process verifies drafts with `ExactSampler`."""
    from actors.workers.exact_sampler import ExactSampler  # imports vLLM

    runner = worker.model_runner
    sampler = getattr(runner, "rejection_sampler", None)
    if not isinstance(sampler, ExactSampler):
        raise RuntimeError(
            f"rollout.speculation: vLLM's {type(runner).__module__} verifies drafts with "
            f"{type(sampler).__name__}, under which samples would change; remove rollout.speculation"
        )


def take_counts(worker: Any) -> DraftCounts:
    """Call `ExactSampler.take_counts` in an engine's worker process."""
    counts: DraftCounts = worker.model_runner.rejection_sampler.take_counts()
    return counts
