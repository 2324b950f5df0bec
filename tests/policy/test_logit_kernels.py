"""The LM head's GPU kernels in Triton's interpreter on a CPU, against the definition in float64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_dist.policy import logit_rows
from grpo_dist.policy.logprobs import choose_logit_rows
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "one block", "no gradient of entropies", "no gradient of log-probs", "three blocks", "certain",
    "the largest logits first", "the largest logits last",
    "scaled", "capped", "a masked logit", "a masked block", "a masked end",
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="the kernels are Triton's, which is not installed")
    return json.loads(output_of("tests.support.interpreted_kernels").splitlines()[-1])


def output_of(module):
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_values_entropies_and_gradients_are_those_of_the_definition(interpreted):
    assert set(interpreted) > CASES
    for case in CASES:
        assert max(interpreted[case]) < 2e-6, (case, interpreted[case])


def test_a_gradient_in_bfloat16_is_rounded_once(interpreted):
    """The interpreter rounds towards zero, a GPU to the nearest."""
    values, entropies, gradient = interpreted["bfloat16"]
    assert max(values, entropies) < 2e-6 and 0 < gradient <= 2**-7


@pytest.mark.parametrize("case", ["whole", "whole, capped"])
def test_the_head_has_the_same_gradients_as_by_torchs_operations(interpreted, case):
    assert len(interpreted[case]) == 6 and max(interpreted[case]) < 2e-6


def test_no_rows_have_no_results(interpreted):
    assert interpreted["no rows"] == [[0], [0], [0, 5]]


@pytest.mark.parametrize("value", ["nan", "infinity"])
def test_a_non_finite_logit_affects_only_its_row(interpreted, value):
    assert interpreted[value] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_target_outside_the_vocabulary_has_no_log_prob(interpreted):
    assert interpreted["no tokens"] == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_strided_operands_have_the_same_results(interpreted):
    assert interpreted["layouts"] == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100():
    """Checks types, which the interpreter does not. Compiling needs no GPU."""
    pytest.importorskip("triton.compiler", reason="the kernels are Triton's, which is not installed")
    sizes = output_of("tests.support.compiled_kernel").split()
    assert [int(size) > 1000 for size in sizes] == [True, True]


def test_a_cpu_and_float64_use_torchs_operations():
    assert choose_logit_rows(torch.empty(1)) is logit_rows
    assert choose_logit_rows(torch.empty(1, dtype=torch.float64)) is logit_rows
