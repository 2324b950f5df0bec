"""Runs submitted to Kubernetes: the manifest against the schema of a RayJob, with a fake kubectl."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from actors.placement.demands import Resources, placement
from actors.placement.fitting import Node, bundles, fits
from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from tests.support.submissions import RAYJOB, TINY, command, config_in

ROOT = Path(__file__).resolve().parents[3]

KUBECTL = """#!/usr/bin/env bash
echo "kubectl $*" >> "$KUBE/calls"
for word in "$@"; do
    case $word in
        get) [[ $* != *pods* ]] || { echo pod/tiny-head; exit; }
             cat "$KUBE/rayjob.json" 2>/dev/null; exit 0 ;;
        create) [[ ! -e $KUBE/exists ]] || { echo "AlreadyExists" >&2; exit 1; }
                cat > "$KUBE/created.yaml"; exit ;;
        delete) rm -f "$KUBE/rayjob.json"; exit ;;
        logs) echo "step 1"; [[ ! -e $KUBE/broken ]]; exit ;;
        exec) exit ;;
    esac
done
"""
OPTIONS = ("--to", "kuberay", "--image", "registry/grpo-dist:1", "--volume", "claim:/data",
           "--gpus-per-node", "8", "--namespace", "research")  # fmt: skip


@pytest.fixture
def kube(tmp_path, monkeypatch):
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    programs.mkdir(), notes.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBE", str(notes))
    monkeypatch.chdir(tmp_path)
    return notes


def submit(capsys, directory, *arguments, text=TINY):
    path = config_in(directory, text=text, output="/data/runs")
    return command(capsys, "submit", path, *OPTIONS, *arguments)


def manifest(capsys, directory, *arguments):
    path = config_in(directory, text=TINY, output="/data/runs")
    capsys.readouterr()
    status = main(["submit", str(path), *OPTIONS, "--dry-run", *map(str, arguments)])
    output = capsys.readouterr()
    assert status == 0, output.err
    return tuple(yaml.safe_load_all(output.out))  # without the warnings


def set_status(notes, status):
    (notes / "rayjob.json").write_text(json.dumps({"status": status}))


def calls(notes):
    return (notes / "calls").read_text().splitlines()


def test_the_manifest_is_a_rayjob_with_the_resources_of_the_run(kube, tmp_path, capsys):
    config, rayjob = manifest(
        capsys, tmp_path, "policy.num_workers=8", "rollout.num_workers=8", "batch.prompts_per_step=8",
        "max_staleness=1", "--secret", "wandb", "--secret", "hub:HF_TOKEN", "--env", "NCCL_DEBUG=INFO",
        "--memory-gib", "400", "checkpoint.grace_s=100",
    )  # fmt: skip
    jsonschema.validate(rayjob, RAYJOB)
    spec, cluster = rayjob["spec"], rayjob["spec"]["rayClusterSpec"]
    assert rayjob["metadata"]["namespace"] == config["metadata"]["namespace"] == "research"
    assert rayjob["metadata"]["name"] == config["metadata"]["name"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"], "suspend" in spec) == (3, True, False)
    assert spec["ttlSecondsAfterFinished"] > 0 and "activeDeadlineSeconds" not in spec
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "130"}}
    assert json.loads(spec["entrypointResources"]) == {"node:__internal_head__": 0.001}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": str(spec["entrypointNumCpus"])}
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    worker, head = group["template"]["spec"], cluster["headGroupSpec"]["template"]["spec"]
    (container,) = worker["containers"]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "400Gi", "nvidia.com/gpu": "8"}
    assert head["containers"][0]["resources"]["limits"] == {"cpu": "8", "memory": "64Gi"}
    for pod in (head, worker):
        container = pod["containers"][0]
        assert container["image"] == "registry/grpo-dist:1"
        assert container["env"] == [
            {"name": "HF_HOME", "value": "/data/.cache/huggingface"},
            {"name": "GRPO_DIST_CACHE", "value": "/data/.cache/grpo-dist"},
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}},
        ]
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts) == set(volumes)
        assert (mounts["runs"], mounts["shm"]) == ("/data", "/dev/shm")
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "claim"}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        shared = 400 // 4 if pod is worker else 32
        assert volumes["shm"]["emptyDir"]["sizeLimit"] in (f"{shared}Gi", f"{shared * 1024}Mi")


def test_all_pods_keep_models_on_the_volume_unless_told_otherwise(kube, tmp_path, capsys):
    options = ("--env", "HF_HOME=/data/hub", "--secret", "paths:GRPO_DIST_CACHE")
    _, rayjob = manifest(capsys, tmp_path, *options)
    cluster = rayjob["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        secret = {"secretKeyRef": {"name": "paths", "key": "GRPO_DIST_CACHE"}}
        home = {"name": "HF_HOME", "value": "/data/hub"}
        assert container["env"] == [home, {"name": "GRPO_DIST_CACHE", "valueFrom": secret}]


def test_a_run_without_gpus_fits_on_its_nodes(kube, tmp_path, capsys):
    """Ray counts the head's CPUs too, but a worker that needs half of all CPUs does not fit there."""
    options = ("--gpus-per-node", "0", "max_staleness=1")
    _, rayjob = manifest(capsys, tmp_path, *options)
    cluster = rayjob["spec"]["rayClusterSpec"]
    head = int(cluster["headGroupSpec"]["rayStartParams"]["num-cpus"])
    (group,) = cluster["workerGroupSpecs"]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    has = Resources(head + group["replicas"] * cpus, 0, cpus, shared=True)
    config = load_config(tmp_path / "tiny.yaml", ["max_staleness=1"])
    nodes = [Node("head", head, 0, 0, 0), *[Node("node", cpus, 0, cpus, 0)] * group["replicas"]]
    assert fits(bundles(placement(config, has, training=True)), nodes)


