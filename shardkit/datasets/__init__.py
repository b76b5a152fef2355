"""Opening datasets: `locate` finds what describes one, `dataset` reads its samples, `verify` checks it whole.

This package depends on formats, storage and cache; they do not depend on it.
"""
