"""The guide "extending": its edits are applied to a copy of the package, and each example runs there."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.support.documents import ROOT, Block, blocks
from tests.support.patience import HANG_S
from tests.support.tiers import slow_after

GUIDE = "grpo_dist/guides/extending.md"
TEXT = (ROOT / GUIDE).read_text()
SECTIONS = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)


def section_of(block: Block) -> str:
    above = "\n".join(TEXT.splitlines()[: block.line])
    return re.findall(r"^## (.+)$", above, re.MULTILINE)[-1]


def apply(diff: str, source: str) -> str:
    """Apply the hunks of ``diff``, separated by ``...``. Each must match exactly one place in ``source``."""
    for hunk in re.split(r"^\.\.\.\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert before and f"\n{source}".count(f"\n{before}") == 1, f"matches no or several places:\n{before}"
        source = f"\n{source}".replace(f"\n{before}", f"\n{after}")[1:]
    return source


@pytest.fixture
def checkout(tmp_path):
    """Copy the packages and configurations."""
    for folder in ("grpo_dist", "actors", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("section", slow_after(SECTIONS, 1))
def test_each_part_is_added_by_the_guide(section, checkout):
    section_blocks = [block for block in blocks(ROOT / GUIDE) if section_of(block) == section]
    for block in section_blocks:
        if block.language == "diff":
            name, _, diff = block.text.partition("\n")
            path = checkout / name.removeprefix("# ")
            path.write_text(apply(diff, path.read_text()))
        elif block.file:
            (checkout / block.file).write_text(block.text)
    examples = [block for block in section_blocks if block.mode == "run"]
    assert len(examples) == 1
    command = [sys.executable, "-c", examples[0].text]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(checkout), "HOME": str(checkout)}
    options = {"cwd": checkout, "env": environment, "timeout": HANG_S}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_the_table_of_the_guide_has_every_part_and_files_that_exist():
    rows = re.findall(r"^\| \[(.+?)\]\(#(.+?)\) \|(.*)$", TEXT, re.MULTILINE)
    assert [text.lower() for text, _, _ in rows] == [name.lower() for name in SECTIONS]
    assert all(anchor == text.replace(" ", "-") for text, anchor, _ in rows)
    files = re.findall(r"`((?:grpo_dist|actors|tests)/[\w/.]+)`", TEXT)
    assert [name for name in files if not (ROOT / name).exists()] == []
