"""Open datasets: `locate` finds a dataset's index, `opened` reads its shards, `verify` checks all of it.

`dataset` has the public class. It uses `provenance` to find the origin of rows, which reads them with
`opened`. This package depends on formats, storage and cache; they do not depend on it.
"""
