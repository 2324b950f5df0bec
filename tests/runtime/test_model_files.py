"""A directory without a complete model is refused with its kind and the remedy."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_dist.runtime.model_files import check_directory, stored_tensors, weights_digest, write_tensors

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(6.0).view(2, 3),
    "b": torch.ones(2, dtype=torch.bfloat16),
}


def place(directory, *names):
    """Create files, and folders (names that end with a slash), in ``directory``."""
    for name in names:
        path = directory / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text("{}")
    return directory


def refusal(directory, key="model.path"):
    with pytest.raises(ValueError, match=f"^{key} = ") as raised:
        check_directory(directory, f"{key} = {directory}")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "no config.json; expected a Hugging Face model directory"),
        (["config.json"], "it has no weights; expected model.safetensors"),
        (["config.json", "training_args.bin", "optimizer.bin"], "the state of a trainer"),
        (["config.json", "global_step3/", "zero_to_fp32.py"], "DeepSpeed checkpoint"),
        (["global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest"], "zero_to_fp32.py"),
        (["actor/model_world_size_4_rank_0.pt", "actor/huggingface/config.json"], "verl.model_merger merge"),
        (["latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/"], "a Megatron checkpoint"),
        (["iter_0000100/mp_rank_00/model_optim_rng.pt"], "a Megatron checkpoint"),
        (["actor/dist_ckpt/"], "a Megatron checkpoint"),
        (["config.json", "pytorch_model_fsdp_0/__0_0.distcp"], "accelerate merge-weights"),
        (["__0_0.distcp", ".metadata"], "shards of torch's distributed checkpoints"),
        (["model.safetensors"], "weights, but no config.json"),
        (["consolidated.safetensors", "params.json"], "the model's own authors"),
        (["config.json", "tf_model.h5"], "TensorFlow"),
        (["config.json", "onnx.onnx"], "ONNX"),
        (["model_index.json", "unet/"], "diffusion"),
        (["a-Q8_0.gguf", "config.json"], "gguf_file='a-Q8_0.gguf')"),
        (
            ["checkpoint-90/config.json", "checkpoint-90/model.safetensors", "checkpoint-100/config.json",
             "checkpoint-100/model.safetensors"],
            "set `model.path` to one, e.g. {dir}/checkpoint-100",
        ),
        (["checkpoint-5/adapter_config.json"], "`model.adapter` to one, e.g. {dir}/checkpoint-5"),
        (
            ["checkpoints/step_000002/manifest.json", "metrics.jsonl"],
            "the directory of a run, and that run has not written its model yet",
        ),
        (
            ["checkpoints/step_000002/manifest.json", "model/config.json", "model/model.safetensors"],
            "the model of that run is in `model`; set `model.path` to {dir}/model",
        ),
    ],
)  # fmt: skip
def test_what_a_directory_is_is_said(tmp_path, names, words):
    assert words.format(dir=tmp_path) in refusal(place(tmp_path, *names))


@pytest.mark.parametrize("folder", ["checkpoints", "checkpoints/step_000002"])
def test_a_checkpoint_of_a_run_leads_to_the_model_of_the_run(tmp_path, folder):
    for file in ("manifest.json", "policy/state/mp_rank_00"):
        place(tmp_path, f"checkpoints/step_000002/{file}")
    place(tmp_path, "model/config.json")
    words = f"for resuming it, and the model of that run is in `model`; set `model.path` to {tmp_path}/model"
    assert words in refusal(tmp_path / folder)


def test_an_adapter_is_called_one(tmp_path):
    adapter = place(tmp_path, "adapter_model.safetensors", "tokenizer.json")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-4B"}')
    assert "a LoRA adapter of Qwen/Qwen3-4B" in refusal(adapter)
    assert f"`model.adapter` to {adapter}" in refusal(adapter)
    assert "merge it" in refusal(adapter, "sft.model")
    place(adapter, "config.json")  # which some trainers copy from the base model
    assert "a LoRA adapter of Qwen/Qwen3-4B" in refusal(adapter)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised (fp8)"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised (awq, 4 bits)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq, 4 bits)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantised (mxfp4)"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantised (bitsandbytes, 4 bits)",
        ),
        ({"compression_config": {"format": "pack-quantized"}}, "quantised (pack-quantized)"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "quantised (fp8)"),
    ],
)
def test_quantised_weights_are_refused_by_their_method(tmp_path, config, words):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in refusal(tmp_path)
    assert "without -FP8" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_quantised_weights_without_a_configuration_are_refused_by_their_type(tmp_path, dtype):
    place(tmp_path, "config.json")
    save_file(WEIGHTS | {"q": torch.zeros(512, 512).to(dtype)}, tmp_path / "model.safetensors")
    assert "quantised (q has type " in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_causal_masks_in_a_checkpoint_are_no_quantised_weights(tmp_path, dtype):
    """As in those of Pythia."""
    place(tmp_path, "config.json")
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 512, 512).tril().to(dtype)}
    save_file(WEIGHTS | mask, tmp_path / "model.safetensors")
    check_directory(tmp_path, "model.path")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n", "git lfs pull"),
        (b"", "damaged"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{not json......}", "damaged"),
    ],
)
def test_files_that_are_no_weights_are_named(tmp_path, content, words):
    place(tmp_path, "config.json")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert words in refusal(tmp_path) and "model.safetensors" in refusal(tmp_path)


def test_a_file_that_is_cut_short_is_named_with_both_sizes(tmp_path):
    file = place(tmp_path, "config.json") / "model.safetensors"
    save_file(WEIGHTS, file)
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    assert f"cut short, {len(content) - 5:,} of {len(content):,} bytes" in refusal(tmp_path)


def test_headers_of_a_file_larger_than_memory_are_read(tmp_path):
    """65 GB in a sparse file: mapping it fails on a smaller machine."""
    shape, size = [32768, 1_000_000], 2 * 32768 * 1_000_000
    header = json.dumps({"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    place(tmp_path, "config.json")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert stored_tensors(tmp_path)["w"].shape == tuple(shape)
    check_directory(tmp_path, "model.path = m")


def test_tensors_are_copied_byte_for_byte_under_other_names(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    write_tensors(out, {f"x.{name}": tensor for name, tensor in stored.items()})
    copied = load_file(out / "model.safetensors")
    assert set(copied) == {f"x.{name}" for name in WEIGHTS}
    for name, tensor in WEIGHTS.items():
        assert torch.equal(copied[f"x.{name}"], tensor) and copied[f"x.{name}"].dtype == tensor.dtype


def test_other_weights_have_another_digest_and_another_copy_has_the_same(tmp_path):
    """Also weights of the same shapes, of which a sample is read."""
    model = tmp_path / "model"
    model.mkdir()
    weights = torch.arange(2_000_000, dtype=torch.float32)
    save_file({"weight": weights}, model / "model.safetensors")
    digest = weights_digest(model)
    copied = shutil.copytree(model, tmp_path / "copied")
    os.utime(copied / "model.safetensors", (0, 0))
    (copied / "consolidated.safetensors").write_bytes(b"not read")
    (copied / "README.md").write_text("new")
    assert weights_digest(copied) == digest
    save_file({"weight": weights * 1.01}, model / "model.safetensors")
    assert weights_digest(model) != digest
