"""A dataset to a bucket and back into training: upload, stream through a cache, stop, resume elsewhere.

    python examples/s3_upload_and_stream.py                                  # a server in this process (moto)
    python examples/s3_upload_and_stream.py --bucket my-bucket               # AWS, by its usual configuration
    python examples/s3_upload_and_stream.py --bucket b --endpoint-url http://127.0.0.1:9000

Writes below the prefix `shardkit-example` of the bucket only. Needs `pip install 'shardkit[torch,s3]'`, and
`pip install 'moto[server]'` for the server in this process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from shardkit.formats.mds import MdsWriter
from shardkit.loaders import StreamingLoader
from shardkit.publish import upload
from shardkit.storage import StorageOptions


@contextmanager
def local_server() -> Iterator[tuple[str, str]]:
    """(endpoint, bucket) of a server that keeps objects in memory and checks no signatures."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
    os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="example")
    try:
        yield endpoint, "example"
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bucket", help="a bucket that you may write to (default: a server in this process)")
    parser.add_argument("--endpoint-url", help="of a server like S3 (default: AWS)")
    args = parser.parse_args()
    place = nullcontext((args.endpoint_url, args.bucket)) if args.bucket else local_server()
    with place as (endpoint, bucket), tempfile.TemporaryDirectory() as name:
        storage, url = StorageOptions(endpoint_url=endpoint), f"s3://{bucket}/shardkit-example"
        rows = np.arange(400 * 64, dtype=np.uint16).reshape(400, 64)
        columns = {"tokens": "ndarray:uint16:64"}
        with MdsWriter(Path(name, "data"), columns=columns, hashes=["xxh64"], shard_bytes="4KiB") as writer:
            writer.write_rows(rows)

        sent = upload(Path(name, "data"), url, storage=storage, progress=False)
        again = upload(Path(name, "data"), url, storage=storage, progress=False)
        print(f"uploaded {len(sent.sent)} files, {sent.sent_bytes:,} bytes, and the index last")
        print(f"uploaded again: {again.sent_bytes:,} bytes sent")

        def loader(cache: str) -> StreamingLoader:
            """The same on every machine; `cache_dir` would be its local disk."""
            return StreamingLoader(
                url,
                batch_size=8,
                return_ids=True,
                cache_dir=Path(name, cache),
                cache_bytes="64MB",
                storage=storage,
            )

        seen: list[int] = []
        with loader("cache-of-one-machine") as first:
            for _, batch in zip(range(20), first, strict=False):
                seen += batch["sample_id"].tolist()
                assert np.array_equal(batch["tokens"].numpy(), rows[batch["sample_id"]])
            state = json.dumps(first.state_dict())
        with loader("cache-of-another") as second:
            second.load_state_dict(json.loads(state))
            for batch in second:
                seen += batch["sample_id"].tolist()
                assert np.array_equal(batch["tokens"].numpy(), rows[batch["sample_id"]])
            cache = second.stats().cache  # `stats().verdict` says in one line whether training waits, and why
        assert sorted(seen) == list(range(400))
        print("streamed 20 batches, stopped, resumed with an empty cache: each of 400 rows came once, equal")
        assert cache is not None
        print(f"the second machine fetched {cache.fetched_bytes:,.0f} bytes, each shard checked by its hash")


if __name__ == "__main__":
    main()
