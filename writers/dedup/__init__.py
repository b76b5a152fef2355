"""Removal of repeated documents: equal ones, and near-duplicates that are verified."""
