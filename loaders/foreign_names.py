"""What to use in shardkit instead of each argument of other loaders, as one text per argument.

The other loaders are torch's DataLoader, MosaicML Streaming, litdata and webdataset.

Errors about unknown options quote these tables, and the pages docs/guides/migrate.md and replace_streaming.md
show them.
"""

from __future__ import annotations

from collections.abc import Mapping

_RETRIES = "`run=Run(timeout_seconds=…)`, the time limit of a batch; requests are retried until then"
_NO_WORKERS = (
    "not needed: the loader prefetches `run=Run(prefetch_batches=…)` batches in a thread, without worker "
    "processes"
)
_ORDER = "not needed: the loader computes its own order"
_LANES = "`order=Order(lanes=…)`; the default depends on the number of shards"
_PASSES = "not needed: each pass over a stream delivers each sample once"
_BATCHES = (
    'not needed: batches mix the streams ("random"), in exact proportions ("stratified") if the global batch '
    "is a multiple of the sum of weights; for batches of a single stream create one loader per stream"
)
_PINNED = "`CudaPrefetcher`, around the loader"

_DATA_LOADER = {
    "batch_size": "`batch_size` of the loader only",
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
    "collate_fn": "`collate_fn`, which gets the list of samples of a batch",
}

_STREAM_OR_DATASET = {
    "remote": "the path or URL",
    "local": "`cache_dir`, shared by all processes of the machine; for local data the path",
    "split": "the sub-folder of the path or URL",
    "download_retry": _RETRIES,
    "download_timeout": _RETRIES,
    "validate_hash": "`run=Run(verify=True)` for local datasets; remote shards are always verified",
    "keep_zip": "not needed: shards are decompressed once, into the cache",
}  # fmt: skip

STREAM: Mapping[str, str] = _STREAM_OR_DATASET | {
    "proportion": "`weight`",
    "repeat": "`weight`, which sets the stream's samples per epoch of `order=Order(epoch_samples=…)`",
    "choose": "`weight`, which sets the stream's samples per epoch of `order=Order(epoch_samples=…)`",
}
"""Replacements for arguments of MosaicML's `streaming.Stream`."""

STREAMING: Mapping[str, str] = _STREAM_OR_DATASET | _DATA_LOADER | {
    "streams": "a list of `Stream`, as the first argument",
    "stream_config": "the arguments of `Stream`",
    "stream_name": "not needed: any dataset can be opened and given to the loader",
    "shuffle": '`shuffle`: "window" or "none"',
    "shuffle_seed": "`seed`",
    "shuffle_algo": '`shuffle`: "global" for naive, "window" for all others',
    "shuffle_block_size": "`order=Order(window=…)`: by default two shards of each lane; of data that no "
    "build shuffled, 2^18 samples in up to 1,024 shards",
    "num_canonical_nodes": _LANES,
    "partition_algo": _LANES,
    "cache_limit": "`cache_bytes`; the cache evicts the shard whose next use is farthest in the future",
    "predownload": "not needed: follows from the order and the size of the cache",
    "epoch_size": "`order=Order(epoch_samples=…)`",
    "sampling_method": _PASSES + '; for "fixed", `exclude` the other rows',
    "sampling_granularity": _PASSES,
    "batching_method": _BATCHES,
    "allow_unsafe_types": "`allow_pickle` of `open_dataset`; give its result to the loader",
    "replication": "`mesh`, or `rank` and `world_size` divided by the replication",
}  # fmt: skip
"""Replacements for arguments of MosaicML's `streaming.StreamingDataset` and `StreamingDataLoader`."""

_PROFILER = "`loader.stats()` reports what steps waited for"

LITDATA: Mapping[str, str] = _DATA_LOADER | {
    "input_dir": "the path that `shardkit convert` wrote",
    "index_path": "the path that `shardkit convert` wrote",
    "item_loader": "the encodings of MDS columns",
    "serializers": "the encodings of MDS columns",
    "cache_dir": "`cache_dir`",
    "max_cache_size": "`cache_bytes`; for a fraction of the free disk use the default",
    "shuffle": '`shuffle`: "window" or "none"',
    "item_shuffle_window": "`order=Order(window=…)`: by default two shards of each lane",
    "num_canonical_nodes": _LANES,
    "seed": "`seed`",
    "subsample": "`exclude` of a `Stream` leaves rows out, the same in every epoch",
    "encryption": "not supported: `shardkit convert` refuses encrypted chunks",
    "storage_options": "`storage`",
    "session_options": "`storage`",
    "transform": "`transform`, on a sample",
    "force_override_state_dict": '`load_state_dict(state, on_mismatch="fork")`',
    "max_pre_download": "not needed: follows from the order and the size of the cache",
    "batch_decode": "not needed: rows of constant size are gathered, not decoded",
    "window_direct_io": "not needed: rows of constant size are gathered, not decoded",
    "profile_batches": _PROFILER,
    "profile_skip_batches": _PROFILER,
    "profile_dir": _PROFILER,
    "profile_cprofile": _PROFILER,
}  # fmt: skip
"""Replacements for arguments of `litdata.StreamingDataset` and `litdata.StreamingDataLoader`."""

_RANKS = "not needed: rank and world size divide each batch, for any number of shards"

_WEBDATASET: Mapping[str, str] = {
    "urls": "the path, URL or pattern, as the first argument",
    "shardshuffle": '`shuffle`: "window" or "none"',
    "resampled": "`endless=True`, which delivers every sample once before it repeats any",
    "detshuffle": "not needed: the order follows from `seed`",
    "nodesplitter": _RANKS,
    "workersplitter": _RANKS,
    "cache_size": "`cache_bytes`",
    "handler": "`Stream(path, exclude=[row])`, with the row that the error names",
    "verbose": "`loader.stats()` reports what steps waited for",
}

_WORKERS = "the loader prefetches in a thread; for worker processes use `StreamingDataLoader` with"

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
    "weights": "`Stream(path, weight=…)` for each dataset; to change weights later, `loader.set_weights`",
    "proportion": "`Stream(path, weight=…)`",
    "datasets": "a list of `Stream`, as the first argument",
    "num_replicas": "`world_size`",
}  # fmt: skip
"""Replacements for arguments of torch's DataLoader and samplers, MosaicML Streaming, litdata, webdataset."""
