"""Mutation scores: how many small changes of a module the tests that are named for it notice."""
