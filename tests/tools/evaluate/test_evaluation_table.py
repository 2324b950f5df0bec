"""Printed tables of evaluations have every number complete for any terminal width."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from grpo_dist.evaluation.estimates import Estimate
from grpo_dist.evaluation.result import JudgedProblem, Measured, Verdict, measure
from grpo_dist.tools.evaluate.result import print_measured
from grpo_dist.types import Prompt

MEASURES = ("pass@1", "pass@4", "pass@8", "avg@16", "maj@4", "maj@8", "cons@16")


@pytest.fixture(params=[80, 120, 200])
def terminal(request):
    return Console(file=io.StringIO(), width=request.param, highlight=False)


def test_no_number_of_a_result_is_truncated(terminal):
    estimates = {name: Estimate(0.5 + i / 100, 0.05, 0.41, 0.62, 50) for i, name in enumerate(MEASURES)}
    sets = [
        Measured("math500", None, None, 500, 8000, 3, 500, 0.02, 1234.0, estimates),
        Measured("math500", "subject", "Counting & Probability", 50, 800, 0, 50, 0.07, 4321.0, estimates),
    ]
    print_measured(terminal, "[m]", sets)
    text = terminal.file.getvalue()
    assert "…" not in text and text.startswith("[m]")
    for share in (51, 52, 53, 54, 55, 56):  # pass@1 equals avg@16 and is shown once
        assert text.count(f"{share}.0 [41.0, 62.0]") == 2
    for cell in ("math500", "  subject Counting & Probability", "1,234", "4,321", "2%", "7%"):
        assert cell in text


def test_samples_that_were_given_up_are_not_short_completions(terminal):
    """The engines returned nothing for them; an empty completion that was graded counts."""

    def judge(name, correct, lengths):
        prompt = Prompt("u", np.empty(0, np.int32), "2", name, "1+1")
        verdict = Verdict("k", "u", correct, None, (), lengths, 0)
        return JudgedProblem.from_verdict(name, prompt, {}, verdict, (1,))

    problems = [judge("some", (1.0, None, 0.0, None), (6, 0, 0, 12)), judge("none", (None, None), (0, 0))]
    measured = list(measure(problems))
    lengths = {m.set: m.length_tokens for m in measured}
    assert lengths["some"] == lengths["all problems"] == lengths["mean of sets"] == 6
    assert math.isnan(lengths["none"])
    # Texts that were sampled elsewhere have no tokens: that is not 0.
    assert all(math.isnan(m.length_tokens) for m in measure([judge("texts", (1.0, 0.0), (0, 0))]))
    print_measured(terminal, "m", measured)
    assert "nan" not in terminal.file.getvalue()
