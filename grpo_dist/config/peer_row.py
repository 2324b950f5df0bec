"""A row of the table of other frameworks' settings."""

from __future__ import annotations

from dataclasses import dataclass, field

FRAMEWORKS = ("verl", "TRL", "OpenRLHF", "ROLL")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. ``ours``: the keys that together have its effect; empty: none. ``names``: by framework.
    ``note``: the conversion, or the alternative.
    """

    ours: tuple[str, ...]
    note: str = ""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def row(
    ours: str, note: str = "", *, verl: str = "", trl: str = "", openrlhf: str = "", roll: str = ""
) -> Row:
    """Build a row from names separated by spaces; ``@`` abbreviates ``actor_rollout_ref.``."""
    texts = dict(zip(FRAMEWORKS, (verl, trl, openrlhf, roll), strict=True))
    names = {name: tuple(text.replace("@", "actor_rollout_ref.").split()) for name, text in texts.items()}
    return Row(tuple(ours.split()), note, {name: settings for name, settings in names.items() if settings})
