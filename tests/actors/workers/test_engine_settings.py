"""Default arguments of an engine: settings that fit model and machine."""

import asyncio
from importlib import import_module
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from actors.transfer import WEIGHT_TRANSFER
from actors.workers import drafter, rollout
from actors.workers.engine_settings import EngineSpec, kv_bytes_per_token
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import SpeculationConfig
from grpo_dist.runtime.hardware import processor_digest
from grpo_dist.types import Sampling
from tests.support import fakes
from tests.support.engine_arguments import GIB, QWEN, arguments, spec

TOKEN = 6144


def test_bytes_of_a_token():
    assert kv_bytes_per_token(QWEN, 4) == TOKEN
    wide = Qwen2Config(
        num_hidden_layers=1, hidden_size=64, head_dim=128, num_attention_heads=2, num_key_value_heads=1
    )
    assert kv_bytes_per_token(wide, 2) == 512


@pytest.mark.parametrize(("in_flight", "sequences"), [(0, 256), (128, 256), (500, 500), (9000, 1024)])
def test_an_engine_can_decode_all_requests_in_flight(in_flight, sequences):
    assert arguments(in_flight=in_flight)["max_num_seqs"] == sequences
    assert arguments(in_flight=in_flight, max_num_seqs=7)["max_num_seqs"] == 7


def test_the_cache_holds_every_sequence_at_full_length():
    one_block_more = 32 * TOKEN
    assert arguments()["kv_cache_memory_bytes"] == 256 * 256 * TOKEN + one_block_more
    assert arguments(max_length=257)["kv_cache_memory_bytes"] == 256 * 288 * TOKEN + one_block_more


def test_the_caches_take_a_quarter_of_the_free_memory_at_most_and_hold_one_sequence_at_least():
    two = {"free": GIB, "engines": 2, "max_length": 4096}
    assert arguments(**two)["kv_cache_memory_bytes"] == GIB // 8 + 32 * TOKEN
    assert arguments(**two | {"free": 1})["kv_cache_memory_bytes"] == (4096 + 32) * TOKEN
    assert arguments(kv_cache_gib=0.5)["kv_cache_memory_bytes"] == GIB // 2


def test_compiled_code_is_kept_per_kind_of_processor(tmp_path):
    """Several machines may share a home directory, and inductor's keys do not name the processor."""
    for name, flags in (("a", "avx2 avx512f"), ("b", "avx2"), ("c", "avx2")):
        cores = f"processor: {name}\nmodel name: X\nflags: {flags}\n" * 2
        (tmp_path / name).write_text(cores)
    a, b, c = (processor_digest(tmp_path / name) for name in "abc")
    assert a != b == c and len(a) == 16


def test_without_a_gpu_prompts_are_prefilled_whole_in_small_blocks():
    defaults = arguments(max_length=20_000)
    assert (defaults["block_size"], defaults["enable_chunked_prefill"]) == (32, False)
    assert defaults["max_num_batched_tokens"] == 20_000


@pytest.mark.parametrize(("colocated", "share"), [(False, 0.85), (True, 0.6)])
def test_an_engine_on_shared_gpus_can_sleep(colocated, share):
    defaults = arguments(device="cuda", colocated=colocated)
    assert defaults["enable_sleep_mode"] is colocated and defaults["gpu_memory_utilization"] == share
    assert defaults["weight_transfer_config"] == {"backend": WEIGHT_TRANSFER}
    assert "block_size" not in defaults and "kv_cache_memory_bytes" not in defaults
    assert arguments(device="cuda", gpu_memory_utilization=0.3)["gpu_memory_utilization"] == 0.3


def test_an_engine_is_warmed_up_with_each_kind_of_sampling_of_the_run(tmp_path):
    greedy = {"temperature": 0.0, "top_k": 20}
    config = fakes.config(sampling={"temperature": 0.7}, evaluation=greedy, rejection={"temperature": 0.7})
    assert EngineSpec.from_config(config, tmp_path).sampling == (
        Sampling(temperature=0.7),
        Sampling(temperature=0.0, top_k=20),
    )


class Engine:
    """Counts the requests in flight at once."""

    def __init__(self):
        self.requests, self.now, self.most = [], 0, 0

    async def generate(self, token_ids, params):
        self.requests.append((params.temperature, params.top_k, params.max_tokens, params.ignore_eos))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        logprobs = SimpleNamespace(logprobs=[-1.0, -1.0], start_indices=[0, 1])
        output = SimpleNamespace(
            finish_reason="length", token_ids=[5, 6], logprobs=logprobs, weight_versions=[],
            routed_experts=None,
        )  # fmt: skip
        return SimpleNamespace(outputs=[output], num_cached_tokens=None)


@pytest.mark.parametrize(("device", "sequences"), [("cuda", 300), ("cpu", 1)])
def test_the_warm_up_decodes_the_largest_batch_on_a_gpu(monkeypatch, device, sequences):
    monkeypatch.setattr(rollout, "device_type", lambda: device)
    ways = (Sampling(temperature=0.7), Sampling(temperature=0.5, top_k=20))
    worker = object.__new__(RolloutWorker)
    worker._spec, worker._engine = spec(in_flight=300, sampling=ways), Engine()
    asyncio.run(worker._warm_up())
    assert worker._engine.most == sequences
    assert worker._engine.requests == [(0.7, 0, 2, True)] * sequences + [(0.5, 20, 2, True)] * sequences


def test_speculation_is_a_drafter_that_vllm_loads_by_its_name():
    assert "speculative_config" not in arguments()
    drafting = arguments(speculation=SpeculationConfig(tokens=3), engine={"additional_config": {"own": 1}})
    assert drafting["speculative_config"] == {
        "method": "custom_class", "model": "actors.workers.drafter.Drafter", "num_speculative_tokens": 3,
    }  # fmt: skip
    limits = {drafter.MAX_SEQUENCES: 4}
    assert drafting["additional_config"] == {"own": 1} | limits
    for wrong in (None, "x"):  # vLLM's own check refuses it, naming the key
        made = arguments(speculation=SpeculationConfig(tokens=3), engine={"additional_config": wrong})
        assert made["additional_config"] == limits
    folder, name = drafter.NAME.rsplit(".", 1)
    assert getattr(import_module(folder), name) is drafter.Drafter
