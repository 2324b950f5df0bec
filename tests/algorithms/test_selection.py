"""The choice of tokens over a whole update: numbers worked by hand."""

import torch

from grpo_dist.algorithms.selection import lowest, random_keys, token_covariances, up_to
from tests.support.numbers_by_hand import close, row


def test_covariances_are_products_of_differences_from_the_means_of_the_update():
    logprobs, advantages = row(-1.0, -3.0, -2.0, -9.0), row(1.0, -1.0, 3.0, 9.0)
    mask = torch.tensor([[True, True, True, False]])
    got = token_covariances(logprobs, advantages, mask, mean_logprob=-2.0, mean_advantage=1.0)
    close(got[0, :3], row(0.0, 2.0, 0.0)[0], 1e-12)
    assert got[0, 3] == -torch.inf


def test_the_lowest_are_as_many_as_asked_for_also_where_values_are_equal():
    values, ids = torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0]), torch.tensor([4, 9, 7, 8, 1])
    for count, chosen in (
        (0, []), (1, [7]), (2, [7, 8]), (3, [7, 8, 9]), (4, [1, 7, 8, 9]), (9, [1, 4, 7, 8, 9]),
    ):  # fmt: skip
        last = lowest(values, ids, count)
        assert sorted(ids[up_to(values, ids, last)].tolist()) == chosen


def test_random_keys_depend_on_id_and_seed_alone_and_are_spread_evenly():
    ids = torch.arange(20_000)
    keys = random_keys(ids, 3)
    assert torch.equal(random_keys(ids.flip(0), 3).flip(0), keys)
    assert not torch.equal(random_keys(ids, 4), keys) and len(keys.unique()) == len(ids)
    assert float(keys.min()) >= 0 and float(keys.max()) < 1
    shares = torch.histc(keys.float(), bins=10, min=0, max=1) / len(ids)
    assert float((shares - 0.1).abs().max()) < 0.01
