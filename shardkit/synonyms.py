"""Words of other tools, each with what to write in shardkit instead, for the errors that `hints` words.

The other tools are torch's DataLoader, MosaicML Streaming, litdata, webdataset, Hugging Face datasets,
datatrove, Megatron-LM, boto3, Hydra and OmegaConf. There is a table for each place where a name can be wrong:
arguments of loaders and other functions, attributes, keys of a recipe, names of filters, verbs, options.
A test compares what the sentences name with the verbs, options and keys that exist. The pages
docs/guides/migrate.md and replace_streaming.md show the tables of other loaders.
"""

from __future__ import annotations

from collections.abc import Mapping


def _for(words: str, sentence: str) -> dict[str, str]:
    """Return a table with the same sentence for each of the words."""
    return dict.fromkeys(words.split(), sentence)


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

_WEIGHTS = "`Stream(path, weight=…)` for each dataset; to change weights later, `loader.set_weights`"
_STATE = "`loader.load_state_dict(state)`, with the state that a checkpoint has of `loader.state_dict()`"
_INSIDE = "`layout=Layout(cu_seqlens=True)` or `block_mask=True`, for attention inside documents"
_LENGTH = "`pack.sequence_length` of the recipe; `sequence_length` for flat files of tokens and for texts"
_STORE = "`storage=StorageOptions(…)`"

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
    **_for("weights probabilities probability ratio blend mixture", _WEIGHTS),
    "proportion": "`Stream(path, weight=…)`",
    "datasets": "a list of `Stream`, as the first argument",
    # torch's samplers and meshes, Accelerate, Megatron-LM
    **_for("num_replicas num_processes dp_size data_parallel_size", "`world_size`"),
    **_for("dp_rank data_parallel_rank process_index global_rank", "`rank`"),
    "local_rank": "`rank`, which counts the ranks of all machines",
    **_for(
        "tensor_parallel_size pipeline_parallel_size context_parallel_size tp_size tp",
        "`mesh`, or `rank` and `world_size` of the data-parallel group",
    ),
    **_for(
        "micro_batch_size per_device_batch_size per_device_train_batch_size bs",
        "`batch_size`, the sequences of one rank and step",
    ),
    "global_batch_size": "`order=Order(global_batch=…)`, or a `batch_size` that is its share of a rank",
    **_for("workers n_workers num_proc", f"{_WORKERS} num_workers="),
    "device": _PINNED,
    **_for("consumed_samples start_step initial_step resume state_dict", _STATE),
    **_for("skip skip_batches skip_first_batches resume_from_checkpoint", _STATE),
    "eod_mask_loss": "`layout=Layout(mask_document_starts=True)`",
    "reset_position_ids": "`layout=Layout(position_ids=True)`",
    **_for("attention_mask reset_attention_mask create_attention_mask", _INSIDE),
    # Hugging Face datasets, and other words
    **_for("streaming keep_in_memory", "not needed: shards of URLs are fetched as they are read"),
    **_for("map map_fn preprocess processor", "`transform`, on a sample"),
    **_for("buffer_size shuffle_buffer shuffle_buffer_size", "`order=Order(window=…)`"),
    "stopping_strategy": "`Stream(path, repeat=…)` bounds the passes over one dataset",
    **_for("return_tensors format output_format", "`layout=Layout(tensors=…)`"),
    **_for("infinite loop cycle", "`endless=True`"),
    **_for("epochs num_epochs", "a `for` over the loader is an epoch; with `endless=True` it never ends"),
    **_for("random_state random_seed", "`seed`"),
    **_for("prefetch prefetch_size", "`run=Run(prefetch_batches=…)`"),
    **_for("seq_len seq_length max_length max_seq_length block_size", _LENGTH),
    **_for("limit max_samples max_steps num_samples", "`Stream(path, choose=…)`, or end the loop"),
    **_for("endpoint_url region profile anonymous", _STORE),
}
"""Replacements for arguments of torch's DataLoader and samplers, and of the loaders of other tools."""

_RUNS_ON = "`shardkit build --workers N`, or `build(recipe, workers=N)`: a recipe does not say how it is run"
_REPLACES = "`shardkit build --replace`, or `build(recipe, replace=True)`"
_GOES_ON = "not needed: the same command continues where it stopped"

