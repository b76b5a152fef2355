"""What does here the work of each argument of torch's DataLoader, MosaicML Streaming, litdata and webdataset.

`integrations.migrate` takes such arguments over by these tables; errors about unknown options quote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["FOREIGN", "LITDATA", "STREAM", "STREAMING", "STREAM_OR_DATASET", "Outcome", "Rule"]

Outcome = Literal["taken over", "replaced", "not needed", "refused"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of an argument: `text` says by what; a refused one may have its `default` all the same."""

    outcome: Outcome
    text: str
    default: object = None


_RETRIES = "`timeout_seconds` for a batch; requests are tried again until then"
_NO_WORKERS = (
    "nothing: the loader prefetches in threads, `prefetch_batches` ahead; there are no worker processes"
)
_ORDER = "nothing: the loader has an order of its own"
_LANES = "`lanes`: follow from the number of shards, kept in the state"
_PASSES = "nothing: each pass over a stream has each of its samples once"
_BATCHES = (
    'nothing: batches mix the streams ("random"), in exact proportions ("stratified") if the global batch is '
    "a multiple of the sum of weights; for batches of one stream, iterate over a loader for each"
)
_PINNED = "`CudaPrefetcher`, around the loader"

_DATA_LOADER = {
    "batch_size": Rule("taken over", "`batch_size`, once"),
    "drop_last": Rule(
        "taken over", '`tail`: "drop" if true, "carry" (the next epoch fills the last batch) or "pad"'
    ),
    "timeout": Rule("taken over", "`timeout_seconds`"),
    "num_workers": Rule("not needed", _NO_WORKERS),
    "prefetch_factor": Rule("not needed", _NO_WORKERS),
    "persistent_workers": Rule("not needed", _NO_WORKERS),
    "multiprocessing_context": Rule("not needed", _NO_WORKERS),
    "worker_init_fn": Rule("not needed", _NO_WORKERS),
    "in_order": Rule("not needed", _NO_WORKERS),
    "generator": Rule("not needed", _NO_WORKERS),
    "pin_memory": Rule("replaced", _PINNED),
    "pin_memory_device": Rule("replaced", _PINNED),
    "sampler": Rule("refused", _ORDER),
    "batch_sampler": Rule("refused", _ORDER),
    "collate_fn": Rule("refused", "call it in the loop: batches are dicts of tensors and lists"),
}

STREAM_OR_DATASET = {
    "remote": Rule("taken over", "the path or URL"),
    "local": Rule("taken over", "`cache_dir`, shared on the machine; the path if nothing is remote"),
    "split": Rule("taken over", "the sub-folder of the path or URL"),
    "download_retry": Rule("replaced", _RETRIES),
    "download_timeout": Rule("replaced", _RETRIES),
    "validate_hash": Rule("replaced", "`verify` of local datasets; remote shards are always verified"),
    "keep_zip": Rule("not needed", "nothing: shards are decompressed once, into the cache"),
}  # fmt: skip

STREAM: Mapping[str, Rule] = STREAM_OR_DATASET | {
    "proportion": Rule("taken over", "`weight`"),
    "repeat": Rule("taken over", "`weight`: the stream's samples in an epoch of `epoch_samples`"),
    "choose": Rule("taken over", "`weight`: the stream's samples in an epoch of `epoch_samples`"),
}
"""Arguments of `streaming.Stream`."""

STREAMING: Mapping[str, Rule] = STREAM_OR_DATASET | _DATA_LOADER | {
    "streams": Rule("taken over", "a list of `Stream`, see below"),
    "stream_config": Rule("taken over", "as the arguments of `Stream`"),
    "stream_name": Rule("refused", "nothing: any dataset can be opened and given to the loader", "stream"),
    "shuffle": Rule("taken over", '`shuffle`: "window" or "none"'),
    "shuffle_seed": Rule("taken over", "`seed`"),
    "shuffle_algo": Rule("taken over", '`shuffle`: "global" for naive, "window" for all others'),
    "shuffle_block_size": Rule("replaced", "`window`: by default two shards of each lane"),
    "num_canonical_nodes": Rule("replaced", _LANES),
    "partition_algo": Rule("replaced", _LANES),
    "cache_limit": Rule("taken over", "`cache_bytes`; evicts the shard whose next use is farthest"),
    "predownload": Rule("not needed", "nothing: follows from the order and the cache's size"),
    "epoch_size": Rule("taken over", "`epoch_samples`"),
    "sampling_method": Rule("refused", _PASSES + '; for "fixed", `exclude` the other rows', "balanced"),
    "sampling_granularity": Rule("not needed", _PASSES),
    "batching_method": Rule("refused", _BATCHES, "random"),
    "allow_unsafe_types": Rule("taken over", "`allow_pickle` of `open_dataset`; the loader takes its result"),
    "replication": Rule("taken over", "`mesh`, or `rank` and `world_size` divided by it"),
}  # fmt: skip
"""Arguments of `streaming.StreamingDataset` and `StreamingDataLoader`."""

