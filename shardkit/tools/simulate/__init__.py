"""A training run's input in virtual time: thousands of ranks on one machine, from the plan alone.

Order, lanes, uses and the cache's plan are the project's own code; the network, the store and the loader's
threads are modelled. `run` simulates a `Scenario`, `outcome` says what came of it.
"""
