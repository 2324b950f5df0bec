"""Formulas that cannot be parsed whole are never compared in part; words and signs around a value count; any
of several golds is right.
"""

import math

import pytest

from grpo_dist.rewards.builtin import Exact, Numeric
from grpo_dist.rewards.equality import same
from grpo_dist.rewards.formula import Unread, is_word, parse
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.math import extract_answer, gold_is_parsable, grade
from grpo_dist.rewards.text import alternatives

SYSTEM = "\\begin{cases}x=4\\\\y=5\\end{cases}"
RIGHT = [  # (gold, what is in the box)
    ("1,2", "Maximum = 2, Minimum = 1"),
    ("\\log_{2} 3", "\\log_2 3"), ("2^{3}\\cdot 3^{2}", "2^3 3^2"), ("3e^2", "e^2 3"),
    ("a_n=2n+1", "a_{n}=2n+1"), ("\\sqrt[3]{2}", "\\sqrt[3]2"), ("(2,\\infty)", "{(2,\\infty)}"),
    ("x\\equiv 2\\pmod 5", "x\\equiv 2\\pmod{5}"), ("\\lg 2", "\\log_{10} 2"), ("e^2", "exp(2)"),
    ("\\ln 2", "ln(2)"), ("e^2", "e**2"), ("x^2+1", "x**2+1"), ("x=y", "y=x"),
    ("(-\\infty,1)\\cup(2,\\infty)", "x<1 \\text{ or } x>2"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(-\\infty,1)\\text{ or }(2,\\infty)"),
    ("\\emptyset", "\\text{no real solutions}"), ("\\emptyset", "\\text{No real solution}"),
    ("\\log_2 8", "3"), ("x_i^2", "x_{i}^{2}"), ("\\sqrt[3]{2+\\sqrt5}+\\sqrt[3]{2-\\sqrt5}", "1"),
    ("\\cos\\frac{\\pi}{17}\\cos\\frac{2\\pi}{17}\\cos\\frac{4\\pi}{17}\\cos\\frac{8\\pi}{17}",
     "\\frac{1}{16}"),
    ("(\\frac{3}{5},\\frac{8}{3}]", "(0.6,2.6667]"), ("19, 46, and 82", "19, 46, \\text{ and } 82"),
    ("19, 46, \\text{ and } 82", "19, 46, and 82"), ("0.\\overline{3}x+1", "\\frac{x}{3}+1"),
    ("1000+x", "1\\,000+x"), ("0.001", "1e-3"), ("(0.001, 2)", "(1e-3, 2)"), ("\\$5", "5"), ("€5", "5"),
    ("€5", "5\\text{ euros}"), ("£5", "5 pounds"), ("n=3", "3"), ("A^T", "A^{T}"),
    ("f'(2)", "f^{\\prime}(2)"), ("\\frac{dy}{dx}=2x", "\\frac{dy}{dx} = 2x"), ("y'=2x", "y' = 2x"),
    ("x=\\pm 2", "x=2 \\text{ or } x=-2"), ("x=\\pm 2", "\\pm 2"), ("\\{-1,2\\}", "x=-1 \\text{ or } x=2"),
    ("x=-1 \\text{ or } x=2", "2, -1"), ("x<-1 \\text{ or } x>1", "(-\\infty,-1)\\cup(1,\\infty)"),
    ("x<-1 \\text{ or } x>1", "x>1 \\lor x<-1"), ("1<x<2", "x>1 \\text{ and } x<2"), ("1<x<2", "2>x>1"),
    ("(1,2)", "1<x<2"), ("n \\equiv 1 \\pmod 4", "n\\equiv 5\\pmod{4}"),
    ("n \\equiv 1 \\pmod 4", "n\\equiv 1 (\\mod 4)"), ("n \\equiv 1 \\pmod 4", "n = 1 \\pmod 4"),
    ("3\\pmod 7", "3 \\pmod{7}"), ("\\frac{dy}{dx}=3x^2", "\\frac{dy}{dx} = 3x^2"),
    ("3x^2", "\\frac{dy}{dx}=3x^2"), ("3x^2", "y'=3x^2"), ("3x^2", "f'(x)=3x^2"), ("f'(x)=3x^2", "3x^2"),
    ("\\ln 2", "\\log_e 2"), ("\\ln 2", "\\operatorname{ln} 2"), ("\\log 2", "\\ln 2"),
    ("\\arctan 2", "\\tan^{-1} 2"), ("\\arctan 2", "\\operatorname{arctg} 2"),
    ("\\operatorname{arccot} 2", "\\cot^{-1}2"), ("\\sinh 1", "\\frac{e-e^{-1}}{2}"),
    ("\\operatorname{sgn}(x)", "\\text{sgn}(x)"), ("5", "\\lvert -5 \\rvert"),
    ("\\binom{n}{2}", "\\frac{n(n-1)}{2}"), ("n!", "n(n-1)!"),
    ("e^{i\\pi/3}", "\\frac12+\\frac{\\sqrt3}{2}i"), ("2^{1/3}", "\\sqrt[3]{2}"),
    ("(1+\\sqrt{2})^2", "3+2\\sqrt{2}"), ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("\\sqrt{5+2\\sqrt{6}}", "\\sqrt{2}+\\sqrt{3}"), ("\\frac{a+b}{2}", "\\frac{1}{2}(a+b)"),
    ("\\frac{\\pi}{4}", "0.785398163"), ("10\\%", "0.1"), ("12", "12.0"), ("12,345", "12345"),
    ("\\mathbb{R}", "(-\\infty,\\infty)"), ("\\mathbb{R}", "\\mathbb{R}"),
    ("\\mathbb{R} \\setminus \\{0\\}", "(-\\infty,0)\\cup(0,\\infty)"),
    ("x\\in\\mathbb{R}, x\\neq 0", "x \\neq 0"), ("\\text{Yes}", "yes"), ("\\text{Yes}", "Yes."),
    ("p(x)=x^2+1", "x^2+1"), ("(x-1)^2+(y-2)^2=9", "(y-2)^2+(x-1)^2=9"), ("x^2+y^2-2x=0", "(x-1)^2+y^2=1"),
    ("y=\\frac{1}{2}x+1", "x-2y+2=0"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    ("\\begin{pmatrix} 1/2 \\\\ 3 \\end{pmatrix}", "\\begin{pmatrix} 0.5 \\\\ 3 \\end{pmatrix}"),
    ("\\left(\\frac{1}{2},\\frac{\\sqrt3}{2}\\right)", "(0.5, \\sqrt{3}/2)"), ("120^\\circ", "120"),
    ("120^\\circ", "\\frac{2\\pi}{3}"), ("\\cos 60^\\circ", "\\frac12"), ("3\\text{ cm}", "3"),
    ("3+\\sqrt{2}\\text{ cm}", "3+\\sqrt{2}"), ("6\\sqrt{2}\\text{ cm}^2", "6\\sqrt2"),
    ("a=1,b=2", "(a,b)=(1,2)"), ("(a,b)=(1,2)", "a=1, b=2"), ("(1,2)", "x=1, y=2"), ("x^2+C", "x^2+C"),
    ("\\frac{x^2}{2}+C", "\\frac{1}{2}x^2 + C"), ("2x+c", "2x+C"), ("\\infty", "+\\infty"),
    ("-\\infty", "-\\infty"), ("x \\ge 2", "[2,\\infty)"), ("x \\ge 2", "x \\geqslant 2"),
    ("[2,\\infty)", "x\\geq2"), ("a_1+a_2", "a_2+a_1"), ("\\sqrt{x^2+1}", "(x^2+1)^{1/2}"),
    ("\\frac{1}{3}", "0.\\overline{3}"), ("0.\\overline{3}", "\\frac{1}{3}"), ("\\frac{1}{x}", "x^{-1}"),
    ("8!", "40320"), ("2^{10}", "1024"), ("\\varphi", "\\phi"), ("\\theta", "θ"),
    ("x\\sqrt{3}", "\\sqrt{3}x"), ("4:3", "4/3"), ("\\overline{AB}", "\\overline{AB}"),
    ("\\vec{v}=(1,2)", "(1,2)"), ("\\langle 1,2\\rangle", "(1,2)"), ("\\{(1,2),(2,1)\\}", "(2,1),(1,2)"),
    ("\\{2,3\\}", "\\{3,2\\}"), ("1,2,3", "3, 2, 1"), ("\\emptyset", "\\varnothing"),
    ("\\emptyset", "\\{\\}"), ("\\emptyset", "no solution"), ("no real solutions", "\\emptyset"),
    ("\\text{None}", "none"), ("(-1)^n", "(-1)^{n}"), ("2^{n+1}", "2\\cdot 2^n"), ("\\max(2,3)", "3"),
    ("\\lfloor 2.5 \\rfloor", "2"), ("e", "e^1"), ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("-\\frac{1}{2}", "-0.5"), ("5x", "5 x"), ("x(x+1)", "x^2+x"), ("\\frac{x}{2}", "\\frac12x"),
    ("x^{2}y", "x^2 y"), ("|x|", "\\left|x\\right|"), ("\\tan x", "\\frac{\\sin x}{\\cos x}"),
    ("\\sec^2 x", "\\frac{1}{\\cos^2 x}"), ("x \\in (1,2)", "(1,2)"), ("1 \\le x \\le 2", "[1,2]"),
    ("[1,2]", "x \\in [1,2]"), ("x=1", "1=x"), ("2n, n \\in \\mathbb{Z}", "2n"),
    ("\\pi r^2", "\\pi\\cdot r^2"), ("\\frac{2}{3}\\pi", "2\\pi/3"), ("3 \\times 10^8", "3e8"),
    ("3 \\times 10^8", "300000000"), ("1.5e-3", "0.0015"), ("y=2x", "2x=y"),
    ("11111111100", "11,\\! 111,\\! 111,\\! 100"), ("2.74", "2,74 €"), ("1,22", "1.22"),
    ("x_{good}^2", "x^2_{good}"), ("2\\overline{x}", "2\\bar{x}"),
    ("(1,7,103, 105), (3, 5, 101, 107)", "(3, 5, 101, 107), (1, 7, 103, 105)"),
    ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"), ("x = k\\pi", "n\\pi"), ("0<f(x)<1", "(0,1)"),
    ("1/3", "x = 5+5+1 = 1/3 \\approx 11"),
    ("\\begin{pmatrix}6 & 8\\end{pmatrix}",
     "\\begin{pmatrix}6 & 2\\end{pmatrix} + 2\\begin{pmatrix}0 & 3\\end{pmatrix}"),
    ("(-8)^{2/3}", "4"), ("4 < m \\leq 8 \\text{ or } 10 \\leq m < 12", "(4, 8] \\cup [10, 12)"),
    ("a \\leqslant -2 \\text{ or } a = 1", "(-\\infty, -2] \\cup \\{1\\}"),
    ("x\\equiv 3\\pmod 7", "x\\equiv 3\\text{ (mod 7)}"), ("x\\equiv 3\\pmod 7", "x\\equiv 3 (mod 7)"),
    ("x\\equiv 3\\pmod 7", "x\\equiv 10\\bmod 7"), ("x\\equiv 3\\pmod 7", "x\\equiv 3 (\\text{mod }7)"),
    ("3\\pmod 7", "x\\equiv 3\\pmod 7"), ("x\\equiv 3\\pmod 7", "10\\pmod 7"),
    ("x\\equiv\\pm1\\pmod 5", "x\\equiv 1,4\\pmod 5"), ("x\\equiv 1,4\\pmod 5", "4, 1\\pmod 5"),
    ("\\lbrace 1,2\\rbrace", "\\{1,2\\}"), ("f(x)=x^2", "f(t)=t^2"), ("\\{(1,2)\\}", "(1,2)"),
    ("\\vec a\\cdot\\vec b", "\\vec{a}\\cdot\\vec{b}"), ("E[X]", "E[ X ]"), ("3\\vec a", "3\\cdot\\vec{a}"),
    ("x\\equiv 1,4\\pmod 5", "x\\equiv 1\\pmod 5 \\text{ or } x\\equiv 4\\pmod 5"),
    ("1+2xye^{x^2}", "2xye^{x^2}+1"), ("B+Axe^{x}", "Axe^{x}+B"), ("e^{-kt}kt", "kte^{-kt}"),
    ("2abR", "2Rab"),
    ("\\frac{cab}{4R}", "\\frac{abc}{4R}"), ("60^\\circ", "\\angle BAC=60^\\circ"),
    ("\\frac12", "\\sin\\angle BAC=0.5"),
    (SYSTEM, "(4,5)"), (SYSTEM, "x=4, y=5"), ("(4,5)", SYSTEM), ("x=4,y=5", SYSTEM),
    (SYSTEM, "\\begin{cases}y=5\\\\x=4\\end{cases}"),
    (SYSTEM, "\\begin{aligned}x&=4,\\\\y&=5.\\end{aligned}"),
    (SYSTEM, "\\left\\{\\begin{array}{l}x=4\\\\y=5\\end{array}\\right."),
    ("18", "\\begin{aligned}17+1&=18\\end{aligned}"),
    ("\\begin{array}{c}1\\\\2\\end{array}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("3,5", "n\\in\\{3,5\\}"), ("n=3,5", "n\\in\\{5,3\\}"), ("1", "x\\in\\{1\\}"), ("n\\in\\{3,5\\}", "3,5"),
    ("x\\in\\{1,2\\}", "x=1 \\text{ or } x=2"), ("\\frac37", "{3\\over 7}"), ("{3\\over 7}", "\\frac37"),
    ("\\frac37", "3\\over7"),
    ("\\frac{\\sqrt3}{2}+x", "{\\sqrt{3}\\over 2}+x"), ("\\frac37", "\\text{$\\frac{3}{7}$}"),
    ("x=5", "5=x"), ("x\\le 1", "-x\\ge -1"), ("2x+y=3", "4x+2y=6"),
    ("\\sum_{k=1}^n k", "\\sum_{k=1}^{n} k"), ("S=n^2", "S=\\sum_{k=1}^n (2k-1)=n^2"),
    ("y=-2", "y+2=0"), ("x=1 \\text{ or } 3x+4y-5=0", "x-1=0\\text{ or }3x+4y-5=0"),
    ("x=3, y=1", "x-3=0, y-1=0"), ("k\\ge3", "k-3\\ge0"), ("a<1", "a-1<0"), ("x+1=0", "x=-1"),
    *(("f(x)=\\begin{cases}x^2 & x\\ge 0\\\\ -x & x<0\\end{cases}", answer) for answer in (
        "f(x)=\\begin{cases}x^2, & x\\ge 0,\\\\ -x, & x<0.\\end{cases}",
        "f(x)=\\begin{cases}x^2 & \\text{if } x\\ge 0\\\\ -x & \\text{if } x<0\\end{cases}",
        "f(x)=\\left\\{\\begin{array}{ll}x^2 & x\\ge 0\\\\ -x & x<0\\end{array}\\right.",
    )),
]  # fmt: skip
# Words and signs that keep the value.
KEEP_THE_VALUE = [
    ("3", "3\\text{ two-digit numbers}"), ("5", "\\text{The answer is 5 for two reasons}"),
    ("5", "5\\text{ canteens}"), ("3", "3\\text{ red and blue balls}"), ("3", "3\\text{ units}^2"),
    ("3", "x_{\\text{two}} = 3"), ("1024", "2^{10}\\text{ = 1024}"), ("\\frac{1}{3}", "0.333\\ldots"),
    ("1, 2, 3, \\ldots", "1,2,3,\\ldots"), ("3.14159", "3.14159\\ldots"), ("0^+", "0^+"),
    ("1, 2", "1\\text{ and }2"), ("1, 2", "1$ and $2"), ("x=1, y=2", "x=1\\text{ and }y=2"),
    ("300", "300\\text{ M}"), ("x \\succeq 3", "x \\succeq 3"),
]  # fmt: skip
WRONG = [
    ("\\lg 2", "2"), ("\\operatorname{arccot} 2", "2"), ("\\dim 3", "3"),
    ("n\\equiv 1\\pmod 4", "n\\equiv 3\\pmod 4"), ("x<1 \\lor x>2", "x<1 \\land x>2"), ("f'(2)", "f(2)"),
    ("A^T", "A"), ("\\$5", "€5"), ("\\$5", "£5"), ("\\$5", "5\\text{ euros}"), ("a_n=2n+1", "a_{n+1}=2n+1"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"), ("proof", "foorp"), ("notfound", "foundnot"),
    ("f''(2)", "f'(2)"), ("\\frac{d^2y}{dx^2}", "\\frac{dy}{dx}"), ("\\operatorname{sgn} 3", "3"),
    ("\\tr A", "A"), ("\\arg z", "z"), ("\\bar{z}", "z"), ("|A|", "A"), ("5!!", "5!"),
    ("\\varphi(10)", "10"), ("x<1, x>2", "x>1, x<2"), ("x \\mid 6", "6 \\mid x"),
    ("p \\implies q", "q \\implies p"), ("\\forall x", "\\exists x"), ("x_1", "x_2"), ("f(x)", "f(y)"),
    ("\\angle A", "\\angle B"), ("\\angle A", "A"), ("\\vec{AB}", "\\vec{BA}"),
    ("\\int_0^1 x\\,dx", "\\int_0^2 x\\,dx"), ("a \\perp b", "a \\parallel b"),
    ("A \\subset B", "B \\subset A"), ("x \\in A", "x \\notin A"), ("A \\cup B", "A \\cap B"),
    ("A\\setminus B", "B \\setminus A"), ("\\sin 2", "\\operatorname{Si} 2"), ("\\Re z", "\\Im z"),
    ("x \\equiv 2", "x=2"), ("\\nabla f", "f"), ("\\Delta x", "x"), ("\\overline{AB}", "\\overline{AC}"),
    ("\\max(x,y)", "\\min(x,y)"), ("A^{-1}", "A"), ("A^*", "A"), ("x^+", "x"), ("\\hat{x}", "x"),
    ("f \\circ g", "g \\circ f"), ("\\overrightarrow{AB}", "\\overrightarrow{BA}"), ("5!", "5"),
    ("{}_5C_2", "{}_5P_2"), ("10 \\pmod 7", "7"), ("x=\\pm 2", "x=2"), ("1<x<2", "1<x<3"),
    ("1<x<2", "1\\le x<2"), ("n \\equiv 1 \\pmod 4", "n\\equiv 1\\pmod 5"), ("n \\equiv 1 \\pmod 4", "1"),
    ("x \\equiv 1", "x \\equiv 2"), ("\\log 2", "\\log_{10} 3"), ("\\log_2 3", "\\log_3 2"),
    ("\\lg 2", "\\ln 2"), ("\\operatorname{lcm}(4,6)", "\\gcd(4,6)"), ("y''", "y'"),
    ("f^{(3)}(x)", "f^{(2)}(x)"), ("f^{-1}(2)", "f(2)"), ("\\dot{x}", "x"), ("\\ddot{x}", "\\dot{x}"),
    ("A^{\\top}", "A"), ("A^\\dagger", "A"), ("\\overline{z}", "z"), ("z^*", "z"), ("\\mathbf{E}[X]", "X"),
    ("P(A \\mid B)", "P(A)"), ("P(A|B)", "P(B|A)"), ("\\neg p", "p"), ("\\lnot p", "p"),
    ("p \\land q", "p \\lor q"), ("p \\to q", "q \\to p"), ("A \\cap B", "A \\cup B"), ("A^c", "A"),
    ("\\sim p", "p"), ("x \\in A", "A"), ("\\forall x P(x)", "\\exists x P(x)"), ("\\partial f", "f"),
    ("\\int_0^1 f", "\\int_0^2 f"), ("\\sum_{k=1}^{n} k", "\\sum_{k=0}^{n-1} k"),
    ("\\operatorname{rank} A", "\\operatorname{tr} A"), ("\\det A", "A"), ("\\|v\\|", "v"),
    ("\\lfloor x \\rfloor", "\\lceil x \\rceil"), ("\\lfloor x \\rfloor", "x"), ("\\{x\\}", "x+1"),
    ("AB", "BA+1"), ("\\text{odd}", "ddo"), ("odd", "doo"), ("odd", "ddo"), ("even", "neve"),
    ("true", "rute"), ("\\text{true}", "rute"),
    ("none", "neon"), ("€5", "\\$5"), ("£5", "€5"), ("¥5", "\\$5"),
    ("5\\text{ euros}", "5\\text{ dollars}"), ("₹5", "€5"), ("5€", "5\\$"),
    ("10\\text{ yen}", "10\\text{ yuan}"), ("x>1 \\text{ and } y<2", "x>1 \\text{ or } y<2"),
    ("x=1 \\text{ and } y=2", "x=2 \\text{ and } y=1"), ("\\pm 3", "\\mp 3+1"), ("\\pm 3", "-3"),
    ("a_1", "a_2"), ("x_1", "x^1"), ("a_{n+1}", "a_n"), ("a_{n+1}", "a_n+1"), ("a_{n-1}=n", "a_n=n"),
    ("f(2)=5", "f(3)=5"), ("f(2)=5", "f'(2)=5"), ("\\sin^2 x", "\\sin x^2"), ("\\angle ABC", "\\angle ACB"),
    ("\\triangle ABC", "ABC+1"), ("l \\perp m", "l \\parallel m"), ("x \\ll y", "x \\gg y"),
    ("x \\approx y", "x \\neq y"), ("x \\le 2", "x \\ge 2"), ("(1,2]", "[1,2)"), ("[1,2]", "(1,2)"),
    ("\\{1,2\\}", "(1,2)+1"), ("\\sqrt[3]{2}", "\\sqrt{2}"), ("\\sqrt[3]{2}", "3\\sqrt{2}"),
    ("2^{3}", "2_{3}"), ("\\frac{2}{3}", "\\binom{2}{3}"), ("5!", "5!!"), ("3!!", "3!"), ("x^{(2)}", "x^2"),
    ("\\Gamma(5)", "5"), ("\\zeta(2)", "2"), ("\\phi(10)", "10"), ("\\mu(10)", "10"), ("\\tau(10)", "10"),
    ("\\sigma(6)", "\\tau(6)"), ("\\operatorname{Re}(z)", "z"), ("\\Im z", "\\Re z"),
    ("\\operatorname{ord}_7 3", "3"), ("\\nu_2(8)", "8"), ("v_2(8)", "8"), ("C_5^2", "C_2^5"),
    ("A_5^2", "C_5^2"), ("^5C_2", "^5P_2"), ("{5 \\choose 2}", "5"), ("1:2:3", "3:2:1"), ("\\exp 2", "2"),
    ("\\operatorname{Li}(2)", "2"), ("\\operatorname{erf} 2", "2"), ("\\mathrm{erf}(2)", "2"),
    ("\\text{erf}(2)", "2"), ("\\nabla \\cdot F", "\\nabla \\times F"), ("a \\times b", "b"),
    ("i\\hat{j}", "i"), ("\\hat{i}", "\\hat{j}"), ("2\\hat{i}+3\\hat{j}", "3\\hat{i}+2\\hat{j}"),
    ("0.1", "0.1000001"), ("1", "0.9999"), ("2004!", "2006!"), ("\\frac{1}{10^{20}}", "0"),
    ("e^{-200}", "0"), ("10^{100}", "10^{101}"), ("x \\Rightarrow y", "y \\Rightarrow x"),
    ("2 \\mid n", "3 \\mid n"), ("A \\subset B", "A \\supset B"),
    ("\\text{increasing}", "\\text{decreasing}"), ("5 \\text{ a.m.}", "5 \\text{ p.m.}"),
    ("\\text{January 5}", "\\text{March 5}"), ("\\text{Room 5}", "\\text{Floor 5}"), ("7_{12}", "7_{10}"),
    ("{}_2F_1(1)", "{}_1F_1(1)"), ("\\dim V = 3", "\\dim W=3"),
    ("\\lim_{x \\to 0} f(x)", "\\lim_{x \\to 1} f(x)"), ("f \\circ g", "f g"), ("A \\oplus B", "A"),
    ("A \\otimes B", "A \\oplus B"), ("\\ell_1", "l_2"), ("x \\bmod 5", "x"), ("\\bar{x}", "\\tilde{x}"),
    ("\\star", "\\circ"), ("\\spadesuit", "\\heartsuit"), ("3\\spadesuit", "3\\heartsuit"),
    ("\\aleph_0", "\\aleph_1"), ("\\hbar", "h"), ("\\square", "\\triangle"),
    ("\\lim_{x\\to 0^{+}} f", "\\lim_{x\\to 0^{-}} f"), ("4\\pi", "12.566"),
    ("\\frac{1+\\sqrt5}{2}", "1.618"), ("(0.6,2.6667]", "(\\frac{3}{5},\\frac{8}{3}]"),
    ("3 \\pmod 7", "4 \\pmod 7"), ("x\\equiv 3\\pmod 7", "x\\equiv 3\\text{ (mod 8)}"),
    ("x\\equiv 3\\pmod 7", "x\\equiv 4\\bmod 7"), ("x\\equiv 1,4\\pmod 5", "x\\equiv 1,3\\pmod 5"),
    ("x\\equiv 1,4\\pmod 5", "x\\equiv 4\\pmod 5"), ("3\\pmod 7", "x\\equiv 4\\pmod 7"),
    ("x\\equiv 3\\pmod 7", "3"), ("3", "3 mod 7"),
    ("\\frac{dy}{dx}", "\\frac{dx}{dy}"), ("\\frac{du}{dt}", "0"), ("(2,3)", "\\{2,3\\}"),
    ("\\{\\{1,2\\}\\}", "\\{1,2\\}"), ("\\{(1,2)\\}", "\\{1,2\\}"), ("E[X^2]", "E[X]^2"),
    ("\\mathbb{E}[X^2]", "\\mathbb{E}[X]^2"), ("\\vec a\\cdot\\vec b", "\\vec a\\times\\vec b"),
    ("\\mathbf{a}\\cdot\\mathbf{b}", "\\mathbf{b}\\times\\mathbf{a}"),
    # a system or a value with a condition, of which math-verify reads one fragment
    *[(SYSTEM, SYSTEM.replace("cases", kind).replace("4", "3")) for kind in ("cases", "aligned")],
    ("\\begin{array}{l}x=4\\\\y=5\\end{array}", "\\begin{array}{l}x=3\\\\y=5\\end{array}"), (SYSTEM, "5"),
    ("5", SYSTEM),
    ("\\begin{cases}1 & n=0\\\\ 0 & n > 0\\end{cases}", "\\begin{cases}1 & n=7\\\\ 0 & n > 0\\end{cases}"),
    ("f(n)=\\begin{cases}0 & n\\text{ even}\\\\1 & n\\text{ odd}\\end{cases}", "1"),
    ("18", "17 \\text{ when } x=18"), ("7", "3\\text{ (maximum }7)"), ("3\\text{ (at }x=7)", "7"),
    ("f(x)=\\begin{cases}x^2 & x\\ge 0\\\\ -x & x<0\\end{cases}",
     "f(x)=\\begin{cases}x^3, & x\\ge 0\\\\ -x, & x<0\\end{cases}"),
    # the problem in place of its solution
    ("x=5", "2x+3=13"), ("x>3", "2x-1>5"), ("(3,\\infty)", "2x-1>5"), ("[-3,-1]", "2x^2+8x\\le -6"),
    ("\\{3,5\\}", "n\\in\\{3,4\\}"), ("n\\in\\{3,5\\}", "3"), ("n\\in\\{3,5\\}", "(3,5)"),
    ("y=1,2", "x\\in\\{1,2\\}"),
    ("AC=5", "AB=6"), ("\\text{odd, even}", "ddo, even"),
]  # fmt: skip


def graded(answer: str, gold: str) -> str:
    return grade(f"So the answer is $\\boxed{{{answer}}}$.", gold).outcome


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1, 2, 3)"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1, 2)"),
        ("1, 2, 3", "(1, 2)"),
        ("x^2 + 3", r"(-\infty, 2) \cup (3, \infty)"),
    ],
)
def test_other_kinds_of_values_are_told_apart_without_math_verify(gold: str, answer: str) -> None:
    assert same(gold, answer) is False
    assert same(answer, gold) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [(r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "(1, 2)"), ("1, 2", "(1, 2)"), ("(1, 2)", "(1, 2), (3, 4)")],
)
def test_what_conventions_tell_apart_is_left_to_math_verify(gold: str, answer: str) -> None:
    assert same(gold, answer) is None


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        (r"\$3.50", "3.5", "correct"),
        (r"\$1,657", "$1657$", "correct"),
        (r"\$5", r"\$6", "wrong"),
        (r"\text{two thirds}", "(1, 2)", "wrong"),
    ],
)
def test_money_is_a_number_and_words_are_none(gold: str, answer: str, outcome: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).outcome == outcome


