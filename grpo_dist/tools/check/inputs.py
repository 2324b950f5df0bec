"""What checks get, and how they report: their result in words, or an exception.

A run is checked in two stages: the first checks have a `CheckedRun` and read its files, the others have
`Inputs`, which is what was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from grpo_dist.config import Config
from grpo_dist.data.duplicates import SourceRows
from grpo_dist.errors import UserError
from grpo_dist.runs.prepare import Prepared
from grpo_dist.runtime.hardware import DeviceType, device_type
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.models import ModelShape, model_of

if TYPE_CHECKING:
    from actors.fit import Fit

TrainAndEvalRows = tuple[list[SourceRows], list[SourceRows]]
T = TypeVar("T")


class CheckFailed(Exception):
    """``problems``: each is one thing to fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class CheckSkipped(Exception):
    """The check needs what another check could not read."""


class NotApplicable(Exception):
    """The run does not have what the check is for."""


def fail(problems: Iterable[str]) -> None:
    """Raise CheckFailed where there are ``problems``."""
    if found := list(problems):
        raise CheckFailed(*found)


@dataclass(frozen=True)
class CheckedRun:
    """The run to check. ``cluster``: where it will be, as `plan` takes it; None: this machine, or the Ray
    cluster that the configuration names.
    """

    config: Config
    cluster: str | None

    @cached_property
    def fit(self) -> Fit | UserError:
        """The placement on the cluster that the run would join now, or why it does not fit."""
        from actors.fit import fit  # Ray: no module of grpo_dist imports it at its top

        try:
            return fit(self.config)
        except UserError as error:
            return error

    @cached_property
    def is_elsewhere(self) -> bool:
        """True where the configuration names a Ray cluster and this machine has no GPU: a login node, say."""
        from actors.connection import address_of  # Ray, as above

        return address_of(self.config.cluster) != "local" and device_type() == "cpu"

    @property
    def device(self) -> DeviceType:
        """The device of the run's workers."""
        if self.cluster is not None:
            return "cuda" if parse_cluster(self.cluster).card else "cpu"
        if isinstance(self.fit, UserError):
            return device_type()
        return "cuda" if self.fit.gpus else "cpu"


@dataclass(frozen=True, slots=True)
class ReadInput(Generic[T]):
    """What a check has read, in words and as a value; ``problems`` may be found in what could be read."""

    words: str
    value: T
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """The run to check with all that it reads; None: unreadable, or the run has none.

    Attributes:
        rows: of `data.train` and `data.eval`.
        longest_demonstration: of the cold start, tokens.
    """

    target: CheckedRun
    rows: TrainAndEvalRows | None
    model_dir: Path | None
    longest_demonstration: int | None
    prepared: Prepared | None

    @property
    def config(self) -> Config:
        return self.target.config

    def shape(self) -> ModelShape:
        """Return the sizes of the model. Raises CheckSkipped where they are unknown."""
        try:
            return model_of(self.config.model, self.config.sft, self.config.seed)
        except UserError as error:
            why = str(error) if self.model_dir is not None else "the model cannot be read"
            raise CheckSkipped(why) from error
