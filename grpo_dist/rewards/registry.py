"""Registry of rewards by name, and rewards as the configuration names them. Custom rewards are
``module:function``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from grpo_dist.config import GatedConfig, RewardsConfig
from grpo_dist.config.rewards import FunctionConfig, ProcessRewardConfig
from grpo_dist.config.secrets import masked_text, shown_value
from grpo_dist.errors import expanded
from grpo_dist.plugins.user_code import REWARD, UserComponent, registered, resolve_target
from grpo_dist.rewards import builtin
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.functions import StepSettings, UserFunction
from grpo_dist.rewards.judges import Generative, LLMJudge
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.served import Remote
from grpo_dist.rewards.unit_tests import UnitTests


@dataclass(frozen=True, slots=True)
class Term:
    """Weight and gate of one part. The part counts only while part ``gate`` is above ``gate_above``."""

    name: str
    weight: float = 1.0
    gate: str | None = None
    gate_above: float = 0.0


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
    steps: StepSettings | None = None  # only for kind process

    @property
    def name(self) -> str:
        return self.term.name


def reward_specs(settings: RewardsConfig) -> list[RewardSpec]:
    """Read `rewards.functions` of the configuration, and what `rewards.overlong_buffer` adds to them."""
    return [
        RewardSpec(
            make_term(r.label, r),
            _target(r.function),
            r.kwargs,
            StepSettings(r.step_separator, r.reduce) if isinstance(r, ProcessRewardConfig) else None,
        )
        for r in settings.select_source("").functions
    ]


def user_rewards(settings: RewardsConfig) -> tuple[UserComponent, ...]:
    """Return the rewards of all sources that are not built in."""
    return tuple(
        UserComponent(REWARD, r.function, REWARD.key, r.kwargs)
        for r in settings.all_functions
        if ":" in r.function or r.function in registered(REWARD)
        if r.function not in REWARDS
    )


def _target(function: str) -> str:
    """Return ``module:name`` for a name that a package registers, else ``function`` itself."""
    if function in REWARDS or ":" in function or function not in registered(REWARD):
        return function
    return resolve_target(REWARD, function)


def model_terms(settings: RewardsConfig) -> list[Term]:
    """Read weights and gates of `rewards.models`."""
    return [make_term(model.name, model) for model in settings.models]


def placed(settings: RewardsConfig) -> RewardsConfig:
    """Make the judges' `cache_path` absolute, since an actor may have another working directory."""
    by_source = {
        source: rewards.model_copy(update={"functions": tuple(map(_placed, rewards.functions))})
        for source, rewards in settings.by_source.items()
    }
    functions = tuple(map(_placed, settings.functions))
    return settings.model_copy(update={"functions": functions, "by_source": by_source})


def _placed(reward: FunctionConfig) -> FunctionConfig:
    if reward.function != "judge" or not isinstance(path := reward.kwargs.get("cache_path"), str):
        return reward
    kwargs = reward.kwargs | {"cache_path": str(expanded(path).absolute())}
    return reward.model_copy(update={"kwargs": kwargs})


def make(spec: RewardSpec) -> Builtin:
    """Create the built-in reward of ``spec``. Raises ValueError for kwargs that it does not accept."""
    reward = REWARDS[spec.function]
    try:
        return reward.model_validate(dict(spec.kwargs))
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(part) for part in item["loc"])
        fields = ", ".join(reward.model_fields) or "none"
        if item["type"] == "missing":
            message = f"kwargs.{key} is missing"
        elif item["type"] == "extra_forbidden":
            message = f"unknown key kwargs.{key}"
        else:
            message = f"kwargs.{key} = {shown_value(item['loc'], item['input'])}: {item['msg'].lower()}"
        message = masked_text(message, dict(spec.kwargs))
        raise ValueError(f"{message}; {spec.function} takes: {fields}") from error


def make_term(name: str, settings: GatedConfig) -> Term:
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


def load_user_function(spec: RewardSpec, pool: GraderPool) -> UserFunction:
    """Load a user's reward. Raises ValueError for an unknown name or a function that cannot be loaded."""
    module_and_name(spec.function)
    return UserFunction(spec.function, spec.kwargs, pool, steps=spec.steps)
