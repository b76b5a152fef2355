"""The schemas of `dropped/*.parquet` and `duplicates/*.parquet`: documents that are not in the dataset.

Together with `provenance/*.parquet` (documents in the dataset) and `quarantine.jsonl` (records that could not
be read) they account for every document of the inputs; records without a document, such as redirects in a
WARC, are only counted. `dropped` lists the documents that filters dropped, in one file per split with any.
`duplicates` lists the documents that steps over all documents removed: duplicates, and documents that were
not chosen, sorted by the document that was kept in their place, so that all duplicates of one document are
adjacent. A document that was kept for an exact or a
URL duplicate may itself be removed in a later stage: follow `kept_document_id` until no line has it as
`document_id`.

`text` holds the beginning of a document as it was when it was removed, for a bounded sample of documents. It
is null for the others; find those in the raw files by `file` and `record`.

`shardkit.writers.rows.dropped_file` and `shardkit.writers.dedup.duplicates` write these files.
"""

from __future__ import annotations

import pyarrow as pa

DROPPED_FOLDER = "dropped"
DUPLICATES_FOLDER = "duplicates"
TEXT_CHARACTERS = 2000

_DOCUMENT = [
    pa.field("document_id", pa.binary(16), nullable=False),
    pa.field("source", pa.int32(), nullable=False),  # index into recipe.inputs
    pa.field("file", pa.string(), nullable=False),
    pa.field("record", pa.int64(), nullable=False),
    pa.field("id", pa.string()),
    pa.field("url", pa.string()),
    pa.field("bytes", pa.int64(), nullable=False),  # size of its text in UTF-8 when it was removed
]

DROPPED_SCHEMA = pa.schema(
    [
        *_DOCUMENT,
        pa.field("rule", pa.string(), nullable=False),  # "<filter>/<rule>"
        pa.field("value", pa.float64()),  # the number that the rule tested
        pa.field("label", pa.string()),  # tested label, or the subject of `value`, such as an evaluation item
        pa.field("bound", pa.float64()),  # the limit with which `value` was compared
        pa.field("text", pa.string()),
    ]
)

DUPLICATES_SCHEMA = pa.schema(
    [
        *_DOCUMENT,
        # url_duplicate, exact_duplicate, near_duplicate or semantic_duplicate; if no text was left,
        # duplicate_lines or empty; amount: the document is beyond what the recipe takes of its source;
        # not_sampled: a `sample` among the steps did not take it.
        pa.field("reason", pa.string(), nullable=False),
        # Jaccard similarity to the kept document; semantic: cosine of the vectors; exact: 1; URL: null
        pa.field("similarity", pa.float32()),
        # Null for these four, or if the kept document is in an index of another corpus.
        pa.field("kept_document_id", pa.binary(16)),
        pa.field("kept_source", pa.int32()),
        pa.field("kept_file", pa.string()),
        pa.field("kept_record", pa.int64()),
        pa.field("kept_id", pa.string()),
        pa.field("kept_url", pa.string()),
        pa.field("text", pa.string()),
        pa.field("kept_text", pa.string()),
    ]
)


def part_name(folder: str, number: int) -> str:
    """Return the name of file `number` of a table, relative to the dataset's folder."""
    return f"{folder}/part-{number:05d}.parquet"
