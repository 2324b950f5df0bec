"""vLLM's layers in this process, without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)


@contextmanager
def one_process_of(dtype: torch.dtype, directory: Path) -> Iterator[None]:
    """Make this process the only one of a model in ``dtype``; its group meets in ``directory``."""
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.model_config = SimpleNamespace(dtype=dtype, is_moe=False)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    cleanup_dist_env_and_memory()