BUILD: Mapping[str, str] = {
    **_for("num_workers num_proc n_workers processes jobs tasks", "`workers`"),
    **_for("force overwrite exist_ok clobber", "`replace=True`"),
    **_for("dry_run explain", "`shardkit build RECIPE --explain`"),
    **_for("resume skip_completed", _GOES_ON),
    **_for("quiet verbose logging_dir", "`progress`"),
    **_for("out target local_dir", "`output`"),
    **_for("data dataset rows records", "`documents`, with a recipe without inputs"),
}
"""Replacements for arguments of functions that process data, such as litdata's `optimize`."""

_WORKER_WORDS = "num_workers workers max_workers num_proc processes jobs"

TRANSFER: Mapping[str, str] = {
    **_for(_WORKER_WORDS, "`threads`"),
    **_for("force overwrite exist_ok", "`replace=True`"),
    **_for("resume continue_", _GOES_ON),
    **_for("quiet verbose", "`progress`"),
    **_for("cache_dir cache_bytes", "`shardkit.warm` fills the cache of a run"),
    **_for("endpoint_url region profile anonymous", _STORE),
}
"""Replacements for arguments of functions that copy or check files, such as `upload_folder`."""

_NO_KEYS = "keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a `profile`, never from options"

STORAGE: Mapping[str, str] = {
    **_for("endpoint endpoint_uri s3_endpoint url", "`endpoint_url`"),
    **_for("region_name aws_region", "`region`"),
    **_for("profile_name aws_profile", "`profile`"),
    **_for("key secret access_key secret_key aws_access_key_id aws_secret_access_key", _NO_KEYS),
    **_for("token aws_session_token session_token", _NO_KEYS),
    **_for("anon no_sign_request unsigned", "`anonymous`"),
    **_for("addressing_style force_path_style use_path_style", "`path_style`"),
    **_for("timeout", "`read_timeout_seconds`, or `retry_seconds` for the whole operation"),
    **_for("retries max_retries max_attempts", "`retry_seconds`: requests are repeated for this time"),
    **_for("max_pool_connections max_concurrency", "`connections`"),
    **_for("server_side_encryption sse", "`encryption`"),
}
"""Replacements for options of stores of boto3, fsspec and the AWS command line."""

TRACE: Mapping[str, str] = {
    **_for("index sample sample_id row_id position", "`row`, the number of a row"),
    **_for("urls links", "`url`, one or a list of them"),
    **_for("doc doc_id doc_ids documents docid", "`document`, an id of shardkit's, or `id`, one of yours"),
    **_for("batch iteration global_step", "`step`, counted from 1, with `state` and `batch_size`"),
    **_for("checkpoint", "`state`, of `loader.state_dict()` or its file"),
    **_for("seed shuffle lanes window tail", "`state`, of `loader.state_dict()`, which has the whole order"),
}
"""Words for questions about documents that `trace` calls by another name."""

OPEN: Mapping[str, str] = {
    "split": "the sub-folder of the path or URL",
    **_for("endpoint_url region profile anonymous", _STORE),
    **_for("cache_dir cache_bytes cache_limit", "`cache=CacheOptions(…)` of shardkit.cache"),
    **_for("streaming keep_in_memory", "not needed: samples are read when they are asked for"),
    **_for("remote local", "the path or URL, as the first argument"),
    **_for("seq_len seq_length max_length block_size", "`sequence_length`"),
}
"""Replacements for arguments of Hugging Face's `load_dataset` and others that open a dataset."""

_OF_SHARDS = "`shard_bytes`, the size of a shard; their number follows from it"
_SHARD_WORDS = (
    "size_limit shard_size max_shard_size chunk_size chunk_bytes num_shards num_chunks maxsize maxcount"
)

WRITER: Mapping[str, str] = {
    **_for(_SHARD_WORDS, _OF_SHARDS),
    **_for(
        "out output_dir remote local path",
        "the folder, as the first argument; `sk.upload` sends it to a store when it is complete",
    ),
    "keep_local": "not needed: the folder stays; `sk.upload` sends it to a store",
    **_for(
        "exist_ok overwrite mode append",
        "a finished dataset is not changed; to append, write a part into a new sub-folder, and `sk.merge`",
    ),
    **_for("progress_bar retry", "not needed: the writer sends nothing; `sk.upload` shows its progress"),
    "max_workers": "each process writes a part of its own, and `sk.merge` joins them",
}
"""Replacements for arguments of MosaicML's `MDSWriter`, litdata's `optimize`, webdataset's `ShardWriter`."""

