"""Nodes that a job requests, compared with the GPUs that the run uses."""

import pytest

from grpo_dist.cli import main
from grpo_dist.tools.submit.job import SubmissionRecord
from grpo_dist.tools.submit.slurm_jobs import SlurmTarget
from tests.support.submissions import command, config_in

KUBERAY = ("--image", "x", "--volume", "runs:/runs", "output_dir=/runs")


def dry_run(capsys, directory, to, *arguments):
    own = KUBERAY if to == "kuberay" else ()
    return command(capsys, "submit", config_in(directory), "--to", to, "--dry-run", *own, *arguments)


@pytest.mark.parametrize("to", ["slurm", "kuberay"])
def test_a_job_that_requests_more_gpus_than_the_run_uses_gets_a_warning(tmp_path, capsys, to):
    status, said = dry_run(capsys, tmp_path, to, "--gpus-per-node", "8", "cluster.placement=separate")
    assert status == 0
    asks = "warning: the job asks for 8 GPU(s), 1 node(s) with 8 each, and the run uses 2: 6 would be idle"
    assert asks in said
    assert "give --gpus-per-node 2" in said


def test_a_submission_prints_the_warning_with_the_job(tmp_path, capsys, monkeypatch):
    submitted = SubmissionRecord("slurm", "1", str(tmp_path))
    monkeypatch.setattr(SlurmTarget, "submit", lambda target, job: submitted)
    arguments = ["submit", str(config_in(tmp_path)), "--to", "slurm", "--gpus-per-node", "8"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "would be idle" in said.err and said.out.startswith("submitted to slurm")


@pytest.mark.parametrize(
    ("to", "arguments", "words"),
    [
        ("slurm", ("--gpus-per-node", "-1"), "--gpus-per-node -1: expected 0 to 1024"),
        ("slurm", ("--gpus-per-node", "10000000"), "expected 0 to 1024"),
        ("slurm", ("--gpus-per-node", "8", "--nodes", "0"), "--nodes 0: expected 1 to 100000"),
        ("kuberay", ("--gpus-per-node", "8", "--nodes", "100000000"), "--nodes 100000000: expected 1 to"),
        ("kuberay", ("--gpus-per-node", "8", "--cpus-per-node", "0"), "--cpus-per-node 0: expected 1 to"),
        ("ray", ("--driver-cpus", "nan"), "--driver-cpus nan: expected 0 to"),
        ("ray", ("--driver-cpus", "-1"), "--driver-cpus -1: expected 0 to"),
        ("ray", ("--driver-cpus", "inf"), "--driver-cpus inf: expected 0 to"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, capsys, to, arguments, words):
    status, said = dry_run(capsys, tmp_path, to, *arguments)
    assert status == 2 and words in said


def test_status_accepts_a_run_directory_with_any_name(tmp_path, capsys):
    status, said = command(capsys, "status", tmp_path / "\udcff")
    assert status == 2 and "nothing was submitted for this run directory" in said
