"""`shardkit simulate`: how the ranks of a training run are fed, in virtual time on one machine.

Order, lanes, cache plan and constants are the loader's own; network, store and threads are modeled.
`simulate` (run) turns a `Scenario` into an `Outcome`.
"""