@pytest.mark.parametrize(("gold", "answer"), [*RIGHT, *KEEP_THE_VALUE])
def test_other_notation_of_the_same_formula_is_correct(gold: str, answer: str) -> None:
    assert graded(answer, gold) == "correct"


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_sign_that_only_one_side_has_counts(gold: str, answer: str) -> None:
    assert graded(answer, gold) == "wrong"


@pytest.mark.parametrize("formula", sorted({text for pair in WRONG for text in pair}))
def test_every_formula_equals_itself(formula: str) -> None:
    assert graded(formula, formula) == "correct"


def test_words_are_no_products_of_letters() -> None:
    assert all(map(is_word, ("proof", "notfound", "odd", "true")))


@pytest.mark.parametrize(
    "text", ["\\foo 3", "x'^2y''z\\", "\\int x dx", "3 \\spadesuit", "two x", "1 2", "(1,2", "\\frac{dy}{dx}"]
)
def test_a_formula_is_parsed_whole_or_not_at_all(text: str) -> None:
    with pytest.raises(Unread):
        parse(text)
    assert same(text, text) is None


def test_a_product_of_letters_is_a_formula() -> None:
    assert graded("a \\cdot b \\cdot c", "abc") == "correct"
    assert graded("zyx", "x y z") == "correct"


