"""Training that starts from a LoRA adapter: peft's files, the adapted model in every role, and exports."""

import json
import re
import shutil

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from grpo_dist.config import LoRAConfig, ModelConfig, PolicyConfig
from grpo_dist.policy.full_weights import FullWeights, write_model
from grpo_dist.policy.lora import (
    adapter_parameters,
    apply_start_adapter,
    check_continued,
    find_base_model,
    find_start_adapter,
    merge_start,
    untrained,
)
from grpo_dist.policy.model import trainable_model
from grpo_dist.policy.text_model import usable_model
from grpo_dist.runs.models import set_chat_template
from tests.support.models import LORA, loaded, logits, made_adapter, wrapper

INSIDE = "only adapters of linear layers inside the model are used"
TOKENS = torch.arange(11, 43)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))


def continued(model_dir, adapter):
    """Return the directory, and the model as a rank has it."""
    started = apply_start_adapter(model_dir, adapter, "model.adapter = a", continued=True)
    model = ModelConfig(path="m", packing=False)
    return started, trainable_model(str(started), torch.float32, model, PolicyConfig(lora=LORA), 0)


def write_trained(model, directory, model_dir):
    """Export ``model``, as rank 0 does."""
    weights = FullWeights(model, PolicyConfig(zero_stage=2, lora=LORA))
    whole, low_rank = (
        {name: tensor.clone() for bucket in weights.buckets(1 << 20, **how) for name, tensor in bucket}
        for how in ({"as_held": True}, {"adapters_only": True})
    )
    write_model(model, whole, low_rank, directory, str(model_dir), False)


def close(a, b):
    return torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"use_rslora": True}, {"target_modules": "all-linear"}, {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
    ],
)  # fmt: skip
def test_a_merged_adapter_is_the_model_that_peft_computes(tiny_model, tmp_path, settings):
    expected = logits(made_adapter(tiny_model, tmp_path / "a", **settings), TOKENS)
    merged = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=False)
    assert close(logits(loaded(merged), TOKENS), expected)
    assert not close(logits(loaded(tiny_model), TOKENS), expected)
    assert find_start_adapter(merged) is None
    assert usable_model(merged, "model.path = m", print) == merged


def test_a_continued_adapter_starts_where_it_ended_and_stays_for_the_reference(tiny_model, tmp_path):
    expected = logits(made_adapter(tiny_model, tmp_path / "a"), TOKENS)
    started, model = continued(tiny_model, tmp_path / "a")
    assert close(logits(model, TOKENS), expected)
    assert close(logits(loaded(started), TOKENS), logits(loaded(tiny_model), TOKENS))  # what an engine loads
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(adapter_parameters(model)) == 2 * 2 * 4
    for parameter in trained:
        parameter.data += 0.1
    moved = logits(model, TOKENS)
    assert not close(moved, expected)
    with untrained(model):
        assert close(logits(model, TOKENS), expected)
    assert close(logits(model, TOKENS), moved)
    reference = loaded(started)
    merge_start(reference, find_start_adapter(started))
    assert close(logits(reference, TOKENS), expected)


def test_synced_and_exported_weights_are_the_base_with_the_trained_adapter(tiny_model, tmp_path):
    made_adapter(tiny_model, tmp_path / "a")
    started, model = continued(tiny_model, tmp_path / "a")
    for _, parameter in adapter_parameters(model):
        parameter.data += 0.05
    weights = FullWeights(model, PolicyConfig(zero_stage=2, lora=LORA))
    sent = {name: t.clone() for bucket in weights.buckets(1 << 20) for name, t in bucket}
    assert set(sent) == {name for name, _ in loaded(tiny_model).named_parameters()}
    whole = loaded(tiny_model)
    whole.load_state_dict(sent, strict=False)
    whole.tie_weights()
    assert close(logits(whole, TOKENS), logits(model, TOKENS))
    write_trained(model, tmp_path / "out", started)
    assert close(logits(loaded(tmp_path / "out"), TOKENS), logits(model, TOKENS))
    again = PeftModel.from_pretrained(loaded(tiny_model), tmp_path / "out/adapter")
    assert close(logits(again, TOKENS), logits(model, TOKENS))
    adapter_config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(tiny_model)
    templated = set_chat_template(started, "{{ messages[0]['content'] }}")
    assert find_base_model(templated) == str(tiny_model) and find_start_adapter(templated).rank == 4
    further, resumed = continued(tiny_model, tmp_path / "out/adapter")  # an export is continued
    assert close(logits(resumed, TOKENS), logits(model, TOKENS)) and further != started


def test_the_tokenizer_of_an_adapter_replaces_that_of_the_base(tiny_model, tmp_path):
    made_adapter(tiny_model, tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(tmp_path / "a")
    for how in (True, False):
        adapted = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=how)
        assert AutoTokenizer.from_pretrained(adapted).chat_template == tokenizer.chat_template


