"""`rollout.engine`: what vLLM does not know, and what is not the user's to set, is refused before a run."""

import subprocess
from types import SimpleNamespace

import pytest

from actors.workers.engine_check import argument_problems
from actors.workers.engine_settings import EngineSpec
from grpo_dist.config.checks import contradictions
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.errors import UserError
from grpo_dist.runs.start_checks import setting_problems
from grpo_dist.runs.vllm_arguments import vllm_problems
from tests.support import fakes
from tests.support.engine_arguments import arguments


def problems(engine, device="cuda", **sections):
    config = fakes.config(rollout={"engine": engine}, **sections)
    return list(engine_problems(config.rollout, config.algorithm, device))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seed", 3, "is set by seed"),
        ("model", "other", "is set by model.path"),
        ("dtype", "float16", "is set by model.dtype"),
        ("max_model_len", 9, "is set by model.max_length"),
        ("gpu_memory_utilization", 0.5, "is set by rollout.gpu_memory_utilization"),
        ("weight_transfer_config", {}, "is set by weight_sync.backend"),
        ("generation_config", "auto", "is set by sampling"),
        ("logprobs_mode", "raw_logprobs", "the sampled distribution"),
        ("speculative_config", {"method": "ngram"}, "is set by rollout.speculation"),
        ("quantization", "fp8", "is set by rollout.quantization"),
        ("distributed_executor_backend", "ray", "is set by rollout.tensor_parallel_size"),
        ("load_format", "dummy", "use the trainer's weights unchanged"),
        ("hf_overrides", {}, "use the trainer's weights unchanged"),
        ("kv_transfer_config", {}, "after a weight sync"),
    ],
)
def test_arguments_that_would_make_numbers_wrong_are_refused_with_the_right_key(name, value, words):
    (said,) = problems({name: value})
    assert said.startswith(f"`rollout.engine.{name}` = {value}") and words in said
    assert said.endswith("; remove it")


def test_arguments_that_the_project_sets_are_refused_unless_they_change_no_number():
    own = {**arguments("cpu"), **arguments("cuda", colocated=True)}
    free = {"block_size", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"}
    free |= {"disable_log_stats"}
    assert {name for name in own if not problems({name: own[name]})} == free


def test_chunked_prefill_is_refused_where_it_crashes_the_engine():
    assert not problems({"enable_chunked_prefill": True}, "cuda")
    assert "crashes" in problems({"enable_chunked_prefill": True}, "cpu")[0]


def test_a_cache_of_another_type_needs_a_correction():
    cache = {"kv_cache_dtype": "fp8"}
    assert not problems(cache)
    uncorrected = {"algorithm": {"correction": {"kind": "none"}}}
    assert "algorithm.correction.kind" in problems(cache, **uncorrected)[0]
    assert not problems(cache, algorithm={"old_logprobs": "rollout"})


def test_fp8_needs_a_correction_bfloat16_and_a_gpu():
    fp8 = {"rollout": {"quantization": "fp8"}}
    kept = fakes.config(**fp8)
    assert not list(contradictions(kept)) and not [p for p in setting_problems(kept, "cuda") if "quanti" in p]
    assert not list(contradictions(fakes.config(**fp8, algorithm={"old_logprobs": "rollout"})))
    (on_cpus,) = (p for p in setting_problems(kept, "cpu") if "quantization" in p)
    assert on_cpus.startswith("`rollout.quantization` = fp8 needs GPUs")
    with pytest.raises(
        ValueError, match=r"quantization` = fp8 makes.*uncorrected; set algorithm\.correction"
    ):
        fakes.config(**fp8, algorithm={"correction": {"kind": "none"}})
    with pytest.raises(ValueError, match=r"quantization` = fp8 .*`model\.dtype` = float32; set model\.dtype"):
        fakes.config(**fp8, model={"path": "m", "dtype": "float32"})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"sampling": {"stop": ["\n"]}}, "`sampling.stop` ends a sample at a text"),
        (
            {"data": {"train": [{"path": "demo:add3"}], "environment": "calculator"}},
            "`data.environment` ends a sample at a text",
        ),
    ],
)
def test_speculation_is_refused_where_a_sample_ends_at_a_text(sections, key):
    drafting = {"rollout": {"speculation": {"tokens": 4}}}
    assert not list(contradictions(fakes.config(**drafting)))
    with pytest.raises(ValueError, match=r"`rollout\.speculation\.tokens` = 4 ") as error:
        fakes.config(**drafting, **sections)
    assert key in str(error.value)


def test_no_engine_is_made_with_refused_arguments(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.engine\.seed` = 3 is set by seed"):
        EngineSpec.of(fakes.config(rollout={"engine": {"seed": 3}}), tmp_path)


def test_names_and_types_are_those_of_the_engine():
    known = {"block_size": int | None, "swap": float, "policy": "a type only for checkers"}
    assert not list(argument_problems({"block_size": 64, "swap": 1, "policy": 3}, known))
    (unknown,) = argument_problems({"blok_size": 64}, known)
    assert unknown.endswith("has no such argument; did you mean `rollout.engine.block_size`?")
    (text,) = argument_problems({"block_size": "64"}, known)
    assert text == "`rollout.engine.block_size` = '64': input should be int, not str"
    (truth,) = argument_problems({"block_size": True}, known)
    assert truth.endswith("input should be int, not bool")


@pytest.mark.family("new processes")
def test_vllm_itself_validates_what_is_set(tiny_model):
    """In a process of its own: names and types of its arguments, and then the engine's configuration."""
    short = fakes.config(rollout={"engine": {"max_num_batched_tokens": 12}})
    (said,) = vllm_problems(short, "cpu", tiny_model)
    assert "max_num_batched_tokens (12) is smaller than max_model_len" in said


def test_without_further_arguments_vllm_is_not_started(monkeypatch, tiny_model):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    assert not list(vllm_problems(fakes.config(), "cpu", tiny_model))
    refused = fakes.config(rollout={"engine": {"seed": 3}})  # by the names alone, and said once
    assert not list(vllm_problems(refused, "cpu", tiny_model))


def test_a_failure_to_validate_with_the_engine_is_a_problem(monkeypatch):
    broken = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no vllm")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: broken)
    (said,) = vllm_problems(fakes.config(rollout={"engine": {"block_size": 64}}), "cpu", None)
    assert "ImportError: no vllm" in said