def test_a_long_gold_is_no_solution_unless_it_has_many_words() -> None:
    rows = " \\\\ ".join(["\\frac{1}{3} & -\\frac{2}{3} & \\frac{2}{3}"] * 3)
    matrix = f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}"
    assert graded(matrix, matrix) == "correct"
    assert graded("\\frac{2}{3}", matrix) == "wrong"
    solution = (
        "First we add all the numbers that are given, and then we halve the sum. " * 3 + "The answer is $7$."
    )
    assert graded("7", solution) == "correct"


LONG = "7" * 3999
PAIRS_OF_LONG_NUMBERS = [
    (f"{LONG}1", f"{LONG}2"), (f"{LONG}1x", f"{LONG}2x"), (f"0.{LONG}1", f"{LONG}2"),
    (f"\\frac{{{LONG}}}{{{LONG}1}}", f"\\frac{{{LONG}}}{{{LONG}2}}"), (f"{LONG}1\\%", f"{LONG}2\\%"),
    (f"\\sin {LONG}1", f"\\sin {LONG}2"), (",".join(["123"] * 1300), ",".join(["124"] * 1300)),
    ("9^{9^{9^{9}}}", "1"), ("\\sum_{k=1}^{10^9} k", "1"), ("(10^{10})!", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), PAIRS_OF_LONG_NUMBERS)
