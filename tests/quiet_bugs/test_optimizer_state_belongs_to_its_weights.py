"""training-gym#536, "fix resume bug": the optimiser state of an earlier checkpoint was loaded into a run
that began at step 0 and should have had a new optimiser.

Adam's first step has the size of the learning rate, against the gradient. With the moments of 200 gradients
of 10 the first step of the new run goes the other way.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.runs.checkpoint import ResumePoint, list_checkpoints, load_resume_point, load_state
from grpo_dist.runs.session import _restore
from tests.support import fakes, made_checkpoints

LR = 0.01


def moved(optimizer, parameter, gradient):
    before = parameter.item()
    parameter.grad = torch.tensor(gradient)
    optimizer.step()
    return parameter.item() - before


def adam():
    parameter = torch.nn.Parameter(torch.tensor(0.0))
    return parameter, torch.optim.Adam([parameter], lr=LR)


class Policy(fakes.World):
    """Records the directories that it loads."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    async def load(self, directory):
        self.loaded.append(directory.relative_to(directory.parents[1]).as_posix())


def restored(point):
    policy = Policy()
    run = SimpleNamespace(config=fakes.config(), tracker=None)
    asyncio.run(_restore(run, point, policy.workers()))
    return policy


def test_the_bug_takes_the_first_step_by_the_gradients_of_another_run():
    parameter, old = adam()
    for _ in range(200):
        moved(old, parameter, 10.0)
    parameter, fresh = adam()
    assert moved(fresh, parameter, -0.1) == pytest.approx(LR, rel=1e-3)
    parameter, stale = adam()
    stale.load_state_dict(old.state_dict())
    assert moved(stale, parameter, -0.1) < -0.5 * LR


def test_a_run_that_begins_loads_no_state_whatever_lies_around(tmp_path):
    made_checkpoints.save(tmp_path, 1)
    point = load_resume_point(None, None, made_checkpoints.PROMPTS)
    assert point == ResumePoint() and point.step == 0
    assert restored(point).loaded == []


def test_a_run_that_resumes_loads_weights_and_optimiser_from_one_directory(tmp_path):
    made_checkpoints.save(tmp_path, 1)
    (checkpoint,) = list_checkpoints(tmp_path)
    state = load_state(checkpoint, fakes.config())
    point = load_resume_point(checkpoint, state, made_checkpoints.PROMPTS)
    assert point.step == 1 and restored(point).loaded == [f"{checkpoint.name}/policy"]


@pytest.mark.parametrize(
    "changed",
    [{"model": {"path": "demo:small"}}, {"policy": {"optimizer": {"weight_decay": 0.5}}}, {"seed": 5}],
)
def test_the_state_of_a_run_of_other_weights_or_settings_is_refused(tmp_path, changed):
    made_checkpoints.save(tmp_path, 1)
    (checkpoint,) = list_checkpoints(tmp_path)
    with pytest.raises(ValueError, match="made with another configuration"):
        load_state(checkpoint, fakes.config(**changed))
