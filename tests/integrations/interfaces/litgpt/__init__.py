"""The part of litgpt 0.5.13 that shardkit's adapter touches. Written from reading it."""
