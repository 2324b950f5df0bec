"""MLflow: metrics, tables of completions, parameters and the run's own files, as one run however often it is
resumed.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.tracking.completions import COLUMNS, Table
from grpo_dist.tracking.metrics_file import METRICS
from grpo_dist.tracking.settings import flat

_TAG = "grpo_dist.id"
_PARAMS_A_CALL, _LONGEST = 100, 6000  # its own limits
_FILES = ("config.yaml", "environment.json")


class MlflowRun:
    def __init__(self, config: Config, run_dir: Path, run_id: str) -> None:
        """``run_id``: the run that was tagged with it goes on."""
        from mlflow.tracking import MlflowClient

        settings = config.tracking.mlflow
        self._client, self._run_dir = MlflowClient(tracking_uri=settings.uri or _beside(run_dir)), run_dir
        experiment = self._experiment(settings.experiment)
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(experiment, tags={_TAG: run_id}, run_name=config.name)
        )
        self._id: str = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._describe(config, known=set(run.data.params))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(_allowed(name), v, now, step) for name, v in metrics.items()]
        )

    def table(self, step: int, table: Table) -> None:
        columns: dict[str, list[Any]] = {
            name: [row[i] for row in table.rows] for i, name in enumerate(COLUMNS)
        }
        self._client.log_table(self._id, columns, f"{table.name}/step_{step:06d}.json")

    def close(self, *, failed: bool) -> None:
        self._client.log_artifact(self._id, str(self._run_dir / METRICS))
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has made it meanwhile
                found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)

    def _describe(self, config: Config, known: set[str]) -> None:
        """A parameter keeps its first value there; config.yaml has those of the last launch."""
        from mlflow.entities import Param

        params = [Param(k, str(v)[:_LONGEST]) for k, v in flat(config).items() if k not in known]
        for first in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS_A_CALL])
        for name in _FILES:
            if (self._run_dir / name).is_file():
                self._client.log_artifact(self._id, str(self._run_dir / name))


def _beside(run_dir: Path) -> str | None:
    """Where neither the configuration nor MLFLOW_TRACKING_URI names a place: one file for all runs of
    `output_dir`.
    """
    return (
        None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{run_dir.absolute().parent}/mlflow.db"
    )


def _allowed(name: str) -> str:
    """pass@1 -> pass_at_1: names have letters, digits, and few signs."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
