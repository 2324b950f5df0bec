"""Groups of completions, hostile texts and reward functions for tests of rewards."""

import numpy as np

from grpo_dist.config import RewardConfig, RewardsConfig
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.scorer import Scorer, Scores


def completion_group(
    completions, gold, *, columns=None, lengths=None, reasons=None, max_new_tokens=100
) -> CompletionGroup:
    """Build a group; ``lengths`` are tokens of each completion, all distinct (None: one per character)."""
    lengths = [len(c) for c in completions] if lengths is None else lengths
    return CompletionGroup(
        completions=tuple(completions), token_ids=tuple(np.arange(n, dtype=np.int32) for n in lengths),
        finish_reasons=tuple(reasons or ["stop"] * len(completions)), gold=gold, columns=columns or {},
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def spec(name, function, weight=1.0, kwargs=None, **gate) -> RewardConfig:
    # Not validated: some tests use values that no configuration can have.
    fields = {"name": name, "function": function, "weight": weight, "kwargs": kwargs or {}}
    return RewardConfig.model_construct(**fields, **gate)


def term(name, weight=1.0, **gate) -> RewardConfig:
    return spec(name, "math", weight, **gate)


def scored(pool, group, *functions) -> tuple[Scores, Scorer]:
    """Score a group with a new scorer, which is closed."""
    scorer = Scorer(functions, pool)
    try:
        return scorer.score(group), scorer
    finally:
        scorer.close()


def check_reward(function, **kwargs) -> None:
    """Check a reward before a run of 10 tokens. Raises ValueError."""
    settings = RewardsConfig(functions=(RewardConfig(function=function, kwargs=kwargs),))
    check_rewards(settings, max_new_tokens=10)


_MATRIX = "\\\\".join(" & ".join(f"x_{{{i * 12 + j}}}" for j in range(12)) for i in range(12))
HOSTILE = {
    "a tower": "\\boxed{9^{9^{9^9}}}",
    "a tower of names": "\\boxed{x^{y^{z^{w^{v^{u^{9999999}}}}}}}",
    "factorials": "\\boxed{((100!)!)!}",
    "a determinant": f"\\boxed{{\\det\\begin{{pmatrix}}{_MATRIX}\\end{{pmatrix}}}}",
    "a power of a matrix": "\\boxed{\\begin{pmatrix}1&1\\\\1&0\\end{pmatrix}^{99999999}}",
    "an integral": "\\boxed{\\int_0^\\infty \\frac{\\sin(x^{x^x})}{\\cos(x!)} dx}",
    "a sum": "\\boxed{\\sum_{n=1}^{10^{12}} \\frac{1}{n^{n}}}",
    "a product": "\\boxed{\\prod_{k=1}^{10^9} (k^2+1)}",
    "a large expansion": "\\boxed{(a+b+c+d+e+f+g)^{500}}",
    "kilometres of brackets": "\\boxed{" + "(" * 100_000 + ")" * 100_000 + "}",
    "brackets never closed": "\\boxed{" * 50_000,
    "braces": "{" * 1_000_000,
    "fractions in fractions": "\\boxed{" + "\\frac{1}{" * 700 + "2" + "}" * 700 + "}",
    "roots in roots": "\\boxed{" + "\\sqrt{" * 1000 + "2" + "}" * 1000 + "}",
    "digits": "\\boxed{" + "7" * 1_000_000 + "}",
    "ten megabytes": "the answer is " * 700_000,
    "control characters": "".join(map(chr, range(32))) * 1000 + "\\boxed{\x00\x1b[2J\x07}",
    "halves of surrogates": "\\boxed{\ud800\udfff}",
    "a protocol": '\\boxed{1}\n["ok", ["correct", ""]]\n',
    "code": "\\boxed{__import__('os').system('kill -9 -1')}",
    "a union": "\\boxed{" + "\\cup".join(f"({i},{i + 1})" for i in range(3000)) + "}",
    "boxes in boxes behind a thought": "<think></think>" + "\\boxed{" * 20_000 + "}" * 20_000,
    "empty boxes behind a thought": "<think></think>" + "\\boxed{}" * 20_000,
    "thoughts": "<think></think>" * 50_000 + "<answer>" * 50_000,
    "a chain": "\\boxed{" + "<".join(f"x_{i}" for i in range(3000)) + "}",
}


def boxed(value: object) -> str:
    return f"\\boxed{{{value}}}"
