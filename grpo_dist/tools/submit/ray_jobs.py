"""Ray target: the Jobs API takes code and configuration, and runs the driver on the head node.

A run's jobs are NAME-1, NAME-2, ... Each resumes the previous one, and none starts while another is pending
or running. The cluster accepts only one of two simultaneous submissions, because both have the same number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config.secrets import HIDDEN
from grpo_dist.errors import Preempted, UserError
from grpo_dist.tools.submit.checks import check_not_left_behind, check_output
from grpo_dist.tools.submit.code import CONFIG, Carried, gather
from grpo_dist.tools.submit.job import Job, JobState, SubmissionRecord, read_record, template

_MOST_CPUS = 100_000  # maximum for the driver
_DEADLINE_S = 60.0  # for the job server's answers
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_ENTRYPOINT = f"python -m grpo_dist.cli train {CONFIG}"
_HEAD = {"node:__internal_head__": 0.001}


@dataclass(frozen=True)
class RayTarget:
    """Options of --to ray. ``driver_cpus``: CPUs reserved for the driver on the head node."""

    address: str | None = None
    driver_cpus: float = 1

    def check(self, job: Job) -> None:
        """Raise UserError for a job that cannot be submitted. Does not contact the cluster."""
        if not 0 <= self.driver_cpus <= _MOST_CPUS:
            raise UserError(f"--driver-cpus {self.driver_cpus:g}: expected 0 to {_MOST_CPUS}")
        check_output(job.config.output_dir, "a Ray job's directory is removed after it")
        check_not_left_behind(job.config.input_paths(), job.config.environments.python)
        with _gather_files(job):  # checks that the code can be uploaded
            pass

    def render(self, job: Job) -> str:
        with _gather_files(job) as carried:
            request = self._request(job, _next_number(job))
            request["runtime_env"]["working_dir"] = carried.summary()
            request["runtime_env"]["env_vars"] |= {v.name: HIDDEN for v in job.environment if v.hidden}
            rendered = {"address": _resolve_address(self.address) or "(none given)", **request}
            text = yaml.safe_dump(rendered, sort_keys=False, width=110)
            notices = "".join(f"# {line}\n" for line in carried.notices())
            return f"{text}{notices}\n# {CONFIG}\n{(carried.directory / CONFIG).read_text()}"

    def submit(self, job: Job) -> SubmissionRecord:
        client = _client(_server(self.address))
        number = _next_number(job)
        with server_errors(client.get_address()):
            for other in client.list_jobs():
                if not (job_number := _number(other.submission_id, job)):
                    continue
                if not other.status.is_terminal():
                    raise UserError(
                        f"{job.run_dir}: its job {other.submission_id} is {other.status}; end it with "
                        f"`grpo-dist stop {job.run_dir}`, or choose another `name`"
                    )
                number = max(number, job_number + 1)
            with _gather_files(job) as carried:
                request = self._request(job, number)
                request["runtime_env"]["working_dir"] = str(carried.directory)
                for line in carried.notices():
                    print(line)
                submitted = client.submit_job(**request)
        return SubmissionRecord("ray", submitted, str(job.run_dir), where=client.get_address())

    def _request(self, job: Job, number: int) -> dict[str, Any]:
        """Return the Jobs API's arguments, without the working directory."""
        environment = {variable.name: variable.value for variable in job.environment}
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
            "runtime_env": {"env_vars": runtime_env()["env_vars"] | job.stop_patience | environment},
        }


def state(record: SubmissionRecord) -> JobState:
    client = _client(record.where)
    with server_errors(record.where):
        info = client.get_job_info(record.job)
    text = f"{info.status}: {info.message}" if info.message else str(info.status)
    if info.driver_exit_code == Preempted.exit_code:
        text += " (preempted after a checkpoint; submit again to resume)"
    return JobState(text, live=not info.status.is_terminal())


def print_logs(record: SubmissionRecord, follow: bool) -> None:
    client = _client(record.where)
    with server_errors(record.where):
        if not follow:
            print(client.get_job_logs(record.job), end="", flush=True)
            return
        client.get_job_info(record.job)  # raises a clear error if the job does not exist

        async def tail() -> None:
            async for text in client.tail_job_logs(record.job):
                print(text, end="", flush=True)

        asyncio.run(tail())


def stop(record: SubmissionRecord) -> None:
    client = _client(record.where)
    with server_errors(record.where):
        client.stop_job(record.job)


def runtime_env() -> dict[str, Any]:
    """Return the runtime environment from `launch/ray_runtime_env.yaml`."""
    return yaml.safe_load(template("ray_runtime_env.yaml"))


@contextmanager
def _gather_files(job: Job) -> Iterator[Carried]:
    """Gather the job's files in a directory that exists during the block."""
    with tempfile.TemporaryDirectory(prefix="grpo-dist-submit-") as directory:
        yield gather(job.config, Path(directory), runtime_env()["excludes"])


def _next_number(job: Job) -> int:
    """Return the number of the next submission from this machine."""
    record = read_record(job.run_dir)
    return 1 + (_number(record.job, job) if record and record.target == "ray" else 0)


def _number(submission_id: str | None, job: Job) -> int:
    """Return the number of a job of this run; 0 for any other job."""
    name, _, number = (submission_id or "").rpartition("-")
    return int(number) if name == job.name and number.isdigit() else 0


def _resolve_address(address: str | None) -> str | None:
    return address or os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS")


def _server(address: str | None) -> str:
    server = _resolve_address(address)
    if not server:
        raise UserError("--to ray: no cluster; give --address http://HEAD:8265, or set RAY_ADDRESS to that")
    if not server.startswith(("http://", "https://")):
        raise UserError(
            f"--to ray: {server} is not the address of a job server; give the address of the dashboard, "
            "e.g. --address http://HEAD:8265"
        )
    return server.rstrip("/")


def _client(address: str) -> Any:
    """Return a client of the job server at ``address`` whose requests have a deadline.

    Raises UserError when there is no answer.
    """
    try:
        from ray.job_submission import JobSubmissionClient  # ray[default] is optional
    except ImportError as error:
        raise UserError(f"--to ray needs Ray's job client: pip install 'ray[default]' ({error})") from error

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **request: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=_DEADLINE_S, **request)

    logging.getLogger("ray").setLevel(logging.ERROR)
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = address  # Ray prefers the environment to the argument
    try:
        with server_errors(address):
            return Client(address)
    finally:
        os.environ.pop(_ADDRESS)
        if before is not None:
            os.environ[_ADDRESS] = before


@contextmanager
def server_errors(address: str) -> Iterator[None]:
    """Turn errors of the server, and an unreachable server, into UserError."""
    # Slow to import; installed by ray[default].
    from aiohttp import ClientError
    from ray.exceptions import AuthenticationError
    from requests.exceptions import RequestException

    try:
        yield
    except AuthenticationError as error:
        raise UserError(f"{address}: {error}") from error
    except (ConnectionError, RequestException, ClientError) as error:  # ClientError: from --follow
        raise UserError(
            f"{address}: no Ray job server answers there ({type(error).__name__}); check the address, and "
            "that the head was started with its dashboard"
        ) from error
    except RuntimeError as error:
        raise UserError(f"{address}: {error}") from error
