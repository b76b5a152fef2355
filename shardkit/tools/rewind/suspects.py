"""Ranks the documents that may have caused spikes of the loss, and says how a run goes on without them.

The candidates of a spike are the documents of its steps, with weight 1, and of the steps before it, d steps
back with weight 1 / (1 + d): the loss may follow a bad update later. If the log has no loss for the steps
between, all of them are candidates (at most MOST_BETWEEN). Steps resolve to rows by arithmetic, as in
`shardkit trace --step`, and rows to documents by the provenance tables.

A step has dozens of innocent documents. `TokenModel` tells them from the culprit without the trained model: a
bigram model of rows that the run saw at ordinary steps. A document is *unusual* by its mean negative
log-likelihood above that of a median document, and its *excess* is what exceeds three times the spread of
ordinary documents, times its part of the tokens of its step. Of each spike, documents get shares that add up
to 1, in proportion to weight times excess, or to weight alone if no document has an excess.

    evidence = sum of shares + shared

where `shared` is the number of further spikes that have the document among their candidates, each by steps of
its own, unless that is chance: documents * P(Poisson(expected) >= shared) must be below 0.05; `expected` is
the document's pieces in the dataset times the candidates' part of the rows. A list for the loader takes the
documents that have at least half of the best evidence for a spike, so all of a step if nothing tells them
apart. Where documents are unknown, rows take their place.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from shardkit.arrays import Ints
from shardkit.datasets.provenance.answers import Tracer
from shardkit.datasets.provenance.run import BatchRow, Run
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import Piece
from shardkit.datasets.provenance.text import read_rows
from shardkit.tools.rewind.losses import MOST_BETWEEN, Floats, LossLog, Spike, SpikeOptions

MAX_ROWS = 1 << 16  # candidate rows; of more spikes, the highest are looked at
_ORDINARY_STEPS = 64
_ORDINARY_ROWS = 1024
_ORDINARY_TOKENS = 1 << 21
_PRIOR = 10.0  # pseudo-counts of the unigram distribution behind each token
_SPREADS = 3.0
_LEAST_SPREAD = 0.05
_SIGMAS_PER_MAD = 1.4826
_SHARE_OF_BEST = 0.5
_HOSTS = 10
_OFTEN = 4  # times as many tokens of a host as in ordinary steps, so that it is named, and at least
_LEAST_SHARE = 0.01  # of the tokens
_CHANCE = 0.05  # number of documents that may be in as many spikes by chance

Key = tuple[int, bytes]
"""The number of a document's dataset among those of the run, and its id."""


@dataclass(slots=True)
class Suspect:
    """A candidate document: its pieces in candidate rows, and its share of each spike, by the spike's number.

    `unusual` is the most that a piece exceeds the median document by, in nats a token; None without tokens.
    `shared` is the evidence that follows from the number of spikes alone.
    """

    tracer: Tracer
    pieces: list[Piece] = field(default_factory=list)
    shares: dict[int, float] = field(default_factory=dict)
    unusual: float | None = None
    shared: int = 0

    @property
    def evidence(self) -> float:
        """The number of spikes that the document may explain; see the module docstring."""
        return sum(self.shares.values()) + self.shared


class TokenModel:
    """A bigram model whose prior is the unigram distribution of the same rows.

    The hierarchical Dirichlet language model of MacKay and Bauman Peto (Natural Language Engineering 1, 1995)
    with fixed pseudo-counts. `rows` are arrays of tokens.
    """

    def __init__(self, rows: Sequence[Ints]) -> None:
        firsts = np.concatenate([row[:-1] for row in rows])
        tokens = np.concatenate(rows)
        self._tokens, self._counts = np.unique(tokens, return_counts=True)
        self._total = len(tokens) + len(self._tokens) + 1
        pairs = firsts << 32 | np.concatenate([row[1:] for row in rows])
        self._pairs, self._pair_counts = np.unique(pairs, return_counts=True)

    def nats(self, row: Ints) -> Floats:
        """Return the negative log-likelihood of each token after the one before it, float64[len(row)]."""
        counts = _count(self._tokens, self._counts, row)
        prior = (counts + 1) / self._total
        likelihood = prior.copy()
        pairs = _count(self._pairs, self._pair_counts, row[:-1] << 32 | row[1:])
        likelihood[1:] = (pairs + _PRIOR * prior[1:]) / (counts[:-1] + _PRIOR)
        nats: Floats = -np.log(likelihood)
        return nats


