"""The commands of the guide "After training", on made-up runs: exports, merging, vLLM's server."""

import json
import math
import os
import shlex
import subprocess
import sys
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from tests.support import fakes
from tests.support.documents import ROOT, blocks
from tests.support.made_weights import write_run
from tests.support.patience import HANG_S, wait_until
from tests.support.processes import free_port

ENGINE = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
GUIDE = ROOT / "grpo_dist/guides/after_training.md"


@pytest.fixture
def place(tiny_model, tmp_path, monkeypatch):
    """Return the guide's directory: a run that trained all weights, and one that trained an adapter."""
    for name, policy in (("mine", {}), ("lora", {"lora": {"rank": 4}})):
        config = fakes.config(model={"path": str(tiny_model), "dtype": "float32"}, name=name, policy=policy)
        for step in (2, 4):
            write_run(tmp_path / "runs" / name, config, tiny_model, step)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, **how):
    process = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, **how)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-3000:]


@pytest.mark.machine
@pytest.mark.slow
def test_the_guide_exports_merges_and_serves(place, tiny_model):
    snippets = blocks(GUIDE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for command in next(block for block in snippets if block.mode == "run").commands:
        run([sys.executable, "-m", "grpo_dist.cli", *shlex.split(command)[1:]], env=environment)
    run([sys.executable, "-c", next(block for block in snippets if block.language == "python").text])
    assert (place / "merged/model.safetensors").is_file() and (place / "mine-2/README.md").is_file()
    serve = next(c for b in snippets for c in b.text.splitlines() if "--lora-modules" in c)
    port = free_port()
    settings = [
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "128",
        "--max-num-seqs", "2", "--enforce-eager", "--kv-cache-memory-bytes", str(2**27),
    ]  # fmt: skip
    _, _, model, *options = shlex.split(serve.replace("BASE", str(tiny_model)))
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    with open(place / "server.log", "w") as log:
        server = subprocess.Popen(
            [*command, *settings], stdout=log, stderr=log, start_new_session=True, env=os.environ | ENGINE
        )
    try:
        answers = [ask(server, port, model, place / "server.log") for model in (str(tiny_model), "mine")]
    finally:
        server.terminate()
        server.wait(timeout=HANG_S)
    assert all(math.isfinite(value) for answer in answers for value in answer)
    assert answers[0] != pytest.approx(answers[1], abs=1e-3)  # the adapter is in use


def ask(server, port, model, log):
    """Return the log-probs of the first tokens that ``model`` writes, once the server answers."""
    request = {"model": model, "prompt": "1+2=", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    address = f"http://127.0.0.1:{port}/v1/completions"

    def answer():
        assert server.poll() is None, log.read_text()[-3000:]
        posted = Request(address, json.dumps(request).encode(), {"Content-Type": "application/json"})
        try:
            with urlopen(posted, timeout=HANG_S) as reply:
                return json.load(reply)["choices"][0]["logprobs"]["token_logprobs"]
        except HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        except URLError:  # the server does not listen yet
            return None

    return wait_until(answer, lambda: log.read_text()[-3000:])
