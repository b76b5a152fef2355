"""The part of tyro that shardkit's adapter to torchtitan touches."""

from types import SimpleNamespace

conf = SimpleNamespace(Suppress="no argument of the command line")
