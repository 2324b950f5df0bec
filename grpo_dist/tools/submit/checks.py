"""Checks a job before submission, and computes the number and size of its nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from actors.placement.demands import Resources, describe, placement
from actors.placement.fitting import Node, bundles, fits
from grpo_dist.config import Config
from grpo_dist.config.secrets import HIDDEN, masked, masked_setting, masked_text
from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.model_files import is_checkpoint
from grpo_dist.tools.submit.job import Job, Variable

# Includes other line breaks of editors and YAML.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LEAST_CPUS, _CPUS_PER_GPU = 16, 8
_MOST = 100_000
# Minimum and maximum of each option.
_BOUNDS = {
    "gpus_per_node": (0, 1024), "cpus_per_node": (1, _MOST), "nodes": (1, _MOST), "memory_gib": (1, _MOST),
}  # fmt: skip


def check_resumes(config: Config, run_dir: Path) -> None:
    """Raise UserError for a run that is complete or cannot resume after an interruption. The steps of
    `epochs` follow from rows that may exist only on the cluster.
    """
    if config.checkpoint.resume == "never":
        raise UserError(
            "`checkpoint.resume` = never: a preempted job would start over in another directory; use "
            "auto, and another `name` for a fresh run"
        )
    from grpo_dist.runs.run_directory import finished_steps  # imports torch

    num_finished = finished_steps(run_dir)
    if num_finished is None or config.epochs is not None:
        return
    from grpo_dist.runs.checkpoint import why_ended_early  # imports pyarrow

    if num_finished >= config.steps:
        raise UserError(
            f"{run_dir}: the run is complete ({num_finished} steps); choose another `name`, or raise "
            "`steps` to continue"
        )
    if reason := why_ended_early(config, run_dir):
        raise UserError(
            f"{run_dir}: the run is complete ({num_finished} steps: {reason}); choose another `name`, or "
            "change that setting to continue"
        )


def check_rewards_known(config: Config) -> None:
    """Raise UserError for an unknown built-in reward, or one that conflicts with an estimator or another
    reward. User-supplied rewards may exist only on the cluster.
    """
    from grpo_dist.rewards.checks import combination_problems, graded_problems, name_problems  # imports numpy

    graded = (graded_problems(seen, advantage) for advantage, seen in config.rewards_by_estimator)
    for problem in chain(name_problems(config.rewards), *graded, combination_problems(config.rewards)):
        raise UserError(problem)


def check_no_secrets(job: Job) -> None:
    """Raise UserError for a secret in anything that others can read: configuration, overrides, variables.

    `commands.submit` calls it for every target. Targets with free-text options also call `check_options`.
    """
    plain = job.config.model_dump(mode="json")
    for place in _differing(plain, masked(plain), ()):
        raise _secret(f"{job.path}: `{'.'.join(place)}`")
    for text in job.overrides:
        if (masked_form := masked_setting(text)) != text:
            raise _secret(f"override {masked_form}")
    for variable in job.environment:
        if not variable.hidden and masked({variable.name: variable.value})[variable.name] != variable.value:
            raise _secret(f"--env {variable.name}={HIDDEN}")


def check_options(options: Sequence[tuple[str, str]]) -> None:
    """Raise UserError for a secret in a target's ``options`` (name, text)."""
    for option, text in options:
        masked_form = masked_setting(text) if text.startswith("-") else masked_text(text)
        if masked_form != text:
            raise _secret(f"{option}={masked_form}")


def _secret(what: str) -> UserError:
    return UserError(
        f"{what} looks like a secret, and others on the cluster could read it; name an environment variable "
        "instead (`api_key_env` of a judge), and pass it with --env or --secret"
    )


def check_one_line(what: str, text: str) -> None:
    """Raise UserError for a control character in ``text``, which is inserted into a script line."""
    if _CONTROL.search(text):
        raise UserError(
            f"{what} = {text!r} has a line break or another control character, which could end its line; "
            "remove it"
        )


