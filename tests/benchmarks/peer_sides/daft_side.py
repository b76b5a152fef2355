"""daft: its `minhash` expression, and near-duplicates as its tutorial and its own benchmark find them.

`signatures` takes the text as it is, as the tool's figures do; with "normalize" the text first goes through
the expression that daft has for that (punctuation, case, form D, white space), which the tutorial uses.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from peer_side import BANDS, NGRAM, ROWS, Request, components, serve


def prepare(table: pa.Table) -> Any:
    import daft

    return daft.from_arrow(table).collect()


def minhash(request: Request, permutations: int) -> Any:
    from daft import col, functions

    text = col("text")
    if request.get("normalize"):
        text = functions.normalize(
            text, remove_punct=True, lowercase=True, nfd_unicode=True, white_space=True
        )
    return functions.minhash(
        text, num_hashes=permutations, ngram_size=NGRAM, hash_function=request["hash_function"]
    )


def signatures(frame: Any, request: Request) -> int:
    return len(frame.select(minhash(request, request["permutations"])).collect())


def near(frame: Any, request: Request) -> list[int]:
    """minhash, bands, explode, group-by, union-find; nothing is verified."""
    from daft import col, functions

    values = frame.select("row", minhash(request, BANDS * ROWS).alias("values"))
    bands = values.select("row", functions.chunk(col("values"), ROWS).alias("band")).explode("band")
    groups = bands.groupby("band").agg(functions.list_agg(col("row")).alias("rows"))
    groups = groups.where(functions.list_count(col("rows"), "all") > 1).select("rows")
    return components(groups.to_arrow().column("rows").to_pylist())


if __name__ == "__main__":
    serve({"signatures": signatures, "near": near}, prepare)
