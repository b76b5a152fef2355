"""shardkit: raw text to deterministic pretraining shards, and those shards to GPUs, exactly once.

    import shardkit as sk

    result = sk.build("recipe.yaml")                  # or a dict of the same keys, or a Recipe
    sk.build(documents, output="out", tokenizer="gpt2")  # dicts, a DataFrame, files: without a recipe
    ds = sk.open("out")                               # or a URL: any MDS or WebDataset
    ds[17], ds[3:9], ds.head().to_pandas()            # rows
    ds.text(17), ds.documents(17)                     # the decoded text of a row, and its documents
    ds.trace(url="example.org/*")                     # the rows that hold a document or site
    for batch in sk.StreamingLoader(ds, batch_size=8):
        ...

Building needs `pip install 'shardkit[write]'`, tensors need torch. Every name is imported on first use, so
`import shardkit` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "BuildResult",
    "CutOptions",
    "Dataset",
    "Layout",
    "MdsWriter",
    "Order",
    "OutputOptions",
    "Recipe",
    "Run",
    "StorageOptions",
    "Stream",
    "StreamingLoader",
    "__version__",
    "build",
    "convert",
    "download",
    "load_recipe",
    "merge",
    "open",
    "open_dataset",
    "pack",
    "trace",
    "upload",
    "verify",
    "warm",
]

from shardkit.lazy import imported
from shardkit.version import __version__

_PLACES = {
    "BuildResult": "shardkit.writers.report.result",
    "CutOptions": "shardkit.tools.convert",
    "Dataset": "shardkit.datasets.dataset",
    "Layout": "shardkit.loaders.config",
    "MdsWriter": "shardkit.formats.mds",
    "Order": "shardkit.loaders.config",
    "OutputOptions": "shardkit.tools.convert",
    "Recipe": "shardkit.writers.recipe.recipe",
    "Run": "shardkit.loaders.config",
    "StorageOptions": "shardkit.storage.store",
    "Stream": "shardkit.loaders.config",
    "StreamingLoader": "shardkit.loaders.loader",
    "build": "shardkit.writers.pipeline",
    "convert": "shardkit.tools.convert",
    "download": "shardkit.publish",
    "load_recipe": "shardkit.writers.recipe.recipe",
    "merge": "shardkit.formats.mds",
    "open": "shardkit.datasets.dataset:open_dataset",
    "open_dataset": "shardkit.datasets.dataset",
    "pack": "shardkit.writers.token_store:pack_store",
    "trace": "shardkit.datasets.dataset",
    "upload": "shardkit.publish",
    "verify": "shardkit.datasets.verify",
    "warm": "shardkit.tools.warm",
}

if TYPE_CHECKING:
    from shardkit.datasets.dataset import Dataset, open_dataset, trace
    from shardkit.datasets.dataset import open_dataset as open
    from shardkit.datasets.verify import verify
    from shardkit.formats.mds import MdsWriter, merge
    from shardkit.loaders import Layout, Order, Run, Stream, StreamingLoader
    from shardkit.publish import download, upload
    from shardkit.storage.store import StorageOptions
    from shardkit.tools.convert import CutOptions, OutputOptions, convert
    from shardkit.tools.warm import warm
    from shardkit.writers import BuildResult, Recipe, build, load_recipe
    from shardkit.writers import pack_store as pack
else:

    def __getattr__(name: str) -> object:
        return imported(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return __all__
