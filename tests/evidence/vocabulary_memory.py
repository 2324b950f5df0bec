"""Prints, as JSON, the peak memory of a policy rank after two updates, for a given vocabulary size.

python tests/evidence/vocabulary_memory.py 150000
"""

import json
import os
import sys
import tempfile

HIDDEN, LAYERS, ROWS, TOKENS = 64, 2, 16, 256


def main(entries):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from actors.transfer.transport import free_port
    from grpo_dist.config import ModelConfig, PolicyConfig
    from grpo_dist.policy.loss import Objective
    from grpo_dist.policy.trainer import Trainer, TrainerSettings
    from grpo_dist.runtime.rendezvous import Rank
    from tests.support.losses import train_batch

    shape = Qwen2Config(
        hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=entries, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        model = Qwen2ForCausalLM(shape)
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(directory)
        del model
        trainer = Trainer(
            Rank(0, 1, "127.0.0.1", free_port("127.0.0.1"), 60.0),
            PolicyConfig(zero_stage=0),
            model=ModelConfig(path=directory),
            model_dir=directory,
            settings=TrainerSettings(
                objective=Objective(), temperature=1.0, token_budget=ROWS * TOKENS, epochs=1, total_updates=2,
                seed=0,
            ),
        )  # fmt: skip
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[:, 0] = False
    tokens = torch.randint(0, entries, mask.shape)
    batch = train_batch(mask, tokens=tokens, advantages=torch.randn(mask.shape))
    for _ in range(2):
        trainer.update([batch])
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    logits = 4 * ROWS * TOKENS * entries
    print(json.dumps({"peak": peak, "weights": 4 * parameters, "all_logits": logits}), flush=True)
    trainer.close()
    os._exit(0)  # skip slow shutdowns


if __name__ == "__main__":
    main(int(sys.argv[1]))
