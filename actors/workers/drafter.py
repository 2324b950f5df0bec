"""Drafts for the samples of a batch that has drained, from texts that the engine has sampled before.

vLLM makes a `Drafter` by its name in ``speculative_config.model`` and asks it after every step. It guesses
the next tokens from a `History` of texts:

    texts     [ oldest ....... | ......... | newest ....... ]      positions count the tokens ever remembered
    heads     bucket of an n-gram -> position of its newest n-gram
    back      position            -> how far back the bucket's n-gram before it is; 0: there is none

A lookup follows these links from the newest to older ones until a position has been forgotten, so that
forgetting a text costs nothing. Other n-grams in the same bucket are passed over.
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


_GRAM = 4  # tokens that must agree before a continuation is looked at
_PLACES = 8  # of each of these n-grams that are looked at, the newest
_LONGEST = 32  # tokens: longer agreements count as equal
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; the golden ratio of 2^64 spreads what follows each other
_LOW = np.uint64(32)  # bits of the index in a text, in one number with the bucket


class History:
    """Sequences of tokens with an index of their n-grams. The oldest leave when ``capacity`` tokens are
    exceeded.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._next = capacity, 1  # position 0 is never a token's
        self._texts: list[NDArray[np.int32]] = []
        self._starts: list[int] = []  # position of each text's first token
        self._forgotten = 0  # of these, from the first on
        self._bits = _bucket_bits(capacity)
        # Zeros that nothing was written to take no memory.
        self._heads = np.zeros(1 << self._bits, dtype=np.int64)
        self._back = np.zeros(capacity, dtype=np.int32)

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Remember a sequence. ``tokens``: int32 [T], which is copied.

        It runs between two steps of the engine: no Python for each token.
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
        """Guess the next tokens: at most ``count``, [] where the last n-gram of ``tokens`` is new.

        Of the places where that n-gram occurred, here or in a remembered text, the one that agrees longest
        backwards is continued; among equals the text with the longest common beginning, which is most often
        a sample of the same prompt.
        """
        if len(tokens) <= _GRAM:
            return []
        best, guess = (0, -1), tokens[:0]
        places = list(self._places(tokens[-_GRAM:]))
        places += [(tokens, end) for end in _own_places(tokens)]
        for text, end in places:
            following = text[end : end + count]
            score = (
                _agreement(text[:end][::-1], tokens[::-1], _LONGEST),
                _agreement(text, tokens, len(tokens)),
            )
            if len(following) and score > best:
                best, guess = score, following
        return [int(token) for token in guess]

    def _forget(self, new: int) -> None:
        """Forget the oldest texts until ``new`` tokens more fit."""
        while self._forgotten < len(self._texts) and self._next + new - self._oldest > self._capacity:
            self._texts[self._forgotten] = self._texts[self._forgotten][:0]
            self._forgotten += 1
        if 2 * self._forgotten > len(self._texts):
            del self._texts[: self._forgotten], self._starts[: self._forgotten]
            self._forgotten = 0

    @property
    def _oldest(self) -> int:
        """The first position that is remembered."""
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
        """Link the n-grams at ``start`` and after it to those of their buckets before them."""
        # Sorting numbers is much faster than sorting an index by them.
        ordered = np.sort((buckets << _LOW) | np.arange(len(buckets), dtype=np.uint64))
        bucket = (ordered >> _LOW).astype(np.int64)
        position = start + (ordered & np.uint64((1 << 32) - 1)).astype(np.int64)
        is_first = np.ones(len(ordered), dtype=bool)  # of its bucket in this text
        is_first[1:] = bucket[1:] != bucket[:-1]
        back = np.empty(len(ordered), dtype=np.int64)
        back[1:] = position[1:] - position[:-1]
        back[is_first] = position[is_first] - self._heads[bucket[is_first]]
        back[back >= self._capacity] = 0  # what is so far back has been forgotten
        self._back[position % self._capacity] = back
        is_last = np.append(is_first[1:], True)
        self._heads[bucket[is_last]] = position[is_last]

    def _places(self, gram: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the newest texts with ``gram``, and the index after it."""
        position, oldest, matches = int(self._heads[self._buckets(gram)[0]]), self._oldest, 0
        wanted = gram.tolist()
        while position >= oldest and matches < _PLACES:
            number = bisect_right(self._starts, position, lo=self._forgotten) - 1
            text, end = self._texts[number], position - self._starts[number] + _GRAM
            if text[end - _GRAM : end].tolist() == wanted:
                matches += 1
                yield text, end
            back = int(self._back[position % self._capacity])
            if not back:
                return
            position -= back


def history_bytes(capacity: int) -> int:
    """Return the host memory that a full `History` takes, bytes."""
    return capacity * 2 * np.dtype(np.int32).itemsize + (8 << _bucket_bits(capacity))


def _bucket_bits(capacity: int) -> int:
    """Return the logarithm of the number of buckets: one for each token, rounded up to a power of two."""
    return max(1, (capacity - 1).bit_length())


def _own_places(tokens: NDArray[np.int32]) -> list[int]:
    """Return the last few positions after the n-gram that ends ``tokens``, without the end itself."""
    starts = len(tokens) - _GRAM
    same = np.ones(starts, dtype=bool)
    for offset in range(_GRAM):
        same &= tokens[offset : offset + starts] == tokens[starts + offset]
    return [int(start) + _GRAM for start in np.flatnonzero(same)[-_PLACES:]]


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32], most: int) -> int:
    """Return how many first tokens are equal, at most ``most``."""
    count = min(len(one), len(other), most)
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count


METHOD, NAME = "custom_class", "actors.workers.drafter.Drafter"
MAX_SEQUENCES = "grpo_dist_speculation_max_sequences"  # in vLLM's ``additional_config``
HISTORY_TOKENS = 16_000_000  # tokens of earlier samples that each process of an engine remembers, the newest
# A verified token costs part of a step: below this share of right drafts they are not worth it. It is then
# only tried again every `_TRIAL` steps.
_WORTH, _TRIAL = 0.3, 16
_TOLD_BY = 4  # last tokens by which a row is taken to hold the text of the step before
_MEMORY = 0.9  # weight of what was before in the running share


class Drafter:
    """Drafts for at most `rollout.speculation.max_sequences` at once; a fuller batch keeps the cores busy
    without.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        use_exact_sampler()
        settings: Any = vllm_config.speculative_config
        self._tokens: int = settings.num_speculative_tokens
        self._most_sequences: int = vllm_config.additional_config[MAX_SEQUENCES]
        self._history = History(HISTORY_TOKENS)
        self._texts = np.zeros((0, 0), dtype=np.int32)  # of each row, after the last step
        self._lengths = np.zeros(0, dtype=np.int64)
        self._pending = 0  # drafted tokens that the next step verifies
        self._share = 1.0  # of right drafts, lately
        self._skipped = 0

    def load_model(self, model: Any) -> None:
        """Do nothing: no model drafts. vLLM calls it of every drafter."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """Return the drafts of each row, [] for none. ``sampled_token_ids``: of the step that has ended;
        ``num_tokens_no_spec`` [rows], ``token_ids_cpu`` [rows, longest]: each row's text with them.
        """
        self._note_share(sampled_token_ids)
        rows = len(sampled_token_ids)
        sampled = np.fromiter(map(len, sampled_token_ids), np.int64, rows)
        self._remember(sampled, np.array(num_tokens_no_spec[:rows]), token_ids_cpu)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        self._pending = 0
        if rows <= self._most_sequences and self._is_worth_it():
            for i in range(rows):
                if sampled_token_ids[i]:  # else its prompt is not finished
                    text = self._texts[i, : self._lengths[i]]
                    drafts[i] = self._history.continuation(text, self._tokens)
            self._pending = sum(map(len, drafts))
        return drafts

    def _note_share(self, sampled: list[list[int]]) -> None:
        if not self._pending:
            return
        right = min(sum(max(len(tokens) - 1, 0) for tokens in sampled), self._pending)
        self._share = _MEMORY * self._share + (1 - _MEMORY) * right / self._pending

    def _is_worth_it(self) -> bool:
        if self._share >= _WORTH:
            return True
        self._skipped = (self._skipped + 1) % _TRIAL
        return self._skipped == 0

    def _remember(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> None:
        """Keep the texts of rows that have ended: those that hold another text now. Of one that has only
        moved a part is kept, which does no harm.

        This runs in every step, also where nothing is drafted: no Python for each row that goes on.
        """
        going = self._going(sampled, lengths, texts)
        for i in np.flatnonzero(~going[: len(self._lengths)]).tolist():
            self._history.add(self._texts[i, : self._lengths[i]])
        before = np.where(going[: len(sampled)], lengths - sampled, 0)
        self._grow(len(sampled), texts.shape[1])
        rows = np.flatnonzero(going[: len(sampled)])
        for token in range(int(sampled[rows].max(initial=0))):
            rows = rows[sampled[rows] > token]
            at = before[rows] + token
            self._texts[rows, at] = texts[rows, at]
        for i in np.flatnonzero(~going[: len(sampled)]).tolist():
            self._texts[i, : lengths[i]] = texts[i, : lengths[i]]
        self._lengths = lengths

    def _going(
        self, sampled: NDArray[np.int64], lengths: NDArray[np.int64], texts: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return which rows, of those now and before, hold the text of the step before and what was sampled
        since.
        """
        rows = min(len(self._lengths), len(sampled))
        old, at = self._lengths[:rows], np.arange(rows)
        same = lengths[:rows] == old + sampled[:rows]
        for back in range(1, _TOLD_BY + 1):
            position = np.maximum(old - back, 0)
            same &= texts[at, position] == self._texts[at, position]
        going = np.zeros(max(len(self._lengths), len(sampled)), dtype=bool)
        going[:rows] = same
        return going

    def _grow(self, rows: int, width: int) -> None:
        have = self._texts.shape
        if rows > have[0] or width > have[1]:
            grown = np.zeros((max(rows, have[0]), max(width, have[1])), dtype=np.int32)
            grown[: have[0], : have[1]] = self._texts
            self._texts = grown


def use_exact_sampler() -> None:
    """Have vLLM's model runner verify drafts with `ExactSampler`. The runner makes its drafter first, and
    then its rejection sampler by the name that is set here.
    """
    from vllm.v1.worker import gpu_model_runner

    from actors.workers.exact_sampler import ExactSampler  # imports vLLM

    gpu_model_runner.RejectionSampler = ExactSampler


def require_exact_sampler(worker: Any) -> None:
    """Raise RuntimeError unless an engine's worker process verifies drafts with `ExactSampler`."""
    from actors.workers.exact_sampler import ExactSampler  # imports vLLM, as below

    runner = worker.model_runner
    sampler = getattr(runner, "rejection_sampler", None)
    if not isinstance(sampler, ExactSampler):
        raise RuntimeError(
            f"rollout.speculation: vLLM's {type(runner).__module__} verifies drafts with "
            f"{type(sampler).__name__}, under which samples would change; remove rollout.speculation"
        )


def take_counts(worker: Any) -> DraftCounts:
    """Return `ExactSampler.take_counts` of an engine's worker process."""
    counts: DraftCounts = worker.model_runner.rejection_sampler.take_counts()
    return counts
