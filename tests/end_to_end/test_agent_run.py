"""A complete run of a third-party agent: an unmodified `openai` client in one process per episode."""

import pyarrow.parquet as pq
import pytest

from tests.support.real_runs import metrics, run

pytestmark = [pytest.mark.machine, pytest.mark.long]

AGENT = """
import json, sys
from openai import BadRequestError, OpenAI

row, client = json.loads(sys.stdin.read()), OpenAI()
messages, digits = [{"role": "user", "content": row["problem"]}], 0
for turn in range(2):
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=12, stream=turn == 1)
    if turn:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    else:
        text = reply.choices[0].message.content
    digits += sum(letter.isdigit() for letter in text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again."}]
summary = [{"role": "user", "content": f"{row['problem']} You said {digits} digits."}]
last = client.chat.completions.create(model="policy", messages=summary, max_tokens=8)
try:
    client.chat.completions.create(model="policy", messages=summary, temperature=0.1)
except BadRequestError as error:
    print(error, file=sys.stderr)
print(json.dumps({"reward": digits}))
"""


@pytest.mark.slow
def test_a_program_that_never_asks_ends_the_run_with_its_message(tmp_path):
    """It asks in the trial before the run."""
    fails = "import pathlib, sys\ntried = pathlib.Path(__file__).with_name('tried')\n"
    fails += "if tried.exists():\n    sys.exit('the corpus is not there')\ntried.touch()\n"
    (tmp_path / "asks.py").write_text(fails + AGENT)
    done = run(
        tmp_path, "steps=2", f"code_paths=[{tmp_path}]",
        'data.train=[{path: "demo:add3", max_rows: 8, environment: {program: asks.py}}]', "data.eval=[]",
        "rewards.functions=[{function: environment}]", "batch={prompts_per_step: 2, samples_per_prompt: 3}",
        "sampling.top_p=0.9", "algorithm.kl.coef=0", "checkpoint.every=0", check=False,
    )  # fmt: skip
    assert done.returncode not in (0, -9), done.stdout
    assert "no sample could be scored" in done.stderr and "the corpus is not there" in done.stderr


@pytest.mark.slow
def test_an_unmodified_client_trains_two_steps_without_mismatch(tmp_path):
    (tmp_path / "asks.py").write_text(AGENT)
    run(
        tmp_path, "steps=2", f"code_paths=[{tmp_path}]",
        'data.train=[{path: "demo:add3", max_rows: 8, environment: {program: asks.py}}]', "data.eval=[]",
        "rewards.functions=[{function: environment}]", "batch={prompts_per_step: 2, samples_per_prompt: 3}",
        "sampling.max_new_tokens=120", "model.max_length=240", "environments.timeout_s=1200",
        "algorithm.kl.coef=0", "checkpoint.every=0", "tracking.samples=true",
    )  # fmt: skip
    steps = [line for line in metrics(tmp_path) if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["mismatch/logprob_diff_max"] <= 1e-6
        assert (line["episode/turns"], line["episode/rows"], line["episode/rewritten"]) == (3, 2, 1)
    assert any(line["policy/grad_norm"] > 0 for line in steps)
    for number in (1, 2):
        for row in pq.read_table(tmp_path / f"runs/run/samples/step_{number:06d}.parquet").to_pylist():
            assert row["finish_reason"] == "stop" and row["turns"][-1]["reward"] == row["reward"]
            assert set(row["policy_versions"]) <= {-1, number - 1}
            assert [turn["row"] for turn in row["turns"]] == [0, 0, 1]
            assert len(row["further_rows"]) == 1 and row["further_rows"][0]["context_ids"]
