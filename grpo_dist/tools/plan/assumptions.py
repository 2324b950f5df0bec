"""What a plan takes as given, beyond the configuration and the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.tools.plan.stragglers import NO_STRAGGLERS, Stragglers


@dataclass(frozen=True, slots=True)
class Assumptions:
    """``bench``: a bench.json to calibrate with; None: data sheets. ``prompt_tokens``: of every prompt; None:
    those of ``bench``, or a share of `data.max_prompt_tokens`. ``shared_tokens``: that all prompts begin
    with; None: those of ``bench`` if its prompts are planned, else none. ``turns``, ``tool_seconds``: of an
    episode; None: those of ``bench``, or see `workload_of`. ``failure_hours``: mean time between failures of
    a GPU, 0: none. ``accepted``: right tokens of a draft; None: those of ``bench``, else none.
    """

    bench: Path | None = None
    prompt_tokens: int | None = None
    turns: int | None = None
    tool_seconds: float | None = None
    failure_hours: float = 0.0
    stragglers: Stragglers = NO_STRAGGLERS
    shared_tokens: int | None = None
    accepted: float | None = None

    def check(self, *, has_environments: bool, drafted: int = 0) -> None:
        """Raise UserError, naming the command's option, for a value out of range or without effect.
        ``drafted``: `rollout.speculation.tokens`.
        """
        given = (
            ("--prompt-tokens", self.prompt_tokens, 1),
            ("--shared-tokens", self.shared_tokens, 0),
            ("--turns", self.turns, 1),
            ("--tool-seconds", self.tool_seconds, 0),
            ("--failure-hours", self.failure_hours, 0),
        )
        for option, value, least in given:
            if value is not None and not least <= value < math.inf:  # NaN is in no range
                raise UserError(f"{option} {value:g}: expected {least} or more")
        if self.accepted is not None and not drafted:
            raise UserError("--accepted: nothing is drafted; set `rollout.speculation.tokens`, or remove it")
        if self.accepted is not None and not 0 <= self.accepted <= drafted:
            raise UserError(
                f"--accepted {self.accepted:g}: expected right tokens of a draft, 0 to "
                f"`rollout.speculation.tokens` = {drafted}"
            )
        if not has_environments and (self.turns is not None or self.tool_seconds is not None):
            raise UserError(
                "--turns, --tool-seconds: no source of problems has an environment (`data.environment`); "
                "remove them"
            )
