"""A pytest plugin: all botocore sessions of a run share what they read from disk.

Each reads about 2 MB of JSON otherwise, 0.1 to 0.2 s for every new client, which is most of the time of a
suite that makes a store for every test.
"""

from __future__ import annotations

import functools

import botocore.loaders
import botocore.session

# Looked up there by each session; the argument is a search path, None unless AWS_DATA_PATH is set.
botocore.session.create_loader = functools.cache(botocore.loaders.create_loader)
