"""A whole run whose temperature and length change from step to step."""

import pyarrow.parquet as pq
import pytest

from tests.support.real_runs import metrics, run

pytestmark = [pytest.mark.machine, pytest.mark.long]

CHANGING = "{temperature: {schedule: [[0, 1.0], [3, 0.4]]}, max_new_tokens: {schedule: [[0, 6], [2, 16]]}}"


def test_engine_trainer_and_reference_agree_on_the_log_probs_of_every_temperature(tmp_path):
    """At one version of the weights: otherwise the mismatch would be that of two temperatures, above 0.1."""
    run(tmp_path, "steps=4", f"sampling={CHANGING}", "evaluation.before=false")
    lines = [line for line in metrics(tmp_path) if line["step"]]
    assert [line["sampling/temperature"] for line in lines] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert [line["sampling/max_new_tokens"] for line in lines] == [6, 6, 16, 16]
    assert [line["rollout/length_max_tokens"] for line in lines] == [6, 6, 16, 16]
    assert all(line["mismatch/logprob_diff_max"] < 1e-5 for line in lines)
    assert lines[0]["first_update/ref/kl"] < 1e-9
    table = pq.read_table(tmp_path / "runs/run/samples/step_000003.parquet").to_pylist()
    assert {row["max_new_tokens"] for row in table} == {16}
    assert [row["temperature"] for row in table] == pytest.approx([0.6] * len(table))
