"""To a Ray cluster by its Jobs API: code and configuration travel, and the driver runs on the head node.

The jobs of a run are NAME-1, NAME-2, ...: each goes on where the one before ended, and none begins while one
is pending or running. Of two that are submitted at once the cluster takes one: they have the same number.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import Config
from grpo_dist.errors import Preempted, UserError
from grpo_dist.secrets import HIDDEN
from grpo_dist.tools.submit.checks import check_no_secrets, check_not_left_behind, check_output
from grpo_dist.tools.submit.code import CONFIG, Carried, gather
from grpo_dist.tools.submit.job import Job, JobState, SubmissionRecord, read_record
from grpo_dist.tools.submit.templates import template

_MOST_CPUS = 100_000  # of the driver
_DEADLINE_S = 60.0  # of one answer of the job server
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_ENTRYPOINT = f"python -m grpo_dist.cli train {CONFIG}"
_HEAD = {"node:__internal_head__": 0.001}


@dataclass(frozen=True)
class RayTarget:
    """``driver_cpus``: reserved for the driver on the head node."""

    address: str | None = None
    driver_cpus: float = 1

    def check(self, job: Job) -> None:
        """Raises UserError for what cannot be submitted so; asks nobody."""
        if not 0 <= self.driver_cpus <= _MOST_CPUS:
            raise UserError(f"--driver-cpus {self.driver_cpus:g}: expected 0 to {_MOST_CPUS}")
        check_output(job.config, "a Ray job's own directory is removed after it")
        check_not_left_behind(job.config)
        check_no_secrets(job)
        with _carried(job):  # refuses code that cannot travel
            pass

    def idle(self, config: Config, target: str) -> str | None:
        """None: the job reserves the GPUs of its workers and no others."""
        return None

    def render(self, job: Job) -> str:
        with _carried(job) as carried:
            request = self._request(job, _next_number(job))
            request["runtime_env"]["working_dir"] = carried.summary()
            request["runtime_env"]["env_vars"] |= {v.name: HIDDEN for v in job.environment if v.hidden}
            shown = {"address": _named(self.address) or "(none given)", **request}
            text = yaml.safe_dump(shown, sort_keys=False, width=110)
            notices = "".join(f"# {line}\n" for line in carried.notices())
            return f"{text}{notices}\n# {CONFIG}\n{(carried.directory / CONFIG).read_text()}"

    def submit(self, job: Job) -> SubmissionRecord:
        client = _client(_server(self.address))
        number = _next_number(job)
        with _answers(client.get_address()):
            for other in client.list_jobs():
                if not (own := _number(other.submission_id, job)):
                    continue
                if not other.status.is_terminal():
                    raise UserError(
                        f"{job.run_dir}: its job {other.submission_id} is {other.status}; end it with "
                        f"`grpo-dist stop {job.run_dir}`, or choose another `name`"
                    )
                number = max(number, own + 1)
            with _carried(job) as carried:
                request = self._request(job, number)
                request["runtime_env"]["working_dir"] = str(carried.directory)
                for line in carried.notices():
                    print(line)
                submitted = client.submit_job(**request)
        return SubmissionRecord("ray", submitted, str(job.run_dir), where=client.get_address())

    def _request(self, job: Job, number: int) -> dict[str, Any]:
        """Arguments of the Jobs API, the working directory aside."""
        given = {variable.name: variable.value for variable in job.environment}
        return {
            "submission_id": f"{job.name}-{number}",
            "entrypoint": _ENTRYPOINT,
            "entrypoint_num_cpus": self.driver_cpus,
            "entrypoint_resources": _HEAD,
            "metadata": {
                "run": str(job.run_dir),
                "config": job.path.name,
                "overrides": " ".join(job.overrides),
            },
            "runtime_env": {"env_vars": _template()["env_vars"] | job.stop_patience | given},
        }


def state(record: SubmissionRecord) -> JobState:
    client = _client(record.where)
    with _answers(record.where):
        info = client.get_job_info(record.job)
    text = f"{info.status}: {info.message}" if info.message else str(info.status)
    if info.driver_exit_code == Preempted.exit_code:
        text += " (it ended in order; submit again and it goes on)"
    return JobState(text, live=not info.status.is_terminal())


def print_logs(record: SubmissionRecord, follow: bool) -> None:
    client = _client(record.where)
    with _answers(record.where):
        if not follow:
            print(client.get_job_logs(record.job), end="", flush=True)
            return
        import asyncio

        client.get_job_info(record.job)  # says in words where there is no such job

        async def tail() -> None:
            async for text in client.tail_job_logs(record.job):
                print(text, end="", flush=True)

        asyncio.run(tail())


def stop(record: SubmissionRecord) -> None:
    client = _client(record.where)
    with _answers(record.where):
        client.stop_job(record.job)


def _template() -> dict[str, Any]:
    return yaml.safe_load(template("ray_runtime_env.yaml"))


@contextmanager
def _carried(job: Job) -> Iterator[Carried]:
    """What travels, in a directory that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="grpo-dist-submit-") as directory:
        yield gather(job.config, Path(directory), _template()["excludes"])


def _next_number(job: Job) -> int:
    """As far as this machine knows: the record of the last submission has its number."""
    record = read_record(job.run_dir)
    return 1 + (_number(record.job, job) if record and record.target == "ray" else 0)


def _number(submission_id: str | None, job: Job) -> int:
    """Of a job of this run; 0 for any other."""
    name, _, number = (submission_id or "").rpartition("-")
    return int(number) if name == job.name and number.isdigit() else 0


def _named(address: str | None) -> str | None:
    return address or os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS")


def _server(address: str | None) -> str:
    found = _named(address)
    if not found:
        raise UserError("--to ray: no cluster; give --address http://HEAD:8265, or set RAY_ADDRESS to that")
    if not found.startswith(("http://", "https://")):
        raise UserError(
            f"--to ray: {found} is no address of a job server; give the one that also shows the dashboard, "
            "e.g. --address http://HEAD:8265"
        )
    return found.rstrip("/")


def _client(address: str) -> Any:
    """Of the job server at ``address``; its requests have a deadline. Raises UserError when none answers."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise UserError(f"--to ray needs Ray's job client: pip install 'ray[default]' ({error})") from error

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **request: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=_DEADLINE_S, **request)

    logging.getLogger("ray").setLevel(logging.ERROR)
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = address  # Ray lets the environment win over the argument
    try:
        with _answers(address):
            return Client(address)
    finally:
        os.environ.pop(_ADDRESS)
        if before is not None:
            os.environ[_ADDRESS] = before


@contextmanager
def _answers(address: str) -> Iterator[None]:
    """Within, what the server refuses, and a server that is not there, is the user's to mend."""
    from aiohttp import ClientError
    from ray.exceptions import AuthenticationError
    from requests.exceptions import RequestException

    try:
        yield
    except AuthenticationError as error:
        raise UserError(f"{address}: {error}") from error
    except (ConnectionError, RequestException, ClientError) as error:  # the last where logs are followed
        raise UserError(
            f"{address}: no Ray job server answers there ({type(error).__name__}); check the address, and "
            "that the head was started with its dashboard"
        ) from error
    except RuntimeError as error:
        raise UserError(f"{address}: {error}") from error
