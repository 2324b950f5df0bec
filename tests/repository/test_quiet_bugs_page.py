"""The page of quiet bugs and the folder of their tests have the same entries, with the same threads."""

import ast
import re

import pytest

from tests.support.documents import ROOT

FOLDER = ROOT / "tests" / "quiet_bugs"
PAGE = (ROOT / "grpo_dist" / "guides" / "quiet_bugs.md").read_text()
ROWS = [
    cells
    for line in PAGE.splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and cells[-1].startswith("`test_")
]
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
THREAD = re.compile(r"([\w-]+#\d+)")


# The collection must have at least these.
REQUIRED = (
    "verl#6362", "verl#6376", "verl#6361", "AReaL#1346", "trl#6369", "marin#6335", "trl#5144",
    "ms-swift#10012", "NeMo-RL#3599", "prime-rl#3050", "NeMo-RL#1798", "miles#2800", "training-gym#536",
    "verl#4948", "verl#5392",
)  # fmt: skip


def entry(name):
    return next(row for row in ROWS if row[-1] == f"`{name}`")


def test_every_file_has_one_row_and_every_row_a_file():
    assert sorted(row[-1].strip("`") for row in ROWS) == FILES
    assert len(FILES) >= 14
    assert all(len(row) == 3 and all(row) for row in ROWS)


@pytest.mark.parametrize("thread", REQUIRED)
def test_the_first_bugs_are_in_it(thread):
    assert [row[-1] for row in ROWS if thread in THREAD.findall(row[0])], thread


@pytest.mark.parametrize("name", FILES)
def test_page_and_docstring_name_the_same_threads(name):
    docstring = ast.get_docstring(ast.parse((FOLDER / name).read_text())) or ""
    row = entry(name)[0]
    assert set(THREAD.findall(row)) == set(THREAD.findall(docstring)), "threads"
    sources = re.findall(r"\w[\w-]* at [0-9a-f]{7}", row)
    assert all(source in docstring for source in sources)
    assert THREAD.search(docstring) or sources


@pytest.mark.parametrize("name", FILES)
def test_every_test_shows_the_bug_next_to_what_holds(name):
    tests = [
        node.name
        for node in ast.parse((FOLDER / name).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    shown = [test for test in tests if test.startswith("test_the_bug_")]
    assert shown and len(tests) > len(shown)


def test_a_link_is_that_of_its_thread():
    links = re.findall(
        r"\[([\w-]+)#(\d+)\]\(https://github\.com/([\w-]+/[\w-]+)/(?:pull|issues)/(\d+)\)", PAGE
    )
    assert len(links) > 40
    repositories = {"NeMo-RL": "NVIDIA-NeMo/RL", "NeMo-Gym": "NVIDIA-NeMo/Gym"}
    for short, number, repository, target in links:
        assert number == target
        assert repository == repositories.get(short, repository) and (
            short in repositories or repository.endswith(f"/{short}")
        )
    unlinked = set(THREAD.findall(re.sub(r"\[[^]]*\]\([^)]*\)", "", PAGE)))
    assert all(f"{thread}*" in PAGE for thread in unlinked)
