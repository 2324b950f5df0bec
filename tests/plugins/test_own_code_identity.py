"""User code is part of a run's identity: a resume with other code is refused, and names the file."""

import asyncio
import shutil

import pytest

from actors.factory import Factory
from actors.placement.reservation import Reservation
from grpo_dist.config import Config
from grpo_dist.loop.progress import Progress
from grpo_dist.plugins.user_code import changed_code, code_digest
from grpo_dist.runs.checkpoint import Checkpoints, check_code, list_checkpoints, load_state, other_code
from grpo_dist.runs.identity import digest_run_code
from grpo_dist.tools.evaluate.store import sample_settings
from tests.support import fakes
from tests.support.made_checkpoints import Disk, whole

LOSS = "import helper_of_loss\n\ndef f(logprobs, advantages):\n    return -logprobs * advantages\n"


@pytest.fixture
def user_dir(tmp_path):
    code = tmp_path / "code"
    (code / "package_of_rewards").mkdir(parents=True)
    (code / "own_loss.py").write_text(LOSS)
    (code / "helper_of_loss.py").write_text("import json\n")
    (code / "unused.py").write_text("")
    (code / "user_metric.py").write_text("def f(step):\n    return step\n")
    (code / "package_of_rewards/__init__.py").write_text("def f(completion):\n    return 1.0\n")
    return code


def config(code, **changes) -> Config:
    sections = {
        "code_paths": [str(code)],
        "algorithm": {"loss": "own_loss:f"},
        "rewards": {"functions": [{"function": "package_of_rewards:f"}]},
        "tracking": {"metrics": [{"function": "user_metric:f"}]},
    }
    return fakes.config(**sections | changes)


def test_the_files_are_those_that_determine_the_numbers(user_dir):
    files = digest(config(user_dir))
    assert sorted(files) == ["helper_of_loss.py", "own_loss.py", "package_of_rewards/__init__.py"]
    (user_dir / "helper_of_loss.py").write_text("import json  # other\n")
    (user_dir / "unused.py").write_text("x = 1\n")
    (user_dir / "package_of_rewards/more.py").write_text("")
    changed = digest(config(user_dir))
    assert changed_code(files, changed) == ["helper_of_loss.py (changed)", "package_of_rewards/more.py (new)"]
    assert changed_code(changed, {}) == [f"{name} (gone)" for name in sorted(changed)]


def test_rewards_of_one_source_count(user_dir):
    functions = [{"function": "package_of_rewards:f"}]
    by_source = {"functions": [], "by_source": {"add3": {"functions": functions}}}
    files = digest(config(user_dir, rewards=by_source, data={"train": [{"path": "demo:add3"}]}))
    assert "package_of_rewards/__init__.py" in files


