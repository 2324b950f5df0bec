"""Scores a right and a wrong answer to one prompt with the rewards of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_dist.config import RewardsConfig, SamplingConfig
from grpo_dist.rewards.registry import REWARDS, placed
from grpo_dist.rewards.text import alternatives
from grpo_dist.rewards.thought import thought_for
from grpo_dist.types import Prompt, Rollout, Thought

ENVIRONMENT = "environment"  # the reward that the environment gives; two texts have no turns
_WRONG = "-987654321"
# Forms of an answer: a reward may ask for any of them. The two texts differ only in the answer.
_ANSWERS = ("The answer is \\boxed{{{answer}}}.", "I work it out step by step.\n#### {answer}", "{answer}")
_THOUGHT_ANSWERS = ("<answer>The answer is \\boxed{{{answer}}}.</answer>", "<answer>{answer}</answer>")


@dataclass(frozen=True)
class RewardTrial:
    """``texts``, ``totals``: of the right and of the wrong answer; ``parts``: each reward's two scores.
    ``reasons``: why a reward gave no score.
    """

    texts: tuple[str, str]
    totals: tuple[float, float]
    parts: dict[str, tuple[float, float]]
    reasons: tuple[str, ...]

    @property
    def separates(self) -> bool:
        """True where the right answer gets more."""
        return self.totals[0] > self.totals[1]

    @property
    def inverts(self) -> bool:
        """True where the wrong answer gets more."""
        return self.totals[0] < self.totals[1]

    @property
    def unscored(self) -> str | None:
        return next((name for name, part in self.parts.items() if np.isnan(part).any()), None)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {right:g} and {wrong:g}" for name, (right, wrong) in self.parts.items())
        lines = [f"a right and a wrong answer get {parts}"]
        for word, total, text in zip(("right", "wrong"), self.totals, self.texts, strict=True):
            lines.append(f"  | {word}, {total:g} in all: {text!r}")
        return "\n    ".join(lines)


def try_rewards(rewards: RewardsConfig, sampling: SamplingConfig, prompt: Prompt) -> RewardTrial:
    """Try each form of an answer until the right answer gets more than the wrong one, or less.

    Where neither happens, returns the first form that all rewards score. Reward models and environments are
    not asked. Raises ValueError for rewards that cannot be used.
    """
    from actors.workers.reward import RewardWorker  # Ray: no module of grpo_dist imports it at its top

    # Functions that a reward model or the environment gates are scored without their gate.
    absent = [model.name for model in rewards.models]
    absent += [f.name or f.function for f in rewards.functions if f.function == ENVIRONMENT]
    functions = tuple(
        f.model_copy(update={"gate": None}) if f.gate in absent else f
        for f in rewards.functions
        if f.function != ENVIRONMENT
    )
    ungraded = {"functions": functions, "models": (), "num_workers": 1, "processes_per_worker": 1}
    settings = placed(rewards.model_copy(update=ungraded))
    worker = RewardWorker(settings, max_new_tokens=sampling.longest)
    # A user's function may return None for a form of answer that it does not know.
    own = {f.name or f.function for f in functions if ":" in f.function}
    right, tried = alternatives(prompt.answer)[0], list[RewardTrial]()
    try:
        for before, form in _forms(thought_for(prompt.thought, rewards)):
            texts = before + form.format(answer=right), before + form.format(answer=_WRONG)
            group, news = worker.score(prompt, [_as_rollout(prompt, i, t) for i, t in enumerate(texts)], {})
            parts = {name: (float(part[0]), float(part[1])) for name, part in group.reward_parts.items()}
            totals = float(group.rewards[0]), float(group.rewards[1])
            tried.append(RewardTrial(texts, totals, parts, tuple(news)))
            unscored = tried[-1].unscored
            if tried[-1].separates or tried[-1].inverts or (unscored is not None and unscored not in own):
                return tried[-1]
    finally:
        worker.close()
    return next((trial for trial in tried if trial.unscored is None), tried[0])


def _forms(thought: Thought) -> list[tuple[str, str]]:
    """Return pairs of a thought, closed where the prompt opens it, and a form of the answer."""
    opening = "" if thought.prompt == "opens" else f"{thought.opening}\n"
    closed = f"{opening}I work it out step by step.\n{thought.closing}\n"
    before = "" if thought.prompt == "closes" else closed
    plain = before if thought.prompt == "opens" else ""
    first, *others = [(plain, form) for form in _ANSWERS]
    return [first, *((before, form) for form in _THOUGHT_ANSWERS), *others]


def is_blind(rewards: RewardsConfig) -> bool:
    """Return True where no reward function depends on the answer, so that both may score the same."""
    builtin = [REWARDS.get(reward.function) for reward in rewards.functions]
    return all(own is not None and own.is_blind for own in builtin)


def without_right_answers(rewards: RewardsConfig) -> list[str]:
    """Return the functions to which no right answer is known before a run."""
    functions = dict.fromkeys(reward.function for reward in rewards.functions)
    return [name for name in functions if name in REWARDS and not REWARDS[name].knows_right_answers]


def _as_rollout(prompt: Prompt, sample: int, text: str) -> Rollout:
    """Make a rollout of ``text`` with one token per word."""
    ids = np.arange(3, 3 + len(text.split()), dtype=np.int32)
    return Rollout(
        prompt.uid, sample, ids, np.zeros(len(ids), np.float32), "stop", text, np.zeros(len(ids), np.int32)
    )
