"""Streams and options of `StreamingLoader`, besides the arguments that everyone uses.

Common options are keyword arguments; all others are in three groups: `Layout`, `Order` and `Run`.
`LoaderConfig` holds all options with their defaults and checks them. `LoaderOptions` repeats the names as a
TypedDict, because type checkers and editors need one, and the signature of `StreamingLoader` lists those that
most people use, because tooltips and `help()` show no names of a TypedDict; a test ensures that all agree.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Rational
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex, TypeAlias, TypedDict

from shardkit.files import local_path
from shardkit.formats.mds.images import IMAGE_WORDS, pixel_decoder
from shardkit.hints import refuse_unknown
from shardkit.order.balance import Balance, DocumentIds, cost_model
from shardkit.storage.store import StorageOptions
from shardkit.synonyms import FOREIGN, STREAM
from shardkit.units import parse_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardkit.datasets.dataset import Dataset
    from shardkit.datasets.document_values import ValueType
    from shardkit.datasets.text_packer import Pack, TokenizerChoice
    from shardkit.order.exclusions import Exclusions
    from shardkit.order.order import Shuffle
    from shardkit.order.run_settings import Tail
    from shardkit.order.token_mask import TokenMask

ExcludedRows: TypeAlias = "Exclusions | Iterable[int | tuple[int, int]] | str | os.PathLike[str] | None"
MaskedTokens: TypeAlias = "TokenMask | Iterable[tuple[int, int, int]] | str | os.PathLike[str] | None"
TokenDtype: TypeAlias = "torch.dtype | np.dtype[np.generic] | type | str | None"
Transform: TypeAlias = "Callable[[dict[str, Any]], dict[str, Any]] | RandomTransform"
RandomTransform: TypeAlias = "Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]"
Collate: TypeAlias = "Callable[[list[dict[str, Any]]], Any] | RandomCollate"
RandomCollate: TypeAlias = "Callable[[list[dict[str, Any]], np.random.Generator], Any]"
DataSource: TypeAlias = "str | os.PathLike[str] | Dataset | Sequence[Stream]"
Weights: TypeAlias = "Sequence[float | Fraction] | Mapping[str, float | Fraction]"
"""Weights of all streams in stream order, or by name; streams that are not named get 0."""

MAX_PREFETCH_BATCHES = 1 << 16
MAX_THREADS = 1024
_VALUE_TYPES = ("float32", "float64", "int64", "hash")  # of `ValueType`, without an import of pyarrow
_DOCUMENT_OPTIONS = ("position_ids", "document_ids", "cu_seqlens", "doc_lens", "seq_lengths", "block_mask")

# Options that may differ between ranks: they affect neither the samples of a batch nor its form.
_OF_ONE_RANK = frozenset(
    (
        *("prefetch_batches", "prefetch_bytes", "timeout_seconds", "cache_dir", "cache_bytes", "connections"),
        *("storage", "verify", "usage_log", "stop_grace_seconds", "stop_together", "threads"),
        *("mesh", "group"),
    )
)
# Options whose value, given or default, is part of a loader's state.
_IN_STATE = frozenset(("lanes", "window", "schedule", "epoch_samples", "global_batch"))

# A loop that requests its next batch sooner than this only reads: prefetching has no work to overlap with.
BUSY_SECONDS = 200e-6


class _Named:
    """Settings whose unknown keywords are refused with a suggestion, which a generated __init__ lacks."""

    __slots__ = ()
    _words: ClassVar[Mapping[str, str]] = FOREIGN

    if not TYPE_CHECKING:

        def __new__(cls, *values: object, **named: object) -> _Named:
            refuse_unknown(f"{cls.__name__}()", named, [field.name for field in fields(cls)], cls._words)
            return object.__new__(cls)


@dataclass(frozen=True, slots=True, repr=False)
class Stream(_Named):
    """A dataset and its share of a mixture.

    Of every `sum of weights` consecutive samples, exactly `weight` come from this stream. Each pass over a
    stream is shuffled differently.
    """

    _words: ClassVar[Mapping[str, str]] = {**FOREIGN, **STREAM}

    path: str | os.PathLike[str] | Dataset
    weight: float | Fraction = 1
    """A whole number, a `Fraction` or a decimal such as 0.7, taken exactly as written; 0 for a stream that a
    schedule adds later. A float without a short decimal form, such as 1 / 6, is taken as that fraction."""
    name: str | None = None
    """Name of the stream in schedules, errors and metrics; default: the last part of the path."""
    repeat: float | None = None
    """Maximum number of passes over the dataset; None: no limit."""
    choose: int | None = None
    """Maximum number of samples to deliver; None: no limit."""
    exclude: ExcludedRows = None
    """Rows that are never delivered: numbers, (first, end) ranges or a file of them (`Exclusions.read`)."""
    mask: MaskedTokens = None
    """Tokens whose labels are -100: (row, first, end) spans or a file of them (`TokenMask.read`)."""

    def __repr__(self) -> str:
        """Return the path and all fields that differ from their defaults."""
        path = self.path if isinstance(self.path, (str, os.PathLike)) else self.path.location
        changed = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        values = [f"{field.name}={getattr(self, field.name)!r}" for field in changed]
        return f"Stream({', '.join([repr(os.fspath(path)), *values])})"

    def __post_init__(self) -> None:
        _to_plain_int(self, "weight", "choose")
        is_number = isinstance(self.weight, (Rational, float)) and not isinstance(self.weight, bool)
        if not is_number or not 0 <= self.weight < math.inf:
            raise ValueError(f"a stream's weight must be a number of at least 0, not {self.weight!r}")
        if self.repeat is not None and not 0 < self.repeat < math.inf:
            raise ValueError(f"repeat must be above 0, not {self.repeat!r}")
        if self.choose is not None and (isinstance(self.choose, bool) or self.choose < 1):
            raise ValueError(f"choose must be a whole number of at least 1, not {self.choose!r}")

    def limit(self, samples: int) -> int | None:
        """Return how many samples of a dataset with `samples` samples may be delivered; None: no limit."""
        limits = [] if self.repeat is None else [math.floor(self.repeat * samples)]
        return min([*limits, *([] if self.choose is None else [self.choose])], default=None)


def _to_plain_int(settings: Stream | LoaderConfig, *names: str) -> None:
    """Replace NumPy integers in these fields by Python ints, because JSON cannot hold NumPy integers."""
    for name in names:
        value = getattr(settings, name)
        if type(value) not in (int, bool) and isinstance(value, numbers.Integral):
            object.__setattr__(settings, name, int(value))


class _Group(_Named):
    """Options that are given together, such as layout=Layout(cu_seqlens=True)."""

    _given: frozenset[str]

    if not TYPE_CHECKING:

        def __new__(cls, **named: object) -> _Group:
            group = super().__new__(cls, **named)
            group.__dict__["_given"] = frozenset(named)
            return group

    @property
    def given(self) -> dict[str, Any]:
        """The options that were passed, including those equal to their default."""
        return {name: value for name, value in vars(self).items() if name in self._given}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in self.given.items())})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(_Group):
    """The form of a batch: fields besides tokens and labels, names and shapes of fields, masked labels."""

    keep_length: bool = False
    """With labels="shifted": keep each row's last token, with label -100, so that rows of L tokens stay L."""
    mask_document_starts: bool | None = None
    """Set labels that are a document's first token to -100, so that no document is predicted from another.

    Default: only if an option that describes documents (`position_ids`, `cu_seqlens`, ...) is set."""
    max_repetitions: int | None = None
    """Set all labels of a row to -100 if it repeats a sequence of 1 to 13 tokens consecutively more often
    than this. Such rows make the loss spike. OLMo 2 trains with 31."""
    position_ids: bool = False
    """Add `position_ids`: int64, counted from 0 in each document."""
    document_ids: bool = False
    """Add `document_ids`: int32, the documents of a row numbered from 0; padding counts as one more."""
    cu_seqlens: bool | int = False
    """Add `cu_seqlens` (int32, document bounds in the flattened batch) and `max_seqlen` (int).

    A number n pads `cu_seqlens` to int32[n] by repeating the last bound and sets `max_seqlen` to the length
    of a row, so that shapes are constant for compiled models. A batch of more than n - 1 documents is an
    error."""
    doc_lens: bool = False
    """Add `doc_lens` (int32[rows, maximum documents per row], padded with 0) and `max_doc_lens` (list)."""
    seq_lengths: bool = False
    """Add `seq_lengths`: for each row the list of its documents' lengths."""
    block_mask: bool | int = False
    """Add the tables of FlexAttention's block mask, causal inside documents, for `block_mask.block_mask_of`.

    A number is the size of a block in tokens; True means 128."""
    document_values: Sequence[str] | Mapping[str, ValueType] | None = None
    """Add a field [rows, maximum documents per row] for each of these values of documents, as `doc_lens`.

    For example ["score", "source"]: fields that a build has in its provenance (`source`, `url`, `id`, … and
    those in `metadata`), or other columns of the files that `tokenizer` reads. Numbers are float32, texts
    their `value_hash` as int64, `source` the number of a name in `loader.sources`. Missing values are NaN or
    -1. {"topic": "int64"} chooses among float32, float64, int64 and hash."""
    flat: bool = False
    """Concatenate the rows: deliver tokens, labels, position ids and document ids with one dimension."""
    rename: Mapping[str, str] | None = None
    """Other names for fields of the batch, such as {"tokens": "input_ids"}."""
    tensors: Literal["torch", "numpy"] = "torch"
    """"numpy" delivers NumPy arrays and does not import torch."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Order(_Group):
    """The order of samples and their assignment to ranks, besides seed, shuffle and tail."""

    lanes: int | None = None
    """Number of lanes of the window shuffle, kept in the state; default: depends on the number of shards."""
    window: int | None = None
    """Number of samples shuffled together in a lane, kept in the state; default: the samples of two average
    shards, or of 64 shards over all lanes if that is more."""
    schedule: Sequence[tuple[int, Weights]] | None = None
    """A mixture's weights by position (in samples over all ranks), instead of the streams' own weights.

    For example [(0, {"web": 3, "code": 1}), (81_000_000, {"web": 1, "code": 1})]."""
    epoch_samples: int | None = None
    """Number of samples in an epoch, kept in the state; default: the samples of all streams together.

    Decides only where a `for` ends and where `tail` applies. The order of samples continues across epochs:
    each sample comes once before any sample is repeated."""
    global_batch: SupportsIndex | Sequence[tuple[int, int]] | None = None
    """Number of sequences in an optimizer step over all ranks, for `steps()`; kept in the state.

    Or a schedule by position, such as [(0, 256), (2_000_000, 512)]: each size applies from the first step
    that starts at or after its position."""
    balance: Balance = None
    """Balance the work of ranks: assign the rows of each global batch to ranks by their cost.

    "attention" uses the sum of squared document lengths, for attention inside documents; a `CostModel` sets
    other costs. None: rank r takes the r-th part of each batch. Must be equal on all ranks. For remote data
    see shardkit.tools.row_costs."""
    mixed_lengths: bool = False
    """Allow streams whose samples differ in shape, if a schedule never mixes them in one batch."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(_Group):
    """How batches are fetched and waited for, and when a run gives up. Does not affect which samples come."""

    prefetch_batches: int = 64
    """Maximum number of batches ready ahead of the training loop; 0: no thread, batches made on request."""
    prefetch_bytes: int | str = "256MiB"
    """Maximum number of bytes ready ahead of the training loop; one batch is always allowed."""
    threads: int = 0
    """Number of threads that decode and transform the samples of a batch; 0: the one that makes the batch.

    For images, whose decoders run in parallel. Transforms that use the global random generators, with one
    parameter, run one after another in the loop's thread."""
    connections: int = 16
    """Number of shards, or ranges of shards, that a process fetches at a time."""
    timeout_seconds: float = 600.0
    """Longest wait for one prefetched batch, in seconds."""
    verify: bool = False
    """Check each local shard's hashes when it is first opened, which takes 18 ms for 64 MiB with xxh64.

    Remote shards are always checked. Raises ValueError if a local dataset's index records no hashes."""
    stop_together: bool = True
    """Report errors of this loader to other ranks, and raise theirs here as `PeerError`.

    Give False for a loader whose errors the loop catches, such as an evaluation loader: a reported error
    stays in effect as long as the process group exists."""
    stop_grace_seconds: float | None = None
    """End this process if its loop has not returned to its loader this many seconds after another rank fails.

    Default: never. The loop gets `PeerError` at its next batch; a collective that hangs is left to the
    timeout of its process group."""


