"""Weights & Biases tracker: metrics, tables of completions, configuration. A resumed run stays one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from grpo_dist.config.secrets import masked_command
from grpo_dist.observe.completions import COLUMNS, Table
from grpo_dist.observe.settings import ShownConfig

_BY_VARIABLE = {"dryrun": "offline"} | {mode: mode for mode in ("online", "offline", "disabled")}
_EVALUATED = "eval/step"  # the x-axis of evaluations, which may come during a later step
_EVALUATIONS = ("eval/", "validation/")
_INIT_S = _FINISH_S = 30.0  # for the server to answer at the start, and to take the rest at the end


class WandbRun:
    """A run at wandb; offline without a key or an answer of the server, for `wandb sync` to upload later."""

    def __init__(
        self,
        project: str,
        config: ShownConfig,
        run_dir: Path,
        run_id: str,
        warn: Callable[[str], None],
    ) -> None:
        """Open the run ``run_id``, or resume it."""
        import wandb  # optional

        with _masked_command():
            self._run = wandb.init(
                project=project,
                name=config.name,
                dir=str(run_dir),
                mode=online_mode(run_dir, warn),
                id=run_id,
                resume="allow",
                config=config.tree,
                # wandb does not capture the terminal output.
                settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S, console="off"),
            )

        self._newest = 0
        for prefix in _EVALUATIONS:
            self._run.define_metric(f"{prefix}*", step_metric=_EVALUATED)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics. wandb closes a step when the next one starts, so parts of a step join it."""
        if any(name.startswith(_EVALUATIONS) for name in metrics):
            self._run.log(metrics | {_EVALUATED: float(step)}, step=self._accepted(step))
        else:
            self._run.log(metrics, step=self._not_closed(step))

    def table(self, step: int, table: Table) -> None:
        import wandb

        rows = wandb.Table(list(COLUMNS), data=[list(row) for row in table.rows])
        at = self._accepted(step) if table.is_evaluation else self._not_closed(step)
        self._run.log({table.name: rows}, step=at)

    def _not_closed(self, step: int) -> int:
        """Return ``step``, or the newest: wandb refuses what comes later for an earlier one."""
        self._newest = max(step, self._newest)
        return self._newest

    def _accepted(self, step: int) -> int:
        """Return the first step from ``step`` on that wandb accepts, for what has an x-axis of its own.

        A resumed run at wandb begins after its last step, and wandb drops without an error what comes for
        that step or an earlier one. Repeated training steps keep their numbers, and are dropped: they would
        all replace each other in the first step that it accepts.
        """
        return max(step, self._newest, self._run.starting_step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


@contextmanager
def _masked_command() -> Iterator[None]:
    """Mask secrets in `sys.argv`, which wandb records."""
    command = sys.argv
    sys.argv = masked_command(command)
    try:
        yield
    finally:
        sys.argv = command


def online_mode(run_dir: Path, warn: Callable[[str], None]) -> Literal["online", "offline", "disabled"]:
    """Choose the mode by WANDB_MODE; where that is not set, online if the server accepts the key."""
    import wandb

    wanted = _BY_VARIABLE.get(os.environ.get("WANDB_MODE", ""), "")
    if wanted == "disabled":
        return "disabled"
    if wanted == "offline":
        return "offline"
    try:
        if wandb.login(verify=True, prompt=False):
            return "online"
        reason = "no key is set" if wanted == "online" else ""
    except wandb.Error as error:
        reason = " ".join(str(error).split())
    if reason:
        warn(f"{reason}; the run is stored in {run_dir / 'wandb'}; upload it with `wandb sync`")
    return "offline"
