"""Names resolve to built-ins, `module:name` from `code_paths`, or entry points of packages."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.config import AlgorithmConfig, Config
from grpo_dist.config.checks import learns_from_equal_rewards
from grpo_dist.config.files import ConfigError, load_config
from grpo_dist.errors import UserError
from grpo_dist.plugins.user_code import ADVANTAGE, LOSS, find_package, load, resolve_target
from grpo_dist.rewards.checks import reward_problems
from grpo_dist.tools.submit.checks import check_rewards_known
from tests.support.documents import ROOT
from tests.support.patience import HANG_S

PLAIN = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with entry points: (name, {group: {point: value}})."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def installed(name: str, groups: dict[str, dict[str, str]]) -> None:
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (site / f"{name.replace('-', '_')}.py").write_text("def found():\n    return 'of the package'\n")
        importlib.invalidate_caches()

    return installed


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: demo:tiny}\ndata: {train: [{path: demo:add3}]}\n")
    return file


def module(directory: Path, name: str, text: str) -> str:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.py").write_text(text)
    return str(directory)


def test_a_name_of_a_package_is_found_by_its_entry_point(install):
    install("short-answers", {"grpo_dist.losses": {"short": "short_answers:found"}})
    assert resolve_target(LOSS, "short") == "short_answers:found"
    assert find_package(LOSS, "short") == "short-answers 1.2"
    assert load(LOSS, "short")() == "of the package"
    config = Config.model_validate(PLAIN | {"algorithm": {"loss": "short"}})
    assert [component.name for component in config.user_components] == ["short"]
    with pytest.raises(ValueError, match=r"'short': expected a built-in advantage.*grpo_dist\.advantages"):
        resolve_target(ADVANTAGE, "short")  # registered for another kind


def test_a_reward_of_a_package_can_be_submitted_and_an_unknown_one_is_named_with_its_key(install, path):
    install("short-answers", {"grpo_dist.rewards": {"short": "short_answers:found"}})
    for kind in ("outcome", "process"):
        check_rewards_known(load_config(path, [f"rewards.functions=[{{function: short, kind: {kind}}}]"]))
    steps = load_config(path, ["rewards.functions=[{function: math, kind: process}]"])
    with pytest.raises(UserError, match=r"kind = process: built-in reward math scores no steps"):
        check_rewards_known(steps)
    for key in ("rewards.functions", "rewards.by_source.add3.functions"):
        config = load_config(path, [f"{key}=[{{function: shorter}}]"])
        expected = f"{key}: reward function 'shorter': expected one of math, .*, short, or `module:function`"
        with pytest.raises(UserError, match=expected):
            check_rewards_known(config)
        (problem,) = reward_problems(config.rewards, max_new_tokens=8)
        assert re.match(expected, problem)


def test_an_estimator_of_a_package_is_treated_as_one_of_a_module(install, path):
    """Both may need no group, and may learn from equal rewards."""
    install("medians", {"grpo_dist.advantages": {"median": "medians:found"}})
    for name in ("median", "medians:found"):
        config = load_config(path, [f"algorithm.advantage={name}", "batch.samples_per_prompt=1"])
        assert config.user_components[0].name == name and learns_from_equal_rewards(config)
    assert not learns_from_equal_rewards(load_config(path))


def test_a_package_cannot_replace_a_built_in_piece(install):
    install("loud", {"grpo_dist.losses": {"ppo_clip": "loud:found"}})
    config = Config.model_validate(PLAIN)
    assert config.algorithm.loss.name == "ppo_clip" and config.user_components == ()


def test_a_name_that_two_packages_register_is_refused(install):
    install("one", {"grpo_dist.losses": {"mine": "one:found"}})
    install("two", {"grpo_dist.losses": {"mine": "two:found"}})
    with pytest.raises(ValueError, match=r"(one|two) 1\.2 and (one|two) 1\.2"):
        resolve_target(LOSS, "mine")


def test_a_module_is_searched_in_code_paths_first_and_each_directory_has_its_own(tmp_path):
    first = module(
        tmp_path / "a", "twice", "import helper_of_twice\ndef f():\n    return helper_of_twice.X\n"
    )
    module(tmp_path / "a", "helper_of_twice", "X = 'a'\n")
    second = module(tmp_path / "b", "twice", "def f():\n    return 'b'\n")
    before = list(sys.path)
    assert load(LOSS, "twice:f", (first,))() == "a"
    assert load(LOSS, "twice:f", (second, first))() == "b"
    assert load(LOSS, "twice:f", (first,)) is load(LOSS, "twice:f", [first])
    assert sys.path[: len(before)] == before  # user directories come last


WRONG = [
    ("absent_piece:f", "module `absent_piece` cannot be imported (ModuleNotFoundError"),
    ("pieces_here:medain", "has no `medain`; did you mean pieces_here:median?"),
    ("pieces_here:number", "`number` is no function or class"),
    ("broken_piece:f", "ZeroDivisionError: division by zero"),
    ("json:loads_it", "has no `loads_it`"),
]


@pytest.mark.parametrize(("name", "message"), WRONG)
def test_a_piece_that_cannot_be_loaded_is_refused_by_name(tmp_path, name, message):
    code = module(tmp_path, "pieces_here", "number = 3\ndef median():\n    return 1\n")
    module(tmp_path, "broken_piece", "1 / 0\n")
    with pytest.raises(ValueError, match="advantage estimator") as caught:
        load(ADVANTAGE, name, (code,))
    assert message in str(caught.value) and name in str(caught.value)


def test_an_own_module_must_not_have_the_name_of_one_in_use(tmp_path):
    code = module(tmp_path, "json", "def f():\n    return 1\n")
    with pytest.raises(ValueError, match="has the name of a module in use"):
        load(ADVANTAGE, "json:f", (code,))


@pytest.mark.parametrize("name", ["grop", "a b:c", "a:", ":b", "a:b c", "1a:b"])
def test_the_configuration_refuses_what_no_piece_can_be_called(path, name):
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"algorithm.advantage='{name}'"])
    assert f"`algorithm.advantage` = '{name}'" in str(caught.value)
    assert "'grpo'" in str(caught.value) and "`module:name` from `code_paths`" in str(caught.value)


def test_code_paths_are_one_list_for_the_whole_configuration():
    config = Config.model_validate(PLAIN | {"code_paths": ["a", "b"], "rewards": {"timeout_s": 1}})
    assert config.rewards.code_paths == config.environments.code_paths == config.code_paths == ("a", "b")
    assert config.rewards.timeout_s == 1 and "code_paths" not in config.model_dump()["rewards"]
    assert Config.model_validate(config.model_dump()) == config
    for name in ("rewards", "environments"):
        with pytest.raises(ValueError, match=f"unknown key `{name}.code_paths`; .* write `code_paths`"):
            Config.model_validate(PLAIN | {name: {"code_paths": ["a"]}})


def test_arguments_need_a_user_component():
    algorithm = {"loss": {"name": "mine:f", "kwargs": {"beta": 2}}}
    config = Config.model_validate(PLAIN | {"algorithm": algorithm})
    component = config.user_components[0]
    assert component.kwargs == {"beta": 2} and component.key == "algorithm.loss"
    with pytest.raises(ValueError, match=r"loss\.ppo_clip\.kwargs"):
        AlgorithmConfig(loss={"kwargs": {"clip": 0.1}})


def test_a_package_that_is_installed_while_the_process_runs_is_found(install):
    """As in a notebook. Entry points are cached until a package directory changes."""
    with pytest.raises(ValueError, match="an installed package registers"):
        resolve_target(ADVANTAGE, "late")
    install("late-pieces", {ADVANTAGE.group: {"late": "late_pieces:found"}})
    assert resolve_target(ADVANTAGE, "late") == "late_pieces:found"


@pytest.mark.slow
def test_a_package_that_pip_has_installed_registers_its_pieces(tmp_path):
    """A wheel from its `pyproject.toml`, in a separate directory and interpreter."""
    project, site = tmp_path / "project", tmp_path / "site"
    project.mkdir()
    (project / "real_pieces.py").write_text(
        "def short(logprobs, advantages): return -logprobs * advantages\n"
    )
    (project / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
        "[project]\nname = 'real-pieces'\nversion = '0.3'\n"
        "[project.entry-points.'grpo_dist.losses']\nreally_short = 'real_pieces:short'\n"
        "[tool.setuptools]\npy-modules = ['real_pieces']\n"
    )
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(project)]
    subprocess.run(command, check=True, timeout=HANG_S)
    code = """
from grpo_dist.config import Config
from grpo_dist.plugins.user_code import LOSS
from grpo_dist.plugins.user_code import load
from grpo_dist.plugins.user_code import find_package
from grpo_dist.runs.identity import digest_run_code
plain = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}
config = Config.model_validate(plain | {"algorithm": {"loss": "really_short"}})
digest = digest_run_code(config)
print(load(LOSS, "really_short")(2, 3), find_package(LOSS, "really_short"), digest)
"""
    paths = os.pathsep.join([str(site), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=HANG_S,
        capture_output=True, text=True,
    )  # fmt: skip
    identity = {"entry point really_short of grpo_dist.losses": "real-pieces 0.3"}
    assert ran.stdout.splitlines()[-1] == f"-6 real-pieces 0.3 {identity}"
