"""Numbers of Dr. GRPO: understand-r1-zero's train_zero_math.py, and the learner of oat that it runs."""

import gc
import logging
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from tests.algorithms.peers.recording.source import Settings, definitions

COMMIT = "dfca49dd460ee7cc8e4a5a162c876a7fd6993b87, oat c1a074c320ff5ca9fe9a4f669bf05208e2f310be"
NAMES = ("plain", "short", "far", "equal", "binary")  # it knows no tokens within an answer that were given


def record(root, cases):
    peer = _load(root)
    for kind in ("drgrpo", "grpo"):
        for name in (*NAMES, "empty"):
            x = cases.of(name)
            settings = {"critic_type": kind, "num_samples": _size(x)}
            rewards = x["rewards"][:, None]
            own = SimpleNamespace(args=Settings(settings))
            found = peer.learner.compute_monte_carlo_advantages(own, rewards, None)
            cases.add("advantages", "compute_monte_carlo_advantages", settings, name, {"advantages": found})
    for kind in ("drgrpo", "grpo"):
        for further in (
            {}, {"cliprange": 0.05}, {"tis_c": 1.2}, {"tis_c": 2.0}, {"beta": 0.04},
            {"reinforce_update": True},
        ):  # fmt: skip
            for name in NAMES[:3]:
                settings = {"critic_type": kind, "generate_max_length": 10, **further}
                cases.loss(
                    "learning_step", settings, name, partial(_loss, peer, settings), torch.float32
                )  # its own type
    for name in ("plain", "far"):
        x = cases.of(name)
        found = peer.ops.masked_whiten(x["advantages"], x["mask"]) * x["mask"]
        cases.add("whiten", "masked_whiten", {"values": "advantages"}, name, {"values": found})


def _size(x):
    return len(x["mask"]) // (int(x["groups"].max()) + 1)


def _load(root):
    oat = root.parent / "oat" / "oat"
    ops = definitions(oat / "utils/ops.py", "masked_sum", "masked_mean", "masked_var", "masked_whiten")
    learner = definitions(root / "train_zero_math.py", "compute_monte_carlo_advantages")
    step = definitions(
        oat / "algorithms/ppo.py", "learning_step", "get_completion_mask", masked_sum=ops.masked_sum,
        masked_mean=ops.masked_mean, masked_whiten=ops.masked_whiten, logging=logging, gc=gc, time=time,
    )  # fmt: skip
    return SimpleNamespace(ops=ops, learner=learner, step=step)


def _loss(peer, settings, x):
    """Run one learning step on rows whose ids are their numbers; the model gives the current log-probs."""
    rows, tokens = x["mask"].shape
    how = Settings(
        {
            "cliprange": 0.2, "tis_c": None, "beta": 0.0, "reinforce_update": False, "reward_scale": 1.0,
            "train_batch_size_per_device": rows, "temperature": 1.0, "num_ppo_epochs": 1,
            "kl_penalty_coef": 0.0, "num_samples": _size(x),
        }
        | settings
    )  # fmt: skip
    found, passes = [], [x["old"], *([x["reference"]] if how["beta"] else []), x["now"]]
    lengths = x["mask"].sum(dim=1)
    ids = torch.arange(rows)[:, None].expand(rows, tokens + 1).contiguous()
    trajectory = {
        "input_ids": ids,
        "attention_mask": (torch.arange(tokens + 1)[None] <= lengths[:, None]).long(),
        "rewards": [[reward] for reward in x["rewards"].tolist()],
        "prompt_ids_lens": [1] * rows,
        "action_logprobs": [own[:n].tolist() for own, n in zip(x["engine"], lengths.tolist(), strict=True)],
        "loss_masks": [1.0] * rows,
    }
    aggregator = (
        partial(peer.ops.masked_sum, constant_normalizer=how["generate_max_length"])
        if how["critic_type"] == "drgrpo"
        else peer.ops.masked_mean
    )

    def logps(model, input_ids, att_mask, temperature, compute_entropy):
        own = passes.pop(0)[input_ids[:, 0]][:, : input_ids.shape[1] - 1]
        return own, torch.zeros_like(own)

    def backward(loss, *_):
        found.append(loss)
        raise _HasLoss

    own = SimpleNamespace(
        args=how, model=None, ref_model="reference" if how["beta"] else None, optimizer=None,
        strategy=SimpleNamespace(backward=backward), get_batch_logps=logps, masked_aggregator=aggregator,
        get_completion_mask=lambda *given: peer.step.get_completion_mask(None, *given),
    )  # fmt: skip
    own.compute_monte_carlo_advantages = lambda *given: peer.learner.compute_monte_carlo_advantages(
        own, *given
    )
    _run(peer, own, trajectory, x["now"].dtype)
    return found[0]


class _HasLoss(Exception):
    """Ends a step that has its loss."""


def _run(peer, own, trajectory, dtype):
    """Run the step on this machine: it asks for a CUDA device, and makes tensors of the default type."""
    device, default = torch.cuda.current_device, torch.get_default_dtype()
    torch.cuda.current_device = lambda: "cpu"
    torch.set_default_dtype(dtype)
    np.random.seed(0)  # its order of rows
    try:
        with suppress(_HasLoss):
            peer.step.learning_step(own, trajectory)
    finally:
        torch.cuda.current_device = device
        torch.set_default_dtype(default)
