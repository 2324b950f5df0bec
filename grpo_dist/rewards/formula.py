"""Parses a formula whole, or not at all: every letter, sign and command of the text is in the tree. Evaluates
it to an exact fraction, else 60 digits; an unknown function gets pseudo-random values.

`equality` compares trees. Other text (prose, an integral, a sign without a meaning) raises `Unread`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from typing import Any, NamedTuple

from mpmath import mp, mpc, mpf

_MAX_DEPTH = 60  # nested groups
_MAX_TOKENS = 4000


class Unread(Exception):
    """The text is no supported formula."""


class Formula(NamedTuple):
    """A formula: kind, parts, and a name or a sign.

    number (``value``), symbol (``name``), call (``name``, arguments), add, multiply, divide, power, negative,
    signs (``+-`` or ``-+``), tuple, interval (``name``: its brackets), set, list, matrix, relation (``name``:
    its signs), congruence (left, right, modulus), and, or, union, intersection, difference, sum, product.
    """

    kind: str
    parts: tuple[Formula, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


_FUNCTIONS = re.findall(
    r"\w+",
    """
    sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh
    arccosh arctanh ln log exp sqrt abs floor ceil gcd lcm max min sgn Re Im arg det dim ker rank tr deg Pr
    """,
)
SAME_FUNCTION = {
    "tg": "tan", "ctg": "cot", "cotg": "cot", "cosec": "csc", "arctg": "arctan", "arcctg": "arccot",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "acot": "arccot", "asinh": "arcsinh",
    "acosh": "arccosh", "atanh": "arctanh", "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh",
    "sh": "sinh", "ch": "cosh", "th": "tanh", "cth": "coth", "sign": "sgn", "ceiling": "ceil", "trace": "tr",
    "rk": "rank", "hcf": "gcd", "gcf": "gcd",
}  # fmt: skip
_LOGARITHMS = {"lg": 10, "lb": 2, "ld": 2}  # names with a fixed base
_FUNCTION_NAMES = frozenset([*_FUNCTIONS, *SAME_FUNCTION, *_LOGARITHMS])
_IN_PLAIN_TEXT = sorted(_FUNCTION_NAMES - {"ch", "sh", "th", "lb", "ld", "rk"}, key=len, reverse=True)
GREEK = frozenset(
    re.findall(
        r"\w+",
        """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma
    varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
    ell hbar
        """,
    )
)
_OTHER_RELATIONS = re.findall(
    r"\w+",
    "notin ni subset subseteq supset supseteq subsetneq sim cong parallel perp propto mid nmid to mapsto "
    "rightarrow Rightarrow implies iff Leftrightarrow leftrightarrow prec succ preceq succeq",
)
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=",
    "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\ne": "!=", "\\neq": "!=", "\\in": "in",
    "\\equiv": "mod", "\\approx": "~", "\\simeq": "~",
    **{f"\\{name}": name for name in _OTHER_RELATIONS},
}  # fmt: skip
_SET_SIGNS = {
    "\\cup": "union", "\\cap": "intersection", "\\setminus": "difference", "\\backslash": "difference",
}  # fmt: skip
_TIMES = {"*", "\\cdot", "\\times", "\\ast"}
_OVER = {"/", "\\div"}
_CONNECTIVES = {"\\land": "and", "\\wedge": "and", "\\lor": "or", "\\vee": "or"}
_FONTS = {
    "mathbf",
    "mathit",
    "mathrm",
    "mathsf",
    "mathcal",
    "boldsymbol",
    "bm",
    "vec",
    "mathop",
    "rm",
    "bf",
    "it",
}
_IN_FONT = re.compile(r"\\(?P<font>[a-z]+)\*?\s*\{(?P<content>[^{}]*)\}")
_MARKS = {"bar", "overline", "hat", "widehat", "tilde", "widetilde", "dot", "ddot", "overrightarrow",
          "underline",           "angle", "triangle", "widearc", "overarc", "measuredangle"}  # fmt: skip
_IGNORED = frozenset(
    re.findall(
        r"\w+",
        "left right mleft mright big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits "
        "nolimits quad qquad",
    )
)
_CLOSING = {"(": ")]", "[": ")]", "{": "}", "\\{": ["\\}"], "\\lfloor": ["\\rfloor"], "\\lceil": ["\\rceil"]}
_TOKEN = re.compile(
    r"(?P<space>\s+|\\[,;:!> ]|~)"
    r"|(?P<words>\\(?:text[a-z]*|mbox|operatorname|math(?:bf|it|rm|sf|cal|op)|boldsymbol|bm|vec)\*?\s*\{[^{}]*\})"
    r"|(?P<environment>\\(?:begin|end)\s*\{[a-z]+\})|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<word>[A-Za-z]+)|(?P<sign>.)",
    re.DOTALL,
)
_TOUCHES = re.compile(r"[\d^_{}]|\.\d|\\(?!text|mbox|q?quad)[A-Za-z]")  # a factor beside a run of letters
_GROUPED = re.compile(r"(?<=\d)\{,\}(?=\d{3})")
_SCIENTIFIC = re.compile(r"(?<![\w.)}\]])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})(?=\s*(?:[,;)\]}]|\\[\]})]|$))")
_NAMED_INDEX = re.compile(r"_\s*\{\s*([A-Za-z]{2,})\s*\}")
_VECTOR = r"\\(?:vec|mathbf|boldsymbol|bm)\s*\{?\s*[A-Za-z]\s*\}?"
MORE_THAN_ALGEBRA = re.compile(  # derivatives, products of two vectors, expected values
    r"\\[dt]?frac\s*\{\s*(?:d|\\partial)(?![A-Za-z]{2})[^{}]*\}\s*\{\s*(?:d|\\partial)\s*[a-z]"
    rf"|{_VECTOR}\s*\\(?:cdot|times)\s*{_VECTOR}|(?<![A-Za-z\\])E\s*\[|\\mathbb\s*\{{\s*[EP]\s*\}}"
)


class _Token(NamedTuple):
    kind: str
    text: str
    spaced: bool  # whether white space precedes it


def is_word(letters: str) -> bool:
    """Return whether a run of letters alone is text rather than a product of variables.

    ``abc``, ``xyz`` and ``mnp`` are products: they are in alphabetical order or have no vowel. So is any run
    that touches another factor, see `_tokens`: ``2Rab``, ``kte^{-kt}``, ``\\angle BAC``.
    """
    plain = letters.lower()
    return len(plain) > 2 and list(plain) != sorted(plain) and any(letter in "aeiou" for letter in plain)


def parse(text: str) -> Formula:
    """Return the tree of a formula in LaTeX or in plain notation (``x**2``, ``sqrt(2)``, ``exp(2)``).

    Raises Unread.
    """
    if MORE_THAN_ALGEBRA.search(text):
        raise Unread(text)
    text = _NAMED_INDEX.sub(r"_{\\text{\1}}", text)
    plain = _SCIENTIFIC.sub(r"(\1*10^{\2})", _GROUPED.sub("", text.replace("**", "^")))
    parser = _Parser(list(_tokens(plain)))
    tree = parser.elements()
    if parser.ahead is not None:
        raise Unread(parser.ahead.text)
    return tree


def _tokens(text: str) -> Iterator[_Token]:
    spaced, before = False, ""
    for count, match in enumerate(_TOKEN.finditer(text)):
        kind, token = str(match.lastgroup), match.group()
        if count > _MAX_TOKENS:
            raise Unread("too long")
        if kind == "space" or (kind == "command" and token[1:] in _IGNORED):
            spaced, before = True, before if before.startswith("\\") else ""
            continue
        if kind == "word":
            touches = _TOUCHES.match(before) or _TOUCHES.match(text, match.end())
            yield from _split_letters(token, spaced, alone=touches is None)
        elif kind == "words":
            yield from _read_font(token, spaced)
        else:
            yield _Token(kind, token, spaced)
        spaced, before = False, token


def _split_letters(letters: str, spaced: bool, alone: bool = True) -> Iterator[_Token]:
    if letters in ("or", "and"):
        yield _Token("command", "\\lor" if letters == "or" else "\\land", spaced)
        return
    if letters in ("pi", "infty", "infinity", "inf", "oo"):
        yield _Token("command", "\\pi" if letters == "pi" else "\\infty", spaced)
        return
    for name in _IN_PLAIN_TEXT:
        if letters == name or (letters.startswith(name) and len(letters) == len(name) + 1 and len(name) > 1):
            yield _Token("command", f"\\{name}", spaced)
            if letters != name:
                yield _Token("letter", letters[-1], False)
            return
    if alone and is_word(letters):
        raise Unread(letters)
    for place, letter in enumerate(letters):
        yield _Token("letter", letter, spaced and not place)


def _read_font(command: str, spaced: bool) -> Iterator[_Token]:
    """Yield the tokens of an operator's name, of a letter in another font, or of the words of an index."""
    match = _IN_FONT.fullmatch(command)
    if match is None:
        raise Unread(command)
    words = match["content"].strip()
    if words in _FUNCTION_NAMES:
        yield _Token("command", f"\\{words}", spaced)
    elif words in ("or", "and") or (len(words) == 1 and words.isalpha()):
        yield from _split_letters(words, spaced)
    elif match["font"] == "operatorname" and words.isalpha():
        yield _Token("function", words, spaced)
    elif match["font"].startswith("text") or match["font"] in ("mbox", "operatorname") or words.isalpha():
        yield _Token("words", words, spaced)
    else:
        yield _Token("sign", "(", spaced)
        yield from _tokens(words)
        yield _Token("sign", ")", False)


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._place, self._depth, self._bars = tokens, 0, 0, 0

    @property
    def ahead(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _next(self) -> _Token:
        token = self.ahead
        if token is None:
            raise Unread("ends early")
        self._place += 1
        return token

    def _sees(self, *texts: str) -> bool:
        return self.ahead is not None and self.ahead.text in texts

    def _accept(self, *texts: str) -> str:
        return self._next().text if self._sees(*texts) else ""

    def _expect(self, *texts: str) -> str:
        return self._accept(*texts) or self._refuse()

    def _refuse(self) -> str:
        raise Unread(self.ahead.text if self.ahead else "ends early")

    def elements(self) -> Formula:
        """Parse a semicolon-separated list of comma-separated lists; a lone element is returned itself."""
        return self._separated(";", lambda: self._separated(",", lambda: self._statement("or")))

    def _separated(self, sign: str, below: Callable[[], Formula]) -> Formula:
        elements = [below()]
        while self._accept(sign):
            elements.append(below())
        return elements[0] if len(elements) == 1 else Formula("list", tuple(elements))

    def _statement(self, connective: str) -> Formula:
        below: Callable[[], Formula] = (
            (lambda: self._statement("and")) if connective == "or" else self._relation
        )
        parts = [below()]
        while self.ahead is not None and _CONNECTIVES.get(self.ahead.text) == connective:
            self._next()
            parts.append(below())
        return parts[0] if len(parts) == 1 else Formula(connective, tuple(parts))

    def _relation(self) -> Formula:
        parts, signs = [self._set()], []
        while self.ahead is not None and (
            self.ahead.text in RELATIONS or (self.ahead.text == "!" and self._follows("="))
        ):
            sign = self._next().text
            if sign == "!":
                self._next()
            name = "!=" if sign == "!" else RELATIONS[sign]
            if name in "<>" and self._accept("="):
                name += "="
            if name == "=" and self._accept("="):
                name = "="
            signs.append(name)
            parts.append(self._set())
        if (modulus := self._modulus()) is not None:
            if signs not in ([], ["mod"], ["="]):
                raise Unread("a modulus")
            return Formula("congruence", (*parts, modulus))
        if signs == ["mod"] and parts[1].kind == "call" and parts[1].name == "mod":  # x \\equiv 3 \\bmod 5
            return Formula("congruence", (parts[0], *parts[1].parts))
        return parts[0] if not signs else Formula("relation", tuple(parts), " ".join(signs))

    def _follows(self, text: str) -> bool:
        next_place = self._place + 1
        return next_place < len(self._tokens) and self._tokens[next_place].text == text

    def _modulus(self) -> Formula | None:
        if self._accept("\\pmod", "\\mod", "\\pod"):
            return self._argument()
        if self._sees("(") and (self._follows("\\mod") or self._follows("\\bmod")):
            self._next(), self._next()
            modulus = self._sum()
            self._expect(")")
            return modulus
        return None

    def _set(self) -> Formula:
        left = self._sum()
        while self.ahead is not None and self.ahead.text in _SET_SIGNS:
            sign = self._next().text
            left = Formula(_SET_SIGNS[sign], (left, self._sum()))
        return left

    def _sum(self) -> Formula:
        terms = []
        sign = self._accept("+", "-", "\\pm", "\\mp")
        while True:
            term = self._term()
            if sign == "-":
                term = Formula("negative", (term,))
            elif sign in ("\\pm", "\\mp"):
                term = Formula("signs", (term,), sign[1:])
            terms.append(term)
            sign = self._accept("+", "-", "\\pm", "\\mp")
            if not sign:
                return terms[0] if len(terms) == 1 else Formula("add", tuple(terms))

    def _term(self) -> Formula:
        value = self._signed_factor()
        while self.ahead is not None:
            if self.ahead.text in _TIMES:
                self._next()
                value = Formula("multiply", (value, self._signed_factor()))
            elif self.ahead.text in _OVER:
                self._next()
                value = Formula("divide", (value, self._signed_factor()))
            elif self.ahead.text == "\\bmod":
                self._next()
                value = Formula("call", (value, self._signed_factor()), "mod")
            elif self._starts_factor():
                if value.kind in ("tuple", "set", "interval", "list"):
                    raise Unread("a product of sets")
                value = Formula("multiply", (value, self._factor()))
            else:
                return value
        return value

    def _signed_factor(self) -> Formula:
        sign = self._accept("+", "-")
        factor = self._factor()
        return Formula("negative", (factor,)) if sign == "-" else factor

    def _starts_factor(self) -> bool:
        token = self.ahead
        if token is None:
            return False
        if token.kind == "number":  # nobody writes a product as "2 3" or ")3"
            before = self._tokens[self._place - 1]
            return before.kind == "letter" or before.text in ("}", "\\pi") or before.text.startswith("\\")
        if token.text in ("|", "\\vert", "\\lvert"):
            return not self._bars
        if token.text == "(":
            return not (self._follows("\\mod") or self._follows("\\bmod"))
        begins = token.text.startswith("\\begin")
        return (
            token.kind in ("letter", "function")
            or begins
            or token.text == "{"
            or self._starts_by_command(token)
        )

    @staticmethod
    def _starts_by_command(token: _Token) -> bool:
        name = token.text[1:]
        return token.kind == "command" and (
            name in _FUNCTION_NAMES | GREEK | _FONTS | _MARKS
            or name in ("frac", "dfrac", "tfrac", "cfrac", "sqrt", "pi", "infty", "binom", "dbinom", "tbinom",
                        "lfloor",                         "lceil", "sum", "prod", "mathbb")
        )  # fmt: skip

    def _factor(self) -> Formula:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unread("too deep")
        base = self._primary()
        while self.ahead is not None:
            if self._accept("^"):
                base = self._raised(base)
            elif self._accept("_"):
                base = self._indexed(base)
            elif self._sees("'", "’", "\\prime"):
                self._next()
                base = self._primed(base, "'")
            elif self._sees("!") and not self._follows("="):
                self._next()
                twice = self._accept("!")
                base = Formula("call", (base,), "!!" if twice else "!")
            else:
                break
        self._depth -= 1
        return base

    def _primed(self, base: Formula, prime: str) -> Formula:
        if base.kind != "symbol":
            raise Unread("a prime")
        return self._applied(base._replace(name=base.name + prime))

    def _raised(self, base: Formula) -> Formula:
        braced = self._sees("{")
        begin = self._place
        inside = self._raw_group() if braced else [self._next()]
        texts = [token.text for token in inside]
        if texts == ["\\circ"] or texts == ["\\degree"]:
            return Formula("multiply", (base, Formula("call", (), "degree")))
        if texts and set(texts) <= {"\\prime", "'"}:
            return self._primed(base, "'" * len(texts))
        if (
            base.kind == "symbol"
            and texts
            and texts[0] in ("(", "\\top", "\\intercal", "*", "\\ast", "\\dagger", "\\dag")
        ):
            if texts[0] == "(" and braced and len(texts) == 3 and texts[1].isdigit():
                return self._primed(base, "'" * min(int(texts[1]), 99))
            if texts[0] != "(":
                mark = "*" if texts[0] == "\\ast" else texts[0]
                return base._replace(name=f"{base.name}^{mark}")
        if texts == ["-", "1"] and self._sees("(") and base.kind == "symbol" and base.name in "fghFGH":
            return self._applied(base._replace(name=f"{base.name}'^-1"))
        self._place = begin
        if not braced and self._sees("-"):
            self._next()
            return Formula("power", (base, Formula("negative", (self._argument(),))))
        return Formula("power", (base, self._argument()))

    def _indexed(self, base: Formula) -> Formula:
        if base.kind == "power" and base.parts[0].kind == "symbol":  # x^2_n
            return base._replace(parts=(self._indexed(base.parts[0]), base.parts[1]))
        if base.kind == "number" and all(token.text == "-" for token in self._tokens[: self._place - 2]):
            return self._drop_base(base)
        if base.kind != "symbol":
            raise Unread("an index")
        begin = self._place
        texts = self._raw_group() if self._sees("{") else [self._next()]
        name = "".join(token.text for token in texts)
        if not re.search(r"[\\+\-*/^(,]", name):
            return self._applied(base._replace(name=f"{base.name}_{name}"))
        end, self._place = self._place, begin
        try:
            index = self._argument()
        except Unread:
            self._place = end
            return self._applied(base._replace(name=f"{base.name}_{name}"))
        return Formula("call", (index,), f"{base.name}_")

    def _drop_base(self, number: Formula) -> Formula:
        """Skip the base of a number, ``52_8``: only the digits are compared here, see `wording.unit`."""
        tokens = self._raw_group() if self._sees("{") else [self._next()]
        if not all(token.kind in ("number", "words", "letter") for token in tokens):
            raise Unread("an index")
        return number

    def _raw_group(self) -> list[_Token]:
        self._expect("{")
        inside: list[_Token] = []
        depth = 1
        while True:
            token = self._next()
            depth += (token.text == "{") - (token.text == "}")
            if not depth:
                return inside
            inside.append(token)

    def _applied(self, function: Formula) -> Formula:
        """Parse a call if arguments in parentheses follow; ``a(b+c)`` is a product."""
        named = re.match(r"[fghFGHP]('|_|\Z)|.*'", function.name) or self._sees_argument(function.name)
        if self._sees("(") and named:
            self._next()
            arguments = self.elements()
            self._expect(")")
            return Formula("call", _arguments(arguments), function.name)
        return function

    def _sees_argument(self, name: str) -> bool:
        """Return whether a capital, p or q is followed by a single variable: ``W(n)``, ``p(x)``."""
        ahead = [token.text for token in self._tokens[self._place : self._place + 3]]
        return (
            bool(re.fullmatch("[A-Zpq]", name))
            and len(ahead) == 3
            and ahead[1] in tuple("xyztnmk")
            and ahead[2] == ")"
        )

    def _argument(self) -> Formula:
        """Parse the argument of a command: a group in braces, or one token with its arguments."""
        if self._accept("{"):
            inside = self.elements()
            self._expect("}")
            return inside
        token = self._next()
        if token.kind == "number":
            return Formula("number", value=Fraction(token.text), name=token.text)
        self._place -= 1
        return self._primary()

    def _primary(self) -> Formula:
        token = self._next()
        if token.kind == "number":
            return Formula("number", value=_exact(token.text), name=token.text)
        if token.kind == "letter":
            return self._applied(Formula("symbol", name=token.text))
        if token.kind == "environment" and token.text.startswith("\\begin"):
            return self._matrix(token.text.partition("{")[2].rstrip("}"))
        if token.kind == "function":
            return self._function(token.text)
        if token.kind == "command" and (command := self._command(token.text[1:])) is not None:
            return command
        if token.text in ("|", "\\vert", "\\lvert"):
            self._bars += 1
            inside = self.elements()
            self._expect("|", "\\vert", "\\rvert")
            self._bars -= 1
            return Formula("call", (inside,), "abs")
        if token.text in _CLOSING:
            return self._group(token.text)
        self._place -= 1
        self._refuse()
        raise AssertionError

    def _group(self, opening: str) -> Formula:
        bars, self._bars = self._bars, 0
        if opening == "\\{" and self._accept("\\}"):
            return Formula("set")
        inside = self.elements()
        closing = self._expect(*_CLOSING[opening])
        self._bars = bars
        if opening in ("\\lfloor", "\\lceil"):
            return Formula("call", (inside,), "floor" if "floor" in opening else "ceil")
        if opening == "\\{":
            return Formula("set", inside.parts if inside.kind == "list" else (inside,))
        if inside.kind == "list" and opening in "([":
            elements = inside.parts
            if len(elements) == 2 and opening + closing != "()":
                return Formula("interval", elements, opening + closing)
            if opening + closing not in ("()", "[]"):
                raise Unread("brackets")
            return Formula("tuple", elements)
        if opening + closing not in ("()", "[]", "{}"):
            raise Unread("brackets")
        return inside

    def _command(self, name: str) -> Formula | None:
        if name in GREEK:  # \varphi is \phi
            return self._applied(Formula("symbol", name=f"\\{name.removeprefix('var')}"))
        if name in ("pi", "infty"):
            return Formula("constant", name=name)
        if name in ("emptyset", "varnothing"):
            return Formula("set")
        if name == "mathbb":
            return Formula("constant", name="".join(token.text for token in self._raw_group()))
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Formula("divide", (self._fraction_part(), self._fraction_part()))
        if name in ("binom", "dbinom", "tbinom"):
            return Formula("call", (self._fraction_part(), self._fraction_part()), "binom")
        if name == "sqrt":
            return self._root()
        if name in ("sum", "prod"):
            return self._repeated(name)
        if name in _MARKS:
            return self._marked(name)
        if name in _FONTS:
            return self._primary()
        return self._function(name) if name in _FUNCTION_NAMES else None

    def _fraction_part(self) -> Formula:
        """Parse an argument of a fraction: without braces, a single digit."""
        token = self.ahead
        if token is not None and token.kind == "number" and len(token.text) > 1:
            self._tokens[self._place : self._place + 1] = [
                token._replace(text=digits) for digits in (token.text[0], token.text[1:])
            ]
        return self._argument()

    def _root(self) -> Formula:
        degree = Formula("number", value=Fraction(2))
        if self._accept("["):
            degree = self._sum()
            self._expect("]")
        if self._sees("("):
            return Formula("call", (self._primary(), degree), "root")
        return Formula("call", (self._argument(), degree), "root")

    def _repeated(self, name: str) -> Formula:
        self._expect("_")
        lower = self._argument()
        self._expect("^")
        upper = self._argument()
        if lower.kind != "relation" or lower.name != "=" or lower.parts[0].kind != "symbol":
            raise Unread(name)
        return Formula(name, (lower.parts[1], upper, self._term()), lower.parts[0].name)

    def _matrix(self, kind: str) -> Formula:
        if kind not in ("pmatrix", "bmatrix", "matrix", "vmatrix", "smallmatrix"):
            raise Unread(kind)
        rows: list[list[Formula]] = [[]]
        while not self._ends():
            rows[-1].append(self._statement("or"))
            if self._accept("\\\\"):
                rows.append([])
            elif not self._accept("&") and not (self.ahead and self.ahead.kind == "environment"):
                self._refuse()
        rows = rows if rows[-1] else rows[:-1]
        if len({len(row) for row in rows}) != 1:
            raise Unread("rows of several lengths")
        matrix = Formula("matrix", tuple(Formula("tuple", tuple(row)) for row in rows))
        return Formula("call", (matrix,), "det") if kind == "vmatrix" else matrix

    def _ends(self) -> bool:
        if self.ahead is None or self.ahead.kind != "environment":
            return False
        return self._next().text.startswith("\\end")

    def _marked(self, name: str) -> Formula:
        tokens = self._raw_group() if self._sees("{") else self._run_of_letters()
        if name == "overline" and len(tokens) == 1:
            name = "bar"
        return Formula("symbol", name=f"\\{name} {''.join(token.text for token in tokens)}")

    def _run_of_letters(self) -> list[_Token]:
        tokens = [self._next()]
        while self.ahead is not None and self.ahead.kind == "letter" and not self.ahead.spaced:
            tokens.append(self._next())
        return tokens

    def _function(self, name: str) -> Formula:
        name = SAME_FUNCTION.get(name, name)
        if name == "sqrt":
            return self._root()
        base, exponent, primes = None, None, ""
        while True:
            if self._accept("_"):
                base = self._argument()
            elif self._accept("^"):
                exponent = Formula("negative", (self._argument(),)) if self._accept("-") else self._argument()
            elif self._accept("'"):
                primes += "'"
            else:
                break
        if name in _LOGARITHMS:
            name, base = "log", base or Formula("number", value=Fraction(_LOGARITHMS[name]))
        arguments = self._arguments_of_function()
        call = Formula("call", (*arguments, *([base] if base is not None else [])), name + primes)
        if exponent is None:
            return call
        if exponent == Formula("negative", (Formula("number", value=Fraction(1), name="1"),)):
            return call._replace(name=f"arc{name}" if f"arc{name}" in _FUNCTIONS else f"{name}^-1")
        return Formula("power", (call, exponent))

    def _arguments_of_function(self) -> tuple[Formula, ...]:
        if self._sees("(", "[", "{", "\\{", "|"):
            return _arguments(self._primary())
        sign = self._accept("-", "+")
        argument = self._factor()
        while self._starts_factor() and self.ahead is not None and not self._is_function(self.ahead):
            if self.ahead.text in ("(", "{") and argument.kind not in ("number", "symbol"):
                break
            argument = Formula("multiply", (argument, self._factor()))
        if self._sees("/") and argument.kind in ("number", "constant", "symbol", "multiply"):
            self._next()
            argument = Formula("divide", (argument, self._factor()))
        return (Formula("negative", (argument,)) if sign == "-" else argument,)

    @staticmethod
    def _is_function(token: _Token) -> bool:
        return (
            token.kind == "command" and token.text[1:] in _FUNCTION_NAMES - {"sqrt"}
        ) or token.kind == "function"


def _arguments(inside: Formula) -> tuple[Formula, ...]:
    return inside.parts if inside.kind in ("list", "tuple", "set") else (inside,)


def _exact(digits: str) -> Fraction:
    return Fraction(Decimal(digits))  # int() refuses more than 4300 digits


# Values


DIGITS = 60
_SAME = mpf(10) ** -35  # relative difference of equal numbers that are not exact
_MAX_BITS = 400_000  # largest exact number
_MAX_EXPONENT = 10**9  # largest float, in bits
_MAX_TERMS = 10_000  # longest sum or product


class TooLarge(Unread):
    """A number has more digits than can be computed: ``9^{9^{9^{9}}}``."""


Number = Any  # Fraction, mpf, mpc
Values = dict[str, Number]


def close(a: Number, b: Number) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    x, y = inexact(a), inexact(b)
    if mp.isinf(x) or mp.isinf(y):
        return bool(x == y)
    return bool(abs(x - y) <= _SAME * max(abs(x), abs(y)))


def is_zero(a: Number) -> bool:
    return a == 0 if isinstance(a, Fraction) else bool(abs(inexact(a)) < mpf(10) ** -45)


def inexact(a: Number) -> Any:
    if isinstance(a, Fraction):
        return mpf(a.numerator) / a.denominator
    if isinstance(a, (mpf, mpc)):
        return a.real if isinstance(a, mpc) and abs(a.imag) <= _SAME * abs(a) else a
    raise Unread("no number")


def real(a: Number) -> Any:
    number = inexact(a)
    if isinstance(number, mpc):
        raise Unread("no real number")
    return number


def evaluate(node: Formula, values: Values) -> Number:
    """Return the value of a formula. Raises Unread, and ArithmeticError where it has no value."""
    kind, parts = node.kind, node.parts
    if kind == "number":
        return node.value
    if kind == "symbol":
        return _symbol(node.name, values)
    if kind == "constant":
        return _constant(node.name)
    if kind in ("sum", "prod"):
        return _repeated(node, values)
    if kind == "call":
        return _call(node, values)
    if kind == "add":
        total: Number = Fraction(0)
        for part in parts:
            total = combined(total, evaluate(part, values), lambda a, b: a + b)
        return total
    if kind not in ("multiply", "divide", "power", "negative"):
        raise Unread(kind)
    numbers = [evaluate(part, values) for part in parts]
    if kind == "negative":
        return -numbers[0]
    if kind == "multiply":
        return combined(numbers[0], numbers[1], lambda a, b: a * b)
    if kind == "divide":
        if is_zero(numbers[1]):
            raise Unread("division by zero")
        return combined(numbers[0], numbers[1], lambda a, b: a / b)
    return _power(numbers[0], numbers[1])


def combined(a: Number, b: Number, operation: Callable[[Any, Any], Any]) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction) and _bits(a) + _bits(b) < _MAX_BITS:
        return operation(a, b)
    result = operation(inexact(a), inexact(b))
    if mp.isnan(result):
        raise Unread("not a number")
    return result