def _count(known: Ints, counts: Ints, values: Ints) -> Ints:
    at = np.searchsorted(known, values).clip(max=len(known) - 1)
    found: Ints = np.where(known[at] == values, counts[at], 0)
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """A row that the run delivered, its pieces, and by how many nats a token each is unusual."""

    row: BatchRow
    pieces: list[Piece]
    unusual: list[float] | None


class Rows:
    """Looks up the documents of rows of a run, and how unusual their tokens are."""

    def __init__(self, tracer: Tracer, run: Run) -> None:
        known = {id(tracer.dataset): tracer}
        for dataset in run.datasets:
            if id(dataset) not in known:
                known[id(dataset)] = Tracer(dataset, tracer.decoder, tracer.characters)
        self.tracers = [known[id(dataset)] for dataset in run.datasets]
        self._model: TokenModel | None = None
        self._median = 0.0
        self.ordinary = _LEAST_SPREAD
        """How unusual, in nats a token, an ordinary document may be."""

    def learn(self, rows: Sequence[BatchRow]) -> list[Seen]:
        """Make a model of every second one of some ordinary rows; the others give the median document."""
        tokens = self._tokens(rows)
        read = [row for row in rows if _place(row) in tokens]
        if len(read) < 4:
            return self.look_up(rows)
        self._model = TokenModel([tokens[_place(row)] for row in read[::2]])
        seen = self.look_up(rows)
        held_out = {_place(row) for row in read[1::2]} - {_place(row) for row in read[::2]}
        values = np.array([one for row in seen if _place(row.row) in held_out for one in row.unusual or ()])
        if len(values):
            self._median = float(np.median(values))
            spread = _SIGMAS_PER_MAD * float(np.median(np.abs(values - self._median)))
            self.ordinary = max(_LEAST_SPREAD, _SPREADS * spread)
        return seen

    def look_up(self, rows: Sequence[BatchRow]) -> list[Seen]:
        """Return what is known of rows, in their order."""
        tokens = {} if self._model is None else self._tokens(rows)
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for stream, numbers in _by_stream(rows).items():
            found = self.tracers[stream].pieces_of_rows(numbers)
            pieces |= {(stream, row): found.get(row) or [self._whole(stream, row)] for row in numbers}
        seen = []
        for row in rows:
            unusual = None
            if self._model is not None and _place(row) in tokens:
                nats = np.concatenate([[0.0], np.cumsum(self._model.nats(tokens[_place(row)]))])
                unusual = [
                    (nats[piece.token_end] - nats[piece.token_start])
                    / max(1, piece.token_end - piece.token_start)
                    - self._median
                    for piece in pieces[_place(row)]
                ]
            seen.append(Seen(row, pieces[_place(row)], unusual))
        return seen

    def _tokens(self, rows: Sequence[BatchRow]) -> dict[tuple[int, int], Ints]:
        """Return {(stream, row): tokens} of the streams that have rows of tokens."""
        found = {}
        for stream, numbers in _by_stream(rows).items():
            dataset = self.tracers[stream].dataset
            if dataset.sequence_length is not None:
                for row, tokens in read_rows(dataset, numbers):
                    found[stream, row] = np.asarray(tokens).astype(np.int64)
        return found

    def _whole(self, stream: int, row: int) -> Piece:
        """Return a row of a dataset whose documents are unknown as if it were a document."""
        tracer = self.tracers[stream]
        place = tracer.place(row)
        length = tracer.dataset.sequence_length or 0
        return Piece(
            row, place["shard"], place["row_in_shard"], 0, length, row.to_bytes(16, "big"), 0, 1, 0,
            place["shard_file"], place["row_in_shard"], None, None, None,
        )  # fmt: skip


def _place(row: BatchRow) -> tuple[int, int]:
    return row.stream, row.row


