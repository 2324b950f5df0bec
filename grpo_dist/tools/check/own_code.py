"""The check of own code: each piece is called on a small made input, as before a run."""

from __future__ import annotations

from grpo_dist.runs.own_code import shadowed
from grpo_dist.runs.own_trials import own_code_problems
from grpo_dist.tools.check.inputs import CheckedRun, NotApplicable, fail


def check_own_code(target: CheckedRun) -> str:
    """Try the user's own pieces, and name packages that register names of built-in ones."""
    config = target.config
    pieces, notes = config.own_pieces, list(shadowed())
    if not pieces and not notes:
        raise NotApplicable
    fail(own_code_problems(pieces, config.code_paths))
    tried = [f"{piece.key}: {piece.name}" for piece in pieces]
    return "\n    ".join([", ".join(tried) or "none", *notes])