DATASET: Mapping[str, str] = {
    "tail": "`dataset[-5:]`",
    "take": "`dataset.head(n)`",
    "skip": "`dataset[n:]`",
    **{f"to_{kind}": f"`dataset[:].to_{kind}()`" for kind in ("numpy", "torch")},
    "to_dict": "`dataset[:].to_numpy()`",
    "to_list": "`list(dataset)`",
    **_for("df with_format set_format", "`dataset.to_pandas()`, `to_arrow()`, or `dataset[:].to_torch()`"),
    "map": "`StreamingLoader(dataset, transform=…)`, or a `python` step of a recipe",
    "filter": "`Stream(dataset, exclude=rows)`, or a filter of a recipe",
    "shuffle": "`StreamingLoader(dataset, seed=…)` shuffles; `dataset.sample(n)` draws rows",
    **_for("schema info", "`dataset.features`, or `print(dataset)`"),
    "column_names": "`list(dataset.features)`",
    **_for("select_columns remove_columns", "`sk.open(path, columns=[…])` names the columns to keep"),
    **_for("num_rows size count num_samples", "`len(dataset)`"),
    "shape": "`len(dataset)` and `dataset.features`",
    "decode_tokens": "`dataset.text(row)`, or `dataset.tokenizer.decode(ids)`",
    "train_test_split": "`split` of a recipe, or ranges such as `dataset[:1000]`",
    **_for("push_to_hub save_to_disk upload", "`shardkit.upload(path, target)`"),
    **_for("batch iter dataloader", "`StreamingLoader(dataset, batch_size=…)`"),
    "id": "`dataset.documents(row)`",
}
"""Replacements for attributes of datasets of Hugging Face, MosaicML and torch."""

_MIXED = (
    "a loader mixes datasets, `StreamingLoader([Stream(a, weight=…), Stream(b)], …)`; for one dataset, name "
    "both inputs in a recipe"
)
_VERB = "the command `shardkit"

PACKAGE: Mapping[str, str] = {
    **_for("MDSWriter ShardWriter", "`MdsWriter`"),
    "merge_index": "`merge(folder)`",
    "StreamingDataset": "`shardkit.loaders.pytorch.StreamingDataset`, or `StreamingLoader`",
    "StreamingDataLoader": "`shardkit.loaders.pytorch.StreamingDataLoader`, or `StreamingLoader`",
    **_for("DataLoader Loader loader WebDataset WebLoader", "`StreamingLoader`"),
    **_for("load load_dataset load_from_disk read LocalDataset", "`open(path)`"),
    **_for("optimize tokenize run write LocalPipelineExecutor", "`build(recipe)`"),
    **_for("info stats describe", f"`print(open(path))`, or {_VERB} info PATH`"),
    **_for("concat concatenate_datasets interleave_datasets CombinedStreamingDataset", _MIXED),
    **{verb: f"{_VERB} {verb}`" for verb in ("audit", "clean", "demo", "init", "plan", "view")},
    "push": "`upload`",
    "pull": "`download`",
    **_for("StepReport Accelerators", "`shardkit.loaders.step_report`"),
    "CudaPrefetcher": "`shardkit.loaders.cuda.CudaPrefetcher`",
    "CacheOptions": "`shardkit.cache.CacheOptions`",
    "LoaderConfig": "`shardkit.loaders.config.LoaderConfig`",
}
"""Replacements for names of other packages, and places of names that are not public here."""

