"""The parts of torchtitan 0.3.0 that shardkit's adapter touches, and what its Trainer calls, in its order.

Written from reading it. The real configurations have many more fields; those that are here have its names.
"""
