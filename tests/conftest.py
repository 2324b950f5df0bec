"""Shared fixtures. Shapes written in signatures are checked while tests run, and only then."""

import gc
import os
from pathlib import Path

from jaxtyping import install_import_hook

# Before torch is imported. Threads of OpenMP wait for each other at every operation: on tensors as small as
# these, two threads on a busy machine take ten times as long as one. Engines and ranks set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray starts its workers at the lowest priority: next to several processes of tests they would get no core.
os.environ.setdefault("RAY_worker_niceness", "0")

# Ray prestarts a worker per core. Actors with their own environment variables, as all here, use none.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

# Imports create two million objects that stay. No collection visits them before the tests begin; later
# ones do once a test unfreezes the heap, as each run of the loop does.
gc.disable()

import tests.support.shapes  # noqa: E402, F401  the hook below names its checker

_REWARDS = [f"grpo_dist.rewards.{name}" for name in ("group", "models", "scorer")]
_CHECKED = ["grpo_dist.algorithms", "grpo_dist.batch", "grpo_dist.policy", *_REWARDS]
install_import_hook(_CHECKED, "tests.support.shapes.checked")

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support.good_inputs import CONFIG, GOOD, write  # noqa: E402
from tests.support.tiers import ALL  # noqa: E402

# Slow examples, or a slow search for them, mean a busy machine. Examples of a test share its fixtures.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
    derandomize=not os.environ.get(ALL),  # `make test` has the same examples every time
)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without `machine` tests in the half of `make test` that starts clusters."""
    machine_half = config.option.markexpr.startswith("machine and")
    if machine_half and collection_path.match("test_*.py"):
        return "mark.machine" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)  # before marks select tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first, so that the others run in parallel."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.dist != "no" and not hasattr(config, "workerinput"):
        gc.enable()  # other processes import the tests


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries report leaks when the process exits


@pytest.fixture
def frozen_heap() -> None:
    """Freeze the heap for tests of code that collects garbage: a full collection takes seconds."""
    gc.collect(1)
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the directory of the real problem sets; skip the test where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real problem sets are not at {SHARED_DATA}")
    return SHARED_DATA


def _folders() -> list[str]:
    """Return every folder with tests: actors import the classes that a test module defines."""
    return sorted({str(path.parent) for path in (ROOT / "tests").rglob("test_*.py")})


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory) -> Path:
    """Models built by tests go here, not into the user's cache; subprocesses inherit it."""
    directory = tmp_path_factory.mktemp("cache")
    os.environ["GRPO_DIST_CACHE"] = str(directory)
    os.environ["HF_HUB_OFFLINE"] = "1"
    # for actors, which import worker classes from test modules
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), *_folders(), os.environ.get("PYTHONPATH")])
    )
    return directory


@pytest.fixture(scope="session")
def tiny_model(model_cache) -> Path:
    """The demo's model with its first, random weights: 0.8 M parameters, tied embeddings."""
    from grpo_dist.demo.model import cached_model

    return cached_model("tiny", seed=0)


@pytest.fixture(scope="session")
def ranks_parent(ray_cluster, tmp_path_factory):
    from grpo_dist.runtime.hardware import thread_environment
    from tests.support.forked_ranks import Parent

    parent = Parent(tmp_path_factory.mktemp("forks"), thread_environment(1))
    yield parent
    parent.close()


@pytest.fixture
def forked_ranks(ranks_parent):
    """Fork the ranks of a `PolicyGroup` instead of starting them with Ray: see `forked_ranks`."""
    with ranks_parent.in_the_place_of_ray():
        yield


@pytest.fixture(scope="session")
def ray_cluster():
    """Start one private Ray for all tests with actors."""
    import ray

    from actors.connection import start_private_ray
    from actors.lifecycle import team

    team.HEALTH_S = 0.5  # notices a dead actor sooner than in a run
    start_private_ray(include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a directory with valid data and a configuration."""
    monkeypatch.chdir(tmp_path)
    write("train.jsonl", GOOD)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path
