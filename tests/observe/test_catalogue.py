"""The metric catalogue lists exactly the metrics that the code can log."""

import ast
import asyncio
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from grpo_dist.driver import run
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.health import REFUSED
from grpo_dist.loop.metrics import OUTCOMES
from grpo_dist.observe.catalogue import described, metrics
from grpo_dist.policy.loss import batch_loss, finish_stats
from grpo_dist.runtime.files import refresh, replace_part
from grpo_dist.runtime.metering import Usage, usage_metrics
from tests.support import fakes
from tests.support.losses import objective

ROOT = Path(__file__).resolve().parents[2]
# Records of benchmarks, plans, submissions and pipelines are not metrics of a run.
ELSEWHERE = ("bench", "plan", "recipe", "submit")
METRICS = metrics()
FAMILIES = {m.name.partition("/")[0] for m in METRICS}
NAME = re.compile(r"[a-z_]+(/[a-z0-9_@<>{}]+)+")
# Partial names; the rest is a stopwatch phase, an outcome, or depends on the run.
PARTS = {"time/<>_s", "outcome/<>", "eval/<>/<>", "health/refused_"}


@cache
def sources() -> dict[str, ast.AST]:
    paths = [p for package in ("grpo_dist", "actors") for p in sorted((ROOT / package).rglob("*.py"))]
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in paths
        if not set(path.parts) & set(ELSEWHERE)
    }


def literal_text(node: ast.AST) -> str | None:
    """Return a string literal; in an f-string <> replaces each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else "<>" for p in node.values)
    return None


def metric_names(nodes) -> set[str]:
    texts = {literal_text(node) for node in nodes if node is not None}
    return {t for t in texts if t and NAME.fullmatch(t)}


def logged(tree: ast.AST) -> set[str]:
    """Return names in code that makes metrics: keys of mappings, and names assigned to variables."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            names |= metric_names(node.keys)
        elif isinstance(node, ast.DictComp):
            names |= metric_names([node.key])
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names |= metric_names([node.slice])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names |= {n for n in metric_names([node.value]) if n.partition("/")[0] in FAMILIES}
    return names


def phases(tree: ast.AST) -> set[str]:
    """Return the phases that a `Stopwatch` times: `with timer("update")`."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    return {f"time/{c.args[0].value}_s" for c in calls if c.func.id in ("timer", "watch") and c.args}


@cache
def written() -> dict[str, str]:
    """Return every name in code that makes metrics, with its file."""
    return {n: path for path, tree in sources().items() for n in logged(tree) | phases(tree)}


def metrics_read(tree: ast.AST) -> set[str]:
    """Return names of existing families anywhere else."""
    nodes = list(ast.walk(tree))
    fragments = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    names = metric_names(node for node in nodes if id(node) not in fragments)
    return {n for n in names if n.partition("/")[0] in FAMILIES}


class Everything(fakes.World):
    """A policy that computes a real loss with all its terms, and actors that report usage."""

    latest: ClassVar[dict[str, Usage]] = {}

    async def update(self, batches, *, kl_coef, bounds):
        settings = objective(
            loss="kl_cov", kl={"coef": 0.1}, entropy={"coef": 0.1}, off_policy_mask_threshold=0.1,
            correction={"kind": "tis", "reject": [{"rule": "token_tv", "high": 0.5}]},
        )  # fmt: skip
        logprobs = -torch.rand(batches[0].tokens.shape)
        entropy = torch.ones(logprobs.shape)
        _, stats = batch_loss(logprobs, batches[0], settings, entropy=entropy)
        metrics = finish_stats(stats)
        refused = {f"{REFUSED}{bound.key}": 0.0 for bound in bounds}
        return metrics | refused | {f"first_update/{name}": metrics[name] for name in ("ref/kl",)}

    async def read(self):
        turns = {"turns": 2.0, "tool_wait_s": 1.0, "later_prompt_tokens": 9.0, "later_cached_tokens": 9.0}
        drafts = {"drafts": 2.0, "drafted_tokens": 8.0, "accepted_tokens": 3.0}
        usage = Usage({"sample": 1.0}, (), {"tokens": 10.0} | turns | drafts, 2**30, 2**30)
        return usage_metrics({"rollout-0": usage})


@pytest.fixture(scope="module")
def run_metrics() -> set[str]:
    """Return the names that the real loop logs on fake workers."""
    world = Everything()
    config = fakes.config(
        steps=2, algorithm={"kl": {"coef": 0.1}},
        evaluation={"samples_per_prompt": 2, "k": [1, 2], "after": False}, max_staleness=1,
    )  # fmt: skip
    workers = replace(world.workers(reference=True), usage=world)
    sets = [EvalSet("held_out", fakes.prompts(3))]
    asyncio.run(run(config, workers, fakes.prompts(8), sets, world, world))
    return {name for metrics in world.logged.values() for name in metrics}


def test_a_run_logs_nothing_that_is_not_in_the_catalogue(run_metrics):
    assert len(run_metrics) > 60
    assert sorted(name for name in run_metrics if described(name) is None) == []


def test_no_code_names_a_metric_that_is_not_in_the_catalogue():
    """Neither code that makes metrics, in any family, nor code that reads them."""
    read = {n: path for path, tree in sources().items() for n in metrics_read(tree)}
    logged = {n: path for n, path in (written() | read).items() if n not in PARTS}
    assert len(logged) > 60
    assert {n: path for n, path in logged.items() if described(n.replace("<>", "x")) is None} == {}


def test_the_catalogue_has_nothing_that_is_not_logged(run_metrics):
    in_code = set(written())
    assert in_code >= PARTS  # otherwise PARTS is outdated
    complete = {name.replace("<>", "x") for name in in_code - PARTS}
    entries = [described(n) for n in complete | run_metrics | {f"outcome/{o}" for o in OUTCOMES}]
    assert [m.name for m in METRICS if m not in entries] == []


def test_every_entry_has_a_unit_a_reducer_and_a_meaning():
    assert len({m.name for m in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.unit and metric.reducer and metric.meaning, metric.name


def test_an_outdated_document_is_reported_and_rewritten(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("top\n<!-- begin generated: x -->\nold\n<!-- end generated: x -->\nbottom\n")
    assert refresh(page, "x", "new", arguments=["--check"]) == 1
    assert "out of date" in capsys.readouterr().out and "old" in page.read_text()
    assert refresh(page, "x", "new", arguments=[]) == 0
    expected = "top\n<!-- begin generated: x -->\nnew\n<!-- end generated: x -->\nbottom\n"
    assert page.read_text() == expected and refresh(page, "x", "new", arguments=["--check"]) == 0
    with pytest.raises(ValueError, match="no marks"):
        replace_part("nothing here", "x", "new")
