"""`shardkit simulate`: how the ranks of a training run are fed, in virtual time on one machine.

Order, lanes, cache plan and the loader's constants are the project's own; network, store and threads are
modelled. `simulate` (run) turns a `Scenario` into an `Outcome`.
"""
