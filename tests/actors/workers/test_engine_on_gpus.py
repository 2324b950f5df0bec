"""What vLLM makes of an engine's arguments on GPUs, by vLLM's own code on a machine without one."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray
import torch
import vllm.config.parallel as parallel
import vllm.platforms as platforms
from vllm import envs
from vllm.config import CompilationConfig, CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.model import _get_head_dtype
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.tokenizers.registry import resolve_tokenizer_args
from vllm.transformers_utils.config import get_config
from vllm.utils.torch_utils import set_torch_threads_for_runtime
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.sample.ops import topk_topp_sampler

from actors.workers import engine_settings, engine_thread
from actors.workers.engine_settings import set_environment
from tests.support.engine_arguments import arguments
from tests.support.patience import HANG_S


class Gpus(type(current_platform)):
    _enum, ray_device_key = PlatformEnum.CUDA, "GPU"

    @classmethod
    def device_count(cls):
        return 2


def test_the_engine_reads_the_files_of_a_mistral_model_that_the_trainer_reads(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "hidden_size": 64}')
    (tmp_path / "params.json").write_text('{"dim": 32}')
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors", "tekken.json"):
        (tmp_path / name).touch()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ours = EngineArgs(**arguments("cuda", model_dir=str(tmp_path)))
    assert resolve_tokenizer_args(tmp_path, tokenizer_mode=ours.tokenizer_mode)[0] == "hf"
    assert get_config(tmp_path, False, config_format=ours.config_format).hidden_size == 64
    loader = DefaultModelLoader(LoadConfig(load_format=ours.load_format))
    _, files, *_ = loader._prepare_weights(str(tmp_path), None, None, True, None)
    assert [os.path.basename(file) for file in files] == ["model-00001-of-00001.safetensors"]


@pytest.fixture
def in_a_bundle_of_two_gpus(monkeypatch):
    """As an engine's actor runs: in the run's placement group, one bundle with all of the engine's GPUs."""
    monkeypatch.setattr(parallel, "current_platform", Gpus())
    monkeypatch.setattr(platforms, "current_platform", Gpus())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    group = SimpleNamespace(bundle_specs=[{"GPU": 2}])
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)


def test_a_tensor_parallel_engine_runs_its_workers_as_its_own_processes(in_a_bundle_of_two_gpus):
    ours = EngineArgs(**arguments("cuda", tensor_parallel_size=2))
    backend = ours.distributed_executor_backend
    config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=backend)
    assert Executor.get_class(SimpleNamespace(parallel_config=config)) is MultiprocExecutor
    one = EngineArgs(**arguments("cuda"))
    assert one.distributed_executor_backend is None  # in its own process


def test_logits_of_bfloat16_models_are_in_float32_as_the_trainers():
    ours = arguments("cuda", dtype="bfloat16")
    config = SimpleNamespace(**ours["hf_overrides"])  # as vLLM changes the model's configuration
    assert _get_head_dtype(config, torch.bfloat16, "generate") == torch.float32
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
        assert "hf_overrides" not in arguments(device, dtype=dtype)


def captured(sequences, **rollout):
    """Return `max_num_seqs`, and the batch sizes for which vLLM captures a CUDA graph."""
    ours = EngineArgs(**arguments("cuda", in_flight=sequences, **rollout))
    largest = ours.max_cudagraph_capture_size
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=ours.enforce_eager),
        compilation_config=CompilationConfig(
            max_cudagraph_capture_size=largest, cudagraph_mode=CUDAGraphMode.PIECEWISE
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ours.max_num_seqs, max_num_batched_tokens=8192),
        uniform_decode_query_len=1,
        performance_mode="balanced",
        speculative_config=None,
    )
    VllmConfig._set_cudagraph_sizes(config)
    return ours.max_num_seqs, config.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize("sequences", [256, 500, 513, 1000, 9000])
def test_the_largest_batch_has_a_cuda_graph(sequences):
    """vLLM makes a graph of whole decoding steps for the sizes up to `max_num_seqs` alone."""
    most, sizes = captured(sequences)
    wanted = min(sequences, 1024)  # no engine has more at once unless the user sets it
    assert wanted <= most < wanted + 16
    assert most in sizes or sequences <= 512  # up to there vLLM adds it itself


@pytest.fixture
def engine_environment(monkeypatch):
    for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    set_environment()
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_the_flashinfer_sampler_is_not_loaded(engine_environment, monkeypatch):
    monkeypatch.setattr(topk_topp_sampler, "current_platform", Gpus())
    assert not topk_topp_sampler.flashinfer_sampler_supported()


def test_samples_do_not_depend_on_the_flashinfer_sampler(monkeypatch):
    """It is never called: it takes no seeds, and returns no log-probs of the sampled distribution. Model
    runner 1.
    """
    monkeypatch.setattr(topk_topp_sampler, "current_platform", Gpus())
    monkeypatch.setattr(topk_topp_sampler, "flashinfer_sampler_supported", lambda: True)
    sampler = topk_topp_sampler.TopKTopPSampler(arguments("cuda")["logprobs_mode"])
    assert sampler.forward == sampler.forward_native


