"""Parses shell scripts: returns the commands that a script would run, with variables filled in. Executes
nothing.

Supports quotes, comments, continued lines, variables with defaults, arrays, arithmetic, `if` and `case` on
known values, and files sourced from the script's folder. Command output stays ``$(...)``; an `if` that
depends on it takes its `else`, a `case` its first branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path

import regex

from grpo_dist.tools.recipe_import.expressions import Uncomputable, evaluate

# Unclosed constructs end with the text. `round` and `curly` recurse for nested brackets.
_SUBSTITUTION = r"\$(?:(?&round)|(?&curly)|[A-Za-z_]\w*|[\d@*\#?$!])|`[^`]*+`?"
_DOUBLE = rf'"(?:\\.|{_SUBSTITUTION}|[^"\\])*+"?'
_QUOTED = rf"\\.|'[^']*+'?|{_DOUBLE}"
_BRACKETS = rf"""(?(DEFINE)(?P<round>\((?:{_QUOTED}|(?<=\s)\#[^\n]*+|(?&round)|[^()])*+\)?)
                           (?P<curly>\{{(?:\\.|(?&round)|(?&curly)|[^{{}}])*+\}}?))"""
_WORD = rf"(?:{_QUOTED}|{_SUBSTITUTION}|[^\s;|&<>()])++"
_TOKEN = regex.compile(
    rf"""[ \t\r]+ | \#[^\n]*
    | \d*(?P<redirect><<-?|>>|[<>]&?|&>)[ \t]*(?P<target>{_WORD})?
    | (?P<token>&&|\|\||;;|[;|&()\n]|[A-Za-z_]\w*\+?=(?&round)|{_WORD}) {_BRACKETS}""",
    regex.X | regex.S,
)
_PART = regex.compile(rf"{_QUOTED}|{_SUBSTITUTION}|[^\\'\"$`]++|. {_BRACKETS}", regex.X | regex.S)
_QUOTED_PART = regex.compile(rf"\\.|{_SUBSTITUTION}|[^\\$`]++|. {_BRACKETS}", regex.X | regex.S)
_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*\+?)=(.*)", re.S)
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_MOST_SOURCED = 4  # maximum depth of sourced files


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would run, with its private variables."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def read_commands(text: str, folder: Path | None = None) -> list[Command]:
    """Return a script's commands. ``folder``: folder of sourced files; None: reads none."""
    script = _Script(folder)
    script.run(text)
    return script.commands


def unknown(text: str) -> bool:
    """Return whether a text contains command output."""
    return "$(" in text


def _tokens(text: str) -> Iterator[str]:
    """Yield operators, words with their quotes, and arrays ``name=(...)``; skip redirections."""
    text, at = text.replace("\\\n", " "), 0
    while match := _TOKEN.search(text, at):
        at = match.end()
        if match["token"]:
            yield match["token"]
        elif (match["redirect"] or "").startswith("<<"):
            end = "".join(part for _, part, _ in _parts(match["target"] or ""))
            line = re.compile(rf"^\s*{re.escape(end)}\s*$", re.M).search(text, at)
            at = line.end() if line else len(text)
            yield "\n"


def _parts(word: str, *, quoted: bool = False) -> Iterator[tuple[str, str, bool]]:
    """Yield the parts of a word: kind, text, and whether it is quoted. Kinds are `text`, and after a ``$``
    `param`, `arithmetic` or `command`.
    """
    for match in (_QUOTED_PART if quoted else _PART).finditer(word):
        part = match[0]
        if part[0] == "'" and not quoted:
            yield "text", part[1:].removesuffix("'"), True
        elif part[0] == '"' and not quoted:
            inner = part[1:].removesuffix('"')
            yield from _parts(inner, quoted=True) if inner else [("text", "", True)]
        elif part[0] == "\\":
            yield "text", part[1:] if not quoted or part[1:] in ("$", "`", '"', "\\") else part, True
        elif part[0] == "`":
            yield "command", part.strip("`"), quoted
        elif part.startswith("$((") and part.endswith("))"):
            yield "arithmetic", part[3:-2], quoted
        elif part.startswith("$("):
            yield "command", part[2:].removesuffix(")"), quoted
        elif part[0] == "$" and len(part) > 1:
            yield "param", part[2:].removesuffix("}") if part[1] == "{" else part[1:], quoted
        else:
            yield "text", part, quoted


class _Script:
    def __init__(self, folder: Path | None) -> None:
        self.folder, self.depth = folder, 0
        self.variables: dict[str, list[str]] = {"HOME": ["~"], "PWD": ["."]}
        self.commands: list[Command] = []
        self.arguments: list[str] = []  # "$@"
        self.tokens: list[str] = []
        self.at = 0

    def run(self, text: str) -> None:
        outer = self.tokens, self.at
        self.tokens, self.at = list(_tokens(text)), 0
        while self.at < len(self.tokens):
            self._block((), active=True)
            self.at += 1  # an unmatched closing keyword
        self.tokens, self.at = outer

    def _block(self, ends: tuple[str, ...], *, active: bool) -> str:
        """Run statements up to a token of ``ends``; return it without consuming it."""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token in ends:
                return token
            if token == "if":
                self._if(active=active)
            elif token == "case":
                self._case(active=active)
            elif token in ("for", "while", "until"):
                self._loop(active=active)
            elif token in (*_OPERATORS, "{", "}", "then", "do", "done", "fi", "esac", "else", "!", "time"):
                self.at += 1
            else:
                self._simple(self._until(_OPERATORS), active=active)
        return ""

    def _until(self, ends: tuple[str, ...]) -> list[str]:
        """Return the tokens up to one of ``ends``, which is not consumed."""
        start = self.at
        while self.at < len(self.tokens) and self.tokens[self.at] not in ends:
            self.at += 1
        return self.tokens[start : self.at]

    def _if(self, *, active: bool) -> None:
        word, done = "if", False
        while word in ("if", "elif", "else"):
            self.at += 1
            holds = not done
            if word != "else":
                condition = self._until(("then",))
                holds = active and not done and self._test(condition)
            word = self._block(("elif", "else", "fi"), active=active and holds)
            done = done or holds
        self.at += 1

    def _case(self, *, active: bool) -> None:
        value = "".join(self._expand(self.tokens[self.at + 1]))
        self._until(("in",))
        self.at, done = self.at + 1, False
        while self.at < len(self.tokens) and self.tokens[self.at] != "esac":
            if self.tokens[self.at] in ("\n", ";;", "("):
                self.at += 1
                continue
            words = [token for token in self._until((")",)) if token not in _OPERATORS]
            self.at += 1
            patterns = [pattern for word in words for pattern in self._expand(word)]
            holds = not done and (unknown(value) or any(fnmatchcase(value, one) for one in patterns))
            self._block((";;", "esac"), active=active and holds)
            done = done or holds
        self.at += 1

    def _loop(self, *, active: bool) -> None:
        """Run a `for` once, with its first value; skip other loops."""
        head = self._until(("do",))
        words = [word for token in head[3:] if token not in _OPERATORS for word in self._expand(token)]
        runs = active and head[0] == "for" and bool(words)
        if runs:
            self.variables[head[1]] = words[:1]
        self.at += 1
        self._block(("done",), active=runs)
        self.at += 1

    def _test(self, tokens: Sequence[str]) -> bool:
        """Return whether a condition holds; False if unknown."""
        groups, joins = [list[str]()], list[str]()
        for token in tokens:
            if token in ("&&", "||"):
                joins.append(token)
                groups.append([])
            elif token not in _OPERATORS:
                groups[-1] += self._expand(token) or [""]
        result = _holds(groups[0])
        for join, group in zip(joins, groups[1:], strict=True):
            result = (result and _holds(group)) if join == "&&" else (result or _holds(group))
        return result

    def _simple(self, tokens: Sequence[str], *, active: bool) -> None:
        if not active or not tokens:
            return
        environment = dict[str, str]()
        rest = tokens[1:] if tokens[0] in _DECLARES else tokens
        while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
            name, text = match.groups()
            if text.startswith("("):
                items = [token for token in _tokens(text[1:].removesuffix(")")) if token not in _OPERATORS]
                self._assign(name, [word for item in items for word in self._expand(item)])
            else:
                environment[name.rstrip("+")] = value = "".join(self._expand(text, splits=False))
                self._assign(name, [value])
            rest = rest[1:]
        words = [word for token in rest for word in self._expand(token)]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            self._source(words[1], [])
        elif words[:1] in (["bash"], ["sh"]) and words[1:] and self._source(words[1], words[2:]):
            pass
        elif words and words[0].startswith("--") and self.commands:  # after a missing backslash
            last = self.commands.pop()
            self.commands.append(Command((*last.words, *words), last.environment))
        elif words:
            self.commands.append(Command(tuple(words), environment))

    def _assign(self, name: str, values: list[str]) -> None:
        before = self.variables.get(name.rstrip("+"), []) if name.endswith("+") else []
        self.variables[name.rstrip("+")] = [*before, *values]

    def _source(self, path: str, arguments: list[str]) -> bool:
        """Run a file in the script's folder; return whether it exists there."""
        if self.folder is None or self.depth >= _MOST_SOURCED:
            return False
        file = (self.folder / path).resolve()
        if not (file.is_relative_to(self.folder.resolve()) and file.is_file()):
            return False
        before, self.arguments = self.arguments, arguments
        self.depth += 1
        self.run(file.read_text(encoding="utf-8", errors="replace"))
        self.depth -= 1
        self.arguments = before
        return True

    def _expand(self, word: str, *, splits: bool = True) -> list[str]:
        """Expand a word to words: unquoted variables are split at blanks, arrays into items."""
        words, started = [""], False
        for kind, text, quoted in _parts(word):
            if kind in ("text", "command"):
                words[-1] += text if kind == "text" else self._printed(text)
                started = True
                continue
            values = self._parameter(text) if kind == "param" else self._arithmetic(text)
            if not quoted and splits:
                values = [part for value in values for part in ([value] if unknown(value) else value.split())]
            if values:
                words[-1] += values[0]
                words += values[1:]
            started = started or bool(values) or (quoted and not text.endswith(("@", "@]")))
        return words if started else []

    def _printed(self, text: str) -> str:
        """Return a command's output if it prints the script's folder or a folder relative to it."""
        plain = text.replace('"', "").replace(" --", "").strip()
        if plain == "pwd":
            return "."
        if re.fullmatch(r"dirname (\$0|\$\{?BASH_SOURCE(\[0\]\})?|\$\{0\})", plain):
            return "."
        if match := re.match(r"cd ([^&;]+?)( &?>\S+)? ?(&&|;) ?pwd", plain):
            return normpath(self._text(match[1]))
        return f"$({text})"

    def _parameter(self, text: str) -> list[str]:
        match = re.match(r"(#?)(\w+|[@*#?$!])(\[[^]]*\])?(.*)", text, re.S)
        if match is None:
            return [""]
        count, name, index, rest = match.groups()
        values = self.variables.get(name, [])
        if name in ("@", "*"):
            return self.arguments
        if count:
            return [str(len(values) if index else len("".join(values)))]
        if index and index[1:-1].isdigit():
            values = values[int(index[1:-1]) :][:1]
        elif not index:
            values = values[:1]
        if default := re.match(r":?([-=+?])(.*)", rest, re.S):
            has = bool(values) and (bool("".join(values)) or not rest.startswith(":"))
            if default[1] == "?":
                return values or [""]
            if default[1] == "+" or not has:
                values = [] if default[1] == "+" and not has else [self._text(default[2])]
            if default[1] == "=":
                self.variables[name] = values
        elif rest and values:
            values = [_shortened(values[0], rest)]
        return values or ([] if index else [""])

    def _text(self, text: str) -> str:
        """Fill in the variables of a default or an expression."""
        plain = text.replace('"', "")
        return "".join(self._expand(f'"{plain}"'))

    def _arithmetic(self, text: str) -> list[str]:
        names = {name: "".join(values[:1]) for name, values in self.variables.items()}
        filled = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0]) or "0", self._text(text))
        try:
            return [str(evaluate(re.sub(r"(?<!/)/(?!/)", "//", filled), {}))]
        except Uncomputable:
            return [f"$(({text}))"]