def test_long_numbers_are_compared_by_all_their_digits(gold: str, answer: str) -> None:
    assert graded(answer, gold) == "wrong"
    assert graded(gold, gold) == "correct"


def test_an_option_behind_a_box_with_a_formula_counts() -> None:
    assert grade("So \\boxed{12}. The answer is (C).", "C").outcome == "correct"
    assert grade("The answer is (C), since \\boxed{x=3}.", "C").outcome == "correct"
    assert grade("So \\boxed{12}. The answer is (D).", "C").outcome == "wrong"
    assert grade("Answer: C\n\nNo: \\boxed{D}", "C").outcome == "wrong"
    assert extract_answer("So \\boxed{12}. The answer is (C).") == "C"
    assert grade("So \\boxed{12}. The answer is (C).", "12").outcome == "correct"


STATED = [
    ("所以答案是：12。", "12"), ("答案：12", "12"), ("答案为12个。", "12"), ("故选：B", "B"), 
    ("因此选（B）。", "B"),
    ("答えは12です。", "12"), ("정답은 12입니다.", "12"), ("La respuesta es 12.", "12"),
    ("La réponse est 12.", "12"), ("Die Antwort lautet 12.", "12"), ("Ответ: 12", "12"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "gold"), STATED)
def test_an_answer_is_stated_in_other_languages(completion: str, gold: str) -> None:
    assert grade(completion, gold).outcome == "correct"
    assert grade(completion, {"12": "13", "B": "C"}[gold]).outcome == "wrong"


