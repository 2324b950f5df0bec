"""What the engine in this process has compiled."""

from __future__ import annotations

import sys


def compilation_began() -> float | None:
    """Return when vLLM began to compile the model, seconds of `time.perf_counter`; None: it has not, or
    does so in another process.
    """
    monitor = sys.modules.get("vllm.compilation.monitor")  # vLLM may be half imported by the engine's thread
    return getattr(monitor, "torch_compile_start_time", 0.0) or None


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled for its engine, without those found in a cache."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    return int(counters["inductor"]["fxgraph_cache_miss"] + compilation_counter.num_aot_compiles)
