"""Open datasets: `locate` finds a dataset's index, `opened` reads its shards, `verify` checks all its files.

`dataset` has the public class `Dataset`. To find the origin of rows, it uses `provenance`, which reads rows
with `opened`. This package depends on formats, storage and cache; they do not depend on it.
"""
