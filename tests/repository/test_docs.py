"""Every command and snippet of the documents runs as for a reader, or is only parsed, with a reason."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from grpo_dist.api import resolved
from grpo_dist.cli import command_parser
from grpo_dist.config import Config
from grpo_dist.config.files import checked, load_config
from grpo_dist.observe.catalogue import described
from grpo_dist.tools.config_reference import anchor
from grpo_dist.tools.recipe.config import PipelineFile
from tests.support.documents import COMMANDS, ROOT, Block, blocks, documents, inline_commands
from tests.support.patience import HANG_S

BLOCKS = [block for path in documents() for block in blocks(path)]
# CHANGELOG.md also names removed commands.
TEXTS = [path for path in documents() if path.name != "CHANGELOG.md"]
INLINE = sorted({(str(p.relative_to(ROOT)), command) for p in TEXTS for command in inline_commands(p)})
BASE = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}]}}
# Commands whose first argument is the reader's file or run, not a configuration.
OTHER_FILES = {"pipeline", "status", "logs", "stop", "report", "score", "compare", "--compare"}


def blocks_in(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def shell() -> list[Block]:
    return [block for block in BLOCKS if block.is_shell]


@pytest.fixture
def place(tmp_path, monkeypatch, request) -> Path:
    """Return a directory with the files that the document names before the block."""
    block: Block = request.getfixturevalue("block")
    for other in blocks(ROOT / block.document):
        if other.file and other.line < block.line:
            target = tmp_path / other.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(other.text)
            monkeypatch.syspath_prepend(str(target.parent))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [
        n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))
    ]:
        del sys.modules[name]


@pytest.mark.parametrize("block", blocks_in("yaml"), ids=str)
def test_a_configuration_in_the_documents_loads(block, tmp_path):
    config = yaml.safe_load(block.text)
    if "stages" in config:
        checked(config, str(block), PipelineFile)
        return
    path = tmp_path / "shown.yaml"
    path.write_text(block.text)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    if not {"model", "data"} <= set(config):  # a part of a configuration
        path.write_text("defaults: [base.yaml]\n" + block.text)
    assert isinstance(load_config(path), Config)


@pytest.mark.parametrize("block", [b for b in blocks_in("python") if b.mode == ""], ids=str)
def test_python_in_the_documents_works_as_written(block, place):
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [b for b in blocks_in("python") if b.mode == "parsed"], ids=str)
def test_python_that_is_only_parsed_compiles_and_its_imports_exist(block):
    compile(block.text, str(block), "exec")
    for line in (li for li in block.text.splitlines() if re.match(r"(from|import) ", li)):
        exec(line, {})


@pytest.mark.parametrize("block", shell(), ids=str)
def test_every_command_of_a_block_exists(block):
    for command in block.commands:
        check_command(command, ROOT / block.document)
    if block.explained:
        text = help_of(block.commands[0].split()[1])
        assert [option for option in block.explained if option not in text] == []


def help_of(command: str) -> str:
    parsers = next(a.choices for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return parsers[command].format_help()


@pytest.mark.parametrize(("document", "command"), INLINE)
def test_every_command_in_a_text_exists(document, command):
    check_command(command, ROOT / document)


def check_command(command: str, document: Path) -> None:
    """Check that program, target, module and options exist, and that overrides fit."""
    words = shlex.split(re.sub(r"\s\[[^]]*\]", "", command).partition(" && ")[0])
    while "=" in words[0]:  # NAME=value before the command
        words = words[1:]
    assert words[0] in COMMANDS, command
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "python":
        assert words[1] != "-m" or find_spec(words[2]), command
        is_shown = any(block.file == words[1] for block in blocks(document))
        assert words[1] == "-m" or (ROOT / words[1]).is_file() or is_shown, command
    elif words[0] == "grpo-dist":
        check_grpo_dist(words, document)


def check_grpo_dist(words: list[str], document: Path) -> None:
    if words[1:] in ([], ["..."], ["--help"]) or words[-1] == "...":
        return
    if len(words) == 2:  # a mention, not a call
        assert help_of(words[1])
        return
    args, rest = command_parser().parse_known_args(words[1:])
    assert args.command and not [word for word in rest if "=" not in word]
    if words[1] == "submit" and args.to in ("slurm", "kuberay"):
        assert args.gpus_per_node is not None, "the command refuses this line"
    if OTHER_FILES & set(words) or (words[1] == "eval" and not words[2].endswith(".yaml")):
        return
    settings = [w for w in words[3:] if "=" in w and not w.startswith("-")]
    overrides = [w for w in settings if not w.partition("=")[2].isupper()]  # NAME is a placeholder
    shown = next((b for b in blocks(document) if b.file == words[2]), None)
    if words[2].startswith("configs/"):
        load_config(ROOT / words[2], overrides)
    elif shown is None:
        load_config(ROOT / "configs/demo.yaml", overrides)
    else:
        resolved(yaml.safe_load(shown.text), overrides)


def test_every_block_that_is_only_parsed_gives_a_reason():
    """`pytest -s` lists them."""
    silent = [str(b) for b in BLOCKS if b.is_shell and not b.mode]
    assert silent == [], "above these: <!-- docs: run --> or <!-- docs: parsed: why -->"
    parsed = [block for block in BLOCKS if block.mode == "parsed"]
    assert not [str(block) for block in parsed if len(block.reason) < 5]
    for block in parsed:
        print(f"only parsed: {block}: {block.reason}")


def test_documents_and_their_marks_are_found():
    names = {str(path.relative_to(ROOT)) for path in documents()}
    assert names >= {"README.md", "launch/README.md", "configs/README.md", "grpo_dist/guides/tutorial.md"}
    untested = [str(b) for b in BLOCKS if b.language not in ("", "yaml", "python", "sh", "bash", "diff")]
    assert untested == [], "no test covers this language"
    marks = sum(path.read_text().count("<!-- docs: ") for path in documents())
    assert marks == sum(bool(block.mode) for block in BLOCKS), "a mark is misspelt, or not above a block"


LINKS = sorted(
    {
        (str(path.relative_to(ROOT)), link)
        for path in documents()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        if "://" not in link
    }
)


@pytest.mark.parametrize(("document", "link"), LINKS)
def test_every_link_between_documents_has_a_target(document, link):
    assert (ROOT / document).parent.joinpath(link).exists()


def test_every_anchor_of_a_link_has_a_heading():
    headings = {
        path: {anchor(heading) for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)}
        for path in documents()
    }
    missing = [
        f"{path.relative_to(ROOT)}: {link}#{name}"
        for path in documents()
        for link, name in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text())
        if name not in headings.get(path.parent.joinpath(link).resolve() if link else path, {name})
    ]
    assert missing == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_in_a_table_of_files_exists(path):
    tables = re.findall(r"^\| file \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", path.read_text(), re.MULTILINE)
    first = [row.split("|")[1] for table in tables for row in table.splitlines()]
    files = [name for cell in first for name in re.findall(r"`([\w./-]+\.py)`", cell)]
    assert [name for name in files if not any((base / name).exists() for base in (ROOT, path.parent))] == []


def run_block(block: Block, place: Path) -> str:
    """Run a block in ``place`` as a reader would and return its output."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if block.language == "python":
        (place / "snippet.py").write_text(apply_overrides(block))
        commands = [[sys.executable, "snippet.py"]]
    else:
        assert not block.overrides
        commands = [[sys.executable, "-m", "grpo_dist.cli", *shlex.split(c)[1:]] for c in block.commands]
        assert all(command.startswith("grpo-dist ") for command in block.commands)
    output = ""
    for command in commands:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, env=environment, timeout=HANG_S
        )
        assert done.returncode == 0, f"{block}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        output += done.stdout
    return output