def test_the_first_directory_with_a_module_counts_as_in_an_import(user_dir, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (second / "own_loss.py").write_text("")
    components = config(user_dir).user_components
    assert code_digest(components, [str(user_dir), str(second)]) == code_digest(components, [str(user_dir)])
    assert code_digest(components, [str(second), str(user_dir)]) != code_digest(components, [str(user_dir)])


def test_a_module_outside_of_code_paths_counts_with_what_it_imports(user_dir, tmp_path, monkeypatch):
    """On PYTHONPATH with imports of sibling modules; for an installed package only its files."""
    elsewhere, installed = tmp_path / "elsewhere", tmp_path / "site-packages"
    (elsewhere / "far_loss").mkdir(parents=True)
    (elsewhere / "far_loss/__init__.py").write_text("import far_helper, numpy, grpo_dist\ndef f(): pass\n")
    (elsewhere / "far_loss/more.py").write_text("")
    (elsewhere / "far_helper.py").write_text("")
    (installed / "installed_loss").mkdir(parents=True)
    (installed / "installed_loss/__init__.py").write_text("import beside_it\n")
    (installed / "installed_loss/more.py").write_text("")
    (installed / "beside_it.py").write_text("")
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.syspath_prepend(str(installed))
    files = digest(config(user_dir, algorithm={"loss": "far_loss:f"}, rewards={}))
    assert sorted(files) == [
        "module far_helper.py", "module far_loss/__init__.py", "module far_loss/more.py",
    ]  # fmt: skip
    (elsewhere / "far_helper.py").write_text("x = 1\n")
    changed = digest(config(user_dir, algorithm={"loss": "far_loss:f"}, rewards={}))
    assert changed_code(files, changed) == ["module far_helper.py (changed)"]
    files = digest(config(user_dir, algorithm={"loss": "installed_loss:f"}, rewards={}))
    assert sorted(files) == ["module installed_loss/__init__.py", "module installed_loss/more.py"]


def test_an_evaluation_is_another_one_with_another_rollout_function_or_helper(user_dir):
    """Another loss changes nothing, since it makes no sample."""
    (user_dir / "own_rollout.py").write_text("import helper_of_rollout\nasync def f(generate): pass\n")
    (user_dir / "helper_of_rollout.py").write_text("")
    with_rollout = config(user_dir, rollout={"function": "own_rollout:f"})
    settings = sample_settings(with_rollout)
    assert sorted(settings["code"]) == [
        "helper_of_rollout.py", "own_rollout.py", "package_of_rewards/__init__.py",
    ]  # fmt: skip
    assert settings["rollout"]["function"] == "own_rollout:f"
    assert sample_settings(config(user_dir))["rollout"]["function"] is None
    (user_dir / "helper_of_loss.py").write_text("x = 1\n")
    assert sample_settings(with_rollout) == settings
    (user_dir / "helper_of_rollout.py").write_text("x = 1\n")
    assert sample_settings(with_rollout) != settings


def test_the_program_of_an_agent_is_code_of_the_run(user_dir):
    (user_dir / "my_agent.py").write_text("import helper_of_loss\n")
    agent = config(user_dir, algorithm={}, data={"train": [{"path": "demo:add3"}],
                   "environment": {"program": "my_agent.py --fast"}})  # fmt: skip
    files = digest(agent)
    assert sorted(files) == ["helper_of_loss.py", "my_agent.py", "package_of_rewards/__init__.py"]
    (user_dir / "my_agent.py").write_text("import helper_of_loss, json\n")
    assert changed_code(files, digest(agent)) == ["my_agent.py (changed)"]


@pytest.mark.parametrize(
    ("command", "labels"),
    [
        ("my-agent.py", ["my-agent.py", "helper_of_agent.py"]),
        ("run.v2.py --fast", ["run.v2.py", "helper_of_agent.py"]),
        ("python my-agent.py run.v2.py", ["my-agent.py", "helper_of_agent.py", "run.v2.py"]),
        ("../beside/agent.py", ["../beside/agent.py", "../beside/helper_of_agent.py"]),
        ("{beside}/agent.py", ["{beside}/agent.py", "{beside}/helper_of_agent.py"]),
        ("node agent.js", []),
        ("missing.py", []),
    ],
)
def test_every_script_of_a_command_is_read_where_the_command_finds_it(
    user_dir, tmp_path, monkeypatch, command, labels
):
    """In the working directory, or outside of it. Its imports come from its directory, then `code_paths`."""
    working, beside = tmp_path / "working", tmp_path / "beside"
    for directory, names in ((working, ("my-agent", "run.v2")), (beside, ("agent",))):
        directory.mkdir()
        (directory / "helper_of_agent.py").write_text("")
        for name in names:
            (directory / f"{name}.py").write_text("import helper_of_agent, helper_of_loss\n")
    monkeypatch.chdir(working)
    labels = [f"program {label.format(beside=beside)}" for label in labels]
    data = {"train": [{"path": "demo:add3"}], "environment": {"program": command.format(beside=beside)}}
    files = digest(config(user_dir, algorithm={}, rewards={}, data=data))
    assert sorted(files) == sorted([*labels, "helper_of_loss.py"] if labels else [])


def test_code_paths_for_actors_do_not_depend_on_a_working_directory(user_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(user_dir.parent)
    absolute = config("code").make_code_paths_absolute()
    for section in (absolute, absolute.rewards, absolute.environments):
        assert section.code_paths == (str(user_dir),)
    monkeypatch.chdir(tmp_path.parent)
    assert digest(absolute) == digest(config(user_dir))
    assert Factory(absolute, {}, Reservation([], None))._config.code_paths == (str(user_dir),)


def digest(config: Config) -> dict[str, str]:
    return digest_run_code(config)


def save_checkpoint(config, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", config, fakes.prompts(8))
    asyncio.run(whole(checkpoints, 1, Disk(), Progress(1)))
    return list_checkpoints(tmp_path / "checkpoints")[-1]


def resume(checkpoint, config):
    state = load_state(checkpoint, config)
    check_code(checkpoint, state, config)
    return state


@pytest.mark.slow
def test_a_resumed_run_with_other_code_is_refused_unless_it_may(user_dir, tmp_path):
    checkpoint = save_checkpoint(config(user_dir), tmp_path)
    assert resume(checkpoint, config(user_dir)).step == 1
    assert other_code(checkpoint, digest(config(user_dir))) == ""
    (user_dir / "user_metric.py").write_text("def f(step):\n    return 2.0 * step\n")
    assert resume(checkpoint, config(user_dir)).step == 1  # a metric determines no number of the run
    (user_dir / "helper_of_loss.py").write_text("import math\n")
    with pytest.raises(
        ValueError, match=r"own code has changed .*: helper_of_loss.py \(changed\)\. .*changed_code=warn"
    ):
        resume(checkpoint, config(user_dir))
    warns = config(user_dir, checkpoint={"changed_code": "warn"})
    assert resume(checkpoint, warns).step == 1
    warning = "warning: your own code has changed since: helper_of_loss.py (changed)"
    assert other_code(checkpoint, digest(warns)) == warning


@pytest.mark.slow
def test_code_that_changes_during_a_run_is_one_warning_and_refuses_no_recovery(user_dir, tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, config(user_dir), fakes.prompts(8))
    asyncio.run(whole(checkpoints, 1, Disk(), Progress(1)))
    assert not caplog.messages
    (user_dir / "helper_of_loss.py").write_text("import math\n")
    for step in (2, 3):
        asyncio.run(whole(checkpoints, step, Disk(), Progress(step)))
    (warning,) = caplog.messages
    assert warning.startswith("your own code has changed during the run: helper_of_loss.py (changed). Proc")
    newest = list_checkpoints(tmp_path)[-1]
    assert load_state(newest, config(user_dir)).step == 3  # as `Run.newest` does
    with pytest.raises(ValueError, match="own code has changed since it was written"):
        resume(newest, config(user_dir))


def test_code_that_was_moved_is_the_same_code(user_dir, tmp_path):
    checkpoint = save_checkpoint(config(user_dir), tmp_path)
    moved = shutil.copytree(user_dir, tmp_path / "moved")
    assert resume(checkpoint, config(moved)).step == 1
