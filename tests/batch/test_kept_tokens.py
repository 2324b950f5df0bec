"""Sampling masks stay with their samples through records, files, batches, updates and epochs."""

import pickle
from dataclasses import replace

import numpy as np

from grpo_dist.batch.rows import select_update, shuffle_updates, split_updates, with_demonstrations
from grpo_dist.environments.dialogue import Dialogue
from grpo_dist.loop.metrics import rollout_metrics
from grpo_dist.observe.samples import write_groups
from grpo_dist.types import KeptTokens, Prompt, Sampling, Task
from tests.support import made_groups
from tests.support.made_episodes import generated
from tests.support.made_groups import shard

V = 108


def same(a, b):
    return a is b or all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("counts", "ids", "bits"))


def lists_of(kept):
    """Unpack by position: [] where all tokens were kept."""
    lists, ids, bits = [], kept.ids.tolist(), iter(kept.bits)
    for count, listed in zip(kept.counts.tolist(), kept.are_listed, strict=True):
        if listed:
            lists.append(ids[:count])
            del ids[:count]
        else:
            lists.append(np.flatnonzero(np.unpackbits(next(bits), bitorder="little")).tolist())
    return lists


def test_a_mask_takes_no_more_than_a_list_or_a_bit_for_each_token():
    lists = [[7, 19], [], [1, 2, 70], list(range(80)), [79]]
    kept = KeptTokens.from_lists(lists, 80)
    assert kept.counts.tolist() == [2, 0, 3, 0, 1] and kept.ids.tolist() == [7, 19, 79]
    assert kept.bits.shape == (1, 10)
    assert lists_of(kept) == [[7, 19], [], [1, 2, 70], [], [79]]
    assert kept.contain(np.array([19, 5, 70, 3, 79])).all()
    assert kept.contain(np.array([18, 5, 71, 3, 78])).tolist() == [False, True, False, True, False]
    assert lists_of(kept.select(np.array([4, 2, 1]))) == [[79], [1, 2, 70], []]
    joined = KeptTokens.join([(kept, 5), (None, 2), (kept.select(np.array([0])), 1)])
    assert lists_of(joined) == [*lists_of(kept), [], [], [7, 19]]
    assert KeptTokens.join([(None, 3)]) is None
    full = KeptTokens.from_lists([np.arange(0, 150_000, 2)] * 3, 151_936)
    assert len(pickle.dumps(full)) < 3 * 151_936 / 8 + 500


def test_messages_and_checkpoints_keep_masks(tmp_path):
    """Also of further rows. Samples without masks take no extra byte, and the records of a run have none."""
    plain = made_groups.episode_groups(rewritten=0.6)
    groups = made_groups.truncated(plain, V)
    made_groups.check_stored(groups, tmp_path, "kept", same)
    write_groups(tmp_path / "plain.parquet", plain, for_training=True)
    assert (tmp_path / "plain.parquet").read_bytes() == _written(tmp_path, plain)


def _written(tmp_path, groups):
    write_groups(tmp_path / "again.parquet", groups)
    return (tmp_path / "again.parquet").read_bytes()


def test_a_batch_its_updates_and_later_epochs_have_the_masks_of_their_rows():
    groups = made_groups.truncated(made_groups.episode_groups(rewritten=0.6), V)
    batch = made_groups.batch_of(groups)
    rows = [row.kept for g in groups for r in g.rollouts for row in r.rows]
    assert len(rows) > sum(len(g.rollouts) for g in groups) and None in rows
    assert all(map(same, batch.kept, rows))
    updates = split_updates(batch, num_groups=3, num_updates=3)
    later = [select_update(updates, u) for u in shuffle_updates(batch, num_groups=3, num_updates=3, seed=1)]
    for part in (*shard(batch, 2), *updates, *later):
        assert all(same(kept, rows[row]) for kept, row in zip(part.kept, part.row_ids.tolist(), strict=True))
    both = with_demonstrations(batch, made_groups.demonstrations(3), first_row=len(batch))
    assert both.kept[: len(rows)] == batch.kept and both.kept[len(rows) :] == (None,) * 3
    assert all(map(same, pickle.loads(pickle.dumps(batch)).kept, rows))
    assert made_groups.batch_of(made_groups.episode_groups()).kept is None


def test_an_episode_has_the_masks_of_its_actions_and_none_of_observed_tokens():
    prompt = Prompt("p", np.array([1, 2], np.int32), "1", "test", task=Task("guess"))
    row = Dialogue(None, prompt)._rows[0]
    row.add(replace(generated([5, 6]), kept=KeptTokens.from_lists([[5, 9], [6]], V)))
    row.give([7, 8])
    row.add(replace(generated([5]), kept=KeptTokens.from_lists([range(2, V)], V)))
    row.give([3])  # after the last action: not part of the sample
    arrays = row.arrays()
    assert arrays["completion_ids"].tolist() == [5, 6, 7, 8, 5]
    assert lists_of(arrays["kept"]) == [[5, 9], [6], [], [], list(range(2, V))]


def test_metrics_say_how_many_tokens_were_kept():
    kept = KeptTokens.from_lists([[5], [5, 6, 7], range(V), []], V)
    group = made_groups.group_of([1.0, 0.0], [4, 4])
    one, two = group.rollouts
    sampled = np.array([True, True, True, False])
    group = replace(group, rollouts=(replace(one, kept=kept, sampled=sampled), two))
    metrics = rollout_metrics([group], 0)
    assert metrics["sampling/kept_tokens_mean"] == 2.0
    assert metrics["sampling/kept_all_share"] == 1 - 2 / 3
    assert not any("kept" in name for name in rollout_metrics([made_groups.group_of([1.0], [4])], 0))


def test_which_samples_need_masks():
    truncated = (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(0.5, min_p=0.1))
    assert all(s.is_truncated and not s.untruncated.is_truncated for s in truncated)
    assert not Sampling(0.0, top_p=0.9).is_truncated and not Sampling(0.3).is_truncated
