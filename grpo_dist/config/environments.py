"""Environments: their workers, the budgets of an episode, and the sandbox for code that the policy writes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import CodePaths, Section
from grpo_dist.plugins.user_code import ENVIRONMENT, registered

# Names without a colon. `grpo_dist.environments.registry` has their classes.
BUILTIN_ENVIRONMENTS = ("calculator", "python")
AGENT = "program:"  # prefix of the command of an agent
# Ends of an episode by an exhausted budget.
BudgetOutcome = Literal["length", "turns", "tool_limit"]


def check_environment_name(name: str) -> None:
    """Raise ValueError for a name that no environment can have."""
    prefix, colon, rest = name.partition(":")
    is_known = name in BUILTIN_ENVIRONMENTS or (colon and prefix and rest) or name in registered(ENVIRONMENT)
    if not is_known:
        raise ValueError(
            f"environment {name!r} is unknown; expected none, {', '.join(BUILTIN_ENVIRONMENTS)}, "
            "my_module:Class, {program: my_agent.py}, verifiers:ENV, reasoning_gym:TASK, openenv:URL, or a "
            f"name that a package registers in {ENVIRONMENT.group}"
        )


def _name_of_program(value: Any) -> Any:
    """Convert {program: my_agent.py} to the environment's name: program:my_agent.py"""
    is_program = isinstance(value, dict) and value.keys() == {"program"} and isinstance(value["program"], str)
    return AGENT + value["program"] if is_program else value


# The name of an environment, or {program: COMMAND}: an external agent.
EnvironmentName = Annotated[str, BeforeValidator(_name_of_program)]


class SandboxConfig(Section):
    """Limits of code that the policy writes, and where it runs."""

    url: str | None = Field(
        None,
        description="address of a SandboxFusion service, e.g. http://sandbox:8080; null: processes on the "
        "environment worker's machine",
    )
    call_s: PositiveFloat = Field(10.0, description="wall clock of one tool call")
    episode_s: PositiveFloat = Field(60.0, description="wall clock of all tool calls of an episode")
    cpu_s: PositiveFloat = Field(20.0, description="CPU time of an episode's code")
    memory_mb: PositiveInt = Field(512, description="memory of an episode's code, MiB")
    processes: PositiveInt = Field(16, description="processes and threads of an episode's code")
    files_mb: PositiveInt = Field(64, description="size of the largest file that code may write, MiB")


class EnvironmentsConfig(Section):
    """The workers of environments, and the budgets of an episode. `sampling.max_new_tokens` limits the tokens
    of an episode after its prompt, sampled and given.
    """

    num_workers: PositiveInt = Field(1, description="actors that run environments and tools")
    code_paths: CodePaths = ()
    python: str | None = Field(
        None,
        description="interpreter of the environments' processes, for packages that exclude this "
        "installation's; null: this one",
    )
    timeout_s: PositiveFloat = Field(
        60.0,
        description="deadline of a step of the environment itself; of its start (import, `preload`, an "
        "agent's first request) if above 300",
    )
    memory_mb: PositiveInt = Field(
        2048, description="memory that the process of an environment may add to its size at start, MiB"
    )
    max_turns: PositiveInt = Field(8, description="actions of the policy; then the episode ends: `turns`")
    max_tool_calls: PositiveInt | None = Field(
        None, description="tool calls of an episode; one more ends it: `tool_limit`; null: no limit"
    )
    max_turn_tokens: PositiveInt | None = Field(
        None,
        description="longest action, tokens; a longer one is cut, and counts as complete; null: no limit",
    )
    max_tool_tokens: PositiveInt = Field(256, description="longest tool result, tokens; longer ones are cut")
    call_format: str = Field(
        "auto",
        description="how tool calls are written: `code` (a fenced block, answered in place) or a tool "
        "parser of vLLM, e.g. hermes; auto: by the chat template",
    )
    mask_outcomes: tuple[BudgetOutcome, ...] = Field(
        (), description="do not train on episodes that end this way; their rewards still count in their group"
    )
    outcome_rewards: dict[BudgetOutcome, float] = Field(
        {}, description="added to the reward of episodes that end this way, e.g. {turns: -0.5}"
    )
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
