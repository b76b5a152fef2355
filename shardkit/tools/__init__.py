"""What users run on datasets: audit, trace, convert, plan, simulate, bench, demo. May use writers and
loaders.
"""