def _holds(words: list[str]) -> bool:
    words = [word for word in words if word not in ("[", "]", "[[", "]]")]
    negated = words[:1] == ["!"]
    words = words[negated:]
    if any(map(unknown, words)):
        return False
    if len(words) == 2 and words[0] in ("-z", "-n"):
        result = (words[1] == "") == (words[0] == "-z")
    elif len(words) == 3 and words[1] in ("=", "==", "!="):
        result = fnmatchcase(words[0], words[2]) == (words[1] != "!=")
    elif len(words) == 3 and words[1] in _NUMBERS:
        try:
            result = bool(evaluate(f"{words[0]} {_NUMBERS[words[1]]} {words[2]}", {}))
        except Uncomputable:
            return False
    else:
        return False
    return result != negated


def _shortened(value: str, rest: str) -> str:
    """Apply ``${name##*/}`` and similar expansions to a value."""
    if match := re.match(r"(##?|%%?)(.*)", rest, re.S):
        ends = range(len(value) + 1)
        order = ends if len(match[1]) == (1 if match[1][0] == "#" else 2) else reversed(ends)
        for end in order:
            part = value[:end] if match[1][0] == "#" else value[end:]
            if fnmatchcase(part, match[2]):
                return value[end:] if match[1][0] == "#" else value[:end]
    if match := re.match(r"//?([^/]*)/(.*)", rest, re.S):
        return value.replace(match[1], match[2], -1 if rest.startswith("//") else 1)
    return value
