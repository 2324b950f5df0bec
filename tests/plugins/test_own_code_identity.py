"""A run's own code is part of its identity: a resumed run with other code is refused, and the file named."""

import asyncio
import shutil

import pytest

from actors.factory import Factory
from actors.placement.reservation import Reservation
from grpo_dist.config import Config
from grpo_dist.loop.progress import Progress
from grpo_dist.plugins.user_code import changed_code, code_digest
from grpo_dist.runs.checkpoint import Checkpoints, list_checkpoints, load_state, other_code
from grpo_dist.runs.identity import digest_run_code
from grpo_dist.tools.evaluate.store import sample_settings
from tests.support import fakes
from tests.support.made_checkpoints import Disk

LOSS = "import helper_of_loss\n\ndef f(logprobs, advantages):\n    return -logprobs * advantages\n"


@pytest.fixture
def own(tmp_path):
    code = tmp_path / "code"
    (code / "package_of_rewards").mkdir(parents=True)
    (code / "own_loss.py").write_text(LOSS)
    (code / "helper_of_loss.py").write_text("import json\n")
    (code / "unused.py").write_text("")
    (code / "own_metric.py").write_text("def f(step):\n    return step\n")
    (code / "package_of_rewards/__init__.py").write_text("def f(completion):\n    return 1.0\n")
    return code


def config(code, **changes) -> Config:
    given = {
        "code_paths": [str(code)],
        "algorithm": {"loss": "own_loss:f"},
        "rewards": {"functions": [{"function": "package_of_rewards:f"}]},
        "tracking": {"metrics": [{"function": "own_metric:f"}]},
    }
    return fakes.config(**given | changes)


def test_the_files_are_those_that_determine_the_numbers(own):
    found = digest(config(own))
    assert sorted(found) == ["helper_of_loss.py", "own_loss.py", "package_of_rewards/__init__.py"]
    (own / "helper_of_loss.py").write_text("import json  # other\n")
    (own / "unused.py").write_text("x = 1\n")
    (own / "package_of_rewards/more.py").write_text("")
    again = digest(config(own))
    assert changed_code(found, again) == ["helper_of_loss.py (changed)", "package_of_rewards/more.py (new)"]
    assert changed_code(again, {}) == [f"{name} (gone)" for name in sorted(again)]


def test_rewards_of_one_source_count(own):
    by_source = {
        "functions": [],
        "by_source": {"add3": {"functions": [{"function": "package_of_rewards:f"}]}},
    }
    found = digest(config(own, rewards=by_source, data={"train": [{"path": "demo:add3"}]}))
    assert "package_of_rewards/__init__.py" in found


def test_the_first_directory_with_a_module_counts_as_in_an_import(own, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (second / "own_loss.py").write_text("")
    pieces = config(own).user_components
    assert code_digest(pieces, [str(own), str(second)]) == code_digest(pieces, [str(own)])
    assert code_digest(pieces, [str(second), str(own)]) != code_digest(pieces, [str(own)])


def test_a_module_outside_of_code_paths_counts_with_what_it_imports(own, tmp_path, monkeypatch):
    """On PYTHONPATH with its neighbours; of an installed package its own files."""
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
    found = digest(config(own, algorithm={"loss": "far_loss:f"}, rewards={}))
    assert sorted(found) == [
        "module far_helper.py", "module far_loss/__init__.py", "module far_loss/more.py",
    ]  # fmt: skip
    (elsewhere / "far_helper.py").write_text("x = 1\n")
    again = digest(config(own, algorithm={"loss": "far_loss:f"}, rewards={}))
    assert changed_code(found, again) == ["module far_helper.py (changed)"]
    found = digest(config(own, algorithm={"loss": "installed_loss:f"}, rewards={}))
    assert sorted(found) == ["module installed_loss/__init__.py", "module installed_loss/more.py"]


def test_an_evaluation_is_another_one_with_another_rollout_function_or_helper(own):
    """And the same with another loss, which makes no sample."""
    (own / "own_rollout.py").write_text("import helper_of_rollout\nasync def f(generate): pass\n")
    (own / "helper_of_rollout.py").write_text("")
    with_rollout = config(own, rollout={"function": "own_rollout:f"})
    found = sample_settings(with_rollout)
    assert sorted(found["code"]) == [
        "helper_of_rollout.py", "own_rollout.py", "package_of_rewards/__init__.py",
    ]  # fmt: skip
    assert found["rollout"]["function"] == "own_rollout:f"
    assert sample_settings(config(own))["rollout"]["function"] is None
    (own / "helper_of_loss.py").write_text("x = 1\n")
    assert sample_settings(with_rollout) == found
    (own / "helper_of_rollout.py").write_text("x = 1\n")
    assert sample_settings(with_rollout) != found


def test_the_program_of_an_agent_is_code_of_the_run(own):
    (own / "my_agent.py").write_text("import helper_of_loss\n")
    agent = config(own, algorithm={}, data={"train": [{"path": "demo:add3"}],
                   "environment": {"program": "my_agent.py --fast"}})  # fmt: skip
    found = digest(agent)
    assert sorted(found) == ["helper_of_loss.py", "my_agent.py", "package_of_rewards/__init__.py"]
    (own / "my_agent.py").write_text("import helper_of_loss, json\n")
    assert changed_code(found, digest(agent)) == ["my_agent.py (changed)"]
    other = agent.data.model_copy(update={"environment": "program:node agent.js"})
    assert sorted(digest(agent.model_copy(update={"data": other}))) == ["package_of_rewards/__init__.py"]


def test_code_paths_for_actors_do_not_depend_on_a_working_directory(own, tmp_path, monkeypatch):
    monkeypatch.chdir(own.parent)
    given = config("code").make_code_paths_absolute()
    assert given.code_paths == given.rewards.code_paths == given.environments.code_paths == (str(own),)
    monkeypatch.chdir(tmp_path.parent)
    assert digest(given) == digest(config(own))
    assert Factory(given, {}, Reservation([], None))._config.code_paths == (str(own),)


def digest(config: Config) -> dict[str, str]:
    return digest_run_code(config.user_components, config.rewards, config.data)


def saved(config, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", config, fakes.prompts(8))
    workers = Disk()

    async def save():
        await checkpoints.save(1, workers, Progress(1))
        await checkpoints.settle()

    asyncio.run(save())
    return list_checkpoints(tmp_path / "checkpoints")[-1]


@pytest.mark.slow
def test_a_resumed_run_with_other_code_is_refused_unless_it_may(own, tmp_path):
    found = saved(config(own), tmp_path)
    assert load_state(found, config(own)).step == 1 and other_code(found, digest(config(own))) == ""
    (own / "own_metric.py").write_text("def f(step):\n    return 2.0 * step\n")
    assert load_state(found, config(own)).step == 1  # a metric determines no number of the run
    (own / "helper_of_loss.py").write_text("import math\n")
    with pytest.raises(
        ValueError, match=r"own code has changed .*: helper_of_loss.py \(changed\)\. .*changed_code=warn"
    ):
        load_state(found, config(own))
    warns = config(own, checkpoint={"changed_code": "warn"})
    assert load_state(found, warns).step == 1
    assert (
        other_code(found, digest(warns))
        == "warning: your own code has changed since: helper_of_loss.py (changed)"
    )


def test_code_that_was_moved_is_the_same_code(own, tmp_path):
    found = saved(config(own), tmp_path)
    moved = shutil.copytree(own, tmp_path / "moved")
    assert load_state(found, config(moved)).step == 1
