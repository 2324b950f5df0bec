"""The date that chat templates write. It belongs to a run: a resumed one keeps it, and so its prompts."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TypeVar

import yaml

from grpo_dist.config import Config

C = TypeVar("C", bound=Config)


def dated(config: C, earlier: str | None = None) -> C:
    """Return ``config`` with `data.template_date`: its own, else that of an ``earlier`` start, else today."""
    if config.data.template_date is not None:
        return config
    data = config.data.model_copy(update={"template_date": earlier or date.today().isoformat()})
    return config.model_copy(update={"data": data})


def date_of_run(run_dir: Path) -> str | None:
    """Return the date that the run in ``run_dir`` writes; None where it has none, or none is readable."""
    try:
        return (
            str(yaml.safe_load((run_dir / "config.yaml").read_text())["data"]["template_date"] or "") or None
        )
    except (OSError, ValueError, RecursionError, TypeError, LookupError, yaml.YAMLError):
        return None
