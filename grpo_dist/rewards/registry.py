"""Registry of rewards by name, and the scorer that combines them. Custom rewards are ``module:function``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from jaxtyping import Float32
from pydantic import ValidationError

from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.config import GatedConfig, RewardConfig, RewardsConfig
from grpo_dist.config.secrets import masked_text, shown_value
from grpo_dist.errors import expanded
from grpo_dist.plugins.user_code import REWARD, OwnPiece, code_files, registered, target_of
from grpo_dist.rewards import builtin
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.combine import Term, as_part, combine
from grpo_dist.rewards.episodes import Turns, failure_of, with_outcome_rewards
from grpo_dist.rewards.functions import OwnFunction, StepScores, StepSettings, noted
from grpo_dist.rewards.generative import Generative
from grpo_dist.rewards.group import CompletionGroup, Verdicts
from grpo_dist.rewards.judge import LLMJudge, deciding_judge, judged_outcomes
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.remote import Remote
from grpo_dist.rewards.unit_tests import UnitTests

_WARNINGS_PER_REWARD = 20  # distinct messages; a function may put its input in each

REWARDS: dict[str, type[Builtin]] = {
    "math": builtin.Math,
    "format": builtin.Format,
    "exact": builtin.Exact,
    "numeric": builtin.Numeric,
    "repetition": builtin.Repetition,
    "language": builtin.Language,
    "overlong": builtin.Overlong,
    "overlong_share": builtin.OverlongShare,
    "cosine_length": builtin.CosineLength,
    "relative_length": builtin.RelativeLength,
    "judge": LLMJudge,
    "remote": Remote,
    "generative": Generative,
    "parity": builtin.Parity,
    "random": builtin.Random,
    "environment": builtin.EnvironmentSum,
    "unit_tests": UnitTests,
}


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward function of the configuration.

    ``function`` is a name of `REWARDS`, with ``kwargs`` as its settings, or ``module:function``, called with
    them.
    """

    term: Term
    function: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps: StepSettings | None = None  # of kind process

    @property
    def name(self) -> str:
        return self.term.name


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of G completions.

    Attributes:
        parts: of each reward by name, before weights and gates.
        outcomes: [G] of the math grader, or of a judge in its place; "" if no reward used either.
        steps: of a function of kind process.
        failures: why rewards gave no score, one reason of each.
    """

    rewards: Float32[np.ndarray, " G"]
    parts: dict[str, Float32[np.ndarray, " G"]]
    outcomes: list[str]
    steps: StepScores | None = None
    failures: tuple[str, ...] = ()


def reward_specs(settings: RewardsConfig) -> list[RewardSpec]:
    """Read `rewards.functions` of the configuration, and what `rewards.overlong_buffer` adds to them."""
    return [
        RewardSpec(
            _term(r.name or r.function, r),
            _target(r.function),
            r.kwargs,
            StepSettings(r.step_separator, r.reduce) if r.kind == "process" else None,
        )
        for r in settings.of("").functions
    ]


def own_rewards(settings: RewardsConfig) -> tuple[OwnPiece, ...]:
    """Return the rewards of all sources that are not built in."""
    return tuple(
        OwnPiece(REWARD, r.function, REWARD.key, r.kwargs)
        for r in settings.all_functions
        if ":" in r.function or r.function in registered(REWARD)
        if r.function not in REWARDS
    )


def _target(function: str) -> str:
    """Return ``module:name`` for a name that a package registers, else ``function`` itself."""
    if function in REWARDS or ":" in function or function not in registered(REWARD):
        return function
    return target_of(REWARD, function)


def model_terms(settings: RewardsConfig) -> list[Term]:
    """Read weights and gates of `rewards.models`."""
    return [_term(model.name, model) for model in settings.models]


def placed(settings: RewardsConfig) -> RewardsConfig:
    """Make the judges' `cache_path` absolute, since an actor may have another working directory."""
    by_source = {
        source: own.model_copy(update={"functions": tuple(map(_placed, own.functions))})
        for source, own in settings.by_source.items()
    }
    functions = tuple(map(_placed, settings.functions))
    return settings.model_copy(update={"functions": functions, "by_source": by_source})


def _placed(reward: RewardConfig) -> RewardConfig:
    if reward.function != "judge" or not isinstance(path := reward.kwargs.get("cache_path"), str):
        return reward
    kwargs = reward.kwargs | {"cache_path": str(expanded(path).absolute())}
    return reward.model_copy(update={"kwargs": kwargs})


