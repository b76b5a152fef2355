"""The parts of OLMo-core (ai2-olmo-core 3.0.0) that shardkit's adapter touches, and what its Trainer calls.

Written from reading it. The real classes have many more arguments; those that are here have its names.
"""
