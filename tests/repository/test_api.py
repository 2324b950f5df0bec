"""The Python API: light to import, typed, and strict about input before anything starts."""

import asyncio
import pkgutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist import Config, UserError, evaluate_model, load_config, train
from grpo_dist.api import resolved
from grpo_dist.config.files import ConfigError
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_import_is_light_and_independent_of_earlier_imports():
    printed = python(
        "import sys, grpo_dist\n"
        "print(sorted({'torch', 'ray', 'numpy', 'pydantic', 'omegaconf'} & set(sys.modules)))"
    )
    assert printed == "[]"
    printed = python(
        "from grpo_dist import train\n"
        "import sys\nprint(train.__module__, sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    )
    assert printed == "grpo_dist.api []"
    printed = python(
        "import grpo_dist.runs.session, grpo_dist.evaluation\nfrom grpo_dist import train\n"
        "import sys\nheavy = {'transformers', 'torch._dynamo', 'ray', 'openai'}\n"
        "print(train.__module__, sorted(heavy & set(sys.modules)))"
    )
    assert printed == "grpo_dist.api []"


def test_no_module_hides_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(grpo_dist.__path__)}
    assert not modules & set(grpo_dist.__all__)
    for name in grpo_dist.__all__:
        assert getattr(grpo_dist, name) is not None and name in dir(grpo_dist)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = grpo_dist.trian


def test_a_value_of_an_unsupported_type_is_refused():
    with pytest.raises(ConfigError, match=r"'object' is not a supported primitive type.*steps"):
        resolved(SMALL | {"steps": object()})


def test_a_file_a_mapping_and_a_config_give_the_same_configuration(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text('model: {path: "demo:tiny"}\ndata: {train: [{path: "demo:add3"}]}\n')
    config = resolved(path, ["steps=7", "+algorithm=dapo"])
    assert isinstance(config, Config) and config.steps == 7 and config.algorithm.loss.clip_high == 0.28
    assert resolved(SMALL, ["steps=7", "+algorithm=dapo"]) == config == resolved(config)
    assert load_config(path) == resolved(str(path)) == resolved(SMALL)
    assert SMALL == {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}


@pytest.mark.parametrize("function", [train, evaluate_model])
def test_unusable_input_is_refused_before_anything_starts(function, tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        function(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="unknown key `step`; did you mean `steps`"):
        function(SMALL, ["step=3"])
    with pytest.raises(UserError, match="resolved already; give them to load_config"):
        function(resolved(SMALL), ["steps=3"])


@pytest.mark.parametrize("function", [train, evaluate_model])
def test_calls_from_a_thread_or_a_running_event_loop_are_refused(function):
    async def inside():
        function(SMALL)

    with pytest.raises(UserError, match="outside of an event loop; in a notebook"):
        asyncio.run(inside())
    refused: list[BaseException] = []

    def in_a_thread():
        try:
            function(SMALL)
        except UserError as error:
            refused.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(HANG_S)
    assert len(refused) == 1


def test_the_package_is_marked_as_typed():
    assert (Path(grpo_dist.__file__).parent / "py.typed").is_file()
    assert 'grpo_dist = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()
