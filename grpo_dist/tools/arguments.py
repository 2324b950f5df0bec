"""Command-line parts shared by several tools. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def add_command(commands: Any, name: str, text: str, run: Callable[..., None], **defaults: Any) -> Any:
    """Add the subcommand ``name`` with the description ``text``, which calls ``run``; return its parser."""
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
    words: bool = False,
) -> None:
    """Add a command's positional arguments, with their help: ``config``, and ``overrides`` of its keys.
    ``nargs``: "?" for an optional ``config``. ``metavars``: for both. ``words``: ``overrides`` need not be
    settings.
    """
    parser.set_defaults(takes="words" if words else "settings")
    parser.add_argument("config", nargs=nargs, metavar=metavars[0], help=config)
    parser.add_argument("overrides", nargs="*", metavar=metavars[1], help=overrides)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Appends words after an option, which argparse leaves over, to the command's
    words.

    Exits with the parser's message for an unknown option, or a word that the command does not take.
    """
    args, rest = parser.parse_known_args(arguments)
    takes = vars(args).pop("takes", "")
    words = [text for text in rest if not text.startswith("-")]
    settings = [text for text in words if "=" in text]
    allowed = words if takes in ("words", "runs") else settings
    if unknown := [text for text in rest if text not in allowed]:
        from grpo_dist.config.secrets import masked_command  # imports pydantic

        advice = _describe_settings(rest) if takes in ("words", "settings") else ""
        parser.error(f"unrecognized arguments: {' '.join(masked_command(unknown))}{advice}")
    if takes == "runs":
        args.config = [*args.config, *(text for text in words if text not in settings)]
        args.overrides = settings
    elif allowed:
        if takes == "words" and args.config is None:  # every word followed an option
            args.config, *allowed = allowed
        args.overrides = [*args.overrides, *allowed]
    return args


def _describe_settings(rest: Sequence[str]) -> str:
    """Return the unknown options in ``rest`` written as settings; "" if there are none."""
    from grpo_dist.config.messages import keys_called  # these import pydantic
    from grpo_dist.config.peers import hint
    from grpo_dist.config.secrets import masked_setting

    hints, flags = list[str](), [i for i, text in enumerate(rest) if text.startswith("--") and text != "--"]
    for i in flags:
        flag, sign, value = rest[i].partition("=")
        if not sign and i + 1 < len(rest) and not rest[i + 1].startswith("-") and "=" not in rest[i + 1]:
            value = rest[i + 1]
        if len(keys := keys_called(flag.lstrip("-").replace("-", "_"))) == 1:
            hints.append(masked_setting(f"{keys[0]}={value or '...'}"))
        elif advice := hint(flag):
            hints.append(f"{flag}: {advice}")
    example = f": {'; '.join(hints)}" if hints else ", e.g. steps=50"
    return f"; settings are given as key=value{example}" if flags else ""


def file_path(text: str) -> Path:
    """Parse an option's path. Expands `~`, because the shell does not expand `--output=~/x`."""
    return Path(os.path.expanduser(text))


def split_overrides(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split positional arguments into non-overrides and overrides (key=value)."""
    from grpo_dist.config.files import is_override  # loads OmegaConf, which --help does not need

    overrides = [text for text in texts if is_override(text)]
    return [text for text in texts if text not in overrides], overrides
