"""A column that a built-in reward names, and no prompt has, is refused before a run."""

import numpy as np

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.data_columns import column_problems
from grpo_dist.types import Prompt


def prompts(**of_source):
    """Return a prompt for each source, with these columns."""
    ids = np.array([1], np.int32)
    return [Prompt(name, ids, "2", name, "1+1?", dict.fromkeys(own, "x")) for name, own in of_source.items()]


def problems(rewards, **of_source):
    return list(column_problems(RewardsConfig.model_validate(rewards), prompts(**of_source)))


CODE = {"function": "unit_tests", "kwargs": {"setup_column": "setup"}}
SERVED = {"function": "remote", "kwargs": {"url": "http://scorer", "columns": ["level", "problem"]}}


def test_columns_that_some_source_has_are_right():
    assert problems({"functions": [{"function": "math"}]}, a=()) == []
    assert problems({"functions": [CODE]}, a=("tests", "setup"), b=()) == []
    assert problems({"functions": [CODE, SERVED]}, a=("tests", "level"), b=("setup",)) == []


def test_a_column_that_no_prompt_has_is_named_with_those_there_are():
    """Its code would not run, and every solution that needs it would be wrong."""
    (found,) = problems({"functions": [CODE]}, a=("tests", "set_up"))
    assert found == (
        "reward unit_tests reads column `setup`, but no prompt has it; their columns are problem, set_up, "
        "tests: add it to `columns` of the source in `data.train`, or correct the kwargs of the reward"
    )
    (found,) = problems({"functions": [SERVED]}, a=(), b=())
    assert "reward remote reads column `level`" in found
    assert len(problems({"functions": [CODE]}, a=())) == 2


def test_the_rewards_of_a_source_read_the_columns_of_its_own_prompts():
    by_source = {"functions": [{"function": "math"}], "by_source": {"code": {"functions": [CODE]}}}
    assert problems(by_source, code=("tests", "setup"), other=()) == []
    (found,) = problems(by_source, code=("tests",), other=("setup",))
    assert "no prompt of source code has it" in found
    assert problems(by_source, other=()) == []  # nothing is scored by it
