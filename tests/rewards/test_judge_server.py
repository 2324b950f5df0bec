"""The judge against a real vLLM OpenAI server. Its model has random weights: structured output restricts the
replies to Yes or No, and the verdicts are arbitrary but deterministic.
"""

import os
import subprocess
import sys
import time
import urllib.request

import pytest

from grpo_dist.rewards.pool import GraderPool
from tests.support.made_completions import check_reward, completion_group, scored, spec
from tests.support.patience import HANG_S
from tests.support.processes import free_port

pytestmark = pytest.mark.machine

START_S = 300.0
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
CHOICE = {"structured_outputs": {"choice": ["Yes", "No"]}}


@pytest.fixture(scope="module")
def base_url(tiny_model, tmp_path_factory):
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model),
                "--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager",
                "--kv-cache-memory-bytes", str(2**27),
            ],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | ENVIRONMENT,
        )  # fmt: skip
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _wait(url, process, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server is not up after {START_S:g} s:\n{log.read_text()[-4000:]}")


def settings(base_url, **more):
    template = "Same? Yes or No.\n\nReference: {reference}\nCandidate: {candidate}\nSame:"
    short = {"template": template, "timeout_s": 120}
    return {"base_url": base_url, "model": "judge", "extra_body": CHOICE} | short | more


@pytest.mark.slow
def test_a_real_server_replies_yes_or_no_reproducibly(base_url):
    with GraderPool(1, timeout_s=HANG_S) as pool:
        rewards = []
        for _ in range(2):
            group = completion_group(["\\boxed{4}", "\\boxed{5}", "four", "\\boxed{2+2}"], "4")
            result, scorer = scored(pool, group, spec("judge", "judge", kwargs=settings(base_url)))
            rewards.append(result.rewards.tolist())
            assert scorer.failures == {}
    assert rewards[0] == rewards[1]
    assert rewards[0][0] == rewards[0][3] == 1.0 and set(rewards[0]) <= {0.0, 1.0}


@pytest.mark.slow
def test_a_real_server_passes_the_check_and_an_unknown_model_does_not(base_url):
    check_reward("judge", **settings(base_url))
    with pytest.raises(ValueError, match=r"judge other at kwargs\.base_url") as refusal:
        check_reward("judge", **settings(base_url, model="other"))
    assert "HTTP 404" in str(refusal.value)
