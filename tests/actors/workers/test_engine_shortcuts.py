"""What this project puts in the place of vLLM's methods changes no result of an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import ray

from tests.support.shortcut_engine import MOST_TOKENS, both, costs

pytestmark = pytest.mark.machine  # imports the engine

OWN = {
    "abort_requests",
    "allocate_slots",
    "cache_blocks",
    "process_outputs",
    "update_from_output",
}


@pytest.mark.parametrize("ahead", [False, True], ids=["model", "ahead"])
def test_an_engine_with_less_to_do_per_token_returns_the_same(ray_cluster, tiny_model, ahead):
    """Samples that end by themselves, by length and by a stop text, preempted ones, aborted ones, and a
    version of the weights that changes under them.
    """
    (plain, without), (own, replaced) = both(tiny_model, ahead=ahead)
    assert own.outputs == plain.outputs and own.preempted == plain.preempted
    assert own.shared == plain.shared and own.hashes == plain.hashes
    assert set(replaced) >= OWN and not OWN & set(without)
    assert len(own.outputs) >= 22 and sum(own.preempted) and len(own.hashes) > 5
    found = [record[4] for record in own.outputs.values()]
    assert any(len(spans) == 3 for spans in found), "the version changed under no request"
    reasons = {record[5] for record in own.outputs.values()}
    assert reasons >= ({"length"} if ahead else {"length", "stop"})
    assert ahead or "7" in {record[6] for record in own.outputs.values()}, "no stop text ended a sample"
    assert max(len(record[0]) for record in own.outputs.values()) <= MOST_TOKENS


def test_the_script_measures_the_steps_that_decode_all_sequences(ray_cluster, tiny_model):
    """20 tokens of each of 4 sequences: the first comes with the prompts, 19 with steps of their own. The
    engine schedules the next step before it takes the last one's tokens.
    """
    steps = np.array(ray.get(costs.remote(tiny_model, 4, 20)))
    assert 17 <= len(steps) <= 20
    *parts, whole, _ = np.median(steps, axis=0)
    assert all(part > 0 for part in parts) and sum(parts) < whole


class Owner:
    def step(self, first, second=1):
        return first, second


def test_a_method_that_takes_something_else_is_refused():
    from actors.workers.replaced_methods import replace_method

    owner = Owner()
    for other in (
        SimpleNamespace(step=lambda first: None),
        SimpleNamespace(step=lambda first, third=1: None),
    ):
        other.step.__name__ = "step"
        with pytest.raises(
            RuntimeError, match=r"Owner\.step takes \(first, second=1\), this project's takes"
        ):
            replace_method(owner, other.step)
    assert owner.step(3) == (3, 1)


def test_a_replaced_method_gets_the_calls_and_has_the_old_one():
    from actors.workers.replaced_methods import replace_method

    owner = Owner()

    def step(first, second=1):
        return own(first, second + 1)

    own = replace_method(owner, step)
    assert owner.step(3) == (3, 2)


@pytest.mark.parametrize(
    ("log_stats", "stream_interval", "routes", "masks"),
    [(True, 1, None, False), (False, 2, None, False), (False, 1, object(), False), (False, 1, None, True)],
)
def test_an_engine_that_returns_more_of_a_token_keeps_vllms_methods(
    log_stats, stream_interval, routes, masks
):
    from actors.workers.sampled_tokens import SampledTokens

    processor = SimpleNamespace(log_stats=log_stats, tracing_enabled=False, stream_interval=stream_interval)
    scheduler = SimpleNamespace(aux_output_connector=routes, return_sampling_mask=masks)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    assert SampledTokens.of(SimpleNamespace(output_processor=processor, engine_core=core)) is None


def test_a_cache_of_another_kind_keeps_vllms_methods():
    from actors.workers.held_blocks import HeldBlocks

    assert HeldBlocks.of(SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=None))) is None