_AMOUNTS = (
    "`amounts` at the top level says how much of each source is used, as {web: {documents: 1M}} does; "
    "`limit` at the top level is for trials, and a loader's mixtures weight datasets in training"
)
_AMOUNT_WORDS = """
    amount choose downsample epochs max_documents max_tokens num_samples max_samples percentage
    proportion ratio repeat repetitions sample sample_rate sampling share subsample tokens upsample
    weight weights mix mixture blend num_tokens token_budget fraction data_mixture
"""
_RUN_WORDS = """
    workers num_workers n_workers num_proc nproc processes jobs tasks executor num_processes
    preprocessing_num_workers
"""
_TEXT_WORDS = """
    text_column text_field text_key content content_column content_key content_field json_keys
    text_keys column field body document_column
"""
_LENGTH_WORDS = """
    seq_len seq_length seqlen max_length max_seq_len max_seq_length context_length context_size
    context_window block_size concat_tokens
"""
_HYDRA = (
    "a recipe is plain YAML without composition: pass the composed config as a dict, "
    "`sk.build(OmegaConf.to_container(config, resolve=True))`"
)
_PLACE_WORDS = """
    out out_dir output_dir output_folder output_path output_prefix save_dir save_path target
    destination dir folder url bucket local remote
"""

_RECIPE = {
    **_for(_AMOUNT_WORDS, _AMOUNTS),
    **_for(_RUN_WORDS, _RUNS_ON),
    **_for("engine ray ray_address cluster", "`shardkit build --engine ray`"),
    **_for("logging log_level log_file verbose", "`shardkit build --log-file FILE`"),
    **_for(
        "wandb mlflow tensorboard",
        "`shardkit build --timings FILE` for a build; `log_to` of shardkit.loaders.step_report for training",
    ),
    **_for("defaults hydra _target_ interpolate", _HYDRA),
    **_for(
        "data dataset datasets data_path data_dir data_files train_files path paths files source "
        "sources input_dir dataset_path corpus",
        "`inputs`: a path, a glob, or a list of them",
    ),
    **_for(_TEXT_WORDS, "`inputs[].text`, the field that has the text"),
    **_for(
        "pipeline stages processors operations transforms ops",
        "`steps`, the filters and duplicate removals in the order in which they run",
    ),
    "deduplication": "`dedup`",
    **_for("minhash fuzzy fuzzy_dedup near_dedup minhash_dedup lsh", "`dedup.near`"),
    **_for(_LENGTH_WORDS, "`pack.sequence_length`"),
    **_for(
        "batch_size global_batch_size micro_batch_size",
        "a loader has `batch_size`: rows are not stored in batches",
    ),
    "shuffle": "not needed: rows are shuffled by `seed`; `pack.order: source` keeps the order of the inputs",
    **_for("random_seed shuffle_seed random_state", "`seed`"),
    **_for(_PLACE_WORDS, "`output`: a folder or URL, or a mapping with `path`"),
    **_for("tmp tmp_dir temp_dir work_dir working_dir logging_dir", "`work`"),
    "cache_dir": "`work` for files between the steps; a loader has `cache_dir`",
    **_for(_SHARD_WORDS, "`output.shard_bytes`"),
    "vocab_size": "not needed: follows from `tokenizer.path`",
    **_for("name_or_path tokenizer_name_or_path tokenizer_model tokenizer_path", "`tokenizer.path`"),
    **_for(
        "val validation test eval train_ratio test_size val_size splits validation_split "
        "split_ratio train_test_split holdout",
        "`split`, such as {validation: 0.1%}",
    ),
    **_for("languages lang", "the filter `language`"),
    **_for("upload push_to_hub hub", "`output: URL`, or `shardkit upload` afterwards"),
    **_for("overwrite force exist_ok replace", _REPLACES),
    **_for("resume skip_completed", _GOES_ON),
}
_TOKENIZER_FILE = "`path`: a tokenizer.json, or the name of a model on the Hugging Face Hub"
_LINES = "`lines`, with `unit` for what is cut: line, paragraph or span"

