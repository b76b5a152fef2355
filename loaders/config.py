"""Streams and options of `StreamingLoader`, besides the arguments that everyone uses.

What every script may need is a keyword argument; all else is in three groups: `Layout`, `Order` and `Run`.
`LoaderConfig` holds all options with their defaults, checked. `LoaderOptions` names the arguments once more,
because type checkers and editors know them only by a TypedDict; a test holds the two together.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Rational
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypedDict

from shardkit.files import local_path
from shardkit.loaders.foreign_names import FOREIGN
from shardkit.order.balance import Balance, DocumentIds, cost_model
from shardkit.storage.store import StorageOptions
from shardkit.units import parse_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardkit.datasets.dataset import Dataset
    from shardkit.order.exclusions import Exclusions
    from shardkit.order.order import Shuffle
    from shardkit.order.run_settings import Tail
    from shardkit.order.token_mask import TokenMask

ExcludedRows: TypeAlias = "Exclusions | Iterable[int | tuple[int, int]] | str | os.PathLike[str] | None"
MaskedTokens: TypeAlias = "TokenMask | Iterable[tuple[int, int, int]] | str | os.PathLike[str] | None"
TokenDtype: TypeAlias = "torch.dtype | np.dtype[np.generic] | type | str | None"
Weights: TypeAlias = "Sequence[float | Fraction] | Mapping[str, float | Fraction]"
"""Of all streams in their order, or by name; streams that are not named get 0."""

MAX_PREFETCH_BATCHES = 1 << 16
_DOCUMENT_OPTIONS = ("position_ids", "document_ids", "cu_seqlens", "doc_lens", "seq_lengths", "block_mask")

# Options that may differ between ranks: they decide neither which samples come nor what a batch looks like.
_OF_ONE_RANK = frozenset(
    (
        *("prefetch_batches", "prefetch_bytes", "timeout_seconds", "cache_dir", "cache_bytes", "connections"),
        *("storage", "verify", "usage_log", "stop_grace_seconds", "stop_together"),
        *("mesh", "group"),
    )
)
# Options whose value, given or default, is part of a loader's state.
_IN_STATE = frozenset(("lanes", "window", "schedule", "epoch_samples", "global_batch"))

BUSY_SECONDS = 200e-6  # a loop that comes back sooner does nothing but read: there is no work to overlap with


# What MosaicML Streaming calls the fields of a stream, where the names differ.
_MOSAICML_NAMES = {"proportion": "weight", "remote": "path", "local": "path"}


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """A dataset and its share of a mixture.

    Of every `sum of weights` consecutive samples, exactly `weight` come from this stream. Each pass over a
    stream is shuffled differently.
    """

    path: str | os.PathLike[str] | Dataset
    weight: float | Fraction = 1
    """A whole number, a `Fraction` or a decimal such as 0.7, taken exactly as written; 0 until a schedule
    raises it. A float without a short decimal, such as 1 / 6, is the fraction that it stands for."""
    name: str | None = None
    """Its name in schedules, errors and metrics; default: the last part of the path."""
    repeat: float | None = None
    """Most passes over the dataset; None: as many as the weights ask for."""
    choose: int | None = None
    """Most samples to deliver."""
    exclude: ExcludedRows = None
    """Rows that are never delivered: numbers, (first, end) ranges or a file of them (`Exclusions.read`)."""
    mask: MaskedTokens = None
    """Tokens whose labels are -100: (row, first, end) spans or a file of them (`TokenMask.read`)."""

    if not TYPE_CHECKING:

        def __new__(cls, *values: object, **named: object) -> Stream:
            """Refuse unknown names here, before the generated __init__ does it without a suggestion."""
            refuse_unknown("Stream()", named, cls.__slots__, _MOSAICML_NAMES)
            return object.__new__(cls)

    def __repr__(self) -> str:
        """The path, and what is not the default."""
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
        """Most samples that may be delivered of a dataset of `samples`; None: any number."""
        limits = [] if self.repeat is None else [math.floor(self.repeat * samples)]
        return min([*limits, *([] if self.choose is None else [self.choose])], default=None)


def refuse_unknown(
    function: str, given: Iterable[str], known: Sequence[str], renamed: Mapping[str, str] | None = None
) -> None:
    """TypeError for a keyword that is not known, with the one that is meant.

    `renamed`: what is meant by names that are close to others, or by those of other libraries. Of the
    remaining names of torch's DataLoader and of other loaders, `foreign_names` says it.
    """
    for name in given:
        if name in known:
            continue
        meant = [(renamed or {}).get(name), *difflib.get_close_matches(name, known, 1)]
        if name not in (renamed or {}) and name in FOREIGN:
            hint = f"here: {FOREIGN[name]}"
        elif (near := next(filter(None, meant), None)) is not None:
            hint = f"did you mean {(renamed or {}).get(near, near)}?"
        else:
            hint = "the docstrings of shardkit.loaders.config.LoaderConfig list the options"
            hint = f"known: {', '.join(known)}" if len(known) <= _LISTED else hint
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}; {hint}")


_LISTED = 10  # names in a message


def _to_plain_int(settings: Stream | LoaderConfig, *names: str) -> None:
    """Replace NumPy's integers by Python's, which JSON and states can hold."""
    for name in names:
        value = getattr(settings, name)
        if type(value) not in (int, bool) and isinstance(value, numbers.Integral):
            object.__setattr__(settings, name, int(value))


class _Group:
    """Options that are given together, such as layout=Layout(cu_seqlens=True)."""

    _given: frozenset[str]

    if not TYPE_CHECKING:

        def __new__(cls, **named: object) -> _Group:
            """Refuse unknown names, before the generated __init__ does it without a suggestion."""
            refuse_unknown(f"{cls.__name__}()", named, [field.name for field in fields(cls)])
            group = object.__new__(cls)
            group.__dict__["_given"] = frozenset(named)
            return group

    @property
    def given(self) -> dict[str, Any]:
        """Return the options that were given, also those with the value of the default."""
        return {name: value for name, value in vars(self).items() if name in self._given}

    def __repr__(self) -> str:
        """Return the options that were given."""
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in self.given.items())})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Layout(_Group):
    """The form of a batch: its fields besides tokens and labels, their names and shapes, masked labels."""

    keep_length: bool = False
    """With labels="shifted": keep each row's last token, with the label -100, so that rows of L give L."""
    mask_document_starts: bool | None = None
    """Set labels that are a document's first token to -100, so that no document is predicted from another.

    Default: only if an option that describes documents (`position_ids`, `cu_seqlens`, ...) is set."""
    max_repetitions: int | None = None
    """A row in which the same 1 to 13 tokens follow each other more than this many times has no labels.

    OLMo 2 trains with 31; such rows make the loss spike."""
    position_ids: bool = False
    """Add `position_ids`: int64, from 0 again after each document's end."""
    document_ids: bool = False
    """Add `document_ids`: int32, the documents of a row numbered from 0; padding counts as one more."""
    cu_seqlens: bool | int = False
    """Add `cu_seqlens` (int32, document bounds in the flattened batch) and `max_seqlen` (int).

    A number n pads them with the last bound to int32[n], and `max_seqlen` is the length of a row: constant
    shapes for compiled models. A batch of more than n - 1 documents is an error."""
    doc_lens: bool = False
    """Add `doc_lens` (int32[rows, most documents in a row], padded with 0) and `max_doc_lens` (list)."""
    seq_lengths: bool = False
    """Add `seq_lengths`: for each row the list of its documents' lengths."""
    block_mask: bool | int = False
    """Add the tables of FlexAttention's block mask, causal inside documents, for `block_mask.block_mask_of`.

    A number is the size of a block in tokens; True: 128."""
    flat: bool = False
    """Deliver tokens, labels, position and document ids as one dimension: the rows one after another."""
    rename: Mapping[str, str] | None = None
    """Other names for fields of the batch, such as {"tokens": "input_ids"}."""
    tensors: Literal["torch", "numpy"] = "torch"
    """"numpy" delivers NumPy arrays and imports no torch."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Order(_Group):
    """Which samples come when, on which rank, besides seed, shuffle and tail."""

    lanes: int | None = None
    """Lanes of the window shuffle; default: from the number of shards, kept in the state."""
    window: int | None = None
    """Samples shuffled together in a lane; default: those of two average shards, or of 64 shards in all lanes
    together if that is more; kept in the state."""
    schedule: Sequence[tuple[int, Weights]] | None = None
    """A mixture's weights from given positions (in samples over all ranks) on, instead of the streams' own.

    For example [(0, {"web": 3, "code": 1}), (81_000_000, {"web": 1, "code": 1})]."""
    epoch_samples: int | None = None
    """Samples that make an epoch; default: of all streams together, kept in the state.

    Only where a `for` ends and `tail` acts: the samples go on in their order, each once before any again."""
    global_batch: SupportsIndex | Sequence[tuple[int, int]] | None = None
    """Sequences of an optimizer step over all ranks, for `steps()`; kept in the state.

    Or a schedule by position, [(0, 256), (2_000_000, 512)]: each size holds from the first step that starts
    there or behind."""
    balance: Balance = None
    """Level the work of ranks: place the rows of each global batch on ranks by what they cost.

    "attention": the sum of squared document lengths, for attention inside documents; or a `CostModel`. None:
    rank r takes the r-th part. Equal on all ranks. For remote data see shardkit.tools.row_costs."""
    mixed_lengths: bool = False
    """Allow streams whose samples differ in shape, for a schedule that changes from some to others."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Run(_Group):
    """How batches are fetched and waited for, and when a run gives up. Decides nothing about samples."""

    prefetch_batches: int = 64
    """Most batches ready ahead of the training loop; 0: no thread, batches are made on request."""
    prefetch_bytes: int | str = "256MiB"
    """Most bytes ready ahead of the training loop; one batch is always allowed."""
    connections: int = 16
    """Shards, or ranges of shards, that a process fetches at a time."""
    timeout_seconds: float = 600.0
    """Longest wait for one batch that is being prefetched."""
    verify: bool = False
    """Compare each local shard's hashes when it is first opened: 18 ms for 64 MiB by xxh64.

    Those of remote shards always are. ValueError for a local dataset whose index states no hashes."""
    stop_together: bool = True
    """False: errors of this loader are not reported to other ranks, nor theirs to it.

    For a loader whose errors the loop catches, such as that of an evaluation: a reported error stands for as
    long as the process group does."""
    stop_grace_seconds: float | None = None
    """End this process if its loop has not returned this long after another rank's loader failed.

    Default: never; the loop gets `PeerError` at its next batch, and a collective that hangs is left to the
    timeout of its process group."""