def apply_overrides(block: Block) -> str:
    if not block.overrides:
        return block.text
    changed = re.sub(r'(train\("[^"]+")', rf"\1, {list(block.overrides)}", block.text)
    assert changed != block.text, f"{block}: no call in it takes overrides"
    return changed


TUTORIAL = "grpo_dist/guides/tutorial.md"
EXTENDING = "grpo_dist/guides/extending.md"  # test_extending.py runs its blocks in a copy of the package
AFTER = "grpo_dist/guides/after_training.md"  # test_after_training.py runs its blocks on generated runs
ALONE = [b for b in BLOCKS if b.mode == "run" and b.document not in (TUTORIAL, EXTENDING, AFTER)]


@pytest.mark.slow
@pytest.mark.parametrize("block", ALONE, ids=str)
def test_a_command_of_the_guides_runs(block, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert run_block(block, tmp_path)


@pytest.mark.machine
@pytest.mark.slow
def test_the_tutorial_runs_from_its_first_line_to_its_last(tmp_path):
    """Runs its blocks in order in one directory; a real engine and a real rank train two steps."""
    shown = blocks(ROOT / TUTORIAL)
    for block in shown:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    outputs = {str(block): run_block(block, tmp_path) for block in shown if block.mode == "run"}
    assert len((tmp_path / "problems.jsonl").read_text().splitlines()) == 500
    assert any("ok  reward: a right and a wrong answer get math 1 and 0" in text for text in outputs.values())
    run = tmp_path / "runs/tutorial"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    before, *steps = [json.loads(line) for line in lines]
    assert before == {"step": 0} and [step["step"] for step in steps] == [1, 2]
    assert (run / "model/model.safetensors").is_file()
    assert all(0 < step["reward/digits"] < 1 for step in steps)
    assert [name for step in steps for name in step if name != "step" and described(name) is None] == []
