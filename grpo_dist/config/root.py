"""The configuration of a whole run: its sections, which must agree with each other."""

from __future__ import annotations

from pydantic import model_validator

from grpo_dist.config.checks import contradictions
from grpo_dist.config.sections import Sections


class Config(Sections):
    """A whole run."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """Report all contradictions in one message."""
        if problems := list(contradictions(self)):
            raise ValueError("; ".join(problems))
        return self
