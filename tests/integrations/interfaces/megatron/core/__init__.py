"""The parts of megatron-core 0.16.1 and Megatron-LM (d98e8a64) that shardkit's adapter touches.

Written from reading them. The real functions have many more arguments; those that are here have their names.
"""