def test_an_engine_that_drafts_takes_model_runner_1_and_others_take_2():
    """They draw with other random numbers: `grpo_dist/guides/throughput.md`."""

    def unsupported(speculation):
        parts = {"distributed_executor_backend": "mp", "pipeline_parallel_size": 1, "use_ubatching": False}
        config = SimpleNamespace(parallel_config=SimpleNamespace(**parts), speculative_config=speculation)
        return VllmConfig._get_v2_model_runner_unsupported_features(config)

    method = arguments("cuda", speculation={"tokens": 4})["speculative_config"]["method"]
    drafts = SimpleNamespace(method=method, parallel_drafting=False)
    assert unsupported(None) == [] and unsupported(drafts) == ["speculative method 'custom_class'"]


@pytest.mark.parametrize("asked", [{"any_explicit_seed": True}, {"return_logprobs": True}])
def test_the_sampler_of_model_runner_2_does_not_use_flashinfer_either(asked):
    """The test above has the sampler of model runner 1, for engines that draft; all others have this one.
    Every request has a seed and asks for log-probs; either suffices.
    """
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler = object.__new__(Sampler)
    sampler.use_flashinfer, sampler.use_xpu_sampler = True, False
    sampler.logprobs_mode = arguments("cuda")["logprobs_mode"]
    sampler.apply_sampling_params = lambda *tensors, **options: None
    sampler._sample_random = lambda *tensors: tensors[-1]  # whether a fused sampler draws
    sampler.sampling_states = SimpleNamespace(
        get_top_k_top_p=lambda *tensors: (None, 0.9),
        any_greedy=lambda requests: False,
        any_explicit_seed=lambda requests: asked.get("any_explicit_seed", False),
    )

    def is_fused(**options):
        return Sampler.sample(sampler, *[None] * 8, **options)

    assert not is_fused(return_logprobs=asked.get("return_logprobs", False))
    sampler.sampling_states.any_explicit_seed = lambda requests: False
    assert is_fused(return_logprobs=False)


def test_vllm_serves_with_one_thread_although_we_set_the_threads_that_load_weights(monkeypatch):
    """vLLM keeps a number that a user has set. Without one, Ray sets 1, and loading is slow."""
    changed = []
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", changed.append)
    set_torch_threads_for_runtime()
    assert changed == []
    engine_thread._serve_with_one_thread()
    set_torch_threads_for_runtime()
    assert changed == [1]


def test_vllms_mark_for_its_own_threads_is_set_between_its_configuration_and_its_engine(monkeypatch):
    marks, name = [], "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"

    class Arguments:
        def create_engine_config(self, _):
            marks.append(os.environ.get(name))

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(engine_thread, "device_type", lambda: "cuda")
    monkeypatch.setattr("vllm.engine.arg_utils.EngineArgs", lambda **_: Arguments())
    monkeypatch.setattr("vllm.v1.executor.Executor.get_class", lambda _: None)
    monkeypatch.setattr(
        "vllm.v1.engine.llm_engine.LLMEngine", lambda *_, **__: marks.append(os.environ.get(name))
    )
    engine_thread.make_engine({})
    assert marks == [None, "1"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_vllm_knows_every_variable_that_is_set_before_its_configuration_is_made(monkeypatch, device):
    """vLLM warns of unknown ones at the start of each engine; the CPU platform has its own variables."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(engine_settings, "device_type", lambda: device)
    set_environment()
    names = {name for name in os.environ if name.startswith("VLLM_")}
    assert names and names <= set(envs.environment_variables)


@pytest.mark.parametrize(("device", "stays"), [("cuda", True), ("cpu", False)])
def test_the_size_of_the_cache_is_the_arguments(monkeypatch, device, stays):
    """vLLM's CPU build prefers the variable that its documentation recommends."""
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "40"})
    monkeypatch.setattr(engine_settings, "device_type", lambda: device)
    set_environment()
    assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) == stays


def fuses_all_reduce(**rollout):
    """Return whether vLLM fuses if flashinfer is installed; by default it does."""
    passes = EngineArgs(**arguments("cuda", **rollout)).compilation_config.pass_config
    VllmConfig._set_config_default(None, passes, "fuse_allreduce_rms", True)
    return passes.fuse_allreduce_rms


def test_a_tensor_parallel_engine_is_the_same_with_and_without_flashinfer(engine_environment):
    assert not fuses_all_reduce(tensor_parallel_size=2) and not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    assert fuses_all_reduce()  # on one GPU nothing is reduced
    assert "compilation_config" not in arguments("cpu", tensor_parallel_size=2)


COMPILE_THREADS = """
import os
from grpo_dist.runtime.hardware import inductor_settings_kept
with inductor_settings_kept():
    import vllm
import torch._inductor.config as inductor
print(inductor.compile_threads, os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"))
"""


@pytest.mark.slow
def test_importing_vllm_leaves_the_threads_that_the_policy_compiles_with():
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "7"}
    command = [sys.executable, "-c", COMPILE_THREADS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert run.stdout.strip().splitlines()[-1] == "7 7", run.stderr
