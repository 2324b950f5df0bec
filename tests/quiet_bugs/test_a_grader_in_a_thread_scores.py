"""verl#5635, "disable signal.alarm() in math_verify to fix silent scoring failure in Ray workers": the grader
set an alarm, which only the main thread may do; the error was caught, and every answer scored 0.
"""

import math
import signal
import threading

from grpo_dist.rewards.pool import GraderPool
from tests.support.made_completions import boxed

PAIRS = [(boxed("\\frac{1}{2}"), "0.5"), (boxed("7"), "8"), ("I do not know", "8")]


def in_a_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def score_of_the_bug():
    """A timeout by a signal around a comparison that is true, and any error as reward 0."""
    try:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.signal(signal.SIGALRM, before)
        return 1.0
    except Exception:
        return 0.0


def test_the_bug_scores_0_in_a_thread():
    assert score_of_the_bug() == 1.0
    assert in_a_thread(score_of_the_bug) == 0.0


def test_the_pool_grades_in_a_thread_as_in_the_main_one():
    with GraderPool(1) as pool:
        here = pool.grade(PAIRS)
        there = in_a_thread(lambda: pool.grade(PAIRS))
    assert [grade.outcome for grade in here] == ["correct", "wrong", "no_answer"]
    assert there == here and [grade.reward for grade in there] == [1.0, 0.0, 0.0]


def test_an_answer_that_fails_to_grade_is_unknown_and_not_wrong():
    with GraderPool(1) as pool:
        (grade,) = pool.call("os:getcwdb", [{}])  # a value that is no number
    assert not isinstance(grade, float) or math.isnan(grade)
    assert grade.outcome == "error"
