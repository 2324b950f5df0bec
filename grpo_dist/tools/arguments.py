"""Parts of the command lines that several tools share. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_command(commands: Any, name: str, text: str, run: Callable[..., None], **defaults: Any) -> Any:
    """Add the subcommand ``name``, described by ``text``, which calls ``run``; return its parser."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run, **defaults)
    return parser


def add_inputs(
    parser: Any,
    config: str,
    overrides: str,
    *,
    nargs: str | None = None,
    metavars: tuple[str | None, str] = (None, "key=value"),
) -> None:
    """Add the positional arguments of a command, with their help: ``config``, and the ``overrides`` of its
    keys. ``nargs``: "?" for a ``config`` that may be missing. ``metavars``: of both.
    """
    parser.add_argument("config", nargs=nargs, metavar=metavars[0], help=config)
    parser.add_argument("overrides", nargs="*", metavar=metavars[1], help=overrides)


def file_path(text: str) -> Path:
    """Parse the path of an option. The shell expands `--output ~/x`, and leaves `--output=~/x` as it is."""
    return Path(os.path.expanduser(text))


def split_overrides(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split positional arguments into the others and the overrides (key=value)."""
    from grpo_dist.config.files import is_override  # loads OmegaConf, which --help does not need

    overrides = [text for text in texts if is_override(text)]
    return [text for text in texts if text not in overrides], overrides