RECIPE: Mapping[str, Mapping[str, str]] = {
    "": _RECIPE,
    "inputs": {
        **_for(f"{_AMOUNT_WORDS} limit", _AMOUNTS),
        **_for(_RUN_WORDS, _RUNS_ON),
        **_for(_TEXT_WORDS, "`text`, the field that has the text"),
        **_for("id_key id_column", "`id`"),
        **_for("name label domain subset", "`source`, the name that the card shows"),
        **_for("type kind file_type reader_type", "`format`"),
        **_for(
            "glob glob_pattern pattern data_files data_dir data_folder file url_prefix urls dataset "
            "data folder dir paths input",
            "`path`: a file, folder, glob or URL",
        ),
        "split": "`path`, with a glob for the files of this split",
        "streaming": "not needed: files are read in pieces",
        "compression": "not needed: found by the names and the first bytes of the files",
        "shuffle": _RECIPE["shuffle"],
        **_for("recursive recurse", "`path`, with ** for folders at any depth"),
        **_for("html extractor", "`extract`"),
    },
    "dedup": {
        **_for("minhash fuzzy fuzzy_dedup lsh near_dup near_dedup", "`near`"),
        **_for("threshold jaccard jaccard_threshold similarity", "`near.similarity`"),
        **_for("num_perm num_hashes num_permutations", "`near.minhash.permutations`"),
        **_for("substring exact_substring suffix_array span spans", "`lines: {unit: span}`"),
        **_for("line paragraph paragraphs sentence sentences ccnet", _LINES),
        **_for("embedding embeddings semdedup", "`semantic`"),
        "document": "`exact`",
    },
    "dedup.near": {
        **_for("threshold jaccard jaccard_threshold", "`similarity`"),
        **_for("num_perm num_hashes num_permutations", "`minhash.permutations`"),
        **_for("n_grams ngrams ngram_size shingle_size n", "`minhash.ngram`"),
        **_for("b num_buckets num_bands", "`bands`"),
        **_for("r hashes_per_bucket num_rows", "`rows`"),
    },
    "tokenizer": {
        **_for(
            "name model type file vocab vocab_file pretrained name_or_path "
            "pretrained_model_name_or_path tokenizer_name_or_path",
            _TOKENIZER_FILE,
        ),
        **_for("add_eos append_eod eod eos_id eos_token_id", "`eos`, the token itself"),
        **_for("add_bos bos_id bos_token_id", "`bos`, the token itself"),
        **_for("add_special_tokens", "`eos` and `bos`, the tokens around a document"),
        **_for(_LENGTH_WORDS, "`pack.sequence_length`"),
    },
    "pack": {
        **_for(f"{_LENGTH_WORDS} length", "`sequence_length`"),
        **_for("packing method mode algorithm type no_wrap split_documents", "`strategy`"),
        "shuffle": "`order`",
        **_for("drop_last drop_remainder", "not needed: `tail` of the loader decides"),
        **_for("bos_text bos_idx", "`tokenizer.bos`, or `row_bos`"),
        **_for("eos_text eod", "`tokenizer.eos`"),
    },
    "output": {
        **_for(_SHARD_WORDS, _OF_SHARDS),
        **_for(_PLACE_WORDS, "`path`: a folder or URL"),
        "type": "`format`",
        **_for("dtype token_dtype", "not needed: the smallest type that holds the vocabulary"),
        **_for("overwrite force exist_ok replace", _REPLACES),
    },
}
"""Replacements for keys of configs of other tools, by the key path (without numbers) of the mapping."""

FILTERS: Mapping[str, str] = {
    **_for("lid langid langdetect language_id lang fasttext_lid glotlid", "`language`"),
    "fasttext": "`language` for a model of languages, `classifier` for others",
    **_for("kenlm ccnet", "`perplexity`"),
    **_for(
        "min_words max_words word_count min_length min_chars max_chars",
        "`length`, such as {length: {min_words: 50}}",
    ),
    **_for("custom function lambda callable code regex LambdaFilter", "`python`, with a function of yours"),
    **_for("toxicity nsfw edu fineweb_edu quality_classifier", "`classifier`, with a model"),
    **_for("blocklist url_filter domains url_blocklist", "`url_lists`"),
    **_for("minhash fuzzy dedup", "`dedup`, at the top level, or a step in `steps`"),
    "llm": "`ask`",
}
"""Replacements for names of filters of datatrove and other tools."""

_TO_BUILD = "`build`; `shardkit init DATA` writes the recipe that it needs"
_ROWS = "`view` shows rows in the browser; in Python `shardkit.open(PATH)[:5]`"

