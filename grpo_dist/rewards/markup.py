"""Extracts natural language from formulas, tags and links.

A policy must not be able to hide words from the language reward in dollars, angle brackets or URLs. So only
what belongs to no language is removed: known LaTeX commands and short runs of letters (products of variables)
from formulas, known tags, and the first few plain ASCII links.
"""

from __future__ import annotations

import re

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
_PHRASE = re.compile(r"[A-Za-z]{2,}(?:[ ,.'-]+[A-Za-z]{2,})+")  # adjacent words are not a product
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
    """Remove the first links, known tags and LaTeX commands from ``text``, which holds no formulas."""
    links = 0

    def link(match: re.Match[str]) -> str:
        nonlocal links
        links += 1
        return match.group() if links > _FREE_LINKS or len(_RUN.findall(match.group())) > _LINK_WORDS else " "

    return _without_commands(_TAG.sub(" ", _LINK.sub(link, text)))


def words_of_formula(text: str) -> str:
    """Return the natural language of a formula: \\text{}, phrases, long words, and letters of other scripts.

    ``x_{\\text{max}} = \\frac{abc}{2}`` has no words, ``the answer is 5`` has three, and so has
    ``the\\,answer\\,is\\,5``.
    """
    text = re.sub(_THIN_SPACE, " ", _DIFFERENTIAL.sub(" | ", text))
    texts = " ".join(_long_runs(words) for words in _TEXT.findall(text))
    return f"{texts} {_long_runs(_NAMES.sub(' ', _without_commands(_TEXT.sub(' | ', text), between=' | ')))}"


def _without_commands(text: str, between: str = " ") -> str:
    """Replace known commands by ``between``, or by a space for spacing and font commands.

    An unknown command becomes its name, since a policy can put a backslash before any word. ``between`` keeps
    the texts on both sides from forming a phrase.
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
