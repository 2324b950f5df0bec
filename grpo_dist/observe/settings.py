"""The configuration as trackers show it, and the check that their packages are installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from grpo_dist.config import Config, TrackingConfig
from grpo_dist.config.files import dump_config
from grpo_dist.config.secrets import masked
from grpo_dist.errors import UserError


def check_trackers(tracking: TrackingConfig) -> str:
    """Return the enabled trackers as text. Raises UserError for one whose package is not installed.

    An unreachable server is no error: it never stops a run.
    """
    on = [package for package in ("tensorboard", "wandb") if getattr(tracking, package)]
    for package in on:
        if find_spec(package) is None:
            raise UserError(
                f"`tracking.{package}` = {getattr(tracking, package)}, but the package {package} is not "
                f"installed; pip install {package}, or remove the setting"
            )
    return ", ".join(["metrics.jsonl", *on])


@dataclass(frozen=True, slots=True)
class ShownConfig:
    """The configuration as trackers show it, with *** for secrets.

    Attributes:
        name: of the run.
        text: YAML.
        tree: nested, for JSON.
    """

    name: str
    text: str
    tree: dict[str, Any]

    @classmethod
    def of(cls, config: Config) -> ShownConfig:
        return cls(config.name, dump_config(config), masked(config.model_dump(mode="json")))

    def flat(self) -> dict[str, str | int | float | bool]:
        """Return it by dotted keys: {"policy.optimizer.lr": 1e-06, ...}."""
        return dict(_leaves(self.tree, ""))


def _leaves(value: Any, path: str) -> list[tuple[str, str | int | float | bool]]:
    if value and isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for name, own in inner for leaf in _leaves(own, f"{path}.{name}" if path else str(name))]
    return [(path, value if isinstance(value, str | int | float) else str(value))]
