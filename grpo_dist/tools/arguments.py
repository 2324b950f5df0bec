"""Parts of the command lines that several tools share. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def add_command(commands: Any, name: str, text: str, run: Callable[..., None], **defaults: Any) -> Any:
    """Add the subcommand ``name``, described by ``text``, which calls ``run``; return its parser."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run, **defaults)
    return parser


def split_overrides(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split positional arguments into the others and the overrides (key=value)."""
    from grpo_dist.config.files import is_override  # loads OmegaConf, which --help does not need

    overrides = [text for text in texts if is_override(text)]
    return [text for text in texts if text not in overrides], overrides
