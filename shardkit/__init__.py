"""shardkit: raw text to deterministic pretraining shards, and those shards to GPUs, exactly once.

    import shardkit as sk

    result = sk.build("recipe.yaml")                  # or a dict of the same keys, or a Recipe
    ds = sk.open("out")                               # or a URL: any MDS or WebDataset
    ds[17], ds[3:9], ds.sample(5).to_pandas()         # rows
    ds.text(17), ds.documents(17)                     # the decoded text of a row, and its documents
    ds.trace(url="example.org/*")                     # the rows that hold a document or site
    for batch in sk.StreamingLoader(ds, batch_size=8):
        ...

Building needs `pip install 'shardkit[write]'`, tensors need torch. Every name is imported on first use, so
`import shardkit` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

__all__ = [
    "BuildResult",
    "CutOptions",
    "Dataset",
    "Layout",
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
    "open",
    "open_dataset",
    "pack",
    "trace",
    "upload",
    "verify",
]

from shardkit.version import __version__

_PLACES = {  # public name -> (module, name in the module)
    "BuildResult": ("shardkit.writers.report.result", "BuildResult"),
    "CutOptions": ("shardkit.tools.convert", "CutOptions"),
    "Dataset": ("shardkit.datasets.dataset", "Dataset"),
    "Layout": ("shardkit.loaders.config", "Layout"),
    "Order": ("shardkit.loaders.config", "Order"),
    "OutputOptions": ("shardkit.tools.convert", "OutputOptions"),
    "Recipe": ("shardkit.writers.recipe.recipe", "Recipe"),
    "Run": ("shardkit.loaders.config", "Run"),
    "StorageOptions": ("shardkit.storage.store", "StorageOptions"),
    "Stream": ("shardkit.loaders.config", "Stream"),
    "StreamingLoader": ("shardkit.loaders.loader", "StreamingLoader"),
    "build": ("shardkit.writers.pipeline", "build"),
    "convert": ("shardkit.tools.convert", "convert"),
    "download": ("shardkit.publish", "download"),
    "load_recipe": ("shardkit.writers.recipe.recipe", "load_recipe"),
    "open": ("shardkit.datasets.dataset", "open_dataset"),
    "open_dataset": ("shardkit.datasets.dataset", "open_dataset"),
    "pack": ("shardkit.writers.token_store", "pack_store"),
    "trace": ("shardkit.datasets.dataset", "trace"),
    "upload": ("shardkit.publish", "upload"),
    "verify": ("shardkit.datasets.verify", "verify"),
}

if TYPE_CHECKING:
    from shardkit.datasets.dataset import Dataset, open_dataset, trace
    from shardkit.datasets.dataset import open_dataset as open
    from shardkit.datasets.verify import verify
    from shardkit.loaders import Layout, Order, Run, Stream, StreamingLoader
    from shardkit.publish import download, upload
    from shardkit.storage.store import StorageOptions
    from shardkit.tools.convert import CutOptions, OutputOptions, convert
    from shardkit.writers import BuildResult, Recipe, build, load_recipe
    from shardkit.writers import pack_store as pack
else:

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
        module, attribute = _PLACES[name]
        with naming_extras(f"shardkit.{name}"):
            return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
