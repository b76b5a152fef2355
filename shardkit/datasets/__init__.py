"""Opening datasets: `locate` finds what describes one, `dataset` reads its samples, `verify` checks it whole.

This package stands above the formats, the storage and the cache. They know nothing of it.
"""
