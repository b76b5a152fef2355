"""Provides the data that pages read: an open dataset, its card, tables and tokenizer.

The object is created once and shared by the threads of the server. Opening the tables only lists their files;
footers are read when a page needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from shardkit.tools.explore.summary import ClusterSummary, Rules
from shardkit.writers.report.costs import StepCost

Params = Mapping[str, str]
"""The query parameters in a page's address."""

_EXCERPT = 400  # length of the excerpt of a document in lists, in characters


class PageNotFoundError(ShardkitError):
    """Raised if a page does not exist, or if the dataset does not have the item to show."""


class Explored:
    """An open dataset with the tables and the tokenizer from which pages are made.

    Without a `decoder`, tokens are shown as numbers. `inputs` is the only folder from which input files are
    read. `costs` are those of the build's steps, if a file has them.
    """

    def __init__(
        self,
        dataset: Dataset,
        decoder: Decoder | None = None,
        *,
        inputs: Path | None = None,
        costs: Sequence[StepCost] = (),
    ) -> None:
        self.dataset, self.costs = dataset, costs
        self.inputs = None if inputs is None else inputs.absolute()
        self.decoder = decoder
        self.tracer = Tracer(dataset, decoder, _EXCERPT)
        self.dropped = ParquetFolder(dataset, DROPPED_FOLDER, DROPPED_SCHEMA)
        self.duplicates = ParquetFolder(dataset, DUPLICATES_FOLDER, DUPLICATES_SCHEMA)
        self.provenance = ParquetFolder(dataset, PROVENANCE_FOLDER, PROVENANCE_SCHEMA)
        self.rules, self.clusters = Rules(self.dropped), ClusterSummary(self.duplicates)
        self.counted_rules = Background(self.rules.count)
        self.counted_clusters = Background(self.clusters.count)

    @property
    def card(self) -> DatasetCard | None:
        return self.dataset.card

    @property
    def name(self) -> str:
        """The last two parts of the path or URL; one part is not enough, as many datasets are named "out"."""
        return "/".join(self.dataset.location.rstrip("/").split("/")[-2:])

    def source(self, number: object) -> str:
        """Return the label of an input of the recipe, or its number as text if it has no label."""
        labels = self.tracer.labels
        return labels[number] if isinstance(number, int) and 0 <= number < len(labels) else str(number)

    @cached_property
    def has_funnel(self) -> bool:
        """Whether the card contains the funnel, which counts the outcomes of all input records."""
        return self.card is not None and self.card.has("funnel")

    @cached_property
    def missing(self) -> list[str]:
        """Sentences that tell the user which files are missing and what cannot be shown without them."""
        found = []
        if not self.has_funnel:
            found.append(
                "No card (dataset.json): this dataset was not built by shardkit, so there is no funnel."
            )
        if not self.provenance.names:
            found.append("No provenance/*.parquet: the documents in a row are unknown.")
        if self.has_funnel and not self.dropped.names and self.lost("/"):
            found.append("No dropped/*.parquet: build it again to see the documents that rules dropped.")
        if self.has_funnel and not self.duplicates.names and self.lost("duplicate"):
            found.append("No duplicates/*.parquet: build it again to see the duplicates that were removed.")
        if self.decoder is None and self.dataset.token_column is not None:
            found.append(f"No tokenizer: {self.tracer.how_to_see_text()}")
        return found

    def lost(self, part: str) -> int:
        """Return how many documents were dropped for reasons whose name contains `part`."""
        assert self.card is not None
        return sum(count.documents for name, count in self.card.funnel.dropped.items() if part in name)


def number_param(params: Params, name: str, default: int, *, most: int) -> int:
    """Return a parameter as a whole number; raises ShardkitError unless it is from 0 to `most`."""
    text = params.get(name, "").strip().replace(",", "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 18 or int(text) > most:
        raise ShardkitError(f"{name} {text[:40]!r} is not a whole number from 0 to {most:,}")
    return int(text)