def test_an_adapter_of_a_wrapper_continues_in_its_text_model(tmp_path):
    whole = wrapper(tmp_path / "gemma3", "gemma3")
    targets = r".*language_model.*\.(q_proj|down_proj)"
    adapted = made_adapter(tmp_path / "gemma3", tmp_path / "a", whole, target_modules=targets)
    expected = logits(adapted, TOKENS)
    text_dir = usable_model(tmp_path / "gemma3", "model.path = m", print)
    merged = apply_start_adapter(text_dir, tmp_path / "a", "model.adapter = a", continued=False)
    assert close(logits(loaded(merged), TOKENS), expected)
    started, model = continued(text_dir, tmp_path / "a")
    assert close(logits(model, TOKENS), expected)
    check_continued(started, LORA, trust_remote_code=False)

    for _, parameter in adapter_parameters(model):
        parameter.data += 0.05
    write_trained(model, tmp_path / "out", started)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "gemma3")
    exported = PeftModel.from_pretrained(base, tmp_path / "out/adapter")
    assert close(logits(exported, TOKENS), logits(model, TOKENS))
    assert not close(logits(model, TOKENS), expected)
    adapter_config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(tmp_path / "gemma3")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (LoRAConfig(rank=8, alpha=8), "has rank 8 and alpha 8.0, and the adapter of `model.adapter` rank 4"),
        (LoRAConfig(rank=4, alpha=16), "alpha 16.0, and the adapter"),
        (LoRAConfig(rank=4, alpha=8), "the adapter of `model.adapter` has no model.layers.0.mlp.gate_proj"),
        (LoRAConfig(rank=4, alpha=8, target_modules=("q_proj",)),
         "`policy.lora` adapts no model.layers.0.mlp.down_proj"),
    ],
)  # fmt: skip
def test_other_adapters_than_the_one_to_start_from_are_refused_with_its_settings(
    tiny_model, tmp_path, lora, words
):
    made_adapter(tiny_model, tmp_path / "a")
    started = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=True)
    settings = r"rank: 4, alpha: 8.0, target_modules: \[down_proj, q_proj\]"
    with pytest.raises(ValueError, match=settings) as raised:
        check_continued(started, lora, trust_remote_code=False)
    assert words in str(raised.value)
    check_continued(started, LORA, trust_remote_code=False)
    check_continued(tiny_model, lora, trust_remote_code=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 8, "lora_alpha": 16, "use_rslora": True},  # alpha / sqrt(rank) has no short decimal number
        {"target_modules": r".*\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": [1]},
    ],
)
def test_an_adapter_is_continued_with_the_settings_of_the_refusal(tiny_model, tmp_path, settings):
    made_adapter(tiny_model, tmp_path / "a", **settings)
    started = apply_start_adapter(tiny_model, tmp_path / "a", "model.adapter = a", continued=True)
    with pytest.raises(ValueError, match=r"; set policy\.lora=\{") as raised:
        check_continued(started, LoRAConfig(rank=3), trust_remote_code=False)
    advice = yaml.safe_load(re.search(r"policy\.lora=(\{.*?\})", str(raised.value))[1])
    check_continued(started, LoRAConfig(**advice), trust_remote_code=False)


def refused(base, adapter):
    with pytest.raises(ValueError, match=r"^model\.adapter = a: ") as raised:
        apply_start_adapter(base, adapter, "model.adapter = a", continued=False)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "lora_only"}, "bias = lora_only"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = "),
        ({"modules_to_save": ["norm"]}, "modules_to_save = "),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights = pissa changed the base weights, too; where it was trained, merge it",
        ),
        ({"init_lora_weights": "pissa_niter_2"}, "init_lora_weights = pissa_niter_2 changed"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = olora changed"),
        # peft merges these once per tied layer, which is not the trained model.
        ({"target_modules": ["q_proj", "embed_tokens"]}, INSIDE),
        ({"target_modules": ["lm_head"]}, INSIDE),
        ({"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, INSIDE),
    ],
)
def test_adapters_that_are_more_than_a_product_in_linear_layers_are_refused(
    tiny_model, tmp_path, settings, words
):
    made_adapter(tiny_model, tmp_path / "a", **settings)
    assert words in refused(tiny_model, tmp_path / "a")


def test_anything_but_an_adapter_of_the_model_is_refused(tiny_model, tmp_path):
    adapter = tmp_path / "a"
    adapter.mkdir()
    assert "no adapter_config.json there; expected a LoRA adapter" in refused(tiny_model, adapter)
    assert "no adapter_config.json" in refused(tiny_model, tiny_model)
    made_adapter(tiny_model, adapter)
    file, other = adapter / "adapter_model.safetensors", tmp_path / "other"
    tensors = load_file(file)
    shutil.copytree(adapter, other)
    save_file({name.replace("layers.0", "layers.70"): t for name, t in tensors.items()}, file)
    assert "has no such weight; the base of the adapter is " in refused(tiny_model, adapter)
    wide = {name: torch.zeros(4, 999) if "q_proj.lora_A" in name else t for name, t in tensors.items()}
    save_file(wide, file)
    words = "q_proj [4, 999], and the model of `model.path` has [128, 128] there"
    assert words in refused(tiny_model, adapter)
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "LOHA"}))
    assert "peft_type is LOHA; expected LORA" in refused(tiny_model, other)
