"""Shell scripts as syntax: the commands that a script would run, with its variables filled in. Nothing is
executed.

Known: quotes, comments, continued lines, variables with defaults, arrays, arithmetic, `if` and `case` on
known values, and files that the script sources from its own folder. What a command would print stays
``$(...)``; an `if` whose condition needs it takes its `else`, a `case` its first branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import normpath
from pathlib import Path

from grpo_dist.tools.recipe_import.expressions import Uncomputable, evaluate

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_CLOSING = {"(": ")", "{": "}"}
_NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_MOST_SOURCED = 4  # files deep


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a word: ``text`` as it is, or what stands behind a ``$``: `param`, `arithmetic`, `command`."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Token:
    """A word of ``pieces``, an operator, or the array ``name=(...)`` of ``items``."""

    operator: str = ""
    pieces: tuple[Piece, ...] = ()
    items: tuple[Token, ...] = ()
    name: str = ""

    @property
    def plain(self) -> str:
        """The text of a word without quotes and variables, e.g. a keyword."""
        plain = all(piece.kind == "text" and not piece.quoted for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if plain else ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that the script would run, and the variables set for it alone."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def read_commands(text: str, folder: Path | None = None) -> list[Command]:
    """Return the commands of a script. ``folder``: of the files that it sources; None: none is read."""
    script = _Script(folder)
    script.run(text)
    return script.commands


def unknown(text: str) -> bool:
    """Return whether a text has output of a command in it."""
    return "$(" in text


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.at = text.replace("\\\n", " "), 0

    def tokens(self, end: str = "") -> Iterator[Token]:
        """Yield tokens up to ``end``, a closing bracket, or the end of the text."""
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == end:
                self.at += 1
                return
            if here in " \t\r":
                self.at += 1
            elif here == "\n":
                self.at += 1
                yield Token(operator="\n")
            elif here == "#":
                self.at = self._find("\n")
            elif match := re.match(r"\d*(<<-?|>>|[<>]&?|&>)", self.text[self.at :]):
                yield from self._redirect(match[0])
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                self.at += len(operator)
                yield Token(operator=operator)
            else:
                yield self._word(end)

    def _redirect(self, sign: str) -> Iterator[Token]:
        """Leave out a redirection: its file, or the lines of a here-document."""
        self.at += len(sign)
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n&;|":
            target = "".join(piece.text for piece in self._word("").pieces)
            if sign.lstrip("0123456789").startswith("<<"):
                match = re.compile(rf"^\s*{re.escape(target)}\s*$", re.M).search(self.text, self.at)
                self.at = match.end() if match else len(self.text)
                yield Token(operator="\n")
        elif self.text.startswith("&", self.at):
            self.at += 1

    def _find(self, sign: str) -> int:
        at = self.text.find(sign, self.at)
        return len(self.text) if at < 0 else at

    def _word(self, end: str) -> Token:
        pieces, plain = list[Piece](), ""
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in " \t\r\n;|&<>()" or (end and here == end):
                if here == "(" and (match := _ASSIGNMENT.fullmatch(plain)) and not pieces:
                    self.at += 1
                    items = tuple(token for token in self.tokens(")") if token.pieces)
                    return Token(items=items, name=match[1] + match[2])
                break
            self.at += 1
            if here == "\\":
                pieces += [Piece("text", plain, False), Piece("text", self.text[self.at : self.at + 1], True)]
                plain, self.at = "", self.at + 1
            elif here == "'":
                close = self._find("'")
                pieces += [Piece("text", plain, False), Piece("text", self.text[self.at : close], True)]
                plain, self.at = "", close + 1
            elif here == '"':
                pieces += [Piece("text", plain, False), *self._quoted()]
                plain = ""
            elif here in "$`":
                pieces += [Piece("text", plain, False), self._variable(here, quoted=False)]
                plain = ""
            else:
                plain += here
        pieces.append(Piece("text", plain, False))
        return Token(pieces=tuple(piece for piece in pieces if piece.text or piece.quoted))

    def _quoted(self) -> Iterator[Piece]:
        plain, begun = "", False
        while self.at < len(self.text) and (here := self.text[self.at]) != '"':
            self.at += 1
            if here == "\\" and self.text[self.at : self.at + 1] in ("$", "`", '"', "\\"):
                plain, self.at = plain + self.text[self.at], self.at + 1
            elif here in "$`":
                if plain:
                    yield Piece("text", plain, True)
                yield self._variable(here, quoted=True)
                plain, begun = "", True
            else:
                plain += here
        self.at += 1
        if plain or not begun:
            yield Piece("text", plain, True)

    def _variable(self, sign: str, *, quoted: bool) -> Piece:
        """Read what follows a ``$`` or a backtick."""
        if sign == "`":
            close = self._find("`")
            text, self.at = self.text[self.at : close], close + 1
            return Piece("command", text, quoted)
        if self.text.startswith("((", self.at):
            self.at += 1
            inner = self._bracketed()
            self.at += 1
            return Piece("arithmetic", inner, quoted)
        if self.text[self.at : self.at + 1] in ("(", "{"):
            kind = "command" if self.text[self.at] == "(" else "param"
            return Piece(kind, self._bracketed(), quoted)
        match = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!]").match(self.text, self.at)
        if match is None:
            return Piece("text", "$", quoted)
        self.at = match.end()
        return Piece("param", match[0], quoted)

    def _bracketed(self) -> str:
        """Return what is inside the bracket that opens here."""
        opening, depth, start = self.text[self.at], 0, self.at + 1
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.at += 1
            elif here == "'" and opening == "(":
                self.at += 1
                self.at = self._find("'")
            depth += (here == opening) - (here == _CLOSING[opening])
            self.at += 1
            if depth == 0:
                break
        return self.text[start : self.at - 1]


class _Script:
    def __init__(self, folder: Path | None) -> None:
        self.folder, self.depth = folder, 0
        self.variables: dict[str, list[str]] = {"HOME": ["~"], "PWD": ["."]}
        self.commands: list[Command] = []
        self.arguments: list[str] = []  # "$@"

    def run(self, text: str) -> None:
        outer = getattr(self, "tokens", []), getattr(self, "at", 0)
        self.tokens, self.at = list(_Lexer(text).tokens()), 0
        while self.at < len(self.tokens):
            self._block((), active=True)
            self.at += 1  # a keyword that closes nothing
        self.tokens, self.at = outer

    def _block(self, ends: tuple[str, ...], *, active: bool) -> str:
        """Run statements up to a keyword of ``ends``, which stays the next token; return it."""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.operator:
                if token.operator in ends:
                    return token.operator
                self.at += 1
            elif token.plain in ends:
                return token.plain
            elif token.plain == "if":
                self._if(active=active)
            elif token.plain == "case":
                self._case(active=active)
            elif token.plain in ("for", "while", "until"):
                self._loop(active=active)
            elif token.plain in ("{", "}", "then", "do", "done", "fi", "esac", "else", "!", "time"):
                self.at += 1
            else:
                self._simple(self._until(()), active=active)
        return ""

    def _until(self, keywords: tuple[str, ...]) -> list[Token]:
        """Return the tokens up to the end of the command, or up to a keyword."""
        start = self.at
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.plain in keywords if keywords else token.operator:
                break
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
        while self.at < len(self.tokens) and self.tokens[self.at].plain != "esac":
            if self.tokens[self.at].operator in ("\n", ";;", "("):
                self.at += 1
                continue
            patterns = list[str]()
            while self.at < len(self.tokens) and self.tokens[self.at].operator != ")":
                patterns += self._expand(self.tokens[self.at]) if self.tokens[self.at].pieces else []
                self.at += 1
            self.at += 1
            holds = not done and (unknown(value) or any(fnmatchcase(value, one) for one in patterns))
            self._block((";;", "esac"), active=active and holds)
            done = done or holds
        self.at += 1

    def _loop(self, *, active: bool) -> None:
        """Run a `for` once, with its first value; no other loop runs."""
        head = self._until(("do",))
        words = [word for token in head[3:] for word in self._expand(token)]
        runs = active and head[0].plain == "for" and bool(words)
        if runs:
            self.variables[head[1].plain] = words[:1]
        self.at += 1
        self._block(("done",), active=runs)
        self.at += 1

    def _test(self, tokens: list[Token]) -> bool:
        """Return whether a condition holds; False where that is not known."""
        groups, joins = [list[str]()], list[str]()
        for token in tokens:
            if token.operator in ("&&", "||"):
                joins.append(token.operator)
                groups.append([])
            elif token.pieces:
                groups[-1] += self._expand(token) or [""]
        result = _holds(groups[0])
        for join, group in zip(joins, groups[1:], strict=True):
            result = (result and _holds(group)) if join == "&&" else (result or _holds(group))
        return result

    def _simple(self, tokens: list[Token], *, active: bool) -> None:
        if not active or not tokens:
            return
        environment = dict[str, str]()
        rest = tokens[1:] if tokens[0].plain in _DECLARES else tokens
        while rest:
            token = rest[0]
            match = _ASSIGNMENT.match(token.pieces[0].text) if token.pieces else None
            if token.name:
                self._assign(token.name, [word for item in token.items for word in self._expand(item)])
            elif match and not token.pieces[0].quoted and token.pieces[0].kind == "text":
                first = Piece("text", token.pieces[0].text[match.end() :], True)
                value = "".join(self._expand(Token(pieces=(first, *token.pieces[1:]))))
                environment[match[1]] = value
                self._assign(match[1] + match[2], [value])
            else:
                break
            rest = rest[1:]
        words = [word for token in rest for word in self._expand(token)]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            self._source(words[1], [])
        elif words[:1] in (["bash"], ["sh"]) and words[1:] and self._source(words[1], words[2:]):
            pass
        elif words and words[0].startswith("--") and self.commands:  # behind a forgotten backslash
            last = self.commands.pop()
            self.commands.append(Command((*last.words, *words), last.environment))
        elif words:
            self.commands.append(Command(tuple(words), environment))

    def _assign(self, name: str, values: list[str]) -> None:
        before = self.variables.get(name.rstrip("+"), []) if name.endswith("+") else []
        self.variables[name.rstrip("+")] = [*before, *values]

    def _source(self, path: str, arguments: list[str]) -> bool:
        """Run a file of the script's own folder; return whether it is one."""
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

    def _expand(self, token: Token) -> list[str]:
        """Return the words that a word becomes: unquoted variables are split at blanks, arrays at items."""
        words, begun = [""], False
        for piece in token.pieces:
            if piece.kind == "text" or piece.kind == "command":
                words[-1] += piece.text if piece.kind == "text" else self._printed(piece.text)
                begun = True
                continue
            expand = self._parameter if piece.kind == "param" else self._arithmetic
            values = expand(piece.text)
            if not piece.quoted:
                values = [part for value in values for part in ([value] if unknown(value) else value.split())]
            if values:
                words[-1] += values[0]
                words += values[1:]
            begun = begun or bool(values) or (piece.quoted and not piece.text.endswith(("@", "@]")))
        return words if begun else []

    def _printed(self, text: str) -> str:
        """Return what a command prints, if that is the script's folder or another, from there."""
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
        """Return a default or an expression with its variables filled in."""
        quoted = Token(pieces=tuple(_Lexer(text.replace('"', "") + '"')._quoted()))
        return "".join(self._expand(quoted))

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
    """Apply ``${name##*/}`` and its like to a value."""
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