def _bits(a: Fraction) -> int:
    return a.numerator.bit_length() + a.denominator.bit_length()


def _symbol(name: str, values: Values) -> Number:
    if name in values:
        return values[name]
    if name in ("e", "i"):
        return +mp.e if name == "e" else mpc(0, 1)
    raise Unread(name)


def _constant(name: str) -> Number:
    if name == "pi":
        return +mp.pi
    if name == "infty":
        return mp.inf
    raise Unread(name)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        if base == 0 and exponent < 0:
            raise Unread("division by zero")
        if base in (0, 1, -1) or abs(exponent) * _bits(base) < _MAX_BITS:
            return base ** int(exponent)
    if (
        isinstance(base, Fraction)
        and isinstance(exponent, Fraction)
        and base > 0
        and 1 < exponent.denominator < 100
    ):
        root = _exact_root(base, exponent.denominator)
        if root is not None:
            return _power(root, Fraction(exponent.numerator))
    if (
        isinstance(exponent, Fraction)
        and exponent.denominator % 2
        and exponent.denominator < 100
        and _is_negative(base)
    ):
        root = _power(-base, exponent)  # the real root
        return -root if exponent.numerator % 2 else root
    x, y = inexact(base), inexact(exponent)
    if x == 0:
        return Fraction(0) if real(y) > 0 else _undefined()
    if abs(y) * abs(mp.log(abs(x), 2)) > _MAX_EXPONENT or mp.isinf(x) or mp.isinf(y):
        raise TooLarge("too large")
    return mp.power(x, y)


