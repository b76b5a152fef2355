"""Filters that judge documents and editors that rewrite them, one module for each family of rules."""
