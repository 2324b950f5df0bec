"""Measures how much of a completion is written in the wanted scripts. Formulas do not count.

A policy must not be able to hide words from the language reward in dollars, angle brackets or URLs. So only
text without language is removed: known LaTeX commands and short runs of letters (products of variables) from
formulas, known tags, and the first few plain ASCII links.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Literal, get_args

# Natural language of formulas, tags and links


_FREE_LINKS = 2  # per completion; further links count as words
_LINK = re.compile(r"https?://[\w-]+(?:\.[\w-]+)+(?::\d+)?(?:/[!-;=?-~]*)?", re.ASCII)
_LINK_WORDS = 6  # runs of letters in a link; a link with more counts as text
_TAG = re.compile(
    r"</?(?:think|thinking|thought|reason|reasoning|answer|solution|step|steps|reflection|final|result|summary|output|code"
    r"|a|b|i|u|s|p|q|br|hr|em|strong|sub|sup|ul|ol|li|h[1-6]|div|span|pre|table|thead|tbody|tr|td|th)\s*/?>",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
# Commands whose argument is an identifier, not text.
_NAMED = re.compile(
    r"\\(?:begin|end)\{(?:align(?:ed|at)?|equation|gather(?:ed)?|cases|d?cases|[bpvBV]?(?:small)?matrix|array|split|multline"
    r"|eqnarray|tabular|itemize|enumerate|center|tikzpicture|asy|document|proof|figure|table|verbatim)\*?\}"
    r"|\\operatorname\*?\{[A-Za-z]{1,6}\}|\\(?:text)?color\{(?:red|blue|green|black|white|gray|orange|purple|magenta)\}"
)
_TEXT = re.compile(r"\\(?:text\w*|mbox|hbox|intertext)\s*\{([^{}]*)\}")
_RUN = re.compile(r"[A-Za-z]+")
# Adjacent words are not a product. The lookbehind keeps the search linear in a long run of letters.
_PHRASE = re.compile(r"(?<![A-Za-z])[A-Za-z]{2,}(?:[ ,.'-]+[A-Za-z]{2,})+")
_NAMES = re.compile(r"(?<![A-Za-z])[A-Z]{2,3}(?![A-Za-z])")  # AB, ABC: segments and triangles
_THIN_SPACE = r"(?:\\[,;:!> ]|~)"
_DIFFERENTIAL = re.compile(rf"{_THIN_SPACE}\s*d[r-zAVS](?![A-Za-z])")  # xy\,dx is no phrase
_SPACING = frozenset(
    {"quad", "qquad", "enspace", "thinspace", "hspace", "rm", "bf", "it", "em"}
    | {"text", "textbf", "textit", "textrm", "textsf", "texttt"}
)
_SHORT = 3  # letters: abc is a product, cm a unit, max an index
_COMMANDS = frozenset(
    re.findall(
        r"\w+",
        """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi
    varpi rho varrho sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi
    Pi Sigma Upsilon Phi Psi Omega aleph hbar ell wp Re Im imath jmath partial nabla infty emptyset
    varnothing forall exists nexists neg lnot top bot angle measuredangle triangle square
    blacksquare Box diamond star bigstar frac dfrac tfrac cfrac sqrt root binom dbinom tbinom choose
    over atop sum prod coprod int iint iiint oint bigcup bigcap bigoplus bigotimes bigvee bigwedge
    lim limsup liminf sup inf max min arg det gcd lcm deg dim ker hom exp log ln lg sin cos tan cot
    sec csc sinh cosh tanh coth arcsin arccos arctan arccot Pr mod bmod pmod pod operatorname to
    gets mapsto rightarrow leftarrow Rightarrow Leftarrow leftrightarrow Leftrightarrow
    longrightarrow longleftarrow Longrightarrow implies impliedby iff uparrow downarrow nearrow
    searrow hookrightarrow xrightarrow le leq leqslant ge geq geqslant lt gt ne neq approx approxeq
    equiv cong sim simeq propto doteq ll gg prec succ preceq succeq subset subseteq supset supseteq
    subsetneq in ni notin not mid nmid parallel nparallel perp vdash models times div cdot cdotp ast
    star circ bullet pm mp oplus ominus otimes odot wedge vee land lor cap cup setminus backslash
    sqcup uplus amalg dagger ldots cdots vdots ddots dots dotsc dotsb because therefore left right
    big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle langle rangle lfloor rfloor
    lceil rceil lvert rvert vert Vert lVert rVert lbrace rbrace lbrack rbrack quad qquad enspace
    thinspace hspace vspace hfill hskip kern phantom hphantom vphantom smash text textbf textit
    textrm textsf texttt textnormal textup textcolor mathrm mathbf mathit mathsf mathtt mathbb
    mathcal mathfrak mathscr boldsymbol bm mbox hbox fbox boxed rm bf it sf tt em emph underline
    overline overrightarrow overleftarrow overbrace underbrace widehat widetilde hat tilde bar vec
    dot ddot acute grave breve check stackrel overset underset substack limits nolimits displaystyle
    textstyle scriptstyle scriptscriptstyle begin end item label ref eqref tag notag nonumber hline
    cline multicolumn color newline linebreak newcommand def section subsection paragraph title
    author maketitle documentclass usepackage includegraphics caption centering cancel bcancel
    xcancel sout degree prime backprime checkmark dollar percent cr intertext tiny small large Large
    LARGE huge normalsize
        """,
    )
)


def words_of_prose(text: str) -> str:
    """Remove the first links, known tags and LaTeX commands from ``text`` without formulas."""
    links = 0

    def link(match: re.Match[str]) -> str:
        nonlocal links
        links += 1
        return match.group() if links > _FREE_LINKS or len(_RUN.findall(match.group())) > _LINK_WORDS else " "

    return _remove_commands(_TAG.sub(" ", _LINK.sub(link, text)))


def words_of_formula(text: str) -> str:
    """Return the natural language of a formula: \\text{}, phrases, long words, and letters of other scripts.

    ``x_{\\text{max}} = \\frac{abc}{2}`` has no words, ``the answer is 5`` has three, and so has
    ``the\\,answer\\,is\\,5``.
    """
    text = re.sub(_THIN_SPACE, " ", _DIFFERENTIAL.sub(" | ", text))
    texts = " ".join(_long_runs(words) for words in _TEXT.findall(text))
    return f"{texts} {_long_runs(_NAMES.sub(' ', _remove_commands(_TEXT.sub(' | ', text), between=' | ')))}"


def _remove_commands(text: str, between: str = " ") -> str:
    """Replace known commands by ``between``, or by a space for spacing and font commands.

    An unknown command becomes its name, since a policy can put a backslash before any word. ``between``
    prevents the texts on both sides from forming a phrase.
    """

    def named(match: re.Match[str]) -> str:
        name = match[1]
        return f" {name} " if name not in _COMMANDS else " " if name in _SPACING else between

    return _COMMAND.sub(named, _NAMED.sub(" ", text))


def _long_runs(text: str) -> str:
    """Remove short runs of Latin letters outside phrases from ``text``."""
    phrases = " ".join(_PHRASE.findall(text))
    rest = _PHRASE.sub(" ", text)
    return f"{phrases} {_RUN.sub(lambda match: match.group() if len(match.group()) > _SHORT else ' ', rest)}"


# Scripts


Script = Literal[
    "latin", "cyrillic", "greek", "han", "hiragana", "katakana", "hangul", "arabic", "hebrew", "devanagari",
    "bengali", "tamil", "telugu", "thai", "georgian", "armenian",
]  # fmt: skip
SCRIPTS: tuple[str, ...] = get_args(Script)

_OPENS = re.compile(r"\$\$?|\\[(\[]|\\begin\{(\w+\*?)\}")
_IN_LINE = re.compile(r"\$[^$\n]*\$")
_ONE_WORD = re.compile(r"(?:\$\$?|\\[(\[])\s*([A-Za-z]{2,})\s*(?:\$\$?|\\[)\]])")
_ENDS = re.compile(r"\\end\{\w+\*?\}")
_LETTER_IS_WORD = frozenset({"han", "hiragana", "katakana", "thai"})  # written without spaces between words
_VARIABLES = frozenset({"latin", "greek"})  # whose single letters are variables in any language


def script_share(text: str, scripts: Collection[str]) -> float:
    """Return the share of words of ``text`` that are written in one of ``scripts``, in [0, 1].

    The language consistency reward of DeepSeek-R1 (arXiv:2501.12948, section 2.3.2): words of the target
    language / all words. A word is a run of letters of one script, or one letter in scripts without spaces.
    Formulas, LaTeX commands, tags, links and single Latin or Greek letters (variables) do not count, but
    natural language inside them does (`markup`). Words spelled letter by letter, and words in the first two
    links, do not count. A text without words scores 1.

        "the answer ответ is $x$", {"latin"}  ->  3 of 4 words = 0.75
        "ответ $the answer$", {"cyrillic"}    ->  1 of 3 words
    """
    prose, formulas = _prose_and_formulas(text)
    words = list(_words(" ".join([words_of_prose(prose), *map(words_of_formula, formulas)])))
    return sum(script in scripts for script in words) / len(words) if words else 1.0


def _prose_and_formulas(text: str) -> tuple[str, list[str]]:
    """Split ``text`` into prose, with a space for each formula, and the formulas.

    Neighbouring one-word formulas are joined: ``$the$ $sum$`` -> ``the sum``.

    A formula is $$ $$, $ $ on one line, \\( \\), \\[ \\] or \\begin{name} \\end{name}. Takes linear time in
    the length of the text, also for thousands of unclosed formulas.
    """
    last = {close: text.rfind(close) for close in ("$$", "\\)", "\\]")}
    last |= {match.group(): match.start() for match in _ENDS.finditer(text)}
    plain: list[str] = []
    formulas: list[list[str]] = []
    done, at, was_word = 0, 0, False
    while match := _OPENS.search(text, at):
        end = _end_of_formula(text, match, last)
        if end is None:
            at = match.start() + 1
        else:
            plain.append(text[done : match.start()])
            word = _ONE_WORD.fullmatch(text, match.start(), end)
            if word and was_word and not plain[-1].strip():
                formulas[-1].append(word[1])
            else:
                formulas.append([word[1] if word else text[match.start() : end]])
            done, at, was_word = end, end, word is not None
    return " ".join([*plain, text[done:]]), [" ".join(words) for words in formulas]


def _end_of_formula(text: str, opening: re.Match[str], last: Mapping[str, int]) -> int | None:
    """Return the end of the formula that begins with ``opening``; None if it is not closed.

    ``last`` holds the last position of each closing mark in ``text``.
    """
    mark, begin = opening.group(), opening.end()
    close = {"$": "", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}.get(mark, f"\\end{{{opening[1]}}}")
    if close and last.get(close, -1) >= begin:
        return text.index(close, begin) + len(close)
    in_line = _IN_LINE.match(text, opening.start())
    return in_line.end() if in_line else None


def _words(text: str) -> Iterator[str]:
    """Yield the script of every word, in order."""
    current, letters = "", 0
    for char in text + " ":
        # A combining mark belongs to the preceding letter.
        script = current if unicodedata.category(char).startswith("M") else _script(char)
        if script != current or script in _LETTER_IS_WORD:
            if current and not (letters == 1 and current in _VARIABLES):
                yield current
            current, letters = script, 0
        letters += 1


@lru_cache(maxsize=65536)
def _script(char: str) -> str:
    """Return the script of a letter, "" for other characters.

    A script not in `SCRIPTS` keeps its Unicode name.
    """
    if not char.isalpha():
        return ""
    first = unicodedata.name(char, "unknown").split()[0].lower()
    return {"cjk": "han", "ideographic": "han", "halfwidth": "katakana", "fullwidth": "latin"}.get(
        first, first
    )
