"""The configuration of a run: all sections, and the checks across them."""

from __future__ import annotations

from pydantic import model_validator

from grpo_dist.config.checks import contradictions
from grpo_dist.config.sections import Sections


class Config(Sections):
    """The configuration of a run."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        """Report all contradictions in one message."""
        if problems := list(contradictions(self)):
            raise ValueError("; ".join(problems))
        return self
