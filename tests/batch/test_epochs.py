"""Later epochs over a batch deal whole groups to its updates again; no row is lost on any number of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.batch.rows import select_update, shuffle_updates, split_updates
from grpo_dist.batch.shared_prefixes import shared_prefixes
from grpo_dist.config.files import ConfigError, load_config
from grpo_dist.loop.groups import ScoredBatch, ScoredGroup
from grpo_dist.loop.staging import Staging
from grpo_dist.loop.updates import make_updates
from grpo_dist.policy.loss import batch_loss
from grpo_dist.policy.packing import _stream_indices
from grpo_dist.types import Denominators, EpochUpdate
from tests.support import fakes, made_groups
from tests.support.good_inputs import CONFIG
from tests.support.losses import change, objective
from tests.support.made_groups import group_of, shard

GROUPS, UPDATES = 6, 3


def by_id(batch):
    """Map row ids to tokens and advantages without padding."""
    rows = zip(
        batch.row_ids.tolist(), batch.tokens, batch.policy.advantages, batch.lengths.tolist(), strict=True
    )
    return {row: (tokens[:n].tolist(), values[:n].tolist()) for row, tokens, values, n in rows}


@pytest.mark.parametrize("make", [made_groups.batch, made_groups.episode_batch])
def test_every_epoch_has_every_row_once_in_whole_groups_with_their_own_denominators(make):
    batch = make(groups=GROUPS)
    epochs = []
    for seed in range(5):
        epoch = shuffle_updates(batch, num_groups=GROUPS, num_updates=UPDATES, seed=seed)
        assert sorted(np.concatenate([u.row_ids for u in epoch]).tolist()) == batch.row_ids.tolist()
        groups = [set(batch.group_ids[torch.from_numpy(u.row_ids)].tolist()) for u in epoch]
        assert [len(ids) for ids in groups] == [GROUPS // UPDATES] * UPDATES
        epochs.append(groups)
        for update in epoch:
            alone = batch.select(update.row_ids.tolist())
            assert update.denominators.tokens == float(alone.policy.mask.sum())
            assert update.denominators.prompts == GROUPS // UPDATES
        for name in ("tokens", "sequences"):
            assert sum(getattr(u.denominators, name) for u in epoch) == getattr(batch.denominators, name)
    assert any(groups != epochs[0] for groups in epochs)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_regroup_their_rows_to_the_same_updates(ranks):
    """For any number of ranks, also ranks without a row of an update."""
    batch = made_groups.episode_batch(groups=GROUPS)
    updates = split_updates(batch, num_groups=GROUPS, num_updates=UPDATES)
    by_rank = list(zip(*(shard(update, ranks) for update in updates), strict=True))
    for update in shuffle_updates(batch, num_groups=GROUPS, num_updates=UPDATES, seed=1):
        parts = [select_update(rows, update) for rows in by_rank]
        merged = {row: values for part in parts for row, values in by_id(part).items()}
        whole = by_id(batch)
        assert merged == {row: whole[row] for row in update.row_ids.tolist()}
        assert sum(map(len, parts)) == len(update.row_ids)
        assert all(part.denominators == update.denominators for part in parts)


@pytest.mark.parametrize("policy_loss", sorted(POLICY_LOSSES))
def test_the_gradient_of_an_epoch_without_denominators_does_not_depend_on_the_grouping(policy_loss):
    """With token-sum the updates of an epoch add up to one update of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    batch = made_groups.batch(groups=GROUPS, reference=False)
    noise = 0.1 * torch.randn(batch.tokens.shape, generator=generator)
    whole = change(batch, policy={"old_logprobs": batch.policy.rollout_logprobs})
    settings = objective(loss=policy_loss, correction="tis", aggregation="token-sum")

    def gradient(parts):
        logprobs = (batch.policy.rollout_logprobs + noise).requires_grad_()
        for part in parts:
            rows = logprobs[part.row_ids, : part.tokens.shape[1]]
            batch_loss(rows, part, settings)[0].backward()
        return logprobs.grad

    updates = split_updates(whole, num_groups=GROUPS, num_updates=UPDATES)
    epoch = shuffle_updates(batch, num_groups=GROUPS, num_updates=UPDATES, seed=3)
    expected = gradient([whole])
    assert expected.any()
    torch.testing.assert_close(gradient([select_update(updates, u) for u in epoch]), expected)


def configured(**changes):
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2, "epochs_per_batch": 3}
    return fakes.config(batch=batch | {"shuffle_epochs": True}, **changes)


def scored(*groups):
    return [ScoredGroup(group, []) for group in groups]


