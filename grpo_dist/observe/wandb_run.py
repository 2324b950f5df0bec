"""Weights & Biases: metrics, tables of completions and the configuration, as one run however often it is
resumed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from grpo_dist.config import Config
from grpo_dist.observe.completions import COLUMNS, Table
from grpo_dist.secrets import masked, masked_command

_BY_VARIABLE = {"offline": "offline", "dryrun": "offline", "disabled": "disabled"}
_INIT_S = _FINISH_S = 30.0  # for its server to answer, and to take what is left at the end


class WandbRun:
    """Offline where no key is set, and where its server does not answer: `wandb sync` uploads it later."""

    def __init__(self, config: Config, run_dir: Path, run_id: str, tell: Callable[[str], None]) -> None:
        import wandb

        settings = config.tracking.wandb
        with _masked_command():
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=config.name,
                dir=str(run_dir),
                mode=online_mode(settings.mode, run_dir, tell),
                id=run_id,
                resume="allow",
                config=masked(config.model_dump(mode="json")),
                # The terminal is the run's own: what is written there is not copied.
                settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S, console="off"),
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """wandb closes a step when the next begins, so what joins a step later still lands in it."""
        self._run.log(metrics, step=step)

    def table(self, step: int, table: Table) -> None:
        import wandb

        self._run.log(
            {table.name: wandb.Table(list(COLUMNS), data=[list(row) for row in table.rows])}, step=step
        )

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


@contextmanager
def _masked_command() -> Iterator[None]:
    """Within, wandb, which records the command line, finds no secrets in it."""
    command = sys.argv
    sys.argv = masked_command(command)
    try:
        yield
    finally:
        sys.argv = command


def online_mode(
    wanted: str, run_dir: Path, tell: Callable[[str], None]
) -> Literal["online", "offline", "disabled"]:
    """Online where that is wanted, a key is set, and its server takes the key; ``auto`` heeds WANDB_MODE."""
    import wandb

    if wanted == "auto":
        wanted = _BY_VARIABLE.get(os.environ.get("WANDB_MODE", ""), wanted)
    if wanted == "disabled":
        return "disabled"
    if wanted == "offline":
        return "offline"
    try:
        if wandb.login(verify=True, prompt=False):
            return "online"
        why = "no key is set" if wanted == "online" else ""
    except wandb.Error as error:
        why = " ".join(str(error).split())
    if why:
        tell(f"{why}; the run is kept in {run_dir / 'wandb'}, for `wandb sync`")
    return "offline"
