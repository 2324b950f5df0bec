"""Claims about a machine with GPUs: each line of `make gpu-check` is a test."""

import pytest

from tests.gpu.check import LINES


@pytest.mark.gpu
@pytest.mark.parametrize("line", LINES)
def test_line(check, line):
    record = check.line(line)
    if record.state in ("skipped", "not run"):
        pytest.skip(f"{record.state}: {record.reason}")
    wrong = [str(claim) for claim in record.claims if not claim.holds]
    assert record.state == "holds", "\n".join([record.reason, *wrong])
