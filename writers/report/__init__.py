"""`report.html`: a dataset's card as one page without scripts or references; the same card, the same bytes."""

from shardkit.writers.report.page import render_report

__all__ = ["render_report"]
