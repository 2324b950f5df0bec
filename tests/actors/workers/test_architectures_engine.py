"""Engine and trainer compute the same model, before and after updates, for every known architecture."""

import pytest

from tests.support.engines import EAGER, LIMIT, differences, trained
from tests.support.models import SHAPES, architecture

pytestmark = [pytest.mark.machine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, EAGER) for name in SHAPES), ("olmo3, sliding window", {}), ("qwen3", {})]
)
def test_eager_and_compiled_engines_compute_the_architecture_of_the_trainer(
    ray_cluster, tmp_path, name, engine
):
    gaps, moved = differences(architecture(tmp_path, name), trained(), engine)
    assert max(gaps) < LIMIT
    assert min(moved) > 0.05
