"""Drafts from earlier texts, and which texts the drafter considers ended."""

import sys

import numpy as np
import pytest

from actors.workers import drafter as drafters
from actors.workers.drafter import History


def text(*tokens):
    return np.array(tokens, dtype=np.int32)


def test_the_text_that_agrees_longest_backwards_is_continued():
    history = History(1000)
    history.add(text(1, 2, 3, 4, 5, 60, 61))
    history.add(text(9, 2, 3, 4, 5, 70, 71))
    assert history.continuation(text(8, 9, 2, 3, 4, 5), 2) == [70, 71]
    assert history.continuation(text(8, 1, 2, 3, 4, 5), 1) == [60]


def test_among_equals_the_text_with_the_longest_common_beginning_is_continued():
    history = History(1000)
    history.add(text(7, 7, 8, 0, 2, 3, 4, 5, 60))
    history.add(text(7, 6, 8, 0, 2, 3, 4, 5, 70))
    assert history.continuation(text(7, 7, 9, 1, 2, 3, 4, 5), 3) == [60]
    assert history.continuation(text(7, 6, 9, 1, 2, 3, 4, 5), 3) == [70]


def test_nothing_is_guessed_after_an_n_gram_that_is_new():
    history = History(1000)
    history.add(text(1, 2, 3, 4, 5))
    assert history.continuation(text(2, 3, 4), 4) == []
    assert history.continuation(text(4, 3, 2, 1, 0), 4) == []
    assert history.continuation(text(0, 2, 3, 4, 5), 4) == []  # the n-gram at its end has no continuation


def test_the_oldest_texts_leave_and_take_their_n_grams_with_them():
    history = History(capacity=20)
    for start in range(10, 100, 10):
        history.add(text(*range(start, start + 10)))
    assert history.continuation(text(0, 10, 11, 12, 13), 2) == []
    assert history.continuation(text(0, 90, 91, 92, 93), 2) == [94, 95]
    history.add(text(*range(21)))  # longer than all that is remembered
    assert history.continuation(text(0, 90, 91, 92, 93), 2) == []
    assert history.continuation(text(0, 1, 2, 3, 4), 2) == []


class ReferenceHistory:
    """The guesses of `History` by plain search: the last 8 places of the n-gram in the newest texts."""

    def __init__(self, capacity):
        self.capacity, self.texts = capacity, []

    def add(self, tokens):
        if len(tokens) > 4:
            self.texts.append(tokens.tolist())
        while sum(map(len, self.texts)) > self.capacity:
            del self.texts[0]

    def continuation(self, tokens, count):
        ids = tokens.tolist()
        every = [(text, end) for text in reversed(self.texts) for end in range(len(text), 3, -1)]
        matches = [(text, end) for text, end in every if text[end - 4 : end] == ids[-4:]]
        within = [(ids, end) for end in range(4, len(ids)) if ids[end - 4 : end] == ids[-4:]]
        best, guess = (0, -1), []
        for other, end in matches[:8] + within[-8:]:
            backwards = agreement(other[:end][::-1], ids[::-1])
            score = (min(backwards, 32), agreement(other, ids))
            if other[end : end + count] and score > best:
                best, guess = score, other[end : end + count]
        return guess


def agreement(one, other):
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


@pytest.mark.parametrize("vocabulary", [2, 6, 2**31 - 1])
def test_guesses_match_a_plain_search(vocabulary):
    """Many texts, which are forgotten in turn; with few tokens every n-gram has more than 8 places."""
    rng = np.random.default_rng(vocabulary)
    history, reference = History(400), ReferenceHistory(400)
    phrases = [rng.integers(vocabulary, size=12, dtype=np.int32) for _ in range(3)]
    guessed = 0
    for _ in range(120):
        parts = [phrases[i][: rng.integers(1, 13)] for i in rng.integers(3, size=rng.integers(1, 7))]
        sample = np.concatenate(parts)
        for length in (len(sample), *rng.integers(1, len(sample) + 1, size=3)):
            expected = reference.continuation(sample[:length], 3) if length > 4 else []
            assert history.continuation(sample[:length], 3) == expected
            guessed += bool(expected)
        history.add(sample)
        reference.add(sample)
    assert guessed > 120


def test_remembering_a_text_takes_no_python_for_each_token():
    """Calls of Python and of numpy, which a tracer counts: as many for 16,000 tokens as for 1,000."""
    history, rng = History(100_000), np.random.default_rng(0)

    def calls_of(tokens):
        sample, events = rng.integers(1000, size=tokens, dtype=np.int32), []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            history.add(sample)
        finally:
            sys.setprofile(None)
        return len(events)

    calls_of(1000)
    assert calls_of(16_000) == calls_of(1000) < 100
    for _ in range(10):
        history.add(rng.integers(1000, size=16_000, dtype=np.int32))
    assert calls_of(16_000) < 100  # texts are forgotten meanwhile


class Batch:
    """Rows as in vLLM's model runner, and their drafter."""

    def __init__(self, monkeypatch, max_sequences=2, tokens=3):
        monkeypatch.setattr(drafters, "use_exact_sampler", lambda: None)
        settings = type("", (), {"num_speculative_tokens": tokens})
        monkeypatch.setattr(drafters, "HISTORY_TOKENS", 1000)
        limits = {drafters.MAX_SEQUENCES: max_sequences}
        config = type("", (), {"speculative_config": settings, "additional_config": limits})
        self.drafter = drafters.Drafter(config)
        self.texts = np.zeros((8, 64), dtype=np.int32)
        self.rows: list[list[int]] = []

    def step(self, *sampled):
        """Append to each row its sampled tokens; return the drafts."""
        for i, tokens in enumerate(sampled):
            self.rows[i] = self.rows[i] + tokens
            self.texts[i, : len(self.rows[i])] = self.rows[i]
        lengths = np.array([len(row) for row in self.rows] + [0] * (8 - len(self.rows)), dtype=np.int32)
        return self.drafter.propose(list(sampled), lengths, self.texts)


@pytest.fixture
def batch(monkeypatch):
    return Batch(monkeypatch)


def test_a_row_that_has_ended_drafts_for_its_siblings(batch):
    batch.rows = [[1, 2, 3, 4], [1, 2, 3, 4]]
    for token in range(10, 20):
        assert batch.step([token], []) == [[], []]
    batch.rows = [[1, 2, 3, 4]]  # the first has ended, and the second has moved to its row
    batch.step([10])
    batch.step([11])
    assert batch.step([12]) == [[13, 14, 15]]
    assert batch.step([13, 14, 15, 16]) == [[17, 18, 19]]


def test_drafts_that_are_never_right_become_rare(batch):
    def drafted_of(steps):
        drafted = 0
        for i in range(steps):
            batch.rows = [[1, 2, 3, 4, 50, 1, 2, 3]]
            drafted += bool(batch.step([4])[0])
            batch.step([i + 100])
        return drafted

    # The running share starts at 1 and loses a tenth with each wrong draft: 0.9^11 > 0.3 > 0.9^12.
    assert drafted_of(12) == 12
    assert drafted_of(8 * drafters._TRIAL) <= 2 * 8
