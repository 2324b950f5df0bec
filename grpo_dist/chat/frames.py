"""Finds chat templates that write the text of a message whatever it says, with the same around it.

{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}    writes every text
{{ message['content'].split('</think>')[-1] }}                          writes what depends on the text
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTENT = "content"
_PLAIN_KEYS = ("role", "name", "tool_calls", "tool_call_id")  # of a message, besides its text
_COUNTS = ("length", "count")  # filters that say nothing of texts
_KINDS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence")  # tests, the same
_NEIGHBOURS = ("previtem", "nextitem")  # messages that a loop has besides its own
# Statements after which what was written may be read again.
_CAPTURES = (
    nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Include, nodes.Import,
    nodes.FromImport, nodes.Extends, nodes.Block, nodes.EvalContextModifier,
)  # fmt: skip


@lru_cache(maxsize=16)
def writes_text_as_it_is(template: str) -> bool:
    """Return whether ``template`` does nothing with the text of messages but to write it, or its `trim`."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:
        return False
    every = [tree, *tree.find_all(nodes.Node)]
    parents = {child: node for node in every for child in node.iter_child_nodes()}
    names = _names_of_messages(tree)
    holders = [node for node in tree.find_all(nodes.Name) if node.name in names and node.ctx == "load"]
    if any(isinstance(node, _CAPTURES) or _key(node) in _NEIGHBOURS for node in every):
        return False
    return all(_is_only_written(node, parents) for node in holders)


def _names_of_messages(tree: nodes.Template) -> set[str]:
    """Return the variables that may hold messages."""
    names, before = {"messages"}, 0
    while len(names) > before:
        before = len(names)
        pairs: list[tuple[nodes.Node, nodes.Node]]
        pairs = [(node.target, node.node) for node in tree.find_all(nodes.Assign)]
        pairs += [(node.target, node.iter) for node in tree.find_all(nodes.For)]
        for target, value in pairs:
            if names & set(_names(value)):
                names |= set(_names(target))
    return names


def _names(node: nodes.Node) -> Iterator[str]:
    for each in [node, *node.find_all((nodes.Name, nodes.NSRef))]:
        if isinstance(each, nodes.Name | nodes.NSRef):
            yield each.name


def _key(node: nodes.Node) -> Any:
    """Return the attribute, or the constant item, that ``node`` reads; None: it reads none."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _is_only_written(node: nodes.Node, parents: Mapping[nodes.Node, nodes.Node]) -> bool:
    """Return whether the texts of ``node``, which holds messages, are written and nothing else."""
    parent = parents[node]
    if isinstance(parent, nodes.Assign):
        return True
    if isinstance(parent, nodes.For):
        return parent.iter is node
    if isinstance(parent, nodes.Filter | nodes.Test):
        return parent.node is node and parent.name in (
            _COUNTS if isinstance(parent, nodes.Filter) else _KINDS
        )
    if not isinstance(parent, nodes.Getattr | nodes.Getitem) or parent.node is not node:
        return False
    key = _key(parent)
    if key == _CONTENT:
        return _is_output(parent, parents)
    return key in _PLAIN_KEYS or (_is_index(parent) and _is_only_written(parent, parents))


def _is_index(node: nodes.Node) -> bool:
    """Return whether ``node`` reads one message of a list, or a part of the list."""
    if not isinstance(node, nodes.Getitem):
        return False
    if isinstance(node.arg, nodes.Slice):
        return True
    return isinstance(_key(node), int) or (
        isinstance(node.arg, nodes.Add | nodes.Sub | nodes.Getattr) and set(_names(node.arg)) == {"loop"}
    )


def _is_output(text: nodes.Node, parents: Mapping[nodes.Node, nodes.Node]) -> bool:
    parent = parents[text]
    if isinstance(parent, nodes.Filter) and parent.name == "trim" and not parent.args and not parent.kwargs:
        parent = parents[parent]
    while isinstance(parent, nodes.Add | nodes.Concat):
        parent = parents[parent]
    return isinstance(parent, nodes.Output)
