"""Doubles and helpers that tests share."""