def test_a_denied_option_in_chinese_is_no_answer() -> None:
    assert grade("不选B。", "B").outcome != "correct"


SCALES = {
    "5\\text{ quadrillion}": "5000000000000000", "5\\text{ quintillion}": "5000000000000000000",
    "5\\text{ gross}": "720", "5\\text{ score}": "100", "5\\text{ bil}": "5000000000",
    "5\\text{ mill.}": "5000000", "5\\text{ thou}": "5000", "5\\text{ millions}": "5000000",
    "5 thousands": "5000", "5\\text{ per thousand}": "0.005", "5\\text{ ppm}": "0.000005", "5‰": "0.005",
    "5\\permil": "0.005",
}  # fmt: skip


@pytest.mark.parametrize("answer", SCALES)
def test_a_scale_is_part_of_the_value(answer: str) -> None:
    assert [graded(answer, gold) for gold in ("5", SCALES[answer])] == ["wrong", "correct"]


def test_per_mille_is_a_share() -> None:
    golds = ("500", "0.5", "\\frac{1}{2}", "500‰")
    assert [graded("500‰", gold) for gold in golds] == ["wrong", "correct", "correct", "correct"]
    assert grade("The answer is 500‰.", "500").outcome == "wrong"


LISTS = [
    "3\\text{ or four}", "3\\text{ and four}", "3\\text{, four}", "3\\text{ apples, or four}",
    "3\\text{ out of four}", "3\\text{ four}", "3\\text{ to four}", "3\\text{ to one}", "3\\text{ or x}",
    "3\\text{ and up}", "3\\text{ / 4}", "3\\text{ - 4}", "3\\text{ 4}", "3\\text{ +- 1}", "3\\text{ plus}",
    "3\\text{ minus one}", "3^+", "3^{+}", "3+", "3\\,+", "3-", "3\\ldots", "3...", "3, \\dots",
]  # fmt: skip
RELATIONS = [
    "\\gtrapprox", "\\lessapprox", "\\succcurlyeq", "\\preccurlyeq", "\\gtreqless", "\\eqslantless", "\\ggg",
    "\\lnsim", "\\gvertneqq", "\\gtrdot", "&gt;", "⩾", "≮", "≳",
]  # fmt: skip


