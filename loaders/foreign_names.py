"""What replaces each argument of torch's DataLoader, MosaicML Streaming, litdata and webdataset.

Errors about unknown options quote these tables, and docs/guides/migrate.md shows them.
"""

from __future__ import annotations

from collections.abc import Mapping

_RETRIES = "`run=Run(timeout_seconds=…)` for a batch; requests are tried again until then"
_NO_WORKERS = (
    "nothing: the loader prefetches in threads, `run=Run(prefetch_batches=…)` ahead; there are no worker "
    "processes"
)
_ORDER = "nothing: the loader has an order of its own"
_LANES = "`order=Order(lanes=…)`: follow from the number of shards, kept in the state"
_PASSES = "nothing: each pass over a stream has each of its samples once"
_BATCHES = (
    'nothing: batches mix the streams ("random"), in exact proportions ("stratified") if the global batch is '
    "a multiple of the sum of weights; for batches of one stream, iterate over a loader for each"
)
_PINNED = "`CudaPrefetcher`, around the loader"

_DATA_LOADER = {
    "batch_size": "`batch_size`, once",
    "drop_last": '`tail`: "drop" if true, "carry" (the next epoch fills the last batch) or "pad"',
    "timeout": "`run=Run(timeout_seconds=…)`",
    "num_workers": _NO_WORKERS,
    "prefetch_factor": _NO_WORKERS,
    "persistent_workers": _NO_WORKERS,
    "multiprocessing_context": _NO_WORKERS,
    "worker_init_fn": _NO_WORKERS,
    "in_order": _NO_WORKERS,
    "generator": _NO_WORKERS,
    "pin_memory": _PINNED,
    "pin_memory_device": _PINNED,
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "collate_fn": "call it in the loop: batches are dicts of tensors and lists",
}

_STREAM_OR_DATASET = {
    "remote": "the path or URL",
    "local": "`cache_dir`, shared on the machine; the path if nothing is remote",
    "split": "the sub-folder of the path or URL",
    "download_retry": _RETRIES,
    "download_timeout": _RETRIES,
    "validate_hash": "`run=Run(verify=True)` of local datasets; remote shards are always verified",
    "keep_zip": "nothing: shards are decompressed once, into the cache",
}  # fmt: skip

STREAM: Mapping[str, str] = _STREAM_OR_DATASET | {
    "proportion": "`weight`",
    "repeat": "`weight`: the stream's samples in an epoch of `order=Order(epoch_samples=…)`",
    "choose": "`weight`: the stream's samples in an epoch of `order=Order(epoch_samples=…)`",
}
"""Arguments of `streaming.Stream`."""

STREAMING: Mapping[str, str] = _STREAM_OR_DATASET | _DATA_LOADER | {
    "streams": "a list of `Stream`, see below",
    "stream_config": "as the arguments of `Stream`",
    "stream_name": "nothing: any dataset can be opened and given to the loader",
    "shuffle": '`shuffle`: "window" or "none"',
    "shuffle_seed": "`seed`",
    "shuffle_algo": '`shuffle`: "global" for naive, "window" for all others',
    "shuffle_block_size": "`order=Order(window=…)`: by default two shards of each lane",
    "num_canonical_nodes": _LANES,
    "partition_algo": _LANES,
    "cache_limit": "`cache_bytes`; evicts the shard whose next use is farthest",
    "predownload": "nothing: follows from the order and the cache's size",
    "epoch_size": "`order=Order(epoch_samples=…)`",
    "sampling_method": _PASSES + '; for "fixed", `exclude` the other rows',
    "sampling_granularity": _PASSES,
    "batching_method": _BATCHES,
    "allow_unsafe_types": "`allow_pickle` of `open_dataset`; the loader takes its result",
    "replication": "`mesh`, or `rank` and `world_size` divided by it",
}  # fmt: skip
"""Arguments of `streaming.StreamingDataset` and `StreamingDataLoader`."""

_PROFILER = "nothing: `loader.stats()` says what steps waited for"

LITDATA: Mapping[str, str] = _DATA_LOADER | {
    "input_dir": "the path that `shardkit convert` wrote",
    "index_path": "the path that `shardkit convert` wrote",
    "item_loader": "the encodings of MDS columns",
    "serializers": "the encodings of MDS columns",
    "cache_dir": "`cache_dir`",
    "max_cache_size": "`cache_bytes`; a fraction of the free disk is left to the default",
    "shuffle": '`shuffle`: "window" or "none"',
    "item_shuffle_window": "`order=Order(window=…)`: by default two shards of each lane",
    "num_canonical_nodes": _LANES,
    "seed": "`seed`",
    "subsample": "`exclude` of a `Stream` leaves rows out, the same in every epoch",
    "encryption": "nothing: `shardkit convert` refuses encrypted chunks",
    "storage_options": "`storage`",
    "session_options": "`storage`",
    "transform": "call it in the loop, on the batch",
    "force_override_state_dict": '`load_state_dict(state, on_mismatch="fork")`',
    "max_pre_download": "nothing: follows from the order and the cache's size",
    "batch_decode": "nothing: rows of constant size are gathered, not decoded",
    "window_direct_io": "nothing: rows of constant size are gathered, not decoded",
    "profile_batches": _PROFILER,
    "profile_skip_batches": _PROFILER,
    "profile_dir": _PROFILER,
    "profile_cprofile": _PROFILER,
}  # fmt: skip
"""Arguments of `litdata.StreamingDataset` and `StreamingDataLoader`."""

_RANKS = "nothing: rank and world size divide each batch, whatever the shards are"

_WEBDATASET: Mapping[str, str] = {
    "urls": "the path, URL or pattern, as the first argument",
    "shardshuffle": '`shuffle`: "window" or "none"',
    "resampled": "`endless=True`: every sample once before any again",
    "detshuffle": "nothing: the order follows from `seed`",
    "nodesplitter": _RANKS,
    "workersplitter": _RANKS,
    "cache_size": "`cache_bytes`",
    "handler": "`Stream(path, exclude=[row])`, with the row that the error names",
    "verbose": "nothing: `loader.stats()` says what steps waited for",
}

_WORKERS = "the loader prefetches in threads by itself; where you want processes, `StreamingDataLoader`, with"

FOREIGN: Mapping[str, str] = {
    **_WEBDATASET,
    **LITDATA,
    **STREAMING,
    **STREAM,
    **{
        name: f"{_WORKERS} {name}="
        for name in (
            *("num_workers", "prefetch_factor", "persistent_workers", "worker_init_fn", "generator"),
            *("multiprocessing_context",),
        )
    },
    "collate_fn": "call it in the loop, on the batch, or give it to `StreamingDataLoader`",
    "weights": "`Stream(path, weight=…)` for each dataset; later `loader.set_weights`",
    "proportion": "`Stream(path, weight=…)`",
    "datasets": "a list of `Stream`, as the first argument",
    "num_replicas": "`world_size`",
}  # fmt: skip
"""Arguments of torch's DataLoader and samplers, MosaicML Streaming, litdata and webdataset."""
