"""MLflow tracker: metrics, tables of completions, parameters and files. A resumed run stays one run."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from grpo_dist.config import MlflowConfig
from grpo_dist.observe.completions import COLUMNS, Table
from grpo_dist.observe.metrics_file import METRICS
from grpo_dist.observe.settings import ShownConfig

_TAG = "grpo_dist.id"
_PARAMS_A_CALL, _LONGEST, _LONGEST_TAG = 100, 6000, 8000  # limits of MLflow
_FILES = ("config.yaml", "environment.json")


class MlflowRun:
    def __init__(self, settings: MlflowConfig, config: ShownConfig, run_dir: Path, run_id: str) -> None:
        """Open the run that is tagged with ``run_id``, or create it."""
        from mlflow.tracking import MlflowClient  # optional
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        here = not (settings.uri or os.environ.get("MLFLOW_TRACKING_URI"))
        # By default all runs of `output_dir` share a database, and a directory of files next to it.
        parent = run_dir.absolute().parent if here else None
        self._client = MlflowClient(tracking_uri=f"sqlite:///{parent}/mlflow.db" if parent else settings.uri)
        self._files, self._run_dir = parent and parent / "mlflow", run_dir
        experiment = self._experiment(settings.experiment)
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run_id}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(experiment, tags={_TAG: run_id}, run_name=config.name)
        )
        self._id: str = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._tables = json.loads(run.data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        self._describe(config, known=set(run.data.params))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric  # optional

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id, [Metric(_allowed(name), v, now, step) for name, v in metrics.items()]
        )

    def table(self, step: int, table: Table) -> None:
        """Write the table of a step, replacing that of a repeated step; `log_table` would append."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS  # optional

        path = f"{table.name}/step_{step:06d}.json"
        self._client.log_dict(self._id, {"columns": COLUMNS, "data": table.rows}, path)
        named = {"path": path, "type": "table"}  # how the pages of MLflow find a table
        if named not in self._tables:
            self._tables.append(named)
            while len(json.dumps(self._tables)) > _LONGEST_TAG:
                del self._tables[0]  # the file itself stays
            self._client.set_tag(self._id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(self._tables))

    def close(self, *, failed: bool) -> None:
        self._client.log_artifact(self._id, str(self._run_dir / METRICS))
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException  # optional

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                location = self._files and self._files.as_uri()
                return str(self._client.create_experiment(name, artifact_location=location))
            except MlflowException:  # another run has created it in the meantime
                found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id)

    def _describe(self, config: ShownConfig, known: set[str]) -> None:
        """Log parameters, which keep their first value in MLflow, and the files of the latest launch."""
        from mlflow.entities import Param  # optional

        params = [Param(k, str(v)[:_LONGEST]) for k, v in config.flat().items() if k not in known]
        for first in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS_A_CALL])
        for name in _FILES:
            if (self._run_dir / name).is_file():
                self._client.log_artifact(self._id, str(self._run_dir / name))


def _allowed(name: str) -> str:
    """Replace characters that MLflow refuses in names: pass@1 -> pass_at_1."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