def _differing(a: Any, b: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(a, dict):
        for key in a:
            yield from _differing(a[key], b[key], (*place, str(key)))
    elif isinstance(a, list):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differing(x, y, (*place, str(i)))
    elif a != b:
        yield place


def check_output(output_dir: str, reason: str) -> None:
    """Raise UserError for a run directory that would be lost with the job."""
    if ".." in Path(output_dir).parts:
        raise UserError(
            f"`output_dir` = {output_dir} contains `..`, which may lead out of the storage that it "
            "names; give the path without"
        )
    if not Path(output_dir).is_absolute():
        raise UserError(
            f"`output_dir` = {output_dir} is relative, and {reason}; set output_dir to an absolute "
            "path on storage that all nodes see"
        )


def check_not_left_behind(inputs: Iterable[tuple[str, str, bool]], python: str | None) -> None:
    """Raise UserError for data, a model or an interpreter with a relative path, which is not uploaded.
    ``inputs``: as `Config.input_paths` yields them; ``python``: `environments.python`.
    """
    named = [(key, value) for key, value, _ in inputs]
    if python is not None:
        named.append(("environments.python", python))
    for key, value in named:
        path = value.rpartition("@")[0] if is_checkpoint(value) else value.removeprefix("random:")
        if not Path(path).is_absolute() and expanded(path).exists():
            raise UserError(
                f"`{key}` = {value} is on this machine and does not travel with the job; put it on storage "
                "that all nodes see and give its absolute path"
            )


def variables(named: Sequence[str]) -> tuple[Variable, ...]:
    """Parse --env: ``NAME`` takes the local value and hides it; ``NAME=value`` shows it.

    Raises UserError for an unset variable, or a secret on the command line, which other users can read.
    """
    return tuple(map(_variable, named))


def _variable(text: str) -> Variable:
    name, sign, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        printed = f"{name}={HIDDEN}" if sign else name  # any value may be a secret
        raise UserError(f"--env {printed}: expected NAME, or NAME=value; a name has letters, digits and _")
    if not sign:
        if name not in os.environ:
            raise UserError(f"--env {name}: not set here; export it first, or give --env {name}=value")
        return Variable(name, os.environ[name], hidden=True)
    if masked({name: value})[name] != value:
        raise UserError(
            f"--env {name}=***: looks like a secret, and other users can read command lines; use --env "
            f"{name}, which passes the value set here without showing it"
        )
    return Variable(name, value, hidden=False)


@dataclass(frozen=True)
class NodeSizes:
    """Requested nodes. ``cpus_per_node`` None: 8 per GPU; ``nodes`` None: the fewest that fit."""

    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    nodes: int | None = None

    @property
    def cpus(self) -> int:
        """CPUs per node."""
        return self.cpus_per_node or max(_LEAST_CPUS, _CPUS_PER_GPU * (self.gpus_per_node or 0))

    def nodes_for(self, config: Config, target: str) -> tuple[int, str]:
        """Return the number of nodes and a description of the placement. Raises UserError if too few."""
        if self.gpus_per_node is None:
            raise UserError(f"--to {target}: give --gpus-per-node, the GPUs of a node (0: train on CPUs)")
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name, None)
            if value is not None and not least <= value <= most:
                raise UserError(f"{format_option(name)} {value}: expected {least} to {most}")
        gpus, cpus = self.gpus_per_node, self.cpus
        refused: UserError | None = None
        for count in [self.nodes] if self.nodes else range(1, 1 + _most_nodes(config)):
            has = Resources(count * cpus, count * gpus, node_cpus=cpus, shared=True)
            try:
                demands = placement(config, has, training=True)
            except UserError as error:
                refused = error
                continue
            there = [Node(f"node {i + 1}", cpus, gpus, cpus, gpus) for i in range(count)]
            if fits(bundles(demands), there):
                return count, describe(demands, has)
            each = f"{gpus} GPU(s) and {cpus} CPU(s)"
            refused = UserError(
                f"cluster: {count} node(s) with {each} each have no room for {describe(demands, has)}; a "
                "worker must fit on one node: use more or larger nodes, or lower "
                "`rollout.tensor_parallel_size`"
            )
        assert refused is not None
        raise refused


def format_option(field: str) -> str:
    """Return a field's command-line option: ``gpus_per_node`` -> --gpus-per-node."""
    return "--" + field.replace("_", "-")


def _most_nodes(config: Config) -> int:
    """Return the maximum useful number of nodes: one per computing worker."""
    models = sum(model.num_workers for model in config.rewards.models)
    models += sum(teacher.num_workers for teacher in config.distillation.teachers_with_workers)
    engines = config.rollout.num_workers + config.evaluation.num_workers
    return engines + config.policy.num_workers + config.reference.num_workers + models
