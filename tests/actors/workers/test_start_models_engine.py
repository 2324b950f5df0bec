"""Engine and trainer compute the same model for start models inside a wrapper, or with an adapter."""

import pytest

from grpo_dist.policy.lora import apply_start_adapter
from grpo_dist.policy.text_model import usable_model
from tests.support.engines import EAGER, LIMIT, differences, largest, trained
from tests.support.models import LORA, biased_experts, loaded, made_adapter, wrapper
from tests.support.real_engine import World
from tests.support.real_ranks import AdaptedWorker

pytestmark = [pytest.mark.machine, pytest.mark.slow]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))


def test_the_text_model_inside_a_wrapper(ray_cluster, tmp_path):
    wrapper(tmp_path / "gemma3", "gemma3")
    text_dir = usable_model(tmp_path / "gemma3", "model.path = gemma3", print)
    gaps, moved = differences(text_dir, trained(), EAGER)
    assert max(gaps) < LIMIT
    assert min(moved) > 0.05


def test_a_model_whose_checkpoint_has_buffers(ray_cluster, tmp_path):
    """Reloading a router without its bias would leave an arbitrary bias in the engine."""
    biased_experts(tmp_path / "glm")
    gaps, moved = differences(tmp_path / "glm", trained(), EAGER)
    assert max(gaps) < LIMIT
    assert min(moved) > 0.05


@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_an_adapter_that_is_continued(ray_cluster, tiny_model, tmp_path, sync):
    """The engine starts from the base, and samples from the adapted model after the first sync."""
    start = made_adapter(tiny_model, tmp_path / "a").merge_and_unload()
    model_dir = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=True)
    world = World(model_dir, trained(lora=LORA.model_copy(update={"sync": sync})), AdaptedWorker, **EAGER)
    try:
        before = world.sample_all()
        assert largest(loaded(tiny_model), before) < LIMIT
        assert largest(start, before) > 0.05
        world.push()
        assert largest(start, world.sample_all()) < LIMIT
    finally:
        world.close()
