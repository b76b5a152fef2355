"""Readers of planned samples: gathered from memory maps, decoded one by one, or mixed."""
