"""Kubernetes target: a RayJob for the KubeRay operator, from `launch/rayjob.yaml`, created with kubectl.

A run has one RayJob, named after it, so a second one cannot exist at the same time. The next submission
replaces a finished RayJob.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

import yaml

from grpo_dist.errors import UserError
from grpo_dist.tools.submit.checks import NodeSizes, check_not_left_behind, check_output
from grpo_dist.tools.submit.code import resolved
from grpo_dist.tools.submit.job import Job, JobState, Refused, SubmissionRecord, ask, template

_OVER = ("Complete", "Failed", "ValidationFailed")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*", re.ASCII)
_SECRET = re.compile(_CLAIM.pattern + r"(:[A-Za-z_][A-Za-z0-9_]*)?")
_NAMES = {  # checked here: the cluster would refuse them only after deleting the previous RayJob
    "--image": (_IMAGE, "the name of an image, e.g. registry/grpo-dist:gpu"),
    "--namespace": (_CLAIM, "small letters, digits and -"),
    "--secret": (_SECRET, "the name of a Secret, or NAME:KEY"),
}
_MOUNT = re.compile(r"/[\w+@-][\w./+@-]*", re.ASCII)
# Paths used by the image, Ray, the manifest and the kernel in a pod.
_USED_BY_PODS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/run", "/var/run", "/dev", "/proc", "/sys",
    "/tmp/ray", "/opt/grpo-dist",  # the image's working directory
)  # fmt: skip
_NO_TEXT = re.compile(r"[yYnN]$|[-+]?\.?\d", re.ASCII)  # not text to some YAML parser: y, 1e3, 0o17
_GIB_PER_GPU, _GIB_ON_CPUS = 64, 32
# Variables set to paths on the volume, unless the user sets them.
_CACHES = {"HF_HOME": ".cache/huggingface", "GRPO_DIST_CACHE": ".cache/grpo-dist"}


@dataclass(frozen=True)
class KubeRayTarget(NodeSizes):
    """Options of --to kuberay.

    ``volume``: CLAIM:/path. ``secret``: names of Secrets, or NAME:KEY for one key as a variable KEY.
    ``memory_gib``: per worker node.
    """

    image: str | None = None
    volume: str | None = None
    memory_gib: int | None = None
    namespace: str | None = None
    secret: list[str] = field(default_factory=list)

    def check(self, job: Job) -> None:
        """Raise UserError for a job that cannot be submitted. Does not contact the cluster."""
        for option, value in (("--image", self.image), ("--volume", self.volume)):
            if not value:
                raise UserError(
                    f"--to kuberay: give {option}: --image takes the image built with docker/Dockerfile, and "
                    "--volume CLAIM:/runs the claim that holds the runs with its mount point"
                )
        named = [("--image", self.image), ("--namespace", self.namespace)]
        for option, text in (*named, *(("--secret", secret) for secret in self.secret)):
            pattern, expected = _NAMES[option]
            if text is not None and not pattern.fullmatch(text):
                raise UserError(f"{option} {text!r}: expected {expected}")
        check_output(job.config.output_dir, "the file system of a pod ends with it")
        _, path = self._volume
        if PurePosixPath(path) not in (out := PurePosixPath(job.config.output_dir), *out.parents):
            raise UserError(
                f"`output_dir` = {job.config.output_dir} is not below {path}, where --volume is mounted, and "
                f"would be lost with the pods; set output_dir={path}"
            )
        check_not_left_behind(job.config.input_paths(), job.config.environments.python)
        for code in job.config.code_paths:
            if not PurePosixPath(code).is_absolute():
                raise UserError(
                    f"`code_paths`: {code} is relative, and no code travels to a pod; put it into the "
                    "image or on the volume, and give its absolute path there"
                )
        if hidden := [variable.name for variable in job.environment if variable.hidden]:
            raise UserError(
                f"--env {hidden[0]}: its value would be in the manifest; create a Secret and give "
                f"--secret NAME:{hidden[0]}, or --env {hidden[0]}=value if it is not secret"
            )
        self.nodes_for(job.config, "kuberay")

    def render(self, job: Job) -> str:
        config, rayjob = yaml.safe_load_all(template("rayjob.yaml"))
        metadata = {"name": job.name, "labels": {"app.kubernetes.io/name": "grpo-dist"}}
        metadata |= {"namespace": self.namespace} if self.namespace else {}
        config["metadata"] = rayjob["metadata"] = metadata
        config["data"] = {"config.yaml": resolved(job.config, grows=False)}
        spec = rayjob["spec"]
        spec["runtimeEnvYAML"] = yaml.safe_dump({"env_vars": job.stop_patience})
        cluster = spec["rayClusterSpec"]
        cluster["rayVersion"] = version("ray")
        head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        nodes, _ = self.nodes_for(job.config, "kuberay")
        group["replicas"] = group["minReplicas"] = group["maxReplicas"] = nodes
        group["groupName"] = "gpu" if self.gpus_per_node else "cpu"
        for pod in (head["template"]["spec"], group["template"]["spec"]):
            self._fill(pod, job)
        gpus = self.gpus_per_node or 0
        gib = self.memory_gib or gpus * _GIB_PER_GPU or _GIB_ON_CPUS
        self._size(group["template"]["spec"], gib, gpus)
        return yaml.dump_all([config, rayjob], Dumper=_Dumper, sort_keys=False, width=110)

    def submit(self, job: Job) -> SubmissionRecord:
        kubectl = _kubectl(self.namespace)
        existing = _rayjob(kubectl, job.name)
        if existing is not None and _is_live(existing):
            raise UserError(
                f"{job.run_dir}: its RayJob {job.name} exists ({_words(existing)}); end it with "
                f"`grpo-dist stop {job.run_dir}`, or choose another `name`"
            )
        # Delete the finished run, or a deleted RayJob's leftover ConfigMap. With an old ConfigMap kubectl
        # would still create the RayJob, with the old configuration.
        leftovers = "configmap" if existing is None else "rayjob,configmap"
        ask([*kubectl, "delete", leftovers, job.name, "--ignore-not-found", "--timeout=90s"])
        ask([*kubectl, "create", "-f", "-"], stdin=self.render(job))
        return SubmissionRecord("kuberay", job.name, str(job.run_dir), where=self.namespace or "")

    @property
    def _volume(self) -> tuple[str, str]:
        claim, _, path = (self.volume or "").partition(":")
        if not _CLAIM.fullmatch(claim) or not _MOUNT.fullmatch(path) or ".." in PurePosixPath(path).parts:
            raise UserError(f"--volume {self.volume}: expected CLAIM:/path, e.g. --volume runs:/runs")
        mounted = PurePosixPath(path)
        for used in map(PurePosixPath, _USED_BY_PODS):
            if mounted.is_relative_to(used) or used.is_relative_to(mounted):
                raise UserError(
                    f"--volume {self.volume}: it would hide files of {used}, which the pods need; mount it "
                    "elsewhere, e.g. --volume runs:/runs"
                )
        return claim, str(mounted)

    def _fill(self, pod: dict[str, Any], job: Job) -> None:
        claim, path = self._volume
        (container,) = pod["containers"]
        container["image"] = self.image
        environment = {v.name: v.value for v in job.environment}
        # Pods share no home directory, and the driver downloads and creates models for all of them.
        secrets = {key for _, sign, key in (secret.partition(":") for secret in self.secret) if sign}
        caches = {name: f"{path}/{folder}" for name, folder in _CACHES.items() if name not in secrets}
        container["env"] = [{"name": name, "value": value} for name, value in (caches | environment).items()]
        container["envFrom"] = []
        for secret in self.secret:
            name, sign, key = secret.partition(":")
            if sign:
                reference = {"secretKeyRef": {"name": name, "key": key}}
                container["env"].append({"name": key, "valueFrom": reference})
            else:
                container["envFrom"].append({"secretRef": {"name": name}})
        for mount in container["volumeMounts"]:
            if mount["name"] == "runs":
                mount["mountPath"] = path
        for volume in pod["volumes"]:
            if volume["name"] == "runs":
                volume["persistentVolumeClaim"] = {"claimName": claim}
            if volume["name"] == "config":
                volume["configMap"] = {"name": job.name}

    def _size(self, pod: dict[str, Any], memory_gib: int, gpus: int) -> None:
        """Set a worker pod's limits; a quarter of its memory is available as shared memory."""
        limits = {"cpu": str(self.cpus), "memory": f"{memory_gib}Gi"}
        pod["containers"][0]["resources"]["limits"] = limits | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
        volume["emptyDir"]["sizeLimit"] = f"{memory_gib * 1024 // 4}Mi"


