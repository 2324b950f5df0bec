"""Searches of a user's regular expression, in a process that ends with a search that hangs."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_dist.runtime.patterns import PatternSearch, PatternTimeout
from tests.support.patience import HANG_S


def test_the_last_match_with_its_group_counts_where_it_is_asked_for():
    text = "score 1, score 2, score none"
    for last, expected in ((False, ["1"]), (True, ["2"])):
        with PatternSearch(r"score (?:(\d)|none)", timeout_s=HANG_S, last=last) as search:
            assert search.search(text) == expected
            assert search.search("no match") is None


def test_a_search_that_hangs_ends_alone_and_threads_share_the_next_process():
    with PatternSearch(r"((?:a+)+)b", timeout_s=1.0, last=True) as search:
        with pytest.raises(PatternTimeout):
            search.search("a" * 40)
        search.timeout_s = HANG_S
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(search.search, [f"{'a' * n}b" for n in range(1, 9)]))
    assert found == [["a" * n] for n in range(1, 9)]