def check_rewards(settings: RewardsConfig, *, max_new_tokens: int) -> None:
    """Raise ValueError for the first reward that cannot be used; see `reward_problems`."""
    for problem in reward_problems(settings, max_new_tokens=max_new_tokens):
        raise ValueError(problem)


def reward_problems(
    settings: RewardsConfig, *, max_new_tokens: int, pool: GraderPool | None = None
) -> Iterator[str]:
    """Yield a message for every reward that cannot be used.

    Loads user functions in a process of ``pool``, None: of a pool of its own, and asks each judge one
    question.
    """
    custom, seen = [], list[tuple[str, Mapping[str, Any]]]()
    for source, own in settings.variants.items():
        key = f"rewards.by_source.{source}.functions" if source else "rewards.functions"
        for spec in reward_specs(own):
            if (spec.name, spec.kwargs) in seen:
                continue
            seen.append((spec.name, spec.kwargs))
            if spec.function not in REWARDS:
                custom.append(spec)
                continue
            try:
                make(spec).check(max_new_tokens=max_new_tokens)
            except ValueError as error:
                yield f"{key} {spec.name}: {error}"
    if not custom:
        return
    with nullcontext(pool) if pool else GraderPool(1, code_paths=settings.code_paths) as loading:
        for spec in custom:
            try:
                own_function(spec, loading)
            except ValueError as error:
                yield str(error)


def graded_problems(settings: RewardsConfig, advantage: str) -> Iterator[str]:
    """Yield a message for every built-in reward with other scores than 0 and 1, if the estimator needs those.
    Of user functions and servers nothing is known.
    """
    if not estimator_of(advantage).only_right_and_wrong:
        return
    builtin = [r for r in settings.all_functions if r.weight and r.function in REWARDS]
    for reward in {r.function: r for r in reversed(builtin)}.values():
        with suppress(ValueError):  # of its kwargs, which `reward_problems` reports
            if make(RewardSpec(_term(reward.name, reward), reward.function, reward.kwargs)).is_graded:
                yield (
                    f"`algorithm.advantage` = {advantage} needs a reward of 0 and 1, but `{reward.function}` "
                    "has other values; set its `weight` to 0, or use another advantage"
                )


def own_code(settings: RewardsConfig) -> Iterator[Path]:
    """Yield source files of user rewards in `code_paths`; all files of a package."""
    modules = {r.function.partition(":")[0] for r in settings.all_functions if ":" in r.function}
    yield from code_files(settings.code_paths, modules)


