"""Whole runs of a real pretrained model with its chat template, of all weights and of adapters: killed and
resumed with the same numbers; transformers and vLLM read the export and compute the same log-probs.

make evidence ARGS=tests/evidence/test_real_model_runs.py
"""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.patience import HANG_S
from tests.support.real_runs import metrics, run, without_clock
from tests.support.smollm2 import real_model

pytestmark = pytest.mark.evidence

SETTINGS = (
    "steps=3", "model.path=demo:smollm2", "data.max_prompt_tokens=96", "data.eval=[]",
    "policy.num_workers=1", "policy.zero_stage=0", "policy.optimizer.lr=1.0e-5", "sampling.max_new_tokens=12",
    "batch.micro_batch_tokens=1024", "algorithm.kl.coef=0", "checkpoint.every=1", "checkpoint.export=true",
    "evaluation.before=false",
)  # fmt: skip
ADAPTERS = ("policy.lora={rank: 8, alpha: 16}", "policy.optimizer.lr=1.0e-4")
ASKED = "What is 17 + 25?"
# Uses nothing of this project. Prints ids and log-probs of a greedy completion.
VLLM = """
import json, sys
from vllm import LLM, SamplingParams
how = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**28}
engine, ids = LLM(sys.argv[1], **how), json.loads(sys.argv[2])
(made,) = engine.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0, max_tokens=12, logprobs=0))
tokens = made.outputs[0].token_ids
logprobs = [own[token].logprob for own, token in zip(made.outputs[0].logprobs, tokens)]
print("FOUND", json.dumps([list(tokens), logprobs]))
"""


@pytest.mark.parametrize("adapters", [(), ADAPTERS], ids=["all weights", "adapters"])
def test_a_killed_run_resumes_to_the_same_numbers_and_its_export_is_read_by_others(tmp_path, adapters):
    real_model()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    run(whole, *SETTINGS, *adapters)
    run(killed, *SETTINGS, *adapters, check=False, kill_after="step_000002")
    run(killed, *SETTINGS, *adapters)
    lines = without_clock(metrics(whole))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert without_clock(metrics(killed)) == lines
    assert all(line["policy/grad_norm"] > 0 for line in lines)
    assert max(line["mismatch/logprob_diff_mean"] for line in lines) < 2e-5
    (exported,) = {path.parent for path in (whole / "runs/run").rglob("model*.safetensors")}
    assert_both_read(exported)


def assert_both_read(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    messages = [{"role": "user", "content": ASKED}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    command = [sys.executable, "-c", VLLM, str(exported), json.dumps(ids)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=exported)
    assert done.returncode == 0, done.stderr[-3000:]
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    completion, logprobs = json.loads(answer.removeprefix("FOUND "))
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids + completion])).logits[0, len(ids) - 1 : -1].double()
    expected = logits.log_softmax(-1)
    assert expected.argmax(-1).tolist() == completion
    gap = (expected.gather(1, torch.tensor(completion)[:, None])[:, 0] - torch.tensor(logprobs)).abs()
    assert len(completion) > 2 and float(gap.mean()) < 1e-5
