"""Runs `shardkit demo`: build, verify, stream, kill and resume with text of this Python installation."""
