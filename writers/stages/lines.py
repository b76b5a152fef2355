"""Step: cuts lines, or spans of words, that other documents contain (dedup/lines.py has the stages)."""

from __future__ import annotations

from functools import partial

from shardkit.writers.dedup import lines
from shardkit.writers.dedup.lines import LINE_KEYS, LINE_LOSERS
from shardkit.writers.dedup.rewriting import left_of
from shardkit.writers.recipe.steps import GlobalStep
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages.flow import Build, Documents, Step, Written
from shardkit.writers.stages.needs import DOCUMENTS, Needs

DUPLICATE_LINES = "duplicate_lines"  # reason in ledgers
_CUT = 0.25  # assumed share of the compared lines that are cut


def cut_lines(move: GlobalStep, documents: Documents, build: Build) -> Documents:
    """Cut repeated lines, and rewrite each split's documents without those that earlier steps removed."""
    files = lines.remove_lines(
        build.run,
        documents.described(),
        documents.removals,
        move.settings,
        build.memory_bytes,
        limits=build.limits,
    )
    cut = [commit.ledger() for commit in files]
    lost = [one.dropped.get(DUPLICATE_LINES, Count()) for one in cut]
    step = Written("cutting lines" if move.nth == 1 else f"cutting lines ({move.nth})", files, cut)
    return documents.losing(DUPLICATE_LINES, lost).rewritten(step, [left_of(commit) for commit in files])


def needs(n: Needs) -> None:
    """Add the requests and bytes of comparing lines, and of rewriting all documents."""
    c = n.corpus
    if not c.lines:
        return
    text, size = c.text_bytes * DOCUMENTS, c.lines * LINE_KEYS.row_bytes
    n.add(lines.MAKE_LINE_KEYS, c.gathered, *n.scans(text, c.gathered), files=2, written=size)
    readers = c.limits.partitions(c.lines, LINE_KEYS.dtype)
    keys = n.exchange(lines.FIND_LINE_LOSERS, LINE_KEYS, c.gathered, c.lines, readers)
    cut = c.lines * _CUT
    written = cut * LINE_LOSERS.row_bytes
    n.add(lines.FIND_LINE_LOSERS, readers, *n.slices(keys, readers), files=1, written=written)
    n.by_split(lines.LINES_REMOVED, LINE_LOSERS, readers, cut)
    gets, read = n.scans(text, c.gathered)
    n.add(lines.CUT_LINES, c.gathered, gets + 2 * c.gathered, read + written, files=4, written=text)


STAGES = lines.MAKE_LINE_KEYS, lines.FIND_LINE_LOSERS, lines.LINES_REMOVED, lines.CUT_LINES


def step_of(move: GlobalStep) -> Step:
    """Return a step over lines."""
    return Step(lambda recipe: STAGES, partial(cut_lines, move), needs)
