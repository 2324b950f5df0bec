"""Registry of rewards by name, and rewards as the configuration names them. Custom rewards are
``module:function``.
"""

from __future__ import annotations

from pydantic import ValidationError

from grpo_dist.config import RewardsConfig
from grpo_dist.config.rewards import FunctionConfig
from grpo_dist.config.secrets import masked_text, shown_value
from grpo_dist.plugins.user_code import REWARD, UserComponent, registered, resolve_target
from grpo_dist.rewards import builtin
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.functions import UserFunction
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.served import Generative, LLMJudge, Remote
from grpo_dist.rewards.unit_tests import UnitTests

REWARDS: dict[str, type[Builtin]] = {
    "math": builtin.Math,
    "format": builtin.Format,
    "exact": builtin.Exact,
    "numeric": builtin.Numeric,
    "repetition": builtin.Repetition,
    "language": builtin.Language,
    "overlong": builtin.Overlong,
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


def user_rewards(settings: RewardsConfig) -> tuple[UserComponent, ...]:
    """Return the rewards of all sources that are not built in."""
    return tuple(
        UserComponent(REWARD, r.function, REWARD.key, r.kwargs)
        for r in settings.all_functions
        if ":" in r.function or r.function in registered(REWARD)
        if r.function not in REWARDS
    )


def make(settings: FunctionConfig) -> Builtin:
    """Create a built-in reward. Raises ValueError for kwargs that it does not accept."""
    reward = REWARDS[settings.function]
    try:
        return reward.model_validate(settings.kwargs)
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
        message = masked_text(message, settings.kwargs)
        raise ValueError(f"{message}; {settings.function} takes: {fields}") from error


def module_and_name(function: str) -> tuple[str, str]:
    """Split the name of a user reward. Raises ValueError unless it is ``module:function``."""
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(
            f"reward function {function!r}: expected one of {', '.join(REWARDS)}, or `module:function`, "
            "e.g. my_rewards:length"
        )
    return module, name


def load_user_function(settings: FunctionConfig, pool: GraderPool) -> UserFunction:
    """Load a user's reward, ``module:function`` or a name that a package registers. Raises ValueError for an
    unknown name or a function that cannot be loaded.
    """
    path = settings.function
    if ":" not in path and path in registered(REWARD):
        path = resolve_target(REWARD, path)
    module_and_name(path)
    return UserFunction(path, settings, pool)
