"""Guarantees for whole packages: imports and shipped files."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_dist.config.files import load_config
from grpo_dist.tools.recipe.config import load_pipeline
from tests.support.patience import HANG_S
from tests.support.reports import make_run

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FOLDERS = ("configs", "configs/bench", "configs/examples")
CONFIGS = sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.yaml"))

IMPORT_ALL = """
import pkgutil, sys
for name in ("ray", "vllm", "deepspeed"):
    sys.modules[name] = None
import grpo_dist
from grpo_dist.environments.registry import ADAPTERS
names = [module.name for module in pkgutil.walk_packages(grpo_dist.__path__, "grpo_dist.")]
needing_extras = {module for module, _, _ in ADAPTERS.values()} | {"grpo_dist.rewards.reasoning_gym"}
assert needing_extras <= set(names)
names = [name for name in names if name not in needing_extras]
for name in names:
    __import__(name)
print(len(names))
"""


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )


@pytest.mark.slow
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


def test_a_reward_worker_imports_nothing_heavy():
    """Such a process restarts after each failure, and most runs have no judge and no reward model."""
    done = python(
        "import sys, actors.workers.reward\n"
        "print(sorted({'torch', 'transformers', 'openai', 'sympy'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_report_needs_neither_torch_nor_transformers_nor_pandas(tmp_path):
    run = make_run(tmp_path / "run", steps=1, recorded=(1,))
    done = python(
        f"import sys\nfrom grpo_dist.cli import main\nprint(main(['report', '{run}']))\n"
        "print({'torch', 'ray', 'transformers', 'pandas', 'sympy'} & set(sys.modules))"
    )
    assert done.stdout.splitlines()[-2:] == ["0", "set()"], done.stderr


def test_whether_a_run_fits_this_machine_is_known_without_ray():
    done = python(
        "import sys\nfrom actors.connection import fit\nfrom grpo_dist.config.files import load_config\n"
        "print(fit(load_config('configs/demo.yaml', [])).gpus >= 0, 'ray' in sys.modules)"
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_a_plan_needs_neither_torch_nor_a_library_of_models():
    """The simulated loop draws more groups under dynamic sampling, and a teacher scores them."""
    small = ["batch.prompts_per_step=8", "sampling.max_new_tokens=64", "dynamic_sampling.enabled=true"]
    words = ["plan", "configs/gsm8k_qwen2.5_1.5b.yaml", "--cluster", "1x8xH100", *small]
    done = python(
        f"import sys\nfrom grpo_dist.cli import main\nprint(main({words}))\n"
        "print({'torch', 'ray', 'transformers', 'huggingface_hub', 'pyarrow'} & set(sys.modules))"
    )
    assert done.stdout.splitlines()[-2:] == ["0", "set()"], done.stderr


def test_data_metrics_and_settings_are_read_without_torch():
    """So a test of only these is collected in 3 seconds."""
    modules = "config.files, data.prompts, data.order, observe.tracker, plugins.inputs, runtime.hardware"
    names = ", ".join(f"grpo_dist.{name}" for name in modules.split(", "))
    done = python(f"import sys, {names}\nprint({{'torch', 'ray', 'transformers'}} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_the_images_pin_every_package_that_an_installation_needs():
    """The CPU build of torch is pinned by launch/setup.sh. `make demo-real` reads a GGUF file."""
    wanted = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert "gguf" in wanted
    for build in ("cpu", "gpu"):
        lines = (ROOT / f"docker/constraints-{build}.txt").read_text().splitlines()
        pinned = {canonicalize_name(line.split("==")[0]) for line in lines}
        assert {canonicalize_name(name) for name in wanted} - pinned <= {"torch"}, build


def test_the_guide_lists_every_extra():
    listed = (ROOT / "grpo_dist/guides/install.md").read_text()
    assert [name for name in PROJECT["optional-dependencies"] if f"`{name}`" not in listed] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path):
    config = load_config(path)
    assert config.name != "run"


def test_the_shipped_pipeline_is_the_recipe_on_the_demo():
    pipeline = load_pipeline(ROOT / "configs/pipelines/r1_demo.yaml")
    assert [stage.kind for stage in pipeline.stages] == [
        "sft", "grpo", "sample", "sft", "grpo", "sample", "sft",
    ]  # fmt: skip
    assert pipeline["distilled"].config.sft.model == "demo:micro"
    assert pipeline["second_grpo"].inputs == ("second_sft",)


def test_every_folder_and_root_file_is_in_the_import_contract():
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    listed = {module.strip() for layer in layers for module in layer.split("|")}
    package = ROOT / "grpo_dist"
    modules = [*package.glob("*/__init__.py"), *package.glob("*.py")]
    names = {path.parent.name if path.parent != package else path.stem for path in modules} - {"__init__"}
    assert listed == {f"grpo_dist.{name}" for name in names} | {"actors"}


@pytest.mark.slow
def test_a_tokenizer_needs_no_compiler_and_a_model_with_remote_code_still_generates(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "remote.py").write_text(
        "from transformers import PreTrainedModel, Qwen2Config as Config, Qwen2ForCausalLM as Model\n"
        "class Remote(PreTrainedModel):\n"
        "    config_class = Config\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.inner = Model(config)\n"
        "        self.post_init()\n"
        "    def prepare_inputs_for_generation(self, ids, **_):\n"
        "        return {'input_ids': ids}\n"
    )
    config = tmp_path / "model" / "config.json"
    auto = {"auto_map": {"AutoModelForCausalLM": "remote.Remote"}, "architectures": ["Remote"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | auto))
    done = python(
        "import sys\nfrom pathlib import Path\nfrom grpo_dist.runs.models import load_tokenizer\n"
        f"path = Path({str(tmp_path / 'model')!r})\n"
        "load_tokenizer(path, False)\n"
        "print(sorted({'torch._dynamo', 'transformers.generation.utils'} & set(sys.modules)))\n"
        "from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin\n"
        "config = AutoConfig.from_pretrained(path)\n"
        "model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)\n"
        "print(type(model).__name__, isinstance(model, GenerationMixin))"
    )
    assert done.stdout.splitlines() == ["[]", "Remote True"], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("skips", [True, False])
def test_a_rank_imports_neither_mlflow_nor_the_compiler_for_deepspeeds_tuner_and_muon(skips):
    """Without the skipping, the compiler is loaded, and mlflow if it is installed."""
    done = python(
        "import os, sys\nos.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from actors.workers.policy import skip_unused_imports\n"
        "from transformers import Qwen2ForCausalLM\n"
        f"if {skips}: skip_unused_imports()\n"
        "import deepspeed.runtime.engine\n"
        "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam\n"
        "heavy = ['mlflow', 'torch._inductor.compile_fx']\n"
        "print([name for name in heavy if sys.modules.get(name)])"
    )
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "[]" if skips else "compile_fx" in loaded, done.stderr
