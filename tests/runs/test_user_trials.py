"""User code is tried before a run, which refuses wrong results, hangs and unknown arguments."""

import asyncio
import threading
from dataclasses import replace

import pytest

from grpo_dist.config.data import UserOrderConfig
from grpo_dist.config.files import load_config
from grpo_dist.data.order import UserOrder, chosen
from grpo_dist.driver import run
from grpo_dist.loop.metrics import UserMetrics
from grpo_dist.plugins import user_code as loading
from grpo_dist.plugins.inputs import MetricInputs, OrderInputs
from grpo_dist.plugins.user_code import (
    ADVANTAGE,
    AGGREGATION,
    KL,
    LOSS,
    METRIC,
    ORDER,
    ROLLOUT,
    SINK,
    UserComponent,
)
from grpo_dist.runs import trials
from grpo_dist.runs.start import check_user_code
from grpo_dist.runs.trials import Start, user_code_problems
from grpo_dist.tools.check import run_checks
from tests.support import fakes
from tests.support.patience import HANG_S, longer

CODE = """
import itertools, time, sys

CALLS = itertools.count()

def good(logprobs, old_logprobs, advantages, beta=1.0):
    return -(logprobs - old_logprobs).exp() * advantages * beta

def batch_mean(logprobs, advantages):
    return -(logprobs - logprobs.mean()) * advantages

def detached(logprobs, advantages):
    return -logprobs.detach() * advantages

def mean_of_means(token_losses, mask):
    return token_losses.sum() / mask.sum()

def asks(rewards, difficulty):
    return rewards

def weighs(rewards, weights):
    return rewards * weights.get("math", 1.0)

def weighs_by_name(rewards, **others):
    return rewards * others["weights"]["math"]

def centres(rewards):
    return rewards

def per_group(rewards, group_ids):
    return rewards[:2]

def nan_kl(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).sqrt()

def text(groups):
    return "many"

def times(step, factor=1):
    return {"a": step * factor, "b": step * factor * 2}

def by_format(parts):
    return parts["format"]

def divides(rewards):
    return rewards * (1 // (len(rewards) - len(rewards)))

def looks_up(logprobs, old_logprobs, advantages):
    return {}["row 7"]

def leaves(rewards):
    sys.exit(3)

def endless(groups):
    CALLS.__next__()
    while True:
        time.sleep(0.01)

def endless_order(prompts, count):
    time.sleep(10_000)

def calls(groups):
    return next(CALLS)

def any_order(prompts, count):
    first = next(CALLS)
    return [(first + i) % len(prompts) for i in range(count)]

def too_few(prompts, count):
    return [0] * count

class HalfSink:
    def log(self, step, metrics):
        pass

async def retold(token_ids, generate):
    first = await generate(token_ids)
    return [[7], first]
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "tried_pieces.py").write_text(CODE)
    return str(tmp_path)


def component(kind, name, **kwargs):
    return UserComponent(kind, f"tried_pieces:{name}", kind.key, kwargs)


class Plain:
    def __len__(self):
        return 100

    def decode(self, ids, **_):
        return str(ids)


WRONG = [
    (LOSS, "batch_mean", {}, "gives other results when the rows are split"),
    (LOSS, "detached", {}, "has no gradient"),
    (LOSS, "good", {"gamma": 1}, "`algorithm.loss.kwargs.gamma`: .* no such argument; it takes beta"),
    (LOSS, "good", {"beta": "2"}, "`algorithm.loss.kwargs.beta`: .* expects float, and str is given"),
    (AGGREGATION, "mean_of_means", {}, "gives other results when the rows are split"),
    (ADVANTAGE, "asks", {}, r"needs `difficulty`, which is no input of its kind \(rewards, group_ids"),
    (ADVANTAGE, "per_group", {}, r"returned shape \[2\]; expected \[8\]"),
    (ADVANTAGE, "leaves", {}, r"small test input \(SystemExit: 3 \(/.*/tried_pieces\.py:\d+ in leaves\)\)"),
    (KL, "nan_kl", {}, "is not finite"),
    (LOSS, "looks_up", {}, r"small test input \(KeyError: .*row 7.*\(/.*/tried_pieces\.py:\d+ in looks_up\)"),
    (ADVANTAGE, "divides", {}, r"test input \(ZeroDivisionError: .* \(/.*/tried_pieces\.py:\d+ in divides\)"),
    (METRIC, "text", {}, "could not convert string to float|fails on a small test input"),
    (ORDER, "any_order", {}, "gives two answers to the same inputs"),
    (ORDER, "too_few", {}, "returned 2 indices with 1 different ones; expected 2 different ones of 0 to 5"),
    (SINK, "HalfSink", {}, "has no method `table`"),
    (ROLLOUT, "retold", {}, "was not generated after the prompt and the parts before it"),
]


@pytest.mark.parametrize("result", [None, [0.9, 1.9], 2])
def test_an_order_that_returns_no_indices_is_refused_by_name(tmp_path, result):
    (tmp_path / "late_order.py").write_text(f"def order(prompts, count):\n    return {result}\n")
    inputs = OrderInputs(7, 2, fakes.prompts(4), {}, 0)
    with pytest.raises(ValueError, match=r"late_order:order returned .*expected 2 different indices"):
        chosen("late_order:order", [str(tmp_path)], {}, inputs)


@pytest.mark.parametrize(("kind", "name", "kwargs", "message"), WRONG)
def test_a_piece_that_cannot_be_used_is_refused(code, kind, name, kwargs, message):
    (problem,) = user_code_problems([component(kind, name, **kwargs)], [code], Plain())
    assert problem.startswith(f"`{kind.key}` = tried_pieces:{name}")
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


def test_a_good_piece_passes_and_every_problem_is_reported(code):
    components = [component(LOSS, "good", beta=2), component(LOSS, "detached"), component(KL, "nan_kl")]
    assert len(list(user_code_problems(components, [code]))) == 2


def test_an_argument_of_a_loss_of_one_source_is_named_by_the_key_of_the_source(code):
    source_loss = replace(component(LOSS, "good", gamma=1), key="data.train.1.algorithm.loss")
    (problem,) = user_code_problems([source_loss], [code])
    assert "`data.train.1.algorithm.loss.kwargs.gamma`: " in problem


def test_a_value_that_does_not_fit_is_not_shown(code):
    (problem,) = user_code_problems([component(LOSS, "good", api_key="sk-very-secret-123")], [code])
    assert "algorithm.loss.kwargs.api_key" in problem and "sk-very" not in problem


def test_check_tries_own_code_and_names_the_key(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {path: demo:tiny}\ndata: {train: [{path: demo:add3}]}\n")
    overrides = ["code_paths=[.]", "algorithm.loss=tried_pieces:good"]

    def check(*more):
        config = load_config("run.yaml", [*overrides, *more])
        return next(result for result in run_checks(config, cluster="1x1xH100") if result.name == "own code")

    assert check().detail == "algorithm.loss: tried_pieces:good" and not check().problem
    failed = check("algorithm.loss.kwargs={gamma: 1}")
    assert failed.problem and "`algorithm.loss` = tried_pieces:good" in failed.detail


def test_an_estimator_that_reads_weights_has_one_of_each_reward(code):
    def check(name, weight):
        by_source = {"add3": {"functions": [{"function": "math", "weight": weight}]}}
        algorithm, data = {"advantage": f"tried_pieces:{name}"}, {"train": [{"path": "demo:add3"}]}
        config = fakes.config(
            code_paths=[code], algorithm=algorithm, data=data, rewards={"by_source": by_source}
        )
        check_user_code(Start(config, print))

    check("weighs", 1)
    check("centres", 3)
    for name in ("weighs", "weighs_by_name"):
        message = (
            rf"`algorithm\.advantage` = tried_pieces:{name} uses one weight of reward math .*\[1\.0, 3\.0\]"
        )
        with pytest.raises(ValueError, match=message):
            check(name, 3)


def metric_settings(code, *functions):
    """Return the settings of user-supplied metrics."""
    metrics = [{"function": function} for function in functions]
    return fakes.config(code_paths=[code], tracking={"metrics": metrics}).tracking.metrics


def test_a_metric_that_fails_is_one_warning(code):
    settings = metric_settings(code, "tried_pieces:text")
    warnings = []
    metrics = UserMetrics(settings, (code,), warnings.append, limit_s=HANG_S)
    assert metrics(MetricInputs(1, [], {})) == {} == metrics(MetricInputs(2, [], {}))
    assert len(warnings) == 1 and "tried_pieces:text failed in step 1 (ValueError" in warnings[0]


def test_two_uses_of_one_metric_have_names_of_their_own(code):
    unnamed = {"function": "tried_pieces:times", "kwargs": {"factor": 3}}
    named = [{"function": "tried_pieces:times"}, {"name": "thrice", **unnamed}]
    tracking = fakes.config(code_paths=[code], tracking={"metrics": named}).tracking
    metrics = UserMetrics(tracking.metrics, (code,), pytest.fail, limit_s=HANG_S)
    assert metrics(MetricInputs(2, [], {})) == {
        "user/times/a": 2.0, "user/times/b": 4.0, "user/thrice/a": 6.0, "user/thrice/b": 12.0,
    }  # fmt: skip
    message = r"two have the name times, and each would overwrite the other; set `name` on one"
    for other in (unnamed, {"function": "other_pieces:times"}, {"name": "times", "function": "math:fsum"}):
        with pytest.raises(ValueError, match=message):
            fakes.config(tracking={"metrics": [named[0], other]})
    with pytest.raises(ValueError, match="pattern"):  # user/a/b comes from a mapping
        fakes.config(tracking={"metrics": [{"name": "a/b", "function": "math:fsum"}]})


def test_each_use_of_a_metric_that_fails_is_a_warning(code):
    named = [{"name": name, "function": "tried_pieces:text"} for name in ("first", "second")]
    tracking = fakes.config(code_paths=[code], tracking={"metrics": named}).tracking
    warnings = []
    metrics = UserMetrics(tracking.metrics, (code,), warnings.append, limit_s=HANG_S)
    for step in (1, 2):
        assert metrics(MetricInputs(step, [], {})) == {}
    assert [text.split(" (")[0] for text in warnings] == [
        "metric first failed in step 1", "metric second failed in step 1",
    ]  # fmt: skip


def test_a_metric_that_hangs_is_one_warning_and_is_not_called_again(code):
    settings = metric_settings(code, "tried_pieces:endless", "tried_pieces:calls")
    warnings = []
    hanging = UserMetrics(settings[:1], (code,), warnings.append, limit_s=0.5)
    assert hanging(MetricInputs(1, [], {})) == {} == hanging(MetricInputs(2, [], {}))
    assert warnings == [
        "metric tried_pieces:endless did not return within `cluster.timeouts.user_code_s` = 0.5 s; the run "
        "continues without it (step 1)"
    ]
    second_metric = UserMetrics(settings[1:], (code,), warnings.append, limit_s=HANG_S)
    first, second = (second_metric(MetricInputs(step, [], {}))["user/calls"] for step in (2, 3))
    assert second == first + 1 and len(warnings) == 1


def trained_with_answers(function, kind, directory, **sections):
    """Train two steps with a function that waits for an answer from the driver's loop; return the world. In
    the loop's thread it would block the answer.
    """
    (directory / f"{function}.py").write_text(
        "import threading\nasked, answered = threading.Event(), threading.Event()\n"
        "def answer():\n    asked.set()\n    return float(answered.wait(60))\n"
        "def metric():\n    return answer()\n"
        "def order(prompts, count, batch):\n    assert answer()\n    return range(batch, batch + count)\n"
    )
    config = fakes.config(
        steps=2, code_paths=[str(directory)], cluster={"timeouts": {"user_code_s": HANG_S}}, **sections
    )
    module = loading.load(kind, f"{function}:metric", [str(directory)]).__globals__
    world = fakes.World()

    async def answer():
        while not module["asked"].is_set():
            await asyncio.sleep(0.01)
        module["answered"].set()

    async def train_and_answer():
        trained = run(config, world.workers(), fakes.prompts(20), [], world, world)
        await asyncio.gather(trained, answer())

    asyncio.run(train_and_answer())
    return world


def test_a_run_goes_on_sampling_while_a_metric_is_computed(tmp_path):
    settings = {"metrics": [{"function": "asking_metric:metric"}]}
    world = trained_with_answers("asking_metric", METRIC, tmp_path, tracking=settings)
    assert [world.logged[step]["user/metric"] for step in (1, 2)] == [1.0, 1.0] and world.warnings == []


@pytest.mark.parametrize("launches", ["launched", "completion"])
def test_a_run_goes_on_sampling_while_a_prompt_order_chooses(tmp_path, launches):
    data, name = {"train": [{"path": "demo:add3"}], "order": f"asking_{launches}:order"}, f"asking_{launches}"
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2, "order": launches}
    world = trained_with_answers(name, ORDER, tmp_path, data=data, max_staleness=1, batch=batch)
    sampled = sorted(uid for uid, _, _ in world.sampled)
    assert len(world.updates) == 2 and len(sampled) == 8
    if launches == "launched":  # the other order leaves out what is in flight
        assert sampled == ["p0", "p1", "p1", "p2", "p2", "p3", "p3", "p4"]


def test_a_prompt_order_that_hangs_ends_the_run_with_its_name_and_the_key(code):
    named = UserOrderConfig(name="tried_pieces:endless_order")
    order = UserOrder(fakes.prompts(6), 2, named, (code,), seed=0, rates={}, limit_s=0.5)
    with pytest.raises(ValueError, match=r"batch 3: prompt order tried_pieces:endless_order did not return "
                       r"within `cluster\.timeouts\.user_code_s` = 0\.5 s; correct it"):  # fmt: skip
        order.take(3)


def test_a_module_that_hangs_on_import_holds_up_no_other(code, tmp_path, monkeypatch):
    """The first is refused at its deadline, the second tried as if it were alone."""
    directory = tmp_path / "hanging"
    directory.mkdir()
    for trial_s in longer(1.0):
        monkeypatch.setattr(trials, "TRIAL_S", trial_s)
        monkeypatch.setattr(loading, "_HUNG_S", trial_s)
        monkeypatch.setattr(loading, "_LOCK", threading.RLock())  # which the first module then holds
        hangs, returns = (f"{name}_{trial_s:g}" for name in ("hangs_on_import", "imports_at_once"))
        (directory / f"{hangs}.py").write_text("import time\ntime.sleep(10_000)\n")
        (directory / f"{returns}.py").write_text(
            "def f(logprobs, advantages):\n    return -logprobs * advantages\n"
        )
        components = [UserComponent(LOSS, f"{name}:f", LOSS.key) for name in (hangs, returns)]
        hang_problem, *other_problems = user_code_problems(components, [str(directory)])
        if not other_problems:
            break
    assert f"{hangs}:f: it did not return within {trial_s:g} s" in hang_problem and other_problems == []
