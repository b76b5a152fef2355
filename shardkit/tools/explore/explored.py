"""An open dataset as the pages see it: its card, its tables, its tokenizer, and what it lacks.

Made once and shared by the threads of the server. Tables are opened by their listing; footers are read when a
page needs them. `fact` helpers turn lines of tables into what templates show.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from shardkit.card import DatasetCard
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.provenance.answers import Tracer
from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.datasets.provenance.text import Decoder
from shardkit.errors import ShardkitError
from shardkit.formats.dropped_table import (
    DROPPED_FOLDER,
    DROPPED_SCHEMA,
    DUPLICATES_FOLDER,
    DUPLICATES_SCHEMA,
)
from shardkit.formats.provenance import PROVENANCE_FOLDER, PROVENANCE_SCHEMA
from shardkit.tools.explore.background import Background
from shardkit.tools.explore.summary import Summary

Params = Mapping[str, str]
"""The query of a page's address."""

_EXCERPT = 400  # characters of a document in a list


class PageNotFoundError(ShardkitError):
    """There is no such page, or the dataset does not have what it would show."""


class Explored:
    """`decoder` None: tokens are shown as numbers. `inputs`: the one folder to read input files from."""

    def __init__(
        self, dataset: Dataset, decoder: Decoder | None = None, *, inputs: Path | None = None
    ) -> None:
        self.dataset = dataset
        self.inputs = None if inputs is None else inputs.absolute()
        self.decoder = decoder
        self.tracer = Tracer(dataset, decoder, _EXCERPT)
        self.dropped = ParquetFolder(dataset, DROPPED_FOLDER, DROPPED_SCHEMA)
        self.duplicates = ParquetFolder(dataset, DUPLICATES_FOLDER, DUPLICATES_SCHEMA)
        self.provenance = ParquetFolder(dataset, PROVENANCE_FOLDER, PROVENANCE_SCHEMA)
        self.summary = Background(Summary(self.dropped, self.duplicates).count)

    @property
    def card(self) -> DatasetCard | None:
        return self.dataset.card

    @property
    def name(self) -> str:
        """The last two parts of its path or URL: many datasets are in a folder "out" of their recipe's."""
        return "/".join(self.dataset.location.rstrip("/").split("/")[-2:])

    def source(self, number: object) -> str:
        """The label of an input of the recipe."""
        labels = self.tracer.labels
        return labels[number] if isinstance(number, int) and 0 <= number < len(labels) else str(number)

    @cached_property
    def has_funnel(self) -> bool:
        """Whether the card says what became of the records of the inputs."""
        return self.card is not None and self.card.has("funnel")

    @cached_property
    def missing(self) -> list[str]:
        """The sentences on what the dataset does not have and what is therefore not shown."""
        found = []
        if not self.has_funnel:
            found.append(
                "No card (dataset.json): this dataset was not built by shardkit, so there is no funnel."
            )
        if not self.provenance.names:
            found.append("No provenance/*.parquet: it is not known which documents are in a row.")
        if self.has_funnel and not self.dropped.names and self.lost("/"):
            found.append("No dropped/*.parquet: build it again to see the documents that rules dropped.")
        if self.has_funnel and not self.duplicates.names and self.lost("duplicate"):
            found.append("No duplicates/*.parquet: build it again to see the duplicates that were removed.")
        if self.decoder is None and self.dataset.token_column is not None:
            found.append(f"No tokenizer: {self.tracer.how_to_see_text()}")
        return found

    def lost(self, part: str) -> int:
        """Documents that were dropped for reasons whose name has this part."""
        assert self.card is not None
        return sum(count.documents for name, count in self.card.funnel.dropped.items() if part in name)


def number_param(params: Params, name: str, default: int, *, most: int) -> int:
    """A whole number from 0 to `most`; ShardkitError."""
    text = params.get(name, "").strip().replace(",", "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18 or int(text) > most:
        raise ShardkitError(f"{name} {text[:40]!r} is not a whole number from 0 to {most:,}")
    return int(text)
