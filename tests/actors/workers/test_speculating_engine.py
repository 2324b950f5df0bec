"""A real engine that drafts returns the same tokens and log-probs as one that does not."""

import pytest

from tests.support.engines import WAYS, Engine, sampled_without_drafts
from tests.support.real_engine import same

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SEEDS = (1, 2, 3)
OTHER_SEEDS = (3, 4, 5)  # one of them in SEEDS


@pytest.fixture(scope="module")
def expected(ray_cluster, tiny_model):
    """Return the samples of an engine without drafts, by way and seeds."""
    return sampled_without_drafts(tiny_model, SEEDS, OTHER_SEEDS)


@pytest.fixture(scope="module")
def drafting(expected, tiny_model):  # after the engine without drafts, which has the same name
    engine = Engine(tiny_model, tokens=4, max_sequences=16)
    yield engine
    engine.close()


def test_drafts_of_a_warm_up_do_not_count(drafting):
    """Also after other tests: each reads the counts last."""
    assert drafting.counts() == (0, 0, 0)


@pytest.mark.parametrize("way", WAYS)
def test_samples_with_and_without_drafts_agree_to_the_last_bit(drafting, expected, way):
    drafting.counts()
    # The second time every text is in the history, so nearly every draft is right. Then known seeds next to
    # new ones: right and wrong drafts in one step of the engine.
    for seeds in (SEEDS, SEEDS, OTHER_SEEDS):
        for group, without in zip(drafting.sample(seeds, **WAYS[way]), expected[way, seeds], strict=True):
            assert same(group, without)
    drafts, drafted, accepted = drafting.counts()
    assert 0 < drafts < accepted < drafted