GROUPS: Mapping[str, type[_Group]] = {"layout": Layout, "order": Order, "run": Run}

_SPELLED = {
    field.name: f"{name}={kind.__name__}({field.name}=…)"
    for name, kind in GROUPS.items()
    for field in fields(kind)  # type: ignore[arg-type]
}


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as one flat dict, with the options of the groups moved to the top level.

    In YAML and JSON a group is a mapping. Raises TypeError if a group has another type, or if an option is
    given outside its group.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        kind = GROUPS.get(name)
        if name in _SPELLED:
            raise TypeError(f"{name} belongs to a group of options: pass {_SPELLED[name]}")
        if kind is None:
            flat[name] = value
        elif isinstance(value, (kind, Mapping)):
            flat |= (kind(**value) if isinstance(value, Mapping) else value).given
        else:
            raise TypeError(f"{name} must be a shardkit.loaders.{kind.__name__}(…), not {value!r}")
    return flat


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Collect flat options into their groups `Layout`, `Order` and `Run`: the inverse of `flattened`."""
    options = {name: value for name, value in flat.items() if name not in _SPELLED}
    for name, kind in GROUPS.items():
        own = {field.name for field in fields(kind)} & flat.keys()  # type: ignore[arg-type]
        if own:
            options[name] = kind(**{option: flat[option] for option in flat if option in own})
    return options


class FurtherOptions(TypedDict, total=False):
    """Keyword arguments of `StreamingLoader` that its signature does not list; see `LoaderConfig`."""

    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    collate_fn: Collate | None
    restart: bool
    storage: StorageOptions | None
    tokenizer: TokenizerChoice | None
    pack: Pack
    token_dtype: str | None
    per_file: bool
    usage_log: str | os.PathLike[str] | None
    mesh: DeviceMesh | None
    group: ProcessGroup | None


class LoaderOptions(FurtherOptions, total=False):
    """All options of a loader as keyword arguments; `LoaderConfig` documents them and sets the defaults."""

    labels: bool | Literal["shifted"]
    columns: Sequence[str] | None
    sequence_length: int | None
    decode: bool | str
    transform: Transform | None
    endless: bool
    cache_dir: str | os.PathLike[str] | None
    cache_bytes: int | str | None
    layout: Layout
    order: Order
    run: Run


class RunOptions(LoaderOptions, total=False):
    """Keyword arguments that wrappers pass to `StreamingLoader`: all but batch size, rank and world size."""

    seed: int
    shuffle: Shuffle
    tail: Tail
    dtype: TokenDtype
    return_ids: bool


# Names that an unknown option may have meant, but that a config does not have.
_OF_THE_LOADER = (*RunOptions.__annotations__, "batch_size", "rank", "world_size")


@dataclass(frozen=True, kw_only=True, repr=False)
class LoaderConfig(Layout, Order, Run):
    """All options of a loader, checked, with defaults; it inherits the options of Layout, Order and Run."""

    labels: bool | Literal["shifted"] = False
    """Add `labels`: int64, -100 for padding. True: the tokens themselves, for models that shift labels.

    "shifted": label i is the token that follows token i. Rows of L + 1 tokens give `tokens` and `labels` of
    L, and every other field describes these L tokens. True is Hugging Face's convention."""
    eos_id: int | None = None
    """Id that ends a document; default: the id in the dataset's card."""
    bos_id: int | None = None
    """Id that begins each document, instead of `eos_id`, for data whose documents have no end token."""
    pad_id: int | None = None
    """Id used only for padding, anywhere in a row: its labels are -100, and it counts as one document.

    For data padded by other tools; rows that are padded with the eos id need no option."""
    columns: Sequence[str] | None = None
    """Deliver these columns only; default: all. Of row files, the others are not read."""
    decode: bool | str = True
    """How images and members of tars are decoded: see `shardkit.open`."""
    transform: Transform | None = None
    """Function that is applied to each sample, a dict {column: value}, and returns the sample to deliver.

    f(sample, rng) draws from a NumPy generator with a seed of the sample's position; f(sample), such as
    torchvision's transforms, from the global generators of Python, NumPy and torch, which are seeded with it.
    So augmentation resumes exactly, for any number of ranks and workers. Numbers, arrays and tensors that it
    returns are stacked, and must have one shape in a batch; other values become lists. Must be picklable for
    worker processes that are not forked. See `shardkit.loaders.transform`."""
    collate_fn: Collate | None = None
    """Function that makes the batch, of any type, from the list of a batch's samples after `transform`.

    May have the parameter `rng`, too."""
    endless: bool = False
    """Continue with the next epoch instead of ending the `for`; the loader then has no length."""
    restart: bool = False
    """Start every `for` at the first sample again, in the same order: for evaluation.

    A loaded state is checked, but the next `for` still starts at the first sample."""
    cache_dir: str | os.PathLike[str] | None = None
    """Folder that caches a remote dataset's shards for all processes of the machine; None: cache in memory.

    A local dataset is read in place, never copied or removed."""
    cache_bytes: int | str | None = None
    """Maximum size of the cache; default: free disk less a reserve, or in memory a quarter of free memory up
    to 8 GiB."""
    storage: StorageOptions | None = None
    """Endpoint, region, profile, … of the store; default: the usual AWS environment."""
    sequence_length: int | None = None
    """Read flat token files in place, in rows of this many tokens: Megatron's .idx/.bin, other .bin, .npy.

    Paths may be files, folders and patterns. If given, all other datasets must have rows of this length;
    lists of integers in row files become such rows."""
    tokenizer: TokenizerChoice | None = None
    """Tokenize the texts of row files while loading, and pack them in rows of `sequence_length`.

    A tokenizer.json, its folder or a model's name; or a mapping with the keys of `tokenizer` in a recipe:
    {"path": …, "eos": …, "bos": …}. The text is the column of `columns`, or else "text" or "messages"
    (conversations, rendered by the chat template, with a loss mask). The first start reads all texts once to
    count rows; the result is kept in `cache_dir`, or in ~/.cache/shardkit."""
    pack: Pack = "best_fit"
    """How `tokenizer` packs documents: "best_fit" cuts only those longer than a row, "concat" at each row."""
    token_dtype: str | None = None
    """Type of the ids in flat files that do not record it (nanoGPT .bin, OLMo .npy), such as "uint32"."""
    per_file: bool = False
    """Start a new row at each flat file and drop its incomplete last row; default: join the files."""
    usage_log: str | os.PathLike[str] | None = None
    """Folder, shared by all ranks, for logs of samples handed to the loop; see `shardkit audit --logs`."""
    mesh: DeviceMesh | None = None
    """Take rank and world size from the dims of this mesh that divide data, in mesh order: dp_replicate,
    dp_shard, dp, batch, data_parallel. Processes that differ only in other dims get the same batches."""
    group: ProcessGroup | None = None
    """Take rank and world size from this process group."""

    def __post_init__(self) -> None:
        for name in ("cache_dir", "usage_log"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, local_path(path, name))
        _to_plain_int(
            self,
            *("eos_id", "bos_id", "pad_id", "max_repetitions"),
            *("lanes", "window", "epoch_samples", "prefetch_batches", "connections"),
        )
        if self.sequence_length is None and (self.token_dtype is not None or self.per_file):
            raise ValueError(
                "token_dtype and per_file apply to flat files of tokens only: give sequence_length, too"
            )
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise ValueError(f"columns must be a list of at least one name, not {self.columns!r}")
        if self.mask_document_starts and not self.labels:
            raise ValueError("mask_document_starts masks labels: give labels=True too, or leave it out")
        self._check_functions()
        cost_model(self.balance)  # raises ValueError for an invalid value
        self._check_layout()
        if self.epoch_samples is not None and self.epoch_samples < 1:
            raise ValueError(f"epoch_samples must be at least 1, not {self.epoch_samples}")
        if not 0 <= self.prefetch_batches <= MAX_PREFETCH_BATCHES:
            limits = f"from 0 to {MAX_PREFETCH_BATCHES:,}"
            raise ValueError(f"prefetch_batches must be {limits}, not {self.prefetch_batches}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, not {self.timeout_seconds}")
        for size in (self.prefetch_bytes, self.cache_bytes):
            if size is not None:
                parse_bytes(size)

    def _check_functions(self) -> None:
        if isinstance(self.threads, bool) or not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be from 0 to {MAX_THREADS}, not {self.threads!r}")
        for name in ("transform", "collate_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, not {function!r:.80}")
            wrong = [option for option in self.token_options if option != "balance"]
            if function is not None and wrong:
                raise ValueError(f"{wrong[0]} describes stored tokens: make it in {name}, or leave one out")
        if self.collate_fn is not None and self.rename:
            raise ValueError("collate_fn makes the batch: give its fields their names there, without rename")

    @classmethod
    def of(cls, options: LoaderOptions) -> LoaderConfig:
        """Return the config of these options; raise TypeError with a suggestion for an unknown name."""
        flat = flattened(options)
        of_streams = {field.name: f"Stream(path, {field.name}=…)" for field in fields(Stream)}
        known = [*GROUPS, *(field.name for field in fields(cls))]
        listed_by = "shardkit.loaders.config.LoaderConfig"
        spelled = of_streams | _SPELLED
        refuse_unknown("StreamingLoader()", options, known, FOREIGN, spelled, listed_by, _OF_THE_LOADER)
        return cls(**flat)

    def _check_layout(self) -> None:
        if not isinstance(self.labels, bool) and self.labels != "shifted":
            raise ValueError(f'labels must be True, False or "shifted", not {self.labels!r}')
        if self.keep_length and self.labels != "shifted":
            raise ValueError('keep_length is an option of labels="shifted": give both, or leave it out')
        for name, what in (("cu_seqlens", "a length"), ("block_mask", "a number of tokens")):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (isinstance(value, int) and value >= 2):
                raise ValueError(f"{name} must be True, False or {what} of at least 2, not {value!r}")
        self._check_values()
        if self.tensors not in ("torch", "numpy"):
            raise ValueError(f'tensors must be "torch" or "numpy", not {self.tensors!r}')
        assert self.ids  # raises ValueError if the ids contradict each other
        if self.max_repetitions is not None and (self.max_repetitions < 1 or not self.labels):
            raise ValueError('max_repetitions must be at least 1 and needs labels=True or labels="shifted"')

    def _check_values(self) -> None:
        names = self.document_values
        if names is not None and (isinstance(names, str) or not all(isinstance(one, str) for one in names)):
            raise ValueError(f"document_values must be a list of names, or types by name, not {names!r}")
        for name, kind in names.items() if isinstance(names, Mapping) else ():
            if kind not in _VALUE_TYPES:
                known = ", ".join(_VALUE_TYPES)
                raise ValueError(
                    f"document_values: the type of {name!r} must be one of {known}, not {kind!r}"
                )

    def shared_by_ranks(self, *, order_only: bool = False) -> dict[str, object]:
        """Return the options that must be equal on all ranks, without those in the loader's state.

        `order_only`: return only options that affect the order of samples. Replicas of a rank, such as
        pipeline stages, may read other fields of the same rows.
        """
        left_out = _OF_ONE_RANK | _IN_STATE
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if order_only:
            return {name: options[name] for name in ("endless", "restart")}
        if self.columns is not None:
            options["columns"] = sorted(self.columns)  # the order of columns has no effect
        for name in ("transform", "collate_fn"):  # two processes have different objects of one function
            options[name] = _name_of(options[name])
        if self.decode in IMAGE_WORDS:
            options["image decoder"] = pixel_decoder()
        return options

    @property
    def opening(self) -> dict[str, Any]:
        """The given options of `open_dataset`, which are the same for all streams."""
        names = (
            "sequence_length",
            "token_dtype",
            "per_file",
            "columns",
            "tokenizer",
            "pack",
            "verify",
            "decode",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def ids(self) -> DocumentIds:
        """The given ids that mark where documents begin and end."""
        return DocumentIds(self.eos_id, self.bos_id, self.pad_id)

    @property
    def token_options(self) -> list[str]:
        """Names of the given options that need a column of tokens."""
        names = ("labels", "flat", "balance", "document_values", *_DOCUMENT_OPTIONS)
        return [name for name in names if getattr(self, name)]

    @property
    def document_options(self) -> list[str]:
        """Names of the given options that describe documents and so need the documents' bounds."""
        return [name for name in _DOCUMENT_OPTIONS if getattr(self, name)]

    @property
    def changes_samples(self) -> bool:
        """Whether functions of the user change samples, or make the batches."""
        return self.transform is not None or self.collate_fn is not None

    @property
    def reads_tokens(self) -> bool:
        """Whether a batch has fields that are computed from the tokens."""
        return bool(self.labels or self.document_options)

    @property
    def masks_document_starts(self) -> bool:
        """Whether a label that is a document's first token is -100."""
        if self.mask_document_starts is None:
            return bool(self.document_options)
        return self.mask_document_starts


def _name_of(function: object) -> str | None:
    """Return a name of a function that is the same in all processes; objects are named by their type."""
    if function is None:
        return None
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
