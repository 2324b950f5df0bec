"""How a check of a run's input reports: its result in words, or an exception; and what checks have read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.data.readers import SourceRows
from grpo_dist.runs.prepare import Prepared
from grpo_dist.runtime.hardware import DeviceType, device_type


class CheckFailed(ValueError):
    """``problems``: each is one thing to fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class CheckSkipped(Exception):
    """The check needs what another check could not read, or what is not known before a run."""


def fail(problems: Iterable[str]) -> None:
    """Raise CheckFailed where there are ``problems``."""
    if found := list(problems):
        raise CheckFailed(*found)


@dataclass
class Start:
    """A run that is about to start, and what the checks so far have read; None: unreadable, or not yet.

    Attributes:
        say: gets notes and warnings of the checks.
        train_first: whether a cold start may train; else the model is the one that it would start from.
        find_device: the device of the run's workers, which may be on another machine.
        rows: of `data.train` and `data.eval`.
        longest_demonstration: of the cold start, tokens.
        warnings: what `say` got and events must have.
    """

    config: Config
    say: Callable[[str], None]
    train_first: bool = False
    find_device: Callable[[], DeviceType] = device_type
    rows: tuple[list[SourceRows], list[SourceRows]] | None = None
    model_dir: Path | None = None
    longest_demonstration: int | None = None
    prepared: Prepared | None = None
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def device(self) -> DeviceType:
        return self.find_device()

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")
        self.warnings.append(f"warning: {message}")
