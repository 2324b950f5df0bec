"""The limits of CONTRIBUTING: sizes of files, functions, classes and constructors; names; floors."""

import ast
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

from tests.support.documents import ROOT

FILES = sorted([*ROOT.glob("grpo_dist/**/*.py"), *ROOT.glob("actors/**/*.py")])


@cache  # parsed where the tests run, not in every process that collects them
def trees():
    return {path: ast.parse(path.read_text()) for path in FILES}


def nodes(kind):
    return [
        (path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, kind)
    ]


def functions(body):
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def name(path: Path, node) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def test_no_file_is_longer_than_350_lines():
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in FILES}
    assert {path: count for path, count in lines.items() if count > 350} == {}


def test_no_function_is_longer_than_60_lines():
    found = nodes(ast.FunctionDef | ast.AsyncFunctionDef)
    assert [name(path, node) for path, node in found if node.end_lineno - node.lineno >= 60] == []


def test_no_class_has_more_than_16_public_methods():
    found = [
        name(path, node)
        for path, node in nodes(ast.ClassDef)
        if sum(not method.name.startswith("_") for method in functions(node.body)) > 16
    ]
    assert found == []


def test_no_constructor_takes_more_than_8_parameters():
    found = []
    for path, node in nodes(ast.ClassDef):
        for method in functions(node.body):
            arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
            if method.name == "__init__" and len(arguments) > 9:  # self, too
                found.append(name(path, node))
    assert found == []


def test_each_class_name_is_unique():
    count = Counter(node.name for _, node in nodes(ast.ClassDef))
    assert [name for name, times in count.items() if times > 1] == []


def test_the_root_of_the_package_has_at_most_9_files():
    assert len(list((ROOT / "grpo_dist").glob("*.py"))) <= 9


def test_every_folder_and_root_file_is_in_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    listed = {module.strip() for floor in floors for module in floor.split("|")}
    rooms = {path.parent if path.name == "__init__.py" else path for path in FILES}
    own = {f"grpo_dist.{path.stem}" for path in rooms if path.parent == ROOT / "grpo_dist"}
    assert own - listed == set() and listed - own == {"actors"}


# Fields of the configuration that are numbers or names, and what dumps or copies the whole tree.
_PLAIN = {"name", "output_dir", "seed", "steps", "max_staleness"}
_WHOLE = {"model_dump", "model_copy", "with_absolute_code"}


def takes_the_whole_configuration() -> dict[str, tuple[set[str], bool]]:
    """Return, for each function with a `Config`, the fields that it reads, and whether it uses the rest."""
    found = {}
    for path, node in nodes(ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        own = {
            a.arg
            for a in arguments
            if a.annotation and ast.unparse(a.annotation) in ("Config", "Config | None")
        }
        if own:
            uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in own]
            fields = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.value in uses]
            found[name(path, node)] = {n.attr for n in fields}, len(fields) < len(uses)
    return found


def test_no_function_takes_the_whole_configuration_for_one_or_two_sections():
    found = takes_the_whole_configuration()
    few = [
        function
        for function, (fields, whole) in found.items()
        if not whole and not fields & _WHOLE and len(fields - _PLAIN) <= 2
    ]
    assert few == []


def test_no_more_functions_than_now_take_the_whole_configuration():
    assert len(takes_the_whole_configuration()) <= 95