def test_names_are_valid_for_kubernetes(kube, tmp_path, capsys):
    for name in ("A.Strange_Name--", "7b", "x" * 90):
        _, rayjob = manifest(capsys, tmp_path, f"name={name}")
        jsonschema.validate(rayjob, RAYJOB)  # the schema has the pattern and the length


def test_a_job_is_created_once_queried_followed_and_stopped(kube, tmp_path, capfd):
    """`capfd`, because kubectl itself prints the log."""
    assert submit(capfd, tmp_path)[0] == 0
    run = "/data/runs/tiny"
    _, rayjob = yaml.safe_load_all((kube / "created.yaml").read_text())
    name = rayjob["metadata"]["name"]
    # It deletes the config map first, in case only the RayJob was deleted by hand.
    assert calls(kube)[-2].startswith(f"kubectl --namespace=research delete configmap {name} ")
    assert calls(kube)[-1] == "kubectl --namespace=research create -f -"

    running = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    set_status(kube, running | {"rayClusterName": "c-1", "jobId": "j-1"})
    status, text = submit(capfd, tmp_path)
    assert status == 2 and f"its RayJob {name} exists (Running: RUNNING)" in text
    text = command(capfd, "status", run)[1]
    assert f"{name} on kuberay" in text and "Running: RUNNING" in text
    assert command(capfd, "logs", run)[1] == command(capfd, "logs", "--follow", run)[1] == "step 1\n"
    (kube / "broken").touch()
    assert command(capfd, "logs", "--follow", run)[0] == command(capfd, "logs", run)[0] == 2
    command(capfd, "stop", run)
    assert calls(kube)[-1].endswith("exec pod/tiny-head --container=ray-head -- ray job stop --no-wait j-1")
    assert "--selector ray.io/cluster=c-1,ray.io/node-type=head" in calls(kube)[-2]

    set_status(kube, {"jobDeploymentStatus": "Initializing"})  # there is no driver yet that could save
    command(capfd, "stop", run)
    assert calls(kube)[-1].endswith(f"delete rayjob,configmap {name} --ignore-not-found --wait=false")

    set_status(kube, {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"})  # so a next job may start
    assert submit(capfd, tmp_path)[0] == 0
    assert [call.split()[2] for call in calls(kube)[-3:]] == ["get", "delete", "create"]
    assert "its RayJob no longer exists" in command(capfd, "status", run)[1]


def test_one_of_two_concurrent_submissions_is_refused(kube, tmp_path, capsys):
    (kube / "exists").touch()
    status, output = submit(capsys, tmp_path)
    assert status == 2 and "AlreadyExists" in output


@pytest.mark.parametrize(("arguments", "words"), [
    (("--volume", "runs"), "--volume runs: expected CLAIM:/path"),
    (("--volume", "claim:/data/../etc"), "expected CLAIM:/path"),
    (("--volume", "claim:/da\nta"), "expected CLAIM:/path"),
    (("--volume", "Claim!:/data"), "expected CLAIM:/path"),
    (("--volume", "claim://"), "expected CLAIM:/path"),
    (("--volume", "claim:/etc/./"), "hide files of /etc, which the pods need"),
    (("--volume", "claim:/opt"), "hide files of /opt/grpo-dist"),
    (("--volume", "claim:/usr/local/runs"), "hide files of /usr"),
    (("--volume", "claim:/var"), "hide files of /var/run"),
    (("--volume", "claim:/dev/shm"), "hide files of /dev"),
    (("--image", "a b\nkind: Pod"), "--image 'a b\\nkind: Pod': expected the name of an image"),
    (("--namespace", "a b"), "--namespace 'a b': expected small letters"),
    (("--secret", "hub:HF_TOKEN: x"), "--secret 'hub:HF_TOKEN: x': expected the name of a Secret"),
    (("output_dir=/data/../etc",), "`output_dir` = /data/../etc contains `..`"),
    (('output_dir="/data/a\\nb"',), "has a line break"),
    (("rewards.functions=[{function: math, kwargs: {a: {api_key: k-1}}}]",), "looks like a secret"),
    (("steps.api_key=k-1", "steps=3"), "override steps.api_key=*** looks like a secret"),
    (("output_dir=/elsewhere",), "`output_dir` = /elsewhere is not below /data"),
    (("output_dir=runs",), "`output_dir` = runs is relative"),
    (("code_paths=[.]",), "no code travels to a pod"),
    (("--env", "PATH"), "--env PATH: its value would be in the manifest"),
    (("--nodes", "1", "policy.num_workers=4", "rollout.num_workers=8"), "12 GPUs are needed"),
    (("--gpus-per-node", "-1"), "--gpus-per-node -1: expected 0 to 1024"),
    (("--nodes", "0"), "--nodes 0: expected 1 to 100000"),
    (("--nodes", "100000000"), "--nodes 100000000: expected 1 to"),
    (("--cpus-per-node", "0"), "--cpus-per-node 0: expected 1 to"),
    (("--memory-gib", "-1"), "--memory-gib -1: expected 1 to"),
    (("--address", "x"), "--address is not an option of --to kuberay"),
    (("checkpoint.resume=never",), "`checkpoint.resume` = never"),
])  # fmt: skip
def test_a_job_that_cannot_work_is_not_submitted(kube, tmp_path, capsys, arguments, words):
    status, output = submit(capsys, tmp_path, *arguments)
    assert status == 2 and words in output and "k-1" not in output
    assert not (kube / "calls").exists()


def test_no_value_becomes_another_part_of_the_manifest(kube, tmp_path, capsys):
    broken = "x\n---\nkind: Pod\nmetadata: {name: 'a\"b'}\n"
    options = (f"data.instruction={json.dumps(broken)}", f"--env=A={broken}")
    config, rayjob = manifest(capsys, tmp_path, *options)
    (container,) = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["env"][2:] == [{"name": "A", "value": broken}]
    assert (config["kind"], rayjob["kind"]) == ("ConfigMap", "RayJob")


@pytest.mark.parametrize(
    "value", ["y", "Y", "n", "N", "1e3", "1e-6", "1E5", "08", "0o17", "-.5e1", "+1", "7"]
)
def test_a_text_that_some_parsers_take_for_a_number_or_boolean_is_quoted(kube, tmp_path, capsys, value):
    status, output = submit(capsys, tmp_path, "--dry-run", "--env", f"A={value}", "--secret", "hub:y")
    assert status == 0, output
    assert output.count(f'value: "{value}"\n') == 2  # in the head's pod and the workers'
    assert output.count('name: "y"\n') == 2 and output.count('key: "y"\n') == 2
    assert "replicas: 1\n" in output and "backoffLimit: 3\n" in output


def test_the_template_itself_is_a_valid_manifest():
    config, rayjob = yaml.safe_load_all((ROOT / "launch/rayjob.yaml").read_text())
    jsonschema.validate(rayjob, RAYJOB)
    assert config["metadata"]["name"] == rayjob["metadata"]["name"]
    assert yaml.safe_load(config["data"]["config.yaml"])["output_dir"] == "/runs"


# The published definition, e.g. helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of a KubeRay release.
CRD = os.environ.get("KUBERAY_CRD")


@pytest.mark.skipif(not CRD, reason="KUBERAY_CRD names no file of the published definition")
def test_both_manifests_satisfy_the_published_schema(kube, tmp_path, capsys):
    definition = yaml.load(Path(str(CRD)).read_text(), yaml.CSafeLoader)
    (v1,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    published = v1["schema"]["openAPIV3Schema"]
    _, rendered = manifest(capsys, tmp_path, "--secret", "hub:HF_TOKEN", "--env", "A=b")
    _, template = yaml.safe_load_all((ROOT / "launch/rayjob.yaml").read_text())
    validator = jsonschema.Draft202012Validator(strict(published))  # `validate` would check the schema too
    for rayjob in (rendered, template):
        validator.validate(rayjob)
    assert not list(beyond(RAYJOB["properties"]["spec"], published["properties"]["spec"], "spec"))


def strict(schema):
    """Return the schema as the API server applies it: unknown keys are errors, some values text or number."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(inner) for key, inner in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        result = {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        result.setdefault("additionalProperties", False)
    return result


def beyond(ours, published, place):
    """Yield keys and types that this schema allows and the published one does not."""
    if "type" in ours and published.get("type", ours["type"]) != ours["type"]:
        yield f"{place}: {ours['type']} is {published['type']}"
    for name, inner in ours.get("properties", {}).items():
        if "properties" in published and name not in published["properties"]:
            yield f"{place}.{name}"
        else:
            yield from beyond(inner, published.get("properties", {}).get(name, {}), f"{place}.{name}")
    if "items" in ours:
        yield from beyond(ours["items"], published.get("items", {}), f"{place}[]")
    if missing := set(published.get("required", ())) - set(ours.get("required", ())):
        yield f"{place}: {missing} must be there"
