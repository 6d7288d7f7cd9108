"""The claims of all scripts as Markdown: docs/claims.md's table, and docs/performance.md's."""

from collections.abc import Mapping, Sequence
from typing import Any

from measure import Claim

__all__ = ["claims_of", "detailed", "replace_between", "short"]

Results = Mapping[str, Mapping[str, Any]]
"""Script (without ``.py``) -> what it has written with ``--json``."""


def claims_of(result: Mapping[str, Any]) -> list[Claim]:
    """The claims in a script's JSON."""
    return [Claim(**claim) for claim in result["claims"]]


def short(results: Results) -> str:
    """docs/claims.md's table: a row for each claim."""
    rows = [
        [
            claim.what,
            f"{number(claim.value)} ({amounts(claim)})",
            f"{number(claim.bar)} of {claim.against}",
            met(claim),
            f"`python benchmarks/{script}.py`",
        ]
        for script, result in results.items()
        for claim in claims_of(result)
    ]
    return table(["claim", "ours / theirs", "at most", "met", "command"], rows)


def detailed(results: Results) -> str:
    """docs/performance.md's tables: one for each script, with what it was run on."""
    head = ["claim", "ours", "theirs", "", "against", "ratio", "middle half", "bar", "aim", "met"]
    parts = []
    for script, result in results.items():
        rows = [
            [claim.what, number(claim.ours), number(claim.peer), claim.unit, claim.against]
            + [number(claim.value), claim.spread, number(claim.bar)]
            + ["" if claim.aim is None else number(claim.aim), met(claim)]
            for claim in claims_of(result)
        ]
        parts.append(f"### `benchmarks/{script}.py`\n\n{table(head, rows)}\n\n{taken_on(result)}")
    return "\n\n".join(parts)


def taken_on(result: Mapping[str, Any]) -> str:
    """One line on the machine, and whether it was a quick run."""
    machine = result["environment"]
    text = f"torch {machine['torch']}, Python {machine['python']}, "
    text += f"{machine['cores']} cores ({machine['machine']})"
    if machine.get("load_average"):
        text += f", load average {machine['load_average'][0]:.1f} at the end"
    return text + ("; a quick run: few rounds." if result.get("quick") else ".")


def amounts(claim: Claim) -> str:
    """What the ratio is of: ``296 against 684 us``; a fixed limit needs no second mention."""
    if claim.against in ("limit", ""):
        return f"{number(claim.ours)} {claim.unit}"
    return f"{number(claim.ours)} against {number(claim.peer)} {claim.unit}".rstrip()


def met(claim: Claim) -> str:
    """The verdict, so that a missed one is seen."""
    verdict = claim.verdict
    return "**missed**" if verdict == "MISSED" else verdict


def number(value: float) -> str:
    """Three digits or so: ``0.034``, ``0.43``, ``12.3``, ``1,234``."""
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.1 else f"{value:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def replace_between(text: str, name: str, body: str) -> str:
    """``text`` with ``body`` between the lines ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: ``text`` does not have each of them once, in this order.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"no place for {name}: one {begin.strip()} and then one {end} are needed")
    before, rest = text.split(begin)
    return before + begin + body + "\n" + end + rest.split(end)[1]
