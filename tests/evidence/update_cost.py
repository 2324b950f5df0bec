"""Measures the CPU time of one rank's update of 13M parameters, against its matrix products alone.

    python -m tests.evidence.update_cost [--prompts 4] [--micro-batches 1024 2048 4096] [--repeats 2]

Groups of 8 samples of 128 tokens, as in configs/bench/cpu_13m.yaml, on two threads. `main` and `second` are
the CPU seconds of the two busiest threads: their difference is work that the second waits for. `products`: 6
operations per weight and token at the rate of a product of an MLP's shape, measured right before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

THREADS, GROUP, PROMPT, COMPLETION = 2, 8, 12, 128
SHAPE = Path("configs/bench/shapes/qwen2_13m.json")


def made_batch(prompts: int, vocabulary: int) -> Any:
    import torch

    from tests.support.losses import change, train_batch

    rows, width, generator = prompts * GROUP, PROMPT + COMPLETION, torch.Generator().manual_seed(0)
    tokens = torch.randint(5, vocabulary, (rows, width), generator=generator)
    tokens[:, :PROMPT] = torch.randint(5, vocabulary, (prompts, PROMPT)).repeat_interleave(GROUP, 0)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    mask[:, PROMPT:] = True
    advantages = torch.tensor([1.0, -1.0]).repeat(rows // 2)[:, None] * mask
    batch = train_batch(mask, tokens=tokens, advantages=advantages)
    groups = torch.arange(prompts).repeat_interleave(GROUP)
    return change(batch, group_ids=groups, prompt_lengths=torch.full((rows,), PROMPT))


def made_trainer(directory: str, shape: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from actors.transfer.transport import free_port
    from grpo_dist.config import ModelConfig, PolicyConfig
    from grpo_dist.policy.loss import Objective
    from grpo_dist.policy.trainer import Trainer, TrainerSettings
    from grpo_dist.runtime.rendezvous import Rank

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(directory)
    return Trainer(
        Rank(0, 1, "127.0.0.1", free_port("127.0.0.1"), 600.0),
        PolicyConfig(num_workers=1, zero_stage=0),
        model=ModelConfig(path=directory, dtype="float32"),
        model_dir=directory,
        settings=TrainerSettings(
            objective=Objective(), temperature=1.0, token_budget=None, epochs=1, total_updates=9, seed=0
        ),
    )


def product_rate(shape: dict[str, Any], tokens: int = 4096, count: int = 20) -> float:
    """Return operations per CPU second of an MLP's product."""
    import torch

    a, b = (
        torch.randn(tokens, shape["hidden_size"]),
        torch.randn(shape["hidden_size"], shape["intermediate_size"]),
    )
    begin = time.process_time()
    for _ in range(count):
        a @ b
    return count * 2 * tokens * b.numel() / (time.process_time() - begin)


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of each thread of this process."""
    tasks = Path("/proc/self/task")
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.update_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    from grpo_dist.runtime.hardware import thread_environment

    os.environ |= thread_environment(THREADS) | {"DS_ACCELERATOR": "cpu"}  # before torch is imported
    from grpo_dist.policy.extensions import build_in_own_directory

    build_in_own_directory()
    shape = json.loads(SHAPE.read_text())
    with tempfile.TemporaryDirectory() as directory:
        trainer, batch = made_trainer(directory, shape), made_batch(options.prompts, shape["vocab_size"])
    weights = sum(p.numel() for p in trainer.engine.module.parameters() if p.ndim == 2)
    tokens = options.prompts * (PROMPT + GROUP * COMPLETION)
    trainer.update([batch])
    print(f"{'micro-batch':>11} {'CPU s':>7} {'main':>6} {'second':>6} {'products':>8} {'share':>6}")
    for _ in range(options.repeats):
        for budget in options.micro_batches:
            products = 6 * weights * tokens / product_rate(shape)
            trainer._micro = replace(trainer._micro, token_budget=budget)
            before, begin = thread_seconds(), time.process_time()
            trainer.update([batch])
            cpu_s = time.process_time() - begin
            threads = sorted(
                (seconds - before.get(name, 0.0) for name, seconds in thread_seconds().items()), reverse=True
            )
            first, second, *_ = threads
            shares = f"{first:>6.2f} {second:>6.2f} {products:>8.2f} {products / cpu_s:>6.0%}"
            print(f"{budget:>11} {cpu_s:>7.2f} {shares}", flush=True)
    os._exit(0)  # skip slow shutdowns


if __name__ == "__main__":
    main()
