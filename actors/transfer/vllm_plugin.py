"""What vLLM loads in each of its processes, through the entry point group `vllm.general_plugins`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from grpo_dist.runtime.stacks import listen

WEIGHT_TRANSFER = "grpo_dist"  # what vLLM calls the receiving side of this project's weight sync


def register() -> None:
    """Register this project's weight transfer with vLLM. vLLM calls it once per process, sometimes more."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if WEIGHT_TRANSFER not in Factory._registry:
        Factory.register_engine(WEIGHT_TRANSFER, "actors.transfer.vllm_receiver", "PackedWeightTransfer")
    _end_with_parent()
    listen()


def _end_with_parent() -> None:
    """Kill this process when the one that started it ends, even if that was killed.

    vLLM's own worker waits for its engine in places where it does not notice that the engine is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()  # bounded: a thread that does nothing else
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


_WATCH = "grpo-dist: end with parent"