class _Dumper(yaml.SafeDumper):
    """Writes block scalars for multi-line texts, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write a text, quoted if needed: kubectl reads more plain words as numbers and booleans than PyYAML."""
    style = "|" if "\n" in text else '"' if _NO_TEXT.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def state(record: SubmissionRecord) -> JobState:
    rayjob = _rayjob(_kubectl(record.where), record.job)
    if rayjob is None:
        return JobState("over; its RayJob no longer exists", live=False)
    return JobState(_words(rayjob), live=_is_live(rayjob))


def print_logs(record: SubmissionRecord, follow: bool) -> None:
    """Print the submitting pod's log, which repeats the driver's output."""
    options = [f"job/{record.job}", "--tail=-1", *(["--follow"] if follow else [])]
    ask([*_kubectl(record.where), "logs", *options], is_printed=True)


def stop(record: SubmissionRecord) -> None:
    """Stop the driver on the head; delete a RayJob without a driver."""
    kubectl = _kubectl(record.where)
    status = (_rayjob(kubectl, record.job) or {}).get("status", {})
    if status.get("jobStatus") in ("PENDING", "RUNNING"):
        head = ask([*kubectl, "get", "pods", "--output=name", "--selector",
                    f"ray.io/cluster={status['rayClusterName']},ray.io/node-type=head"]).split()  # fmt: skip
        if head:
            ask([*kubectl, "exec", head[0], "--container=ray-head", "--",
                 "ray", "job", "stop", "--no-wait", status["jobId"]])  # fmt: skip
            return
    ask([*kubectl, "delete", "rayjob,configmap", record.job, "--ignore-not-found", "--wait=false"])


def _kubectl(namespace: str | None) -> list[str]:
    return ["kubectl", *([f"--namespace={namespace}"] if namespace else [])]


def _rayjob(kubectl: list[str], name: str) -> dict[str, Any] | None:
    try:
        text = ask([*kubectl, "get", "rayjob", name, "--ignore-not-found", "--output=json"])
    except Refused as error:
        if "the server doesn't have a resource type" in str(error):
            raise UserError(f"{error}; the KubeRay operator is not installed on this cluster") from error
        raise
    return dict(json.loads(text)) if text.strip() else None


def _is_live(rayjob: dict[str, Any]) -> bool:
    return rayjob.get("status", {}).get("jobDeploymentStatus") not in _OVER


def _words(rayjob: dict[str, Any]) -> str:
    status = rayjob.get("status", {})
    parts = [status.get("jobDeploymentStatus") or "new", status.get("jobStatus"), status.get("message")]
    return ": ".join(part for part in parts if part)
