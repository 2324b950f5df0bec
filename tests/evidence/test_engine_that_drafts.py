"""Lossless speculative decoding: an engine with drafts and one without give over 1,000 bit-identical samples.

make evidence ARGS=tests/evidence/test_engine_that_drafts.py
"""

import pytest

from tests.support.engines import WAYS, Engine, sampled_without_drafts
from tests.support.real_engine import PROMPTS, same

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(3600)]

SEEDS, OTHER_SEEDS = tuple(range(60)), tuple(range(30, 90))  # half of the second are in the first


def test_over_1000_samples_are_those_without_drafts(ray_cluster, tiny_model):
    expected = sampled_without_drafts(tiny_model, SEEDS, OTHER_SEEDS)
    drafting = Engine(tiny_model, tokens=4, max_sequences=16)
    samples = 0
    for (way, seeds), groups in expected.items():
        for group, without in zip(drafting.sample(seeds, **WAYS[way]), groups, strict=True):
            assert same(group, without), (way, seeds)
            samples += len(group)
    drafts, drafted, accepted = drafting.counts()
    drafting.close()
    print(f"{samples} samples; {drafts} drafts of {drafted} tokens, {accepted} of them right")
    assert samples == 2 * len(WAYS) * len(PROMPTS) * 60 > 1000
    assert drafts > 0 and 0 < accepted < drafted
