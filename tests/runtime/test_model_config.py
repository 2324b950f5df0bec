"""The longest sequence that engine and trainer compute alike, from the position scaling in config.json."""

import pytest
from transformers import AutoConfig

from grpo_dist.runtime.model_config import Heads, heads_of_layers, length_problem, position_limit

YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("text_config", "limit"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        # model cards of Qwen2.5 and Qwen3 (more positions than the original), config of DeepSeek-V3
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960,
          "rope_parameters": YARN | {"original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 163840,
          "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, 163840),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (  # Phi-4-mini
            {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
             "rope_scaling": {"type": "longrope"} | LONG},
            4096,
        ),
        (  # Gemma 3: each layer type has its scaling, which the positions already include
            {"model_type": "gemma3_text", "max_position_embeddings": 131072,
             "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0},
                                 "sliding_attention": {"rope_type": "default"}}},
            131072,
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": None, "rope_parameters": {}}, 2048),
        ({"model_type": "cohere2", "max_position_embeddings": 132096, "sliding_window": 4096}, 4096),
        ({"model_type": "gemma2", "max_position_embeddings": 8192, "sliding_window": 4096}, 8192),
    ],
)  # fmt: skip
def test_the_longest_sequence_follows_the_scaling_of_positions(text_config, limit):
    assert position_limit(text_config) == limit


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3"])
def test_transformers_own_reading_of_a_file_has_the_same_limit(kind):
    rope = {"type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = {"max_position_embeddings": 256, "rope_scaling": rope}
    read = AutoConfig.for_model("llama", **raw | {"rope_scaling": dict(rope)}).to_dict()
    assert position_limit(read) == position_limit(raw) == {"yarn": 1024, "linear": 1024}.get(kind, 256)


def test_a_row_that_is_too_long_is_refused_with_what_to_lower():
    assert length_problem(None, 10**6, "m", supervised=False) is None
    assert length_problem(512, 512, "m", supervised=True) is None
    assert "may be 513 tokens" in length_problem(512, 513, "m", supervised=False)
    assert "sft.max_length = 513, but m takes at most 512" in length_problem(512, 513, "m", supervised=True)


def test_layers_may_have_heads_of_their_own():
    gemma4 = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, head_dim=64, global_head_dim=128)
    assert [h.size for h in heads_of_layers(gemma4)] == [64] * 5 + [128]
    qwen2 = AutoConfig.for_model("qwen2", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert set(heads_of_layers(qwen2)) == {Heads(4, 2, 16)}
