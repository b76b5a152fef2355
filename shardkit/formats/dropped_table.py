"""The formats of `dropped/*.parquet` and `duplicates/*.parquet`: documents that are not in the dataset.

Together with `provenance/*.parquet` (documents that are) and `quarantine.jsonl` (records that could not be
read) they account for every document of the inputs; records without one, such as redirects in a WARC, are
only counted. `dropped` has what filters dropped, a file for each split that lost something. `duplicates` has
what was removed after that, sorted by the document that stays, so that its duplicates lie together. A
document that stays for an exact duplicate, or one of its URL, may itself be removed in a later stage: follow
`kept_document_id` until it is in no line as `document_id`.

Texts are the beginnings of a bounded sample of documents, as they were when they were removed; null for the
others, which are found in the raw files by `file` and `record`.

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
    pa.field("bytes", pa.int64(), nullable=False),  # of UTF-8, as it was removed
]

DROPPED_SCHEMA = pa.schema(
    [
        *_DOCUMENT,
        pa.field("rule", pa.string(), nullable=False),  # "<filter>/<rule>"
        pa.field("value", pa.float64()),  # the number that the rule judged
        pa.field("label", pa.string()),  # or the label; beside a number, what that is about
        pa.field("bound", pa.float64()),  # the limit that the number was compared with
        pa.field("text", pa.string()),
    ]
)

DUPLICATES_SCHEMA = pa.schema(
    [
        *_DOCUMENT,
        # url_duplicate, exact_duplicate, near_duplicate; duplicate_lines and empty: nothing was left of it
        pa.field("reason", pa.string(), nullable=False),
        pa.field("similarity", pa.float32()),  # Jaccard, with what stays; 1 for exact, null for url
        # Null where nothing was left, and where it duplicates a document of an index of another corpus.
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
    """The name, in the dataset, of file `number` of a table."""
    return f"{folder}/part-{number:05d}.parquet"
