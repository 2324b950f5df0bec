"""`rollout.engine`: arguments unknown to vLLM, or not for users to set, are refused before a run."""

import re
import subprocess
from importlib.resources import files
from types import SimpleNamespace

import pytest

from actors.workers.engine_check import argument_problems, known_arguments
from grpo_dist.config.checks import contradictions
from grpo_dist.config.engine_arguments import engine_problems, refused_arguments
from grpo_dist.runs.start_checks import setting_problems, vllm_problems
from tests.support import fakes
from tests.support.engine_arguments import arguments

# Neither set by a key nor refused: they change speed, memory, logs or rounding, concern images, or have no
# effect on an engine that is sent token ids only.
ALLOWED = frozenset(
    """
    additional_config aggregate_engine_logging allowed_local_media_path allowed_media_domains async_scheduling
    attention_backend attention_config block_size collect_detailed_traces compilation_config
    cpu_distributed_timeout_seconds cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
    disable_log_stats distributed_timeout_seconds download_dir ec_manager_config enable_batch_sharded_sampling
    enable_cumem_allocator enable_ep_weight_filter enable_expert_parallel enable_flashinfer_autotune
    enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mm_embeds enable_mm_processor_stats
    enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_shm_tensor_arena
    enable_trace_replay engram_config expert_placement_strategy fail_on_environ_validation gdn_prefill_backend
    hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype_skip_layers
    kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_sharing_fast_prefill language_model_only
    limit_mm_per_prompt linear_backend log_config_file log_level logging_config
    long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_mode mamba_config
    mamba_ssu_algorithm max_cudagraph_capture_size max_logprobs max_num_active_seqs max_num_batched_tokens
    max_num_queued_reqs max_num_queued_tokens max_parallel_loading_workers media_io_kwargs
    mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
    mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_processor_kwargs
    mm_shm_cache_max_object_size_mb mm_tensor_ipc model_impl model_loader_extra_config moe_backend
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes optimization_level otlp_traces_endpoint
    per_request_spec_decode_metrics performance_mode prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit profiler_config pt_load_map_location reasoning_config reasoning_parser
    reasoning_parser_plugin renderer_num_workers replayssm_buffer_len
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version
    shutdown_timeout skip_mm_profiling sleep_mode_offload_cudagraph sparse_indexer_topk_backend
    stream_interval structured_outputs_config swa_bounded_replay use_fp64_gumbel use_replayssm
    use_tqdm_on_load video_pruning_method video_pruning_rate watermark worker_extension_cls
    """.split()  # noqa: SIM905
)
# Refused without a GPU, and without a correction.
CONDITIONAL = {
    "enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens", "kv_cache_dtype",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype",
}  # fmt: skip


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
        ("kv_offloading_size", 4, "after a weight sync"),
        ("cpu_offload_gb", 2, "cannot replace offloaded weights"),
        ("enable_eplb", True, "would load them where they were"),
        ("tokens_only", True, "could not return texts"),
        ("data_parallel_rank", 1, "is set by rollout.num_workers"),
        ("prefill_context_parallel_size", 2, "is set by rollout.tensor_parallel_size"),
        ("max_lora_rank", 16, "is set by policy.lora"),
        ("enable_elastic_ep", True, "for engines with data parallelism"),
        ("device_ids", [0], "GPUs that Ray assigns"),
    ],
)
def test_arguments_that_would_make_numbers_wrong_are_refused_with_the_right_key(name, value, words):
    (problem,) = problems({name: value})
    assert problem.startswith(f"`rollout.engine.{name}` = {value}") and words in problem
    assert problem.endswith("; remove it")


