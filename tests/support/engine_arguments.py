"""Engine arguments for a small model, for tests of engine settings."""

from transformers import Qwen2Config

from actors.workers.engine_settings import EngineSpec, engine_arguments
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig

# 6 layers of 2 key-value heads of size 64: 2 * 6 * 2 * 64 * 4 bytes a token in float32
QWEN = Qwen2Config(hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2)
GIB = 2**30


def spec(in_flight=0, engines=1, colocated=False, max_length=256, dtype="float32", sampling=(), **rollout):
    model, directory = ModelConfig(path="m", dtype=dtype), rollout.pop("model_dir", "m")
    sections = RolloutConfig(**rollout), WeightSyncConfig(), model, directory, max_length, 0
    return EngineSpec(*sections, in_flight=in_flight, engines=engines, colocated=colocated, sampling=sampling)


def arguments(device="cpu", free=100 * GIB, **settings):
    return engine_arguments(spec(**settings), QWEN, device=device, free_memory=free)
