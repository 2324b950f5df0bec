"""Makes vLLM's engine in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.processes import without_collections


def make_engine(arguments: dict[str, Any], imported: Callable[[], None]) -> Any:
    """Return an engine. ``arguments``: those of `vllm.EngineArgs`. ``imported`` is called before it loads the
    model.
    """
    with without_collections():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

    imported()
    # The usage context selects vLLM's defaults for batch use: larger prefills.
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    if device_type() == "cuda":
        _serve_with_one_thread()
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    if "worker_cls" in arguments:  # `engine_settings.RECORDING_WORKER`
        from actors.workers.route_recorder import attach  # imports vLLM

        attach(engine)
    attach_shortcuts(engine)
    return engine


def _serve_with_one_thread() -> None:
    """Have vLLM serve with one thread of torch: others would wait busily on the cores that prepare a step.

    It does so unless the user set OMP_NUM_THREADS. This project set it, for loading; without it, Ray sets 1.
    vLLM's mark for "not the user's" is set once its configuration is made, which warns of variables that it
    does not list, this one among them.
    """
    os.environ.setdefault("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "1")


def attach_shortcuts(engine: Any) -> None:
    """Have ``engine`` do less per token, with the same results but for ranks of tokens, which nothing
    reads.
    """
    from actors.workers.held_blocks import HeldBlocks
    from actors.workers.sampled_tokens import SampledTokens  # imports vLLM

    SampledTokens.of(engine)
    HeldBlocks.of(engine.engine_core.engine_core.scheduler)
