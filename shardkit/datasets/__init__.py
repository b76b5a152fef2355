"""Opening datasets: `locate` finds what describes one, `opened` reads its shards, `verify` checks it whole.

`dataset` has what users hold. It asks `provenance` where rows are from, which reads what `opened` gives. This
package depends on formats, storage and cache; they do not depend on it.
"""
