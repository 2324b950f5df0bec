"""Prints one JSON object for each dtype and ZeRO stage, of two policy ranks: bytes of all tensors that a rank
holds between the last backward pass of an update and its optimiser step, and of each rank's checkpoint files.

    python tests/evidence/rank_memory.py
"""

import gc
import json
import os
import re
import tempfile
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
RANKS, BUCKET = 2, 1_000_000
CASES = [("float32", 0), ("float32", 1), ("float32", 2), ("float32", 3)]
CASES += [("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)]
SHAPE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": True,
}  # fmt: skip


def held_bytes():
    import torch

    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def saved_bytes(trainer, directory):
    """Return the bytes of each rank's files; shared files count for the first rank."""
    import torch

    trainer.save(directory)
    torch.distributed.barrier()  # all ranks have written
    sizes = [0] * RANKS
    for file in directory.rglob("*.pt"):
        rank = re.search(r"zero_pp_rank_(\d+)", file.name)
        sizes[int(rank[1]) if rank else 0] += file.stat().st_size
    return sizes


def rank(index, port, directory, dtype, stage):
    import torch

    from grpo_dist.config import ModelConfig, PolicyConfig
    from grpo_dist.policy.loss import Objective
    from grpo_dist.policy.trainer import Trainer, TrainerSettings
    from grpo_dist.runtime.rendezvous import Rank
    from tests.support.losses import train_batch

    sections = {"zero_optimization": {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}}
    trainer = Trainer(
        Rank(index, RANKS, "127.0.0.1", port, 60.0),
        PolicyConfig(num_workers=RANKS, zero_stage=stage, deepspeed=sections if stage else {}),
        model=ModelConfig(path=directory, dtype=dtype),
        model_dir=directory,
        settings=TrainerSettings(
            objective=Objective(), temperature=1.0, token_budget=64, epochs=1, total_updates=9, seed=0
        ),
    )
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[:, 0] = False
    tokens = torch.randint(0, 100, mask.shape)
    batch = train_batch(mask, tokens=tokens, advantages=torch.randn(mask.shape))
    trainer.update([batch])  # creates the optimiser's moments
    files = saved_bytes(trainer, Path(directory) / f"{dtype}_{stage}")
    trainer.accumulate(batch)
    if index == 0:
        print(json.dumps({"dtype": dtype, "stage": stage, "bytes": held_bytes(), "files": files}), flush=True)
    trainer.close()
    os._exit(0)  # skip slow shutdowns


def main():
    from grpo_dist.policy.extensions import build_in_own_directory

    build_in_own_directory()
    import deepspeed  # noqa: F401  # once, before ranks are forked
    import torch.multiprocessing as mp
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import grpo_dist.policy.trainer  # noqa: F401
    from actors.transfer.transport import free_port

    with tempfile.TemporaryDirectory() as directory:
        Qwen2ForCausalLM(Qwen2Config(**SHAPE)).save_pretrained(directory)
        gc.collect()
        for dtype, stage in CASES:
            port, forked = free_port("127.0.0.1"), mp.get_context("fork")
            ranks = [
                forked.Process(target=rank, args=(i, port, directory, dtype, stage)) for i in range(RANKS)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(120)


if __name__ == "__main__":
    main()