_PROFILER = Rule("not needed", "nothing: `loader.stats()` says what steps waited for")

LITDATA: Mapping[str, Rule] = _DATA_LOADER | {
    "input_dir": Rule("replaced", "the path that `shardkit convert` wrote"),
    "index_path": Rule("replaced", "the path that `shardkit convert` wrote"),
    "item_loader": Rule("replaced", "the encodings of MDS columns"),
    "serializers": Rule("replaced", "the encodings of MDS columns"),
    "cache_dir": Rule("taken over", "`cache_dir`"),
    "max_cache_size": Rule("taken over", "`cache_bytes`; a fraction of the free disk is left to the default"),
    "shuffle": Rule("taken over", '`shuffle`: "window" or "none"'),
    "item_shuffle_window": Rule("replaced", "`window`: by default two shards of each lane"),
    "num_canonical_nodes": Rule("replaced", _LANES),
    "seed": Rule("taken over", "`seed`"),
    "subsample": Rule("refused", "`exclude` of a `Stream` leaves rows out, the same in every epoch", 1.0),
    "encryption": Rule("refused", "nothing: `shardkit convert` refuses encrypted chunks"),
    "storage_options": Rule("refused", "`storage`"),
    "session_options": Rule("refused", "`storage`"),
    "transform": Rule("refused", "call it in the loop, on the batch"),
    "force_override_state_dict": Rule("replaced", '`load_state_dict(state, on_mismatch="fork")`'),
    "max_pre_download": Rule("not needed", "nothing: follows from the order and the cache's size"),
    "batch_decode": Rule("not needed", "nothing: rows of constant size are gathered, not decoded"),
    "window_direct_io": Rule("not needed", "nothing: rows of constant size are gathered, not decoded"),
    "profile_batches": _PROFILER,
    "profile_skip_batches": _PROFILER,
    "profile_dir": _PROFILER,
    "profile_cprofile": _PROFILER,
}  # fmt: skip
"""Arguments of `litdata.StreamingDataset` and `StreamingDataLoader`."""

_RANKS = "nothing: rank and world size divide each batch, whatever the shards are"

_WEBDATASET: Mapping[str, Rule] = {
    "urls": Rule("taken over", "the path, URL or pattern, as the first argument"),
    "shardshuffle": Rule("replaced", '`shuffle`: "window" or "none"'),
    "resampled": Rule("replaced", "`endless=True`: every sample once before any again"),
    "detshuffle": Rule("not needed", "nothing: the order follows from `seed`"),
    "nodesplitter": Rule("not needed", _RANKS),
    "workersplitter": Rule("not needed", _RANKS),
    "cache_size": Rule("taken over", "`cache_bytes`"),
    "handler": Rule("replaced", "`Stream(path, exclude=[row])`, with the row that the error names"),
    "verbose": Rule("not needed", "nothing: `loader.stats()` says what steps waited for"),
}

_WORKERS = "the loader prefetches in threads by itself; where you want processes, `StreamingDataLoader`, with"

FOREIGN: Mapping[str, Rule] = {
    **_WEBDATASET,
    **LITDATA,
    **STREAMING,
    **STREAM,
    **{
        name: Rule("not needed", f"{_WORKERS} {name}=")
        for name in (
            *("num_workers", "prefetch_factor", "persistent_workers", "worker_init_fn", "generator"),
            *("multiprocessing_context",),
        )
    },
    "collate_fn": Rule("refused", "call it in the loop, on the batch, or give it to `StreamingDataLoader`"),
    "weights": Rule("replaced", "`Stream(path, weight=…)` for each dataset; later `loader.set_weights`"),
    "proportion": Rule("taken over", "`Stream(path, weight=…)`"),
    "datasets": Rule("taken over", "a list of `Stream`, as the first argument"),
    "num_replicas": Rule("taken over", "`world_size`"),
}  # fmt: skip
"""Arguments of torch's DataLoader and samplers, MosaicML Streaming, litdata and webdataset."""