class Scorer:
    """Scores completions of one problem with every reward. Thread-safe.

    ``failures`` counts the messages of samples that a reward could not score; `news` returns each message
    once.

    Args:
        models: weights and gates of reward models, whose scores are passed to `score`.
        sharing: by name, the scorers of the run that have a reward and share the rate limit of its server.
        outcome_rewards: `environments.outcome_rewards`, added to the reward of episodes that ended so.

    Raises:
        ValueError: a reward cannot be used, or two share a name.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        pool: GraderPool,
        *,
        models: Sequence[Term] = (),
        sharing: Mapping[str, int] | None = None,
        outcome_rewards: Mapping[Any, float] | None = None,
    ) -> None:
        self._pool, self._lock = pool, Lock()
        self._outcome_rewards = dict(outcome_rewards or {})
        self._terms = [*(spec.term for spec in specs), *models]
        self.failures: dict[str, Counter[str]] = {}
        self._news: list[str] = []
        self._last: dict[str, str] = {}
        names = [term.name for term in self._terms]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; give each `name` once")
        self._own = {spec.name: own_function(spec, pool) for spec in specs if spec.function not in REWARDS}
        self._builtin = {spec.name: make(spec) for spec in specs if spec.function in REWARDS}
        self._judge = deciding_judge({spec.name: spec.function for spec in specs})
        for name, reward in self._builtin.items():
            reward.start(workers=(sharing or {}).get(name, 1), note=partial(self._note, name))

    def score(
        self, group: CompletionGroup, modelled: Mapping[str, Float32[np.ndarray, " G"]] | None = None
    ) -> Scores:
        """Compute every reward and their combination.

        User functions are called as in `functions`, with the names they accept. An exception, a timeout,
        None, NaN and a value that is not finite as float32 all mean "could not be scored", and so does an
        environment that failed.

        Args:
            modelled: of each reward model.
        """
        verdicts = Verdicts(group, self._pool, self._outcome_rewards)
        values: dict[str, Any] = dict(modelled or {})
        for name, reward in self._builtin.items():
            values[name] = reward.score(group, verdicts)
        steps = None
        for name, own in self._own.items():
            results, of_steps = own.score(group)
            steps = steps or of_steps
            values[name], reasons = noted(results)
            for reason in reasons:
                self._note(name, reason)
        parts = {term.name: as_part(values[term.name]) for term in self._terms}
        for name, part in parts.items():
            self._note_overflow(name, values[name], part)
        failures = tuple(
            f"reward {term.name}: {self._latest(term.name)}"
            for term in self._terms
            if term.weight and np.isnan(parts[term.name]).any()
        )
        judged = parts[self._judge].tolist() if self._judge else None
        outcomes = verdicts.outcomes if judged is None else judged_outcomes(judged, verdicts.outcomes)
        rewards = combine(parts, self._terms)
        return self._ended(group, Scores(rewards, parts, outcomes, steps, failures))

    def news(self) -> tuple[str, ...]:
        """Return messages not returned before: why samples were not scored, and other notes of rewards."""
        with self._lock:
            news, self._news = tuple(self._news), []
        return news

    def close(self) -> None:
        for reward in self._builtin.values():
            reward.close()

    def _ended(self, group: CompletionGroup, scores: Scores) -> Scores:
        """Add what the ends of episodes are worth; samples that failed or were given up are not scored."""
        if not any(group.turns) and "error" not in group.finish_reasons:
            return scores
        reasons, outcomes, failures = group.finish_reasons, list(scores.outcomes), list(scores.failures)
        turns: Sequence[Turns] = group.turns or [()] * len(reasons)
        rewards = with_outcome_rewards(scores.rewards, reasons, turns, self._outcome_rewards)
        failed = np.equal(reasons, "error")
        for i in np.flatnonzero(failed):
            outcomes[i] = outcomes[i] and "error"
            if group.turns:
                self._note("environment", failure_of(turns[i]))
                failures.append(f"environment: {failure_of(turns[i])}")
        parts = {name: np.where(failed, np.float32(np.nan), part) for name, part in scores.parts.items()}
        rewards = np.where(failed, np.float32(np.nan), rewards)
        return Scores(rewards, parts, outcomes, scores.steps, tuple(dict.fromkeys(failures)))

    def _latest(self, name: str) -> str:
        """Return the last reason why reward ``name`` gave no score."""
        with self._lock:
            return self._last.get(name, "it returned None or NaN, which mean that it could not be scored")

    def _note_overflow(self, name: str, values: Any, part: np.ndarray) -> None:
        """Note scores dropped because they are infinite. NaN and None are intended, so they need no note."""
        given = np.asarray(values, dtype=np.float64)
        for value in given[np.isnan(part) & ~np.isnan(given)]:
            self._note(name, f"gave {value:g}, which is not finite as a float32; the sample is not scored")

    def _note(self, name: str, detail: str) -> None:
        with self._lock:
            self._last[name] = detail
            seen = self.failures.setdefault(name, Counter())
            new = detail not in seen
            if new and len(seen) >= _WARNINGS_PER_REWARD:
                detail, new = "further messages", False
            seen[detail] += 1
            if new:
                self._news.append(f"reward {name}: {detail}")


def make(spec: RewardSpec) -> Builtin:
    """Create the built-in reward of ``spec``. Raises ValueError for kwargs that it does not accept."""
    reward = REWARDS[spec.function]
    try:
        return reward.model_validate(dict(spec.kwargs))
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(part) for part in item["loc"])
        known = ", ".join(reward.model_fields) or "none"
        if item["type"] == "missing":
            message = f"kwargs.{key} is missing"
        elif item["type"] == "extra_forbidden":
            message = f"unknown key kwargs.{key}"
        else:
            message = f"kwargs.{key} = {shown_value(item['loc'], item['input'])}: {item['msg'].lower()}"
        message = masked_text(message, dict(spec.kwargs))
        raise ValueError(f"{message}; {spec.function} takes: {known}") from error


def _term(name: str, settings: GatedConfig) -> Term:
    return Term(name, settings.weight, settings.gate, settings.gate_above)


def module_and_name(function: str) -> tuple[str, str]:
    """Split the name of a user reward. Raises ValueError unless it is ``module:function``."""
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(
            f"reward function {function!r}: expected one of {', '.join(REWARDS)}, or `module:function`, "
            "e.g. my_rewards:length"
        )
    return module, name


def own_function(spec: RewardSpec, pool: GraderPool) -> OwnFunction:
    """Load a user's reward. Raises ValueError for an unknown name or a function that cannot be loaded."""
    module_and_name(spec.function)
    return OwnFunction(spec.function, spec.kwargs, pool, steps=spec.steps)
