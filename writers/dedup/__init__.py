"""Removal of duplicates: equal URLs, texts and lines, and near-duplicates that are verified."""