GROUPS: Mapping[str, type[_Group]] = {"layout": Layout, "order": Order, "run": Run}

_SPELLED = {
    field.name: f"{name}={kind.__name__}({field.name}=…)"
    for name, kind in GROUPS.items()
    for field in fields(kind)  # type: ignore[arg-type]
}


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with what is given in groups beside the others.

    In YAML and JSON a group is a mapping. TypeError for what is no group, and for an option outside of its
    group.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        kind = GROUPS.get(name)
        if name in _SPELLED:
            raise TypeError(f"{name} is given in a group of shardkit.loaders: pass {_SPELLED[name]}")
        if kind is None:
            flat[name] = value
        elif isinstance(value, (kind, Mapping)):
            flat |= (kind(**value) if isinstance(value, Mapping) else value).given
        else:
            raise TypeError(f"{name} is {name}={kind.__name__}(…), of shardkit.loaders, not {value!r}")
    return flat


def grouped(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same options in their groups: what `flattened` takes apart."""
    options = {name: value for name, value in flat.items() if name not in _SPELLED}
    for name, kind in GROUPS.items():
        own = {field.name for field in fields(kind)} & flat.keys()  # type: ignore[arg-type]
        if own:
            options[name] = kind(**{option: flat[option] for option in flat if option in own})
    return options


class LoaderOptions(TypedDict, total=False):
    """Further keyword arguments of `StreamingLoader`; `LoaderConfig` has their meaning and defaults."""

    labels: bool | Literal["shifted"]
    layout: Layout
    order: Order
    run: Run
    eos_id: int | None
    bos_id: int | None
    pad_id: int | None
    columns: Sequence[str] | None
    endless: bool
    restart: bool
    cache_dir: str | os.PathLike[str] | None
    cache_bytes: int | str | None
    storage: StorageOptions | None
    sequence_length: int | None
    token_dtype: str | None
    per_file: bool
    usage_log: str | os.PathLike[str] | None
    mesh: DeviceMesh | None
    group: ProcessGroup | None


class RunOptions(LoaderOptions, total=False):
    """All keyword arguments of `StreamingLoader` but batch size, rank and world size, for what wraps one."""

    seed: int
    shuffle: Shuffle
    tail: Tail
    dtype: TokenDtype
    return_ids: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class LoaderConfig(Layout, Order, Run):
    """The options of a loader, checked, with their defaults; those of its groups are fields of it, too."""

    labels: bool | Literal["shifted"] = False
    """Add `labels`, int64, padding -100. True: the tokens (Hugging Face's convention: the model shifts them).

    "shifted": label i is the token that follows token i. Rows of L + 1 tokens give `tokens` and `labels` of
    L, and every other field describes these L tokens."""
    eos_id: int | None = None
    """The id that ends a document; default: as the dataset's card states."""
    bos_id: int | None = None
    """The id that begins each document, for data whose documents have no end: instead of `eos_id`."""
    pad_id: int | None = None
    """An id that is nothing but padding, anywhere in a row: labels are -100, and it counts as one document.

    For data that others padded; rows that are padded by the eos id need no option."""
    columns: Sequence[str] | None = None
    """Deliver these columns only; default: all."""
    endless: bool = False
    """Continue with the next epoch instead of ending the `for`; the loader then has no length."""
    restart: bool = False
    """Start every `for` at the first sample again, in the same order: for evaluation.

    A state that is loaded is checked, but the next `for` starts at the first sample all the same."""
    cache_dir: str | os.PathLike[str] | None = None
    """Where a remote dataset's shards are kept, shared by all processes of the machine; None: in memory.

    A local dataset is read in place, never copied or removed."""
    cache_bytes: int | str | None = None
    """Most bytes kept there; default: free disk less a reserve, or a quarter of free memory up to 8 GiB."""
    storage: StorageOptions | None = None
    """Endpoint, region, profile, … of the store; default: the usual AWS environment."""
    sequence_length: int | None = None
    """Read flat files of tokens in place, as rows of this many: Megatron's .idx and .bin, other .bin, .npy.

    Paths may be files, folders and patterns. Other datasets must have rows of this length, if it is given."""
    token_dtype: str | None = None
    """Type of the ids in flat files that do not state it (nanoGPT's .bin, OLMo's .npy), such as "uint32"."""
    per_file: bool = False
    """Begin a row at each flat file, and leave out the end of each that fills none; default: one stream."""
    usage_log: str | os.PathLike[str] | None = None
    """Folder, shared by all ranks, that logs the samples handed to the loop: for `shardkit audit --logs`."""
    mesh: DeviceMesh | None = None
    """Take rank and world size from the dims of this mesh that divide data, in their order: dp_replicate,
    dp_shard, dp, batch, data_parallel. Processes that differ in other dims only get the same batches."""
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
                "token_dtype and per_file are for flat files of tokens: give sequence_length, too"
            )
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise ValueError(f"columns must be a list of at least one name, not {self.columns!r}")
        if self.mask_document_starts and not self.labels:
            raise ValueError("mask_document_starts masks labels: give labels=True too, or leave it out")
        cost_model(self.balance)  # ValueError for no such option
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

    @classmethod
    def of(cls, options: LoaderOptions) -> LoaderConfig:
        """Fill in defaults; TypeError with a suggestion for an unknown name."""
        flat = flattened(options)
        of_streams = {field.name: f"Stream(path, {field.name}=…)" for field in fields(Stream)}
        known = [*GROUPS, *(field.name for field in fields(cls))]
        refuse_unknown("StreamingLoader()", options, known, of_streams | _SPELLED)
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
        if self.tensors not in ("torch", "numpy"):
            raise ValueError(f'tensors must be "torch" or "numpy", not {self.tensors!r}')
        assert self.ids  # ValueError for a contradiction
        if self.max_repetitions is not None and (self.max_repetitions < 1 or not self.labels):
            raise ValueError('max_repetitions is at least 1, and needs labels=True or labels="shifted"')

    def shared_by_ranks(self, *, order_only: bool = False) -> dict[str, object]:
        """Return the options that must be equal on all ranks, without those that a state has.

        `order_only`: for replicas, such as a pipeline's stages, which may want other fields of the same rows.
        """
        left_out = _OF_ONE_RANK | _IN_STATE
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        if order_only:
            return {name: options[name] for name in ("endless", "restart")}
        if self.columns is not None:
            options["columns"] = sorted(self.columns)  # whose order decides nothing
        return options

    @property
    def ids(self) -> DocumentIds:
        """The ids given to find documents by."""
        return DocumentIds(self.eos_id, self.bos_id, self.pad_id)

    @property
    def token_options(self) -> list[str]:
        """The options given that need a column of tokens."""
        return [name for name in ("labels", "flat", "balance", *_DOCUMENT_OPTIONS) if getattr(self, name)]

    @property
    def document_options(self) -> list[str]:
        """The options given that describe documents: they need to know where each begins."""
        return [name for name in _DOCUMENT_OPTIONS if getattr(self, name)]

    @property
    def reads_tokens(self) -> bool:
        """Whether a batch has fields that follow from the tokens."""
        return bool(self.labels or self.document_options)

    @property
    def masks_document_starts(self) -> bool:
        """Whether a label that is a document's first token is -100."""
        if self.mask_document_starts is None:
            return bool(self.document_options)
        return self.mask_document_starts
