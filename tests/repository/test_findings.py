"""The findings, without installing them: pinned scripts, their page, and the output of `make findings`."""

import importlib.util
import os
import re

import pytest

from tests.support.documents import ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
PAGE = (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_is_an_executable_script_that_needs_nothing_of_this_project(path):
    text = path.read_text()
    assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env bash\n# ")
    assert not re.search(r"grpo.dist|\.\./", text)
    packages = re.search(r"^packages=\((.*)\)$", text, re.MULTILINE)[1].split()
    assert packages and all(re.fullmatch(r"[\w-]+==[\w.]+", package) for package in packages)
    assert "trap 'rm -rf \"$work\"' EXIT" in text


def test_the_page_has_a_row_of_each_finding():
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert [row.count(" | ") for row in rows] == [3] * len(rows)
    assert sorted(re.match(r"\| \[(\w+)\]\(\1\.sh\)", row)[1] for row in rows) == [p.stem for p in SCRIPTS]
    assert SCRIPTS


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run findings that exit with ``codes``; return exit code and output."""
    spec = importlib.util.spec_from_file_location("run_findings", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)

    def call(codes, *arguments):
        for name, code in codes.items():
            (tmp_path / f"{name}.sh").write_text(f"echo seen latest=$FINDINGS_LATEST\nexit {code}\n")
        monkeypatch.setattr("sys.argv", ["run.py", *arguments])
        return module.main(), capsys.readouterr().out

    return call


def test_a_changed_finding_fails_the_run_and_shows_what_it_printed(run):
    code, output = run({"a": 0, "b": 1, "c": 2})
    assert code == 1
    assert re.findall(r"^(\w.*?) +\w \(", output, re.MULTILINE) == ["holds", "changed", "not installed"]
    assert output.count("    seen latest=\n") == 2


def test_one_finding_can_be_named_and_an_unknown_one_is_refused(run, capsys):
    assert run({"a": 0, "b": 1}, "a")[0] == 0
    with pytest.raises(SystemExit) as error:
        run({}, "c")
    assert error.value.code == 2 and "no finding c" in capsys.readouterr().err
