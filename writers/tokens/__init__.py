"""Texts to tokens, and tokens to rows of one length."""