@pytest.mark.parametrize("answer", [*LISTS, *(f"{relation} 3" for relation in RELATIONS)])
def test_a_list_a_range_and_a_relation_are_not_their_first_number(answer: str) -> None:
    assert graded(answer, "3") == "wrong"


@pytest.mark.parametrize("sentence", ["3 to four", "$\\gtrapprox 3$", "$\\succcurlyeq 3$"])
def test_a_range_and_a_relation_without_a_box_are_not_their_first_number(sentence: str) -> None:
    assert grade(f"The answer is {sentence}.", "3").outcome != "correct"


def group(gold, *answers):
    texts = tuple(f"It is \\boxed{{{answer}}}." for answer in answers)
    return CompletionGroup(texts, (), ("stop",) * len(texts), gold, {}, 99)


@pytest.mark.parametrize(
    ("gold", "golds"),
    [
        ('["5", "five"]', ["5", "five"]),
        ('["\\\\frac{1}{2}"]', ["\\frac{1}{2}"]),
        ("[1, 2]", ["[1, 2]"]),  # a list that is the answer
        ('["a", 1]', ['["a", 1]']),
        ('["a" and more', ['["a" and more']),
        ("", [""]),
    ],
)
def test_a_list_of_texts_has_several_golds_and_other_text_is_one(gold, golds):
    assert alternatives(gold) == golds


def test_any_gold_is_right_and_part_of_a_list_is_not():
    golds = '["\\\\frac{1}{2}", "6"]'
    answers = ("0.5", "6", "7", "\\frac{1}{2}, 6")
    assert [graded(answer, golds) for answer in answers] == ["correct", "correct", "wrong", "wrong"]
    assert grade("I do not know", golds).outcome == "no_answer"
    assert [graded(answer, "5, -5") for answer in ("5", "5, -5")] == ["wrong", "correct"]
    assert gold_is_parsable(golds) and not gold_is_parsable('["6", "?!"]')


def test_text_and_number_rewards_take_any_gold():
    several = group('["five", "5"]', "5", "Five", "6")
    assert Exact().score(several, None) == [1.0, 1.0, 0.0]
    assert Numeric().score(several, None) == [1.0, 0.0, 0.0]
    (unscorable,) = Numeric().score(group('["five", "six"]', "5"), None)
    assert math.isnan(unscorable)
