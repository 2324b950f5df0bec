"""A right and a wrong answer to one prompt, through the rewards of a run: what would be taught."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_dist.config import Config
from grpo_dist.types import Prompt, Rollout, Thought

_WRONG = "-987654321"
# Ways of giving an answer: a reward may ask for any of them. The two texts differ in the answer alone.
_ANSWERS = ("The answer is \\boxed{{{answer}}}.", "I work it out step by step.\n#### {answer}", "{answer}")
_THOUGHT_ANSWERS = ("<answer>The answer is \\boxed{{{answer}}}.</answer>", "<answer>{answer}</answer>")
# Rewards that do not look at whether an answer is right.
_BLIND = ("format", "repetition", "language", "overlong")


@dataclass(frozen=True)
class Trial:
    """``texts``, ``totals``: of the right and of the wrong answer; ``parts``: each reward's two scores.
    ``news``: why one could not be given.
    """

    texts: tuple[str, str]
    totals: tuple[float, float]
    parts: dict[str, tuple[float, float]]
    news: tuple[str, ...]

    @property
    def separates(self) -> bool:
        """Whether the right answer gets more."""
        return self.totals[0] > self.totals[1]

    @property
    def unscored(self) -> str | None:
        return next((name for name, part in self.parts.items() if np.isnan(part).any()), None)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {right:g} and {wrong:g}" for name, (right, wrong) in self.parts.items())
        lines = [f"a right and a wrong answer get {parts}"]
        for word, total, text in zip(("right", "wrong"), self.totals, self.texts, strict=True):
            lines.append(f"  | {word}, {total:g} in all: {text!r}")
        return "\n    ".join(lines)


def try_rewards(config: Config, prompt: Prompt) -> Trial:
    """The first form of answer whose right one gets more than its wrong one; the first that is scored where
    none does.
    Reward models are not asked. Raises ValueError for rewards that cannot be used.
    """
    from actors.workers.reward import RewardWorker
    from grpo_dist.rewards.registry import placed
    from grpo_dist.rewards.thought import thought_for

    models = [model.name for model in config.rewards.models]  # their gates cannot be looked at either
    functions = tuple(
        f.model_copy(update={"gate": None}) if f.gate in models else f for f in config.rewards.functions
    )
    ungraded = {"functions": functions, "models": (), "num_workers": 1, "processes_per_worker": 1}
    settings = placed(config.rewards.model_copy(update=ungraded))
    worker = RewardWorker(settings, max_new_tokens=config.sampling.max_new_tokens)
    # A function of the user's may give None for an answer in a form that it does not know.
    own = {f.name or f.function for f in functions if ":" in f.function}
    tried: list[Trial] = []
    try:
        for before, form in _forms(thought_for(prompt.thought, config.rewards)):
            texts = before + form.format(answer=prompt.answer), before + form.format(answer=_WRONG)
            group, news = worker.score(prompt, [_as_rollout(prompt, i, t) for i, t in enumerate(texts)], {})
            parts = {name: (float(part[0]), float(part[1])) for name, part in group.reward_parts.items()}
            totals = float(group.rewards[0]), float(group.rewards[1])
            tried.append(Trial(texts, totals, parts, tuple(news)))
            unscored = tried[-1].unscored
            if tried[-1].separates or (unscored is not None and unscored not in own):
                return tried[-1]
    finally:
        worker.close()
    return next((trial for trial in tried if trial.unscored is None), tried[0])


def _forms(thought: Thought) -> list[tuple[str, str]]:
    """What stands before an answer, and the form of the answer: a thought that the prompt opens is closed."""
    opening = "" if thought.prompt == "opens" else f"{thought.opening}\n"
    closed = f"{opening}I work it out step by step.\n{thought.closing}\n"
    before = "" if thought.prompt == "closes" else closed
    plain = before if thought.prompt == "opens" else ""
    first, *others = [(plain, form) for form in _ANSWERS]
    return [first, *((before, form) for form in _THOUGHT_ANSWERS), *others]


def is_blind(config: Config) -> bool:
    """Whether no reward function looks at the answer, so that right and wrong may get the same."""
    return all(reward.function in _BLIND for reward in config.rewards.functions)


def _as_rollout(prompt: Prompt, sample: int, text: str) -> Rollout:
    """``text`` as if a model had sampled it, a token a word."""
    ids = np.arange(3, 3 + len(text.split()), dtype=np.int32)
    return Rollout(
        prompt.uid, sample, ids, np.zeros(len(ids), np.float32), "stop", text, np.zeros(len(ids), np.int32)
    )
