"""Sizes of the nodes that a job requests."""

import pytest

from tests.support.submissions import command, config_in

KUBERAY = ("--image", "x", "--volume", "runs:/runs", "output_dir=/runs")


def dry_run(capsys, directory, to, *arguments):
    own = KUBERAY if to == "kuberay" else ()
    return command(capsys, "submit", config_in(directory), "--to", to, "--dry-run", *own, *arguments)


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
