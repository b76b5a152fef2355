"""Compiled kernels over the UTF-8 bytes of a batch: characters, words, lines, n-grams, sentences."""