def _by_stream(rows: Iterable[BatchRow]) -> dict[int, list[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        found[row.stream].add(row.row)
    return {stream: sorted(numbers) for stream, numbers in sorted(found.items())}


@dataclass(frozen=True, slots=True)
class Findings:
    """The suspects by falling evidence, and what distinguishes the candidates' sources and hosts.

    `chosen` are the suspects for a list, `examined` the numbers of the spikes whose documents were looked up,
    and `alike` those of which nothing tells the documents apart.
    """

    suspects: list[Suspect] = field(default_factory=list)
    chosen: list[Suspect] = field(default_factory=list)
    examined: set[int] = field(default_factory=set)
    alike: set[int] = field(default_factory=set)
    sources: list[dict[str, Any]] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)


def first_candidate(spike: Spike, options: SpikeOptions) -> int:
    """Return the first step whose documents are candidates for a spike."""
    since_logged = max(spike.logged_before + 1, spike.step - MOST_BETWEEN)
    return max(1, min(spike.step - options.before, since_logged))


def find_suspects(
    tracer: Tracer, run: Run, log: LossLog, spikes: Sequence[Spike], options: SpikeOptions
) -> Findings:
    """Rank the documents of the spikes' candidate steps. Raises ShardkitError if the run has no such step."""
    assert run.plan is not None
    steps = _candidates(spikes, options, MAX_ROWS // (run.plan.global_batch * run.accumulate))
    examined = _examined(run, spikes, steps)
    rows = Rows(tracer, run)
    usual = rows.learn(_ordinary_rows(run, log, steps))
    suspects: dict[Key, Suspect] = {}
    count, alike = 0, set[int]()
    shares_of: list[tuple[str, int, int]] = []  # source or host, spike, tokens
    for number in sorted(examined):
        seen = [(rows.look_up(run.batch(step)), weight) for step, weight in steps[number].items()]
        count += sum(len(some) for some, _ in seen)
        if not _add_shares(suspects, rows, number, seen):
            alike.add(number)
        shares_of += [
            (name, number, piece.token_end - piece.token_start)
            for some, _ in seen
            for one in some
            for piece in one.pieces
            for name in _names(rows.tracers[one.row.stream], piece)
        ]
    _set_shared(suspects, count)
    ranked = sorted(suspects.items(), key=lambda entry: (-entry[1].evidence, entry[0]))
    usual_tokens: Counter[str] = Counter()
    for one in usual:
        for piece in one.pieces:
            for name in _names(rows.tracers[one.row.stream], piece):
                usual_tokens[name] += piece.token_end - piece.token_start
    chosen = {key for number in examined for key in _best(suspects, number)}
    alike -= {number for suspect in suspects.values() if suspect.shared for number in suspect.shares}
    return Findings(
        [suspect for _, suspect in ranked],
        [suspect for key, suspect in ranked if key in chosen],
        examined,
        alike,
        _compared(shares_of, usual_tokens, "source"),
        _compared(shares_of, usual_tokens, "host"),
    )


def _candidates(spikes: Sequence[Spike], options: SpikeOptions, most: int) -> list[dict[int, float]]:
    """Return {candidate step: weight} for each spike. A step is a candidate for only one of them.

    Besides the spike's own steps, they are the nearest ones before it, `most` in all.
    """
    found: list[dict[int, float]] = [dict.fromkeys(spike.steps, 1.0) for spike in spikes]
    taken = {step for steps in found for step in steps}
    for spike, steps in zip(spikes, found, strict=True):
        for step in range(spike.step - 1, first_candidate(spike, options) - 1, -1):
            if step not in taken and len(steps) < most:
                steps[step] = 1 / (1 + spike.step - step)
                taken.add(step)
    return found


def _examined(run: Run, spikes: Sequence[Spike], steps: Sequence[Mapping[int, float]]) -> set[int]:
    """Return the numbers of the highest spikes, of at most MAX_ROWS candidate rows, or of one spike."""
    assert run.plan is not None
    left = MAX_ROWS
    found: set[int] = set()
    for number in sorted(range(len(spikes)), key=lambda number: (-spikes[number].score, number)):
        left -= len(steps[number]) * run.plan.global_batch * run.accumulate
        if left < 0 and found:
            break
        found.add(number)
    return found


def _ordinary_rows(run: Run, log: LossLog, steps: Sequence[Mapping[int, float]]) -> list[BatchRow]:
    """Return rows of logged steps that are no candidates, from all parts of the log."""
    candidates = np.array([step for some in steps for step in some], np.int64)
    ordinary = log.steps[~np.isin(log.steps, candidates)]
    if not len(ordinary):
        return []
    assert run.plan is not None
    count = int(np.clip(_ORDINARY_ROWS // (run.plan.global_batch * run.accumulate), 8, _ORDINARY_STEPS))
    chosen = np.unique(ordinary[np.linspace(0, len(ordinary) - 1, count).astype(np.int64)])
    rows = [row for step in chosen.tolist() for row in run.batch(step)]
    length = max(dataset.sequence_length or 1 for dataset in run.datasets)
    most = max(16, min(_ORDINARY_ROWS, _ORDINARY_TOKENS // length))
    return rows[:: -(-len(rows) // most)]


def _add_shares(
    suspects: dict[Key, Suspect], rows: Rows, number: int, seen: Sequence[tuple[list[Seen], float]]
) -> bool:
    """Divide spike `number` among the documents of its candidates; return whether one has an excess."""
    values: dict[Key, list[float]] = {}  # of each document: weight times excess, and weight
    for some, weight in seen:
        tokens = sum(piece.token_end - piece.token_start for one in some for piece in one.pieces) or 1
        for one in some:
            tracer = rows.tracers[one.row.stream]
            for place, piece in enumerate(one.pieces):
                key = rows.tracers.index(tracer), piece.document_id
                suspect = suspects.setdefault(key, Suspect(tracer))
                suspect.pieces.append(piece)
                best = suspect.unusual
                value = values.setdefault(key, [0.0, 0.0])
                value[1] = max(value[1], weight)
                if one.unusual is not None:
                    unusual = float(one.unusual[place])
                    if best is None or unusual > best:  # its text is shown
                        suspect.unusual = unusual
                        suspect.pieces.insert(0, suspect.pieces.pop())
                    excess = max(0.0, unusual - rows.ordinary)
                    value[0] += weight * excess * (piece.token_end - piece.token_start) / tokens
    kind = 0 if any(excess for excess, _ in values.values()) else 1
    total = sum(value[kind] for value in values.values())
    for key, value in values.items():
        suspects[key].shares[number] = value[kind] / total
    return kind == 0


def _set_shared(suspects: Mapping[Key, Suspect], rows: int) -> None:
    """Set the evidence of documents that several spikes have, from `rows` candidate rows."""
    several: dict[int, list[bytes]] = defaultdict(list)
    for (dataset, document), suspect in suspects.items():
        if len(suspect.shares) > 1:
            several[dataset].append(document)
    for dataset, documents in several.items():
        pieces: Counter[bytes] = Counter()
        tracer = suspects[dataset, documents[0]].tracer
        if tracer.table is not None:
            for table in tracer.table.search(Selection(documents=documents)):
                pieces.update(table.column("document_id").to_pylist())
        for document in documents:
            suspect = suspects[dataset, document]
            further = len(suspect.shares) - 1
            expected = pieces[document] * rows / len(tracer.dataset)
            if len(suspects) * _poisson_tail(expected, further) < _CHANCE:
                suspect.shared = further


def _poisson_tail(expected: float, least: int) -> float:
    """Return the probability that a Poisson variable of this mean is at least `least`."""
    below = sum(math.exp(-expected) * expected**number / math.factorial(number) for number in range(least))
    return max(0.0, 1 - below)


def _best(suspects: Mapping[Key, Suspect], number: int) -> list[Key]:
    """Return the documents with at least half of the best evidence for a spike."""
    evidence = {key: one.shares[number] + one.shared for key, one in suspects.items() if number in one.shares}
    best = max(evidence.values(), default=0.0)
    return [key for key, value in evidence.items() if value >= _SHARE_OF_BEST * best]


def _names(tracer: Tracer, piece: Piece) -> list[str]:
    """Return the source of a piece, and the host of its URL, as "source NAME" and "host NAME"."""
    label = tracer.labels[piece.source] if piece.source < len(tracer.labels) else str(piece.source)
    names = [f"source {label}"]
    try:
        host = urlsplit(piece.url or "").hostname
    except ValueError:
        host = None
    return [*names, f"host {host}"] if host else names


def _compared(
    tokens_of: Iterable[tuple[str, int, int]], usual: Mapping[str, int], kind: str
) -> list[dict[str, Any]]:
    """Compare the parts that sources or hosts have in candidate rows with those in ordinary rows."""
    spikes: dict[str, set[int]] = defaultdict(set)
    tokens: Counter[str] = Counter()
    for name, number, count in tokens_of:
        if name.startswith(f"{kind} "):
            spikes[name].add(number)
            tokens[name] += count
    total = max(1, sum(tokens.values()))
    usual_total = max(1, sum(count for name, count in usual.items() if name.startswith(f"{kind} ")))
    found: list[dict[str, Any]] = [
        {
            kind: name.partition(" ")[2],
            "spikes": len(spikes[name]),
            "share": tokens[name] / total,
            "usual_share": usual.get(name, 0) / usual_total,
        }
        for name in tokens
    ]
    found.sort(key=lambda one: (one["usual_share"] - one["share"], one[kind]))
    if kind == "source":
        return found
    several = [one for one in found if one["spikes"] > 1]
    least = {one[kind]: max(_LEAST_SHARE, _OFTEN * one["usual_share"]) for one in several}
    return [one for one in several if one["share"] >= least[one[kind]]][:_HOSTS]
