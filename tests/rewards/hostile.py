"""Answers made to hang, crash or exhaust a verifier."""

from __future__ import annotations

from collections.abc import Callable

KINDS: tuple[Callable[[int], str], ...] = (
    lambda i: f"{9 + i}^{{9^9}}",
    lambda i: f"{i + 2}^{{{i + 2}^{{{i + 2}^{{{i + 2}}}}}}}",
    lambda i: f"{10_000_000 + i}!",
    lambda i: f"(({9 + i % 3}!)!)!" + " " * i,
    lambda i: f"\\binom{{{10_000_000 + i}}}{{5000000}}",
    lambda i: "\\frac{1}{" * 1000 + str(i) + "}" * 1000,
    lambda i: "+".join(str(k + i) for k in range(20_000)),
    lambda i: "+".join(str(k + i) for k in range(300)),
    lambda i: "\\{" + ",".join(str(k * i) for k in range(1, 2000)) + "\\}",
    lambda i: ",".join(f"({k},{k + i})" for k in range(150)),
    lambda i: "\x00" * (50 + i),
    lambda i: f"3\x00{i}",
    lambda i: "{" * (500 + i),
    lambda i: "(" * (20 + i % 4) + "1" + ")" * (20 + i % 4),
    lambda i: "\\sqrt{" * 60 + str(i) + "}" * 60,
    lambda i: "x^" * 200 + str(i),
    lambda i: f"\\sum_{{k=1}}^{{10^{{{i + 8}}}}} k^k",
    lambda i: f"\\int_0^1 x^{{x^{{x^{{{i}}}}}}} dx",
    lambda i: f"\\prod_{{k=1}}^{{{10_000_000 + i}}} k",
    lambda i: f"\\sin(\\cos(\\tan(\\exp(\\exp(\\exp({i + 9}))))))",
    lambda i: f"\\exp(\\exp(\\exp({i + 9})))",
    lambda i: f"10^{{{99_990 + i}}}",
    lambda i: f"{i}=17{i}E572252225}}",
    lambda i: f"{i + 2}.5e-{572_252_225 + i}",
    lambda i: "9" * (300 + i),
    lambda i: "\\begin{pmatrix}" + "\\\\".join("&".join(["1"] * 40) for _ in range(40)) + str(i) + "\\end{pmatrix}",
    lambda i: "\\left(x+1\\right)^{" + str(5000 + i) + "}",
    lambda i: f"\\text{{{'a' * 1500}}}{i}",
    lambda i: "\ud800" + str(i),
    lambda i: "∑∫∮" * 100 + str(i),
    lambda i: f"\\log_{{{i + 2}}} {{\\log_{{2}} {{10!!!}}}}",
    lambda i: "-" * 300 + str(i),
    lambda i: f"\\binom{{{99_000 + i}}}{{49000}}",
    lambda i: f"\\frac{{9^{{{99_000 + i}}}}}{{7^{{99998}}}}",
    lambda i: f"\\sin(10^{{{90_000 + i}}})",
    lambda i: f"(1+\\sqrt{{2}})^{{{9_000 + i}}}-(1-\\sqrt{{2}})^{{{9_000 + i}}}",
    lambda i: f"(x+y+z+w+{i}+\\sqrt{{x}})^{{99}}+(x-y)^{{99}}",
    lambda i: "\\sqrt{2+" * 14 + str(i) + "}" * 14,
    lambda i: f"\\{{x^2+k{i}, x^3, " + ", ".join(f"\\sin({k}x)" for k in range(30)) + "\\}",
    lambda i: f"{i}^{{99999}}\\cdot {i + 1}^{{99999}}\\cdot \\pi^{{99999}}",
    lambda i: f"\\tan(\\tan(\\tan(\\tan({i}+x))))-\\cot(\\cot(x^{i}))",
    lambda i: f"\\frac{{x^{{{i + 90}}}-1}}{{x-1}}-\\frac{{y^{{{i + 90}}}-1}}{{y-1}}",
)


def hostile_answers(count: int) -> list[tuple[str, str]]:
    """`count` different (answer, gold), cycling through all kinds."""
    golds = ("3", "x+1", "(1,2)", "\\frac{1}{2}", "1,-2")
    return [(KINDS[i % len(KINDS)](i // len(KINDS)), golds[(i + i // len(KINDS)) % len(golds)]) for i in range(count)]
