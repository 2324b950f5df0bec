"""The front page and the files for contributors agree with the code."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from grpo_dist.algorithms.advantages import ADVANTAGES
from tests.support.documents import ROOT, blocks, documents, is_quoted

README = (ROOT / "README.md").read_text()
QUOTED = [block for path in documents() for block in blocks(path) if block.mode == "quoted"]
SOURCE = "def f():\n    a = 1\n    for x in y:\n        b(x)\n        c(x)\n    d()\n"


def section(name, text=README):
    return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("block", QUOTED, ids=str)
def test_quoted_code_is_the_code(block):
    assert is_quoted(block.text, (ROOT / block.reason).read_text())


def test_the_front_page_quotes_the_loop():
    assert [(b.document, b.reason) for b in QUOTED] == [("README.md", "grpo_dist/driver.py")]


@pytest.mark.parametrize(
    ("quote", "fits"),
    [
        ("for x in y:\n    b(x)\n    c(x)\n", True),
        ("for x in y:\n    ...\n    c(x)\n...\nd()\n", True),
        ("for x in y:\n    c(x)\n", False),  # a line is missing, without ...
        ("for x in y:\n    c(x)\n    b(x)\n", False),
        ("for x in y:\n    b(z)\n", False),
        ("for x in y:\nb(x)\n", False),
    ],
)
def test_a_quote_that_differs_from_its_source_is_found(quote, fits):
    assert is_quoted(quote, SOURCE) == fits


def test_every_promise_names_a_test_file_that_exists():
    promises = [line for line in section("Guarantees").splitlines() if line.startswith("- ")]
    files = [re.search(r"`(tests/\S+\.py)`$", line) for line in promises]
    assert len(promises) == 6 and all(match and (ROOT / match[1]).is_file() for match in files)


def test_every_place_to_add_something_exists():
    rows = [line.split("|")[1:4] for line in section("Make it yours").splitlines()[3:] if line]
    kinds = ("reward", "estimator", "metric", "data source", "launcher", "weight transfer")
    assert all(any(kind in row[0] for row in rows) for kind in kinds)
    for _, _, package in rows:
        places = re.findall(r"`((?:grpo_dist|actors)/[\w/]+(?:\.py)?)`", package)
        assert places and all((ROOT / place).exists() for place in places)
        folder = ROOT / (places[0] if not places[0].endswith(".py") else str(Path(places[0]).parent))
        for name, file in re.findall(r"`(\w+)` in `(\w+\.py)`", package):
            assert re.search(rf"^(def )?{name}\b", (folder / file).read_text(), re.MULTILINE), (name, file)


def test_the_map_has_every_folder_of_the_code_and_no_other():
    text = section("Map", (ROOT / "grpo_dist/guides/architecture.md").read_text())
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", text)}
    folders = {
        str(path.parent.relative_to(ROOT))
        for package in ("grpo_dist", "actors")
        for path in (ROOT / package).glob("*/__init__.py")
    }
    assert named >= folders
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_estimator_is_on_the_page_of_formulas():
    text = (ROOT / "grpo_dist/algorithms/README.md").read_text()
    assert {name for name in ADVANTAGES if f"`{name}`" not in text} == set()


def test_every_guide_is_in_the_index():
    index = (ROOT / "grpo_dist/guides/README.md").read_text()
    guides = {path.name for path in (ROOT / "grpo_dist/guides").glob("*.md")} - {"README.md"}
    assert {name for name in guides if f"]({name})" not in index} == set()


def test_the_top_level_holds_what_it_is_meant_to():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.split("/")[0] for name in listed.splitlines() if (ROOT / name).exists()}
    folders = {"actors", "configs", "docker", "findings", "grpo_dist", "launch", "tests"}
    assert {n for n in top if not n.startswith(".")} == folders | {
        "AGENTS.md", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml",
    }  # fmt: skip


def test_continuous_integration_runs_what_a_change_must_pass():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    commands = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert commands[-1] == "bash .ci/run"


def test_commit_hooks_run_the_programs_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    programs = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks}
    assert programs == {"ruff", "mypy", "lint-imports"}
    assert all(f"$(BIN)/{program} " in lint or f"$(BIN)/{program}\n" in lint for program in programs)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    packages = {re.match(r"[\w-]+", name)[0] for name in extras}
    assert packages >= {"ruff", "mypy", "import-linter"}
