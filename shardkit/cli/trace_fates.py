"""Prints outcomes of documents (`shardkit trace --why`) and documents that a rule dropped (`--dropped`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.cli.common import print_columns, stderr_console, stdout_console

_CHARACTERS = 300  # maximum length of a printed text


def show_fates(answer: Mapping[str, Any]) -> None:
    """Print the answer of `find_fates`."""
    for facts in answer["documents"]:
        _show(facts)
    _more(len(answer["documents"]), sum(answer["counts"].values()))
    for pattern in answer["unmatched"]:
        stderr_console().print(f"not found: {pattern}")


def show_dropped(answer: Mapping[str, Any]) -> None:
    """Print the answer of `find_dropped`: documents that a rule dropped, or a table of the rules."""
    if (rule := answer["rule"]) is None:
        rows = [(name, f"{count:,}") for name, count in answer["rules"].items()]
        print_columns("", ("rule", "documents dropped"), rows)
        return
    for facts in answer["documents"]:
        _show(facts | {"outcome": "dropped"})
    _more(len(answer["documents"]), answer["rules"][rule])


def _more(shown: int, count: int) -> None:
    if shown < count:
        stderr_console().print(f"… and {count - shown:,} more documents: --limit 0 shows all")


def _show(facts: Mapping[str, Any]) -> None:
    """Print one document and its outcome. Lines are not folded, so that URLs can be copied."""
    console = stdout_console()
    if facts["outcome"] == "unreadable":
        console.print(f"{facts['file']} record {facts['record']:,}", style="bold")
        console.print(f"  could not be read: {facts['reason']}: {facts['error']}")
        return
    console.print(_title(facts), style="bold")
    for line in _outcome(facts):
        console.print(f"  {line}")
    for rule in (facts.get("failed") or ())[1:]:
        console.print(f"  it also fails {rule}: {_number((facts['values'] or {}).get(rule))}")
    if facts.get("text"):
        console.print(f"  “{' '.join(facts['text'].split())[:_CHARACTERS]}”", style="dim")


def _title(facts: Mapping[str, Any]) -> str:
    names = [str(facts[name]) for name in ("url", "id") if facts[name]]
    return "  ".join([f"{facts['source']}: {facts['file']} record {facts['record']:,}", *names])


def _outcome(facts: Mapping[str, Any]) -> list[str]:
    outcome = facts["outcome"]
    if outcome == "kept":
        copies = f", also for {facts['copies'] - 1:,} duplicates" if facts["copies"] > 1 else ""
        return [f"kept: in {_rows(facts['rows'])}{copies}"]
    if outcome == "dropped":
        values = [] if facts["value"] is None else [_number(facts["value"])]
        judged = " of ".join([*values, *([facts["label"]] if facts["label"] is not None else [])])
        judged = f": {judged}" if judged else ""
        bound = "" if facts["bound"] is None else f", bound {_number(facts['bound'])}"
        return [f"dropped by {facts['rule']}{judged}{bound}"]
    if facts["reason"] in ("duplicate_lines", "empty"):
        left = "all its lines are in other documents" if facts["reason"] == "duplicate_lines" else "no token"
        return [f"dropped as {facts['reason']}: {left}"]
    if facts["reason"] == "amount":
        return [f"left out by amounts.{facts['source']}: documents with lower hashes were chosen"]
    if facts["reason"] == "not_sampled":
        return [f"left out by a sample of {facts['source']}: documents with lower hashes were chosen"]
    is_alike = facts["reason"] in ("near_duplicate", "semantic_duplicate")
    likeness = f" (similarity {facts['similarity']:.3f})" if is_alike else ""
    kept = facts["kept_url"] or facts["kept_id"]
    lines = [f"removed as {facts['reason']}{likeness}"]
    if facts["kept_file"] is None:
        return [*lines, "of a document in an index of another corpus"]
    lines.append(f"of {facts['kept_file']} record {facts['kept_record']:,}{f'  {kept}' if kept else ''}")
    if (stays := facts["stays"]) is not None:
        text = "another text of its URL" if facts["reason"] == "url_duplicate" else "its text"
        lines.append(f"{text} is in {_rows(stays['rows'])}, as {_title(stays)}")
    return lines


def _rows(rows: list[int]) -> str:
    some = ", ".join(f"{row:,}" for row in rows[:10]) + (", …" if len(rows) > 10 else "")
    return f"row{'s' if len(rows) > 1 else ''} {some}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