def _is_negative(number: Number) -> bool:
    real = inexact(number)
    return not isinstance(real, mpc) and bool(real < 0)


def _undefined() -> Number:
    raise Unread("undefined")


def _exact_root(number: Fraction, degree: int) -> Fraction | None:
    if _bits(number) > 4000:
        return None
    roots = []
    for part in (number.numerator, number.denominator):
        root = math.isqrt(part) if degree == 2 else round(mp.root(part, degree))
        if root**degree != part:
            return None
        roots.append(root)
    return Fraction(*roots)


def _root(number: Number, degree: Number) -> Number:
    """Return a root; for a negative number and an odd degree, the real root."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree < 1000:
        return _power(number, combined(Fraction(1), degree, lambda a, b: a / b))
    return _power(number, 1 / degree)


def _repeated(node: Formula, values: Values) -> Number:
    """Evaluate a finite sum or product."""
    low, high = (evaluate(part, values) for part in node.parts[:2])
    if (
        not (isinstance(low, Fraction) and isinstance(high, Fraction))
        or low.denominator * high.denominator != 1
    ):
        raise Unread("bounds")
    if high - low > _MAX_TERMS:
        raise Unread("many terms")
    total: Number = Fraction(0 if node.kind == "sum" else 1)
    for index in range(int(low), int(high) + 1):
        term = evaluate(node.parts[2], {**values, node.name: Fraction(index)})
        total = combined(total, term, (lambda a, b: a + b) if node.kind == "sum" else (lambda a, b: a * b))
    return total


def _call(node: Formula, values: Values) -> Number:
    name = node.name
    if name == "degree":
        return mp.pi / 180
    if name == "det" and node.parts[0].kind == "matrix":
        return _determinant([[evaluate(x, values) for x in row.parts] for row in node.parts[0].parts])
    numbers = [evaluate(part, values) for part in node.parts]
    function = FUNCTIONS.get(name)
    if function is None:
        return _opaque(name, numbers)
    return function(*numbers)


def _determinant(rows: list[list[Number]]) -> Number:
    if len(rows) > 5 or any(len(row) != len(rows) for row in rows):
        raise Unread("a determinant")
    if not rows:
        return Fraction(1)
    total: Number = Fraction(0)
    for column, first in enumerate(rows[0]):
        minor = _determinant([row[:column] + row[column + 1 :] for row in rows[1:]])
        total = total + (-1) ** column * first * minor
    return total


def _opaque(name: str, numbers: Sequence[Number]) -> Number:
    """Return a pseudo-random value of an unknown function: equal for equal arguments, and only for those."""
    total = mpf(int.from_bytes(blake2b(name.encode(), digest_size=5).digest(), "big")) / 2**36
    for place, number in enumerate(numbers):
        x = inexact(number)
        if mp.isinf(x) or abs(x) > mpf(10) ** 20:
            raise TooLarge("too large")
        total += x * mp.sqrt(place + 2 + len(name))
    return mp.sin(total) + 2


def _function(compute: Callable[..., Any]) -> Callable[..., Number]:
    def evaluate(*numbers: Number) -> Number:
        result = compute(*(inexact(number) for number in numbers))
        if mp.isnan(result) or (mp.isinf(result) and not any(mp.isinf(inexact(n)) for n in numbers)):
            raise Unread("undefined")
        return result

    return evaluate


def _exactly(compute: Callable[..., Any], otherwise: str) -> Callable[..., Number]:
    """Return a function of whole numbers; other numbers get an opaque value."""

    def evaluate(*numbers: Number) -> Number:
        if all(isinstance(number, Fraction) and number.denominator == 1 for number in numbers):
            return Fraction(compute(*(int(number) for number in numbers)))
        return _opaque(otherwise, sorted(numbers, key=lambda n: str(inexact(n))))

    return evaluate


def _logarithm(number: Number, base: Number | None = None) -> Number:
    """Return a logarithm, by default natural; exact for powers of a whole base."""
    if is_zero(number):
        raise Unread("undefined")
    logarithm = mp.log(inexact(number)) / (mp.log(inexact(base)) if base is not None else 1)
    if isinstance(number, Fraction) and isinstance(base, Fraction) and not isinstance(logarithm, mpc):
        nearest = round(logarithm)
        if abs(nearest) < 10_000 and _bits(base) * abs(nearest) < _MAX_BITS and base**nearest == number:
            return Fraction(nearest)
    return logarithm


def _factorial(number: Number) -> Number:
    if isinstance(number, Fraction) and number.denominator == 1 and 0 <= number <= 20_000:
        return Fraction(math.factorial(int(number)))
    x = inexact(number)
    if abs(x) > 10**12:
        raise TooLarge("too large")
    return mp.gamma(x + 1)


def _binomial(n: Number, k: Number) -> Number:
    if all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= 20_000 for x in (n, k)):
        return Fraction(math.comb(int(n), int(k)))
    return mp.binomial(inexact(n), inexact(k))


def _double_factorial(number: Number) -> Number:
    if not isinstance(number, Fraction) or number.denominator != 1 or not -1 <= number <= 5000:
        raise Unread("double factorial")
    return Fraction(math.prod(range(int(number), 0, -2)))


def _absolute(number: Number) -> Number:
    return abs(number) if isinstance(number, Fraction) else abs(inexact(number))


def _extreme(pick: Callable[..., Any]) -> Callable[..., Number]:
    return lambda *numbers: pick(numbers, key=real)


def _rounded(compute: Callable[[Any], Any]) -> Callable[[Number], Number]:
    return lambda number: Fraction(int(compute(number if isinstance(number, Fraction) else real(number))))


_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch")
FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{name: _function(getattr(mp, name)) for name in _TRIGONOMETRIC},
    **{f"arc{name}": _function(getattr(mp, f"a{name}")) for name in _TRIGONOMETRIC},
    "exp": lambda number: _power(+mp.e, number), "ln": _logarithm, "log": _logarithm, "root": _root,
    "abs": _absolute, "floor": _rounded(math.floor), "ceil": _rounded(math.ceil),
    "gcd": _exactly(math.gcd, "gcd"), "lcm": _exactly(math.lcm, "lcm"),
    "mod": _exactly(lambda a, b: a % b, "mod"), "max": _extreme(max), "min": _extreme(min),
    "!": _factorial, "!!": _double_factorial, "binom": _binomial,
    "sgn": lambda number: Fraction((real(number) > 0) - (real(number) < 0)),
}  # fmt: skip
