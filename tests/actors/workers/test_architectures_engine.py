"""Engine and trainer compute the same model, before and after updates, for every architecture there is."""

import pytest

from tests.support.engines import EAGER, LIMIT, differences, trained
from tests.support.models import SHAPES, architecture

pytestmark = [pytest.mark.machine, pytest.mark.slow]


@pytest.mark.parametrize("name", SHAPES)
def test_engine_and_trainer_compute_the_same_architecture(ray_cluster, tmp_path, name):
    own, moved = differences(architecture(tmp_path, name), trained(), EAGER)
    assert max(own) < LIMIT
    assert min(moved) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmo3, sliding window", "qwen3"])
def test_so_does_an_engine_that_compiles(ray_cluster, tmp_path, name):
    own, moved = differences(architecture(tmp_path, name), trained(), {})
    assert max(own) < LIMIT
    assert min(moved) > 0.05
