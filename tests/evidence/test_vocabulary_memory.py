"""Only weights make a rank's memory grow with the vocabulary: [tokens, vocabulary] never exists."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.evidence

SCRIPT = Path(__file__).with_name("vocabulary_memory.py")


def measured(entries):
    done = subprocess.run([sys.executable, str(SCRIPT), str(entries)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_peak_memory_at_150_000_entries_is_that_of_the_weights():
    """Proportional to the weights: the weights, their gradient, Adam's two moments, and the intermediate
    gradients of the tied weight (head, embedding, their sum). All logits at once, in the forward pass alone,
    would take three times the growth of the whole process.
    """
    small, large = measured(128), measured(150_000)
    assert 3 * (large["peak"] - small["peak"]) < large["all_logits"]
