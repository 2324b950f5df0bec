"""Functions of a peer's checkout, compiled out of their files without importing the peer.

A trainer's module names its whole stack at the top: engines, launchers, kernels. Its formulas need torch.
"""

import __future__

import ast
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

_KEPT_DECORATORS = ("torch.no_grad()", "staticmethod", "dataclass")


def definitions(path, *names, **given):
    """Return the functions and classes ``names`` of the file ``path``, also those within a class.

    They see ``given``, each other, torch, numpy and a few standard modules. Annotations are not evaluated;
    decorators that register or time are dropped.
    """
    wanted = dict.fromkeys(names)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and wanted.get(node.name, 0) is None:
            wanted[node.name] = node
    missing = [name for name, node in wanted.items() if node is None]
    if missing:
        raise ValueError(f"{path}: no definition of {', '.join(missing)}; this is not the recorded commit")
    for node in wanted.values():
        node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) in _KEPT_DECORATORS]
    space = {
        "torch": torch, "np": np, "math": math, "F": F, "nn": torch.nn, "defaultdict": defaultdict,
        "dataclass": dataclass, "itertools": itertools, **given,
    }  # fmt: skip
    tree = ast.Module(list(wanted.values()), type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec", flags, dont_inherit=True), space)
    return SimpleNamespace(**{name: _plain(space[name]) for name in names})


def _plain(value):
    return value.__func__ if isinstance(value, staticmethod) else value


class Settings(dict):
    """Settings that are read as attributes and by `get`, as peers do."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]
