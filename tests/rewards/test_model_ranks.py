"""Reward models that are split over processes: they score as one process does, and none stays behind."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from grpo_dist.rewards.models import Classifier, check_model
from tests.support import reward_models
from tests.support.patience import HANG_S
from tests.support.reward_models import MADE, marked_tokenizer

TOKENIZER = marked_tokenizer()
TEXTS = ["one\n\ntwo\n\nso 2", "2", "a\n\nb"]

_SPLIT = """
import json, sys
import numpy as np
from torch.distributed import destroy_process_group
from grpo_dist.rewards.model_ranks import load_classifier
from tests.rewards.test_model_ranks import scored
from tests.support.reward_models import model_settings

for line in sys.stdin:
    model = load_classifier(model_settings(tensor_parallel_size=2, **json.loads(line)))
    for _ in range(2):  # ranks take more than one call
        scores = scored(model)
    print(json.dumps(scores), flush=True)
    if sys.argv[1:] == ["hold"]:
        print(model._peers[0]._process.pid, flush=True)
        sys.stdin.readline()
    model.close()
    destroy_process_group()
"""


_JOIN = """
import json, os
from dataclasses import replace
import psutil, torch.distributed
from grpo_dist.rewards import model_ranks
from grpo_dist.runtime.rendezvous import NotAMember

def join(rank):
    try:
        model_ranks._join(rank)
    except NotAMember as error:
        return str(error)
    sockets = psutil.Process().net_connections("tcp")
    return sorted({socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN})

for changes in ({}, {"secret": b"another"}):
    first, second = model_ranks._new_group(2)
    seen, done = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.write(seen[1], json.dumps(join(replace(second, **changes))).encode())
        os.read(done[0], 1)
        os._exit(0)
    print(json.dumps([join(first), json.loads(os.read(seen[0], 4096))]))
    torch.distributed.destroy_process_group()
    os.write(done[1], b".")
"""


def test_ranks_listen_on_loopback_alone_and_refuse_peers_without_their_secret():
    command = [sys.executable, "-c", _JOIN]
    out = subprocess.run(command, stdout=subprocess.PIPE, timeout=HANG_S, check=True).stdout
    listening, (ours, theirs) = map(json.loads, out.splitlines())
    assert listening == [["127.0.0.1"], ["127.0.0.1"]]
    assert "rank 1 of a process group does not know the secret" in ours
    assert "rank 0 of a process group does not know the secret" in theirs


def scored(model):
    ids = [np.array([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id], np.int32) for text in TEXTS]
    scores = model.score("1+1?", TEXTS, ids, TOKENIZER)
    return [scores.rewards.tolist(), [steps.tolist() for steps in scores.step_rewards or ()]]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", _SPLIT, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def model_args(directory):
    for kind in ("outcome", "classifier"):
        path = reward_models.random(directory / kind, kind)
        yield {"name": kind, "path": path, "kind": kind}
    for name, make in MADE.items():
        make(directory / name)
        yield {"name": name, "path": str(directory / name), "kind": name}


@pytest.mark.machine
@pytest.mark.slow
def test_two_processes_score_as_one_in_every_format(tmp_path):
    """Float32 on gloo; the plan of each architecture is transformers' own."""
    models = list(model_args(tmp_path))
    process = start()
    answers, _ = process.communicate("".join(json.dumps(model) + "\n" for model in models), timeout=HANG_S)
    assert process.returncode == 0
    for model, line in zip(models, answers.splitlines(), strict=True):
        check_model(reward_models.model_settings(tensor_parallel_size=2, **model))
        rewards, steps = scored(Classifier(reward_models.model_settings(**model)))
        ours, our_steps = json.loads(line)
        np.testing.assert_allclose(ours, rewards, rtol=0, atol=1e-5, err_msg=model["name"])
        assert len(set(np.round(rewards, 4))) == len(TEXTS)  # the samples differ by far more
        for one, other in zip(our_steps, steps, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=model["name"])


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("first", ["rank 0", "rank 1"])
def test_a_rank_that_is_killed_takes_the_other_with_it(tmp_path, first):
    model = {"name": "m", "path": reward_models.random(tmp_path, "outcome"), "kind": "outcome"}
    process = start("hold")
    process.stdin.write(json.dumps(model) + "\n")
    process.stdin.flush()
    process.stdout.readline()
    peer = psutil.Process(int(process.stdout.readline()))
    sockets = [s for rank in (psutil.Process(process.pid), peer) for s in rank.net_connections("tcp")]
    assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    os.kill(process.pid if first == "rank 0" else peer.pid, signal.SIGKILL)
    assert process.wait(HANG_S) == (-signal.SIGKILL if first == "rank 0" else 1)
    end = time.monotonic() + HANG_S
    while peer.is_running() and peer.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 4}, "4 does not divide its num_attention_heads = 2; use a divisor"),
        ({"tensor_parallel_size": 2}, "model_type bert has no plan for splitting it in transformers; use 1"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_a_run(tmp_path, changes, message):
    path = reward_models.random(tmp_path, "outcome")
    if "bert" in message:
        from transformers import BertConfig

        plain = BertConfig(architectures=["BertForSequenceClassification"], num_labels=1)
        plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_model(reward_models.model_settings(path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2, "gpu_share": 0.5}, "either shares a GPU or is split over several"),
        ({"tensor_parallel_size": 2, "trust_remote_code": True}, "remote code .* no tensor-parallel plan"),
    ],
)
def test_settings_that_contradict_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reward_models.model_settings("p", **changes)