VERBS: Mapping[str, str] = {
    **_for("help usage man", "`shardkit --help`, or `shardkit VERB --help`"),
    "version": "`shardkit --version`",
    **_for("head tail cat show print peek sample rows less", _ROWS),
    **_for("stats stat describe inspect ls list count summary schema wc du card size", "`info`"),
    **_for("merge concat join mix combine interleave append", _MIXED),
    **_for(
        "run make tokenize preprocess process filter dedup deduplicate write optimize prepare "
        "execute resume continue ingest",
        _TO_BUILD,
    ),
    **_for(
        "train fit launch load stream",
        "a loop of yours over `StreamingLoader`; examples/train_plain.py is one, and `plan train` estimates",
    ),
    "shuffle": "`convert SRC DST --shuffle`; loaders shuffle by themselves",
    "split": "`split` of a recipe",
    **_for("rewind spikes spike", "`trace PATH --losses FILE`"),
    **_for("push sync put cp copy publish send", "`upload`"),
    **_for("pull fetch get cache warm prefetch", "`download`"),
    **_for(
        "rm remove delete",
        "a dataset is a folder or prefix, removed as any other; `clean` removes files between the steps",
    ),
    **_for(
        "check validate lint test doctor fsck",
        "`verify PATH` for a dataset, `build RECIPE --explain` for a recipe",
    ),
    **_for("create new start scaffold setup quickstart", "`init`"),
    **_for("serve explore ui web browse open report dashboard explorer", "`view`"),
    **_for("export import migrate reshard transcode", "`convert`"),
    **_for("estimate cost price", "`plan`"),
    **_for(
        "bench benchmark profile",
        "`plan build RECIPE` measures a build, and `loader.stats()` says what a loop waited for",
    ),
    **_for("why", "`trace PATH --why`"),
    **_for("dropped", "`trace PATH --dropped`"),
    **_for("dups search find grep documents lookup", "`trace`"),
    **_for("status explain diff", "`build RECIPE --explain`"),
    **_for("index", "`dedup-index`"),
    **_for("config set", "`build RECIPE --set KEY=VALUE`"),
    **_for("completion completions", "`shardkit --completion SHELL`"),
    **_for("repack", "`pack`"),
}
"""Replacements for verbs of other commands."""

OPTIONS: Mapping[str, str] = {
    **_for("num_workers num_proc nproc jobs j processes n_workers num_processes", "--workers --threads"),
    **_for("o out out_root output_dir output_path output_folder dest target", "--output"),
    **_for("force overwrite exist_ok f yes y clobber", "--replace --force"),
    **_for("max_samples num_samples max_records max_documents n head", "--limit"),
    **_for("plan check what_if simulate n", "--explain --dry-run"),
    **_for("override overrides param opt D", "--set"),
    **_for("q silent no_progress", "--quiet"),
    **_for("log logging logfile", "--log-file"),
    **_for("traceback trace", "--debug"),
    **_for("endpoint s3_endpoint endpoint_uri", "--endpoint-url"),
    **_for("aws_profile", "--profile"),
    **_for("index n_row sample", "--row"),
    **_for("global_step iteration iter", "--step"),
    **_for("bs micro_batch_size", "--batch-size"),
}
"""Options of other commands, each with ours that may be meant: the first that a verb has."""

RENAMED: Mapping[str, str] = {
    "virtual_style": "path_style=false",
    "eos": "eos_id",
    "bos": "bos_id",
    "pad": "pad_id",
    "price_core_hour": "core_hour",
    "price_get": "get_1000",
    "price_put": "put_1000",
    "price_gb_month": "gb_month",
    "price_egress_gb": "egress_gb",
}
"""Options of earlier versions of shardkit, each with the key (and value) that replaces it."""

OPTION_SENTENCES: Mapping[str, str] = {
    "keep": "the folder is kept unless --clean is given",
    **_for(
        "v verbose log_level",
        "progress is shown unless --quiet is given; --log-file keeps it, --debug shows where an error arose",
    ),
    **_for("resume skip_completed continue", _GOES_ON),
    **_for(
        "input inputs data files i input_dir",
        "`--set inputs=PATH`, or `shardkit init PATH` for a recipe of its own",
    ),
    **_for("config config_name config_path c recipe", "the recipe, without an option"),
    **_for("search grep find query", "the page Search of `shardkit view PATH`, or `trace PATH --url URL`"),
}
"""Sentences for options of other commands that no option replaces."""
