"""Rules that no linter has: reasons for imports inside functions, arguments that stay as they are, names of
classes.
"""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import ROOT

FILES = sorted(
    path
    for package in ("grpo_dist", "actors")
    for path in (ROOT / package).rglob("*.py")
    if "notebooks" not in path.parts  # each cell is a function
)
# Why these are imported inside functions. What is of this project, or light, says why where it is imported.
REASONS = {
    "ray": "grpo_dist imports without it",
    "vllm": "grpo_dist imports without it, and it takes a minute",
    "deepspeed": "only ranks need it",
    "torch": "seconds, which commands that compute nothing do without",
    "transformers": "seconds, and only where a model or tokenizer is read",
    "tokenizers": "with transformers",
    "safetensors": "with torch",
    "huggingface_hub": "only for models of the hub",
    "peft": "only for adapters",
    "gguf": "only for GGUF files",
    "flash_attn": "optional",
    "wandb": "optional",
    "pynvml": "installed on machines with GPUs alone",
    "psutil": "only where an engine starts",
    "httpx": "only where a service is asked",
    "requests": "with ray's client of jobs",
    "math_verify": "only where answers are graded",
}
STATED_FOR_THE_FILE = {"grpo_dist/cli.py": "Heavy imports are\ninside the commands."}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def blocks(function: ast.AST) -> Iterator[list[ast.Import | ast.ImportFrom]]:
    """Yield adjacent imports together: one comment serves them."""
    for node in ast.walk(function):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            found: list[ast.Import | ast.ImportFrom] = []
            for statement in body if isinstance(body, list) else []:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    found.append(statement)
                elif found:
                    yield found
                    found = []
            if found:
                yield found


def packages(block: list[ast.Import | ast.ImportFrom]) -> set[str]:
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in block]
    return {name.split(".")[0] for name in names}


def unexplained(path: Path) -> Iterator[str]:
    text = path.read_text()
    lines = text.splitlines()
    if STATED_FOR_THE_FILE.get(str(path.relative_to(ROOT)), "\0") in text:
        return
    seen = set()
    for function in functions(ast.parse(text)):
        for block in blocks(function):
            first, last = block[0].lineno, block[-1].end_lineno or 0
            commented = any("#" in line for line in lines[first - 2 : last])
            if first not in seen and not commented and not packages(block) <= REASONS.keys():
                yield f"{path.relative_to(ROOT)}:{first}"
            seen.add(first)


@pytest.mark.parametrize("package", ["grpo_dist", "actors"])
def test_every_import_inside_a_function_has_a_reason(package: str) -> None:
    """It keeps a command light, or a dependency optional, and a comment says which."""
    found = [place for path in FILES if path.is_relative_to(ROOT / package) for place in unexplained(path)]
    assert not found, "hoist these, or say why: " + ", ".join(found)


# What writes into an argument, because that is what it is called for.
WRITERS = {
    "buffers": [
        "batch/rows.py:_fill",
        "actors/transfer/delta_stream.py:receive_changes",
        "actors/transfer/delta_stream.py:receive_whole",
    ],
    "what torch, transformers, PEFT and DeepSpeed keep on their own objects": [
        "policy/checkpoint_format.py:keep_used_conversions",
        "policy/deepspeed_engine.py:use_policy_files",
        "policy/export.py:save_pretrained",  # restored before it returns
        "policy/export.py:write_model",  # restored before it returns
        "policy/logprobs.py:forward",
        "policy/lora.py:add_adapters",
        "policy/trainer.py:_gated_step",
        "policy/varlen_attention.py:forward",
        "runtime/logit_transform.py:_replaced",  # restored before it returns
    ],
    "what checks have read, for those behind them": [
        "runs/start.py:check_cold_start",
        "runs/start.py:check_data",
        "runs/start.py:check_model",
        "runs/start.py:check_prompts",
    ],
    "handles that are connected with each other": [
        "actors/colocated_handles.py:colocated",
        "actors/colocation.py:__init__",
        "actors/colocation.py:admit",
        "actors/evaluation_engines.py:__init__",
        "actors/weight_sync.py:__init__",
    ],
    "one walk or one episode, whose state a private function keeps": [
        "policy/state_files.py:_cloned",
        "environments/runner.py:_ask",
        "environments/sandbox/cells.py:_trim",
        "tools/submit/kuberay.py:_size",
    ],
}


def assigned(function: Function) -> Iterator[ast.expr]:
    """Yield what is assigned or deleted."""
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def writes_into_an_argument(function: Function) -> bool:
    """Return whether an attribute or item of a parameter is assigned or deleted. A parameter that is assigned
    itself is a value of the function's own.
    """
    a = function.args
    names = {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)} - {"self", "cls"}
    found = list(assigned(function))
    names -= {target.id for target in found if isinstance(target, ast.Name)}
    for target in found:
        inner = target
        while isinstance(inner, ast.Attribute | ast.Subscript):
            inner = inner.value
        if inner is not target and isinstance(inner, ast.Name) and inner.id in names:
            return True
    return False


def test_functions_do_not_write_into_arguments() -> None:
    """The exceptions are written for it. One that is fixed leaves the list."""
    found = {
        f"{path.relative_to(ROOT)}:{function.name}".removeprefix("grpo_dist/")
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
        if writes_into_an_argument(function)
    }
    assert found == {name for names in WRITERS.values() for name in names}


def test_each_class_name_is_unique() -> None:
    trees = (ast.parse(path.read_text()) for path in FILES)
    count = Counter(n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, times in count.items() if times > 1] == []


def test_every_folder_and_root_file_is_in_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    listed = {module.strip() for layer in layers for module in layer.split("|")}
    modules = {path.parent if path.name == "__init__.py" else path for path in FILES}
    package = {f"grpo_dist.{path.stem}" for path in modules if path.parent == ROOT / "grpo_dist"}
    assert package - listed == set() and listed - package == {"actors"}
