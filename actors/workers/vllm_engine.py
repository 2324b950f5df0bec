"""Makes vLLM's engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_dist.runtime.imports import without_collections


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
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    if "worker_cls" in arguments:  # `engine_settings.RECORDING_WORKER`
        from actors.workers.route_recorder import attach  # imports vLLM

        attach(engine)
    attach_shortcuts(engine)
    return engine


def attach_shortcuts(engine: Any) -> None:
    """Have ``engine`` do less per token, with the same results."""
    from actors.workers.held_blocks import HeldBlocks
    from actors.workers.sampled_tokens import SampledTokens  # imports vLLM

    SampledTokens.of(engine)
    HeldBlocks.of(engine.engine_core.engine_core.scheduler)