def test_arguments_that_the_project_sets_are_refused_unless_they_change_no_number():
    ours = {**arguments("cpu"), **arguments("cuda", colocated=True)}
    free = {"block_size", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"}
    free |= {"disable_log_stats", "watermark"}
    assert {name for name in ours if not problems({name: ours[name]})} == free


def test_every_argument_of_the_installed_engine_is_set_by_a_key_or_refused_or_allowed():
    known = set(known_arguments())
    lists = [*map(set, refused_arguments().values()), ALLOWED, CONDITIONAL]
    assert set().union(*lists) == known
    assert sum(map(len, lists)) == len(known)  # each in one list
    uncorrected = {"algorithm": {"correction": {"kind": "none"}}}
    assert {name for name in known if not problems({name: "other"}, "cpu", **uncorrected)} == ALLOWED


@pytest.mark.parametrize(
    ("key", "value"), [("enable_stochastic_rounding", True), ("stochastic_rounding_philox_rounds", 4)]
)
def test_settings_within_an_argument_are_refused_too(key, value):
    (text,) = problems({"mamba_config": {"backend": "triton", key: value}})
    assert text.startswith(f"`rollout.engine.mamba_config.{key}` = {value}: the engine would round its state")
    assert not problems({"mamba_config": {"backend": "triton"}})
    source = files("vllm").joinpath("config/mamba.py").read_text()
    assert re.search(rf"^\s+{key}\s*:", source, re.MULTILINE), "the installed engine lacks the setting"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_chunked_prefill", True),
        ("long_prefill_token_threshold", 64),
        ("max_num_scheduled_tokens", 64),
    ],
)
def test_prefill_in_chunks_is_refused_where_it_crashes_the_engine(name, value):
    assert not problems({name: value}, "cuda")
    assert "crashes" in problems({name: value}, "cpu")[0]


@pytest.mark.parametrize("name", ["kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"])
def test_a_cache_of_another_type_needs_a_correction(name):
    cache = {name: "fp8"}
    assert not problems(cache)
    uncorrected = {"algorithm": {"correction": {"kind": "none"}}}
    assert "set algorithm.correction (" in problems(cache, **uncorrected)[0]
    assert not problems(cache, algorithm={"correction": "bypass"})


def test_fp8_needs_a_correction_bfloat16_and_a_gpu():
    fp8 = {"rollout": {"quantization": "fp8"}}
    kept = fakes.config(**fp8)
    assert not list(contradictions(kept)) and not [p for p in setting_problems(kept, "cuda") if "quanti" in p]
    assert not list(contradictions(fakes.config(**fp8, algorithm={"correction": "bypass"})))
    (on_cpus,) = (p for p in setting_problems(kept, "cpu") if "quantization" in p)
    assert on_cpus.startswith("`rollout.quantization` = fp8 needs GPUs")
    with pytest.raises(ValueError, match=r"quantization` = fp8, .*uncorrected; set algorithm\.correction"):
        fakes.config(**fp8, algorithm={"correction": {"kind": "none"}})
    with pytest.raises(
        ValueError, match=r"quantization` = fp8, `model\.dtype` = float32: .*; set model\.dtype"
    ):
        fakes.config(**fp8, model={"path": "m", "dtype": "float32"})


@pytest.mark.parametrize(
    "sections",
    [
        {"sampling": {"stop": ["\n"]}},
        {"data": {"train": [{"path": "demo:add3"}], "environment": "calculator"}},
    ],
)
def test_speculation_is_refused_where_a_sample_ends_at_a_text(sections):
    drafting = {"rollout": {"speculation": {"tokens": 4}}}
    assert not list(contradictions(fakes.config(**drafting)))
    with pytest.raises(ValueError, match=r"speculation\.tokens` = 4: .*`data\.environment` may end a sample"):
        fakes.config(**drafting, **sections)


def test_names_and_types_must_match_the_engine():
    known = {"block_size": int | None, "swap": float, "policy": "a type only for checkers"}
    assert not list(argument_problems({"block_size": 64, "swap": 1, "policy": 3}, known))
    (unknown,) = argument_problems({"blok_size": 64}, known)
    assert unknown.endswith("has no such argument; did you mean `rollout.engine.block_size`?")
    (server,) = argument_problems({"enable_log_requests": True}, known_arguments())  # vLLM's server has it
    assert "vLLM's engine has no such argument" in server
    (text,) = argument_problems({"block_size": "64"}, known)
    assert text == "`rollout.engine.block_size` = '64': input should be int, not str"
    (boolean,) = argument_problems({"block_size": True}, known)
    assert boolean.endswith("input should be int, not bool")


@pytest.mark.slow
def test_vllm_itself_validates_what_is_set(tiny_model):
    """In a separate process: names and types of the arguments, then the engine's configuration."""
    short = fakes.config(rollout={"engine": {"max_num_batched_tokens": 12}})
    (problem,) = vllm_problems(short, "cpu", tiny_model)
    assert "max_num_batched_tokens (12) is smaller than max_model_len" in problem


def test_a_failure_to_validate_with_the_engine_is_a_problem(monkeypatch):
    broken = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: no vllm")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: broken)
    (problem,) = vllm_problems(fakes.config(rollout={"engine": {"block_size": 64}}), "cpu", None)
    assert "ImportError: no vllm" in problem
