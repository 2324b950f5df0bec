"""Selections over all tokens of an update are the same for any number of ranks."""

import multiprocessing

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.selection import token_covariances
from grpo_dist.policy.preparation import Preparation
from tests.support import made_groups
from tests.support.losses import change, objective
from tests.support.made_groups import shard
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

RATIOS = {"kind": "tis", "high": 1.5, "normalize": True}
HOW = {
    "kl_cov": objective(loss={"name": "kl_cov", "cov_share": 0.1}),
    "clip_cov": objective(loss={"name": "clip_cov", "cov_share": 0.1, "cov_low": -0.5, "cov_high": 2.0}),
    "share": objective(loss={"name": "clip_cov", "cov_share": 1.0, "cov_low": 0.0, "cov_high": 1.0}),
    "token": objective(correction=RATIOS),
    "sequence": objective(correction={**RATIOS, "level": "sequence"}),
}


@pytest.fixture(scope="module")
def batch():
    """Return rows with gaps in their masks."""
    return made_groups.episode_batch(groups=5, rewritten=0.4)


def logprobs_of(batch):
    """Return the engine's log-probs, moved by a function of the row id."""
    moved = 0.3 * torch.sin(7.0 * batch.row_ids[:, None] + torch.arange(batch.tokens.shape[1]))
    return batch.policy.rollout_logprobs + moved, torch.zeros(batch.tokens.shape)


def prepare(rank, world, rows, reports, store, results):
    """Run as one rank, in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    preparation = Preparation(logprobs_of, torch.device("cpu"), reports)
    choices = {}
    for name, how in HOW.items():
        algorithm = how.algorithm
        step = preparation.prepare_step(rows, algorithm, moves=True)
        mean_weight = preparation.prepare_update(step, algorithm, number=5).choice.mean_weight
        step = change(step, policy={"old_logprobs": rows.policy.rollout_logprobs})
        ready = preparation.prepare_update(step, algorithm, number=5)
        choices[name] = mean_weight, {} if ready.choice.selected is None else by_row(ready)
    results.put((rank, choices))
    dist.destroy_process_group()


def by_row(batch):
    return {
        int(row): np.flatnonzero(selected).tolist()
        for row, selected in zip(batch.row_ids, batch.choice.selected, strict=True)
    }


def on_ranks(parts, path, *, shared=False):
    """Return means and selected tokens of ``parts``, one process each. ``shared``: all have the same rows."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = [
        (i, len(parts), part, not shared or i == 0, path / "store", results) for i, part in enumerate(parts)
    ]
    processes = [context.Process(target=prepare, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    answers = [results.get(timeout=HANG_S) for _ in processes]
    for process in processes:
        process.join(timeout=HANG_S)
    return [choices for _, choices in sorted(answers, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def whole(batch, tmp_path_factory):
    (choices,) = on_ranks([batch], tmp_path_factory.mktemp("one"))
    return choices


def test_the_chosen_tokens_and_the_mean_weight_are_those_of_their_definition(batch, whole):
    mask, (logprobs, _) = batch.policy.mask, logprobs_of(batch)
    count = int(0.1 * batch.denominators.tokens)
    products = token_covariances(
        logprobs, batch.policy.advantages, mask,
        mean_logprob=float(logprobs[mask].double().mean()),
        mean_advantage=float(batch.policy.advantages[mask].double().mean()),
    )  # fmt: skip
    highest = products >= products[mask].sort(descending=True).values[count - 1]
    assert whole["kl_cov"][1] == {i: np.flatnonzero(highest[i]).tolist() for i in range(len(batch))}
    ratio = (logprobs - batch.policy.rollout_logprobs).exp()
    advantages, tokens = batch.policy.advantages, batch.denominators.tokens
    clipped = ((advantages < 0) & (ratio < 0.8)) | ((advantages > 0) & (ratio > 1.2))
    for name, low, high, most in (("share", 0.0, 1.0, tokens), ("clip_cov", -0.5, 2.0, count)):
        among = mask & (products > low) & (products < high) & ~clipped
        chosen = [(row, column) for row, columns in whole[name][1].items() for column in columns]
        assert len(chosen) == min(most, int(among.sum())) > 0 and all(among[at] for at in chosen)
    for level in ("token", "sequence"):
        weights, _ = correction(
            logprobs, batch.policy.rollout_logprobs, mask, kind="tis", level=level, low=0, high=1.5
        )
        rows = mask.any(dim=1)
        of_rows = weights.sum(dim=1)[rows] / mask.sum(dim=1)[rows]
        mean = weights[mask].double().mean() if level == "token" else of_rows.double().mean()
        assert whole[level][0] == pytest.approx(float(mean), rel=1e-6)
    assert whole["kl_cov"][0] == 1.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_choose_as_one_that_has_all_rows(batch, whole, tmp_path, ranks):
    by_rank = on_ranks(shard(batch, ranks), tmp_path)
    for name, (mean, rows) in whole.items():
        assert {row: columns for rank in by_rank for row, columns in rank[name][1].items()} == rows
        assert [rank[name][0] for rank in by_rank] == pytest.approx([mean] * ranks, rel=1e-12)


def test_ranks_that_share_their_rows_count_them_once(batch, whole, tmp_path):
    for choices in on_ranks([batch, batch], tmp_path, shared=True):
        expected = {name: (pytest.approx(mean, rel=1e-12), rows) for name, (mean, rows) in whole.items()}
        assert choices == expected
