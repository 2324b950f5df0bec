"""What must hold of the packages as a whole: imports, shipped files, the words of the README."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.cli import _parser
from grpo_dist.config_files import load_config
from grpo_dist.recipe.config import load_pipeline

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs/bench").glob("*.yaml")])

IMPORT_ALL = """
import pkgutil, sys
for name in ("ray", "vllm", "deepspeed"):
    sys.modules[name] = None
import grpo_dist
names = [module.name for module in pkgutil.walk_packages(grpo_dist.__path__, "grpo_dist.")]
for name in names:
    __import__(name)
print(len(names))
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_whole_package_imports_without_ray_vllm_and_deepspeed():
    done = python(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_help_imports_nothing_heavy():
    done = python(
        "import sys\nfrom grpo_dist.cli import main\n"
        "try:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'ray', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert "key=value" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path):
    config = load_config(path)
    assert config.name != "run"


def test_the_shipped_pipeline_is_the_recipe_on_the_demo():
    pipeline = load_pipeline(ROOT / "configs/pipelines/r1_demo.yaml")
    assert [stage.kind for stage in pipeline.stages] == [
        "sft",
        "grpo",
        "sample",
        "sft",
        "grpo",
        "sample",
        "sft",
    ]
    assert pipeline["distilled"].config.sft.model == "demo:micro"
    assert pipeline["second_grpo"].inputs == ("second_sft",)


def commands():
    text = (ROOT / "README.md").read_text() + (ROOT / "launch/README.md").read_text()
    blocks = re.findall(r"```(?:\w+)?\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`(grpo-dist [^`]+)`", text)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in [*lines, *inline] if line.startswith(("grpo-dist ", "make "))]


@pytest.mark.parametrize("command", commands())
def test_commands_in_the_readme_exist(command):
    words = shlex.split(command.partition("  #")[0])
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    args, rest = _parser().parse_known_args(words[1:])
    assert args.command and not [word for word in rest if "=" not in word]
    if {"pipeline", "status", "logs", "stop", "report", "--compare"} & set(words):
        return  # its files are the reader's own
    path = words[2] if words[2].startswith("configs/") else "configs/demo.yaml"
    load_config(ROOT / path, [w for w in words[3:] if "=" in w and not w.startswith("-")])


def test_every_section_of_the_configuration_is_in_the_readme():
    from grpo_dist.config import Config

    readme = (ROOT / "README.md").read_text()
    assert not [name for name in Config.model_fields if f"`{name}`" not in readme]
