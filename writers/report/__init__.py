"""`report.html`: a dataset's card as one self-contained page. The same card gives the same bytes."""

from shardkit.writers.report.page import render_report

__all__ = ["render_report"]