def ids(epochs):
    return [[sorted(u.row_ids.tolist()) for u in epoch] for epoch in epochs]


def test_updates_of_later_epochs_follow_from_the_seed_and_the_step():
    """A resumed run then has the updates of an uninterrupted run."""
    groups = scored(*(group_of([1, 0], [2, 3]) for _ in range(4)))
    first = [ids(make_updates(configured(), groups, step, kl_coef=0.0)[1]) for step in range(6)]
    again = [ids(make_updates(configured(), groups, step, kl_coef=0.0)[1]) for step in range(6)]
    assert first == again and all(len(epochs) == 2 for epochs in first)
    assert len({str(epoch) for epochs in first for epoch in epochs}) > 3
    other = [ids(make_updates(configured(seed=5), groups, step, kl_coef=0.0)[1]) for step in range(6)]
    assert other != first
    plain = fakes.config(batch={"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2})
    assert make_updates(plain, groups, 0, kl_coef=0.0)[1] == []


def test_the_needed_tokens_cover_all_epochs():
    """Two prefixes of 40 tokens, two groups of each, two updates: 4 x 40 or 2 x 40 tokens by the grouping."""
    group = group_of([1, 0], [2, 2], prompt_tokens=41)
    groups = [replace(group, prompt=prompt_of(group, first=i % 2, last=i)) for i in range(4)]
    sizes = set()
    for step in range(6):
        config = configured()
        updates, later = make_updates(config, scored(*groups), step, kl_coef=0.0)
        every = [*updates, *(select_update(updates, update) for epoch in later for update in epoch)]
        computed = [stream_of(update) for update in every]
        staged = Staging(config, fakes.World(), Moments())._stage(step, ScoredBatch(scored(*groups)), 0.0)
        assert staged.needed_tokens == pytest.approx(sum(computed) / len(every))
        sizes.add(staged.needed_tokens)
    assert len(sizes) > 1


def prompt_of(group, *, first, last):
    ids = np.r_[np.full(40, first + 1), last + 10].astype(np.int32)
    return replace(group.prompt, uid=f"p{last}", token_ids=ids)


def stream_of(update):
    indices = _stream_indices(update.lengths.tolist(), shared_prefixes(update))
    return int(indices.max()) + 1


def test_no_update_of_any_epoch_is_left_without_rows():
    """Two of four groups have a signal. If an update of a later epoch has neither, its rows stay."""
    silent, useful = group_of([1, 1], [4, 4]), group_of([1, 0], [2, 3])
    groups = scored(useful, silent, useful, silent)
    for step in range(20):
        updates, later = make_updates(configured(), groups, step, kl_coef=0.0)
        kept = {row for update in updates for row in update.row_ids.tolist()}
        assert {0, 1, 4, 5} <= kept
        for update in (u for epoch in later for u in epoch):
            assert kept & set(update.row_ids.tolist())
            assert update.denominators.sequences == 4  # idle samples count


@pytest.mark.parametrize("top_k", [0, 3])
def test_demonstrations_and_teacher_log_probs_stay_with_their_update(top_k):
    batch = made_groups.mixed_batch(top_k=top_k)
    updates = [batch, replace(batch, row_ids=batch.row_ids + 100)]
    rows = [batch.row_ids.numpy()[::2], batch.row_ids.numpy()[1::2] + 100]
    for part in rows:
        update = select_update(updates, made_update(np.concatenate(rows), demonstrated=7.0))
        assert set(part.tolist()) <= set(update.row_ids.tolist()) and update.denominators.demonstrated == 7.0
        assert update.demonstrated.shape == update.tokens.shape
        for row in update.row_ids.tolist() if top_k else ():
            at, size = update.row_ids.tolist().index(row), int(batch.lengths[row % 100])
            for name in ("top_ids", "top_logprobs"):
                ours = getattr(update.teacher, name)[at, :size]
                theirs = getattr(batch.teacher, name)[row % 100, :size]
                assert ours.shape == (size, top_k) and torch.equal(ours, theirs)


def made_update(row_ids, **denominators):
    return EpochUpdate(row_ids, Denominators(**{"tokens": 0.0, "sequences": 0.0} | denominators))


@pytest.mark.parametrize("changes", [("batch.epochs_per_batch=2",), ("batch.updates_per_step=2",)])
def test_shuffled_epochs_need_several_epochs_and_updates(tmp_path, changes):
    (tmp_path / "base.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match=r"groups are dealt to updates again"):
        load_config(tmp_path / "base.yaml", ["batch.shuffle_epochs=true", *changes])
