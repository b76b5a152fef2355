"""Checks steps as they were delivered, one after another: exactly once, and in the order that was promised.

Two proofs, independent of each other, in memory that does not grow with the number of samples:

    exact   every delivered id is taken back to its stream's index (`positions_of`, a function of id and
            epoch). A step's indices must be exactly those of its positions, each once. Different indices come
            from different samples, so that none is delivered twice in an epoch, whatever that function does;
            and N different ids of N are all. The set of a step then follows from its positions alone.
    sums    of each epoch's ids, as a multiset, against those of all kept rows of the index (`fingerprint`):
            no order's arithmetic takes part.

Deliveries are int64[steps, ranks, batch]; -1 is padding. What does not fit is kept, up to a limit, with
signs: an id where it does not belong +1, one that is missing there -1. What is left over in an epoch is
repeated or lost; what cancels out was moved to another step.

Deliveries that do not fit, told apart: lost, repeated, moved to another step, or another rank's part.

A sample where it does not belong counts +1 in its epoch, one that is missing in its step -1. When all is
known, what is above 0 was repeated, what is below was lost, and what came out even was moved. Followed up
to a limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.tools.audit.expectation import Expectation, Steps
from shardkit.tools.audit.findings import Finding, Findings, SampleHash, ShardCounts, Tally, check_shards

__all__ = ["BLOCK_POSITIONS", "Checker", "Misfits", "Offences"]

MAX_FOLLOWED = 1 << 17  # samples, about 30 MB; with more wrong than that, the first ones tell the story

MAX_EXPLAINED = 8  # steps whose ranks' parts are looked at

NEAR_STEPS = 2  # before and behind a faulty step, in which a rank's samples are looked for

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Sample:
    """One sample in one epoch: where it came too much, and where it is missing."""

    index: int
    net: int = 0
    came: tuple[int, int] | None = None  # (step, rank)
    missing: int | None = None  # step


@dataclass(frozen=True, slots=True)
class Misfits:
    """A stream's samples in some steps: arrays of one length, and which of them are in their own step.

    `edges` are the stream's indices where each step begins, and behind the last.
    """

    ids: _Ints
    indices: _Ints
    rows: _Ints
    ranks: _Ints
    edges: _Ints
    fits: npt.NDArray[np.bool_]


class Offences:
    """What did not fit, until `settle` says what it amounts to."""

    def __init__(self, expected: Expectation, findings: Findings) -> None:
        self._expected, self._findings = expected, findings
        self._samples: dict[tuple[int, int, int], _Sample] = {}
        self._explained = self._not_followed = 0

    def add(self, stream: int, found: Misfits, first_step: int) -> set[int]:
        """Note what is wrong; gives the rows of the first steps that it is in."""
        size = max(self._expected.streams[stream].samples, 1)
        start, end = int(found.edges[0]), int(found.edges[-1])
        fitting = np.flatnonzero(found.fits)
        _, firsts, times = np.unique(found.indices[fitting], return_index=True, return_counts=True)
        again = np.delete(fitting, firsts) if (times > 1).any() else fitting[:0]
        extra = np.sort(np.concatenate([np.flatnonzero(~found.fits), again]))
        came = np.zeros(end - start, dtype=np.bool_)
        came[found.indices[fitting] - start] = True
        missing = start + np.flatnonzero(~came)
        missing_rows = np.searchsorted(found.edges, missing, side="right") - 1
        for which in extra[: self._room(len(extra))].tolist():
            index, sample = int(found.indices[which]), int(found.ids[which])
            entry = self._samples.setdefault((stream, index // size, sample), _Sample(index))
            entry.net += 1
            entry.came = entry.came or (first_step + int(found.rows[which]), int(found.ranks[which]))
        kept = missing[: self._room(len(missing))]
        ids = self._expected.samples_at(stream, kept) if len(kept) else kept
        for index, sample, row in zip(kept.tolist(), ids.tolist(), missing_rows.tolist(), strict=False):
            entry = self._samples.setdefault((stream, index // size, sample), _Sample(index))
            entry.net -= 1
            entry.index = index
            entry.missing = first_step + row if entry.missing is None else entry.missing
        faulty = np.unique(np.concatenate([found.rows[extra], missing_rows]))
        return set(faulty[:MAX_EXPLAINED].tolist())

    def _room(self, wanted: int) -> int:
        room = min(wanted, max(0, MAX_FOLLOWED - len(self._samples)))
        self._not_followed += wanted - room
        return room

    def settle(self) -> None:
        """Nothing more will come: say what was lost, repeated or moved."""
        for (stream, epoch, sample), entry in self._samples.items():
            kind = "moved" if not entry.net else "repeated" if entry.net > 0 else "lost"
            count = max(1, abs(entry.net))
            if not self._findings.wants(kind):
                self._findings.counts[kind] += count
                continue
            step, rank = entry.came or (None, None)
            if kind == "moved":
                problem = f"belongs to step {entry.missing}"
            elif kind == "repeated":
                problem = "delivered here, where it does not belong, and elsewhere in the epoch"
            else:
                problem, step, rank = "not delivered at its step, nor later", entry.missing, None
            self._findings.add(
                Finding(
                    kind=kind,
                    problem=problem,
                    epoch=epoch,
                    position=self._expected.position_of(stream, entry.index),
                    step=step,
                    rank=rank,
                    **self._expected.place(sample),  # type: ignore[arg-type]
                ),
                count,
            )
        if self._not_followed:
            self._findings.notices.append(
                f"{self._not_followed:,} more samples did not fit and were not followed: of those listed, "
                "some called lost or repeated may have been moved"
            )

    def explain(self, steps: Steps, delivered: _Ints, rows: list[int], first_step: int) -> None:
        """For the first faulty steps: which ranks were given something else than their part, and what."""
        ranks = delivered.shape[1]
        for row in rows:
            if self._explained >= MAX_EXPLAINED:
                return
            self._explained += 1
            parts = self._parts(steps, row, ranks)
            assert parts is not None
            for rank in range(ranks):
                given = _as_set(delivered[row, rank])
                if given == parts[rank]:
                    continue
                finding = Finding(
                    kind="part",
                    problem=self._whose(given, parts, steps, row, ranks, first_step)
                    or f"{len(given - parts[rank]):,} of {delivered.shape[2]:,} samples are not of its part",
                    position=steps.start + row * steps.size,
                    step=first_step + row,
                    rank=rank,
                )
                self._findings.add(finding)

    def _parts(self, steps: Steps, row: int, ranks: int) -> list[frozenset[int]] | None:
        """The samples of each rank's part of a step; None before the first position."""
        start = steps.start + row * steps.size
        if start < 0:
            return None
        ids = self._expected.order.global_batches(start, steps.size, 1).sample_id[0]
        cuts = [len(ids) * rank // ranks for rank in range(ranks + 1)]
        return [_as_set(ids[cuts[rank] : cuts[rank + 1]]) for rank in range(ranks)]

    def _whose(
        self,
        given: frozenset[int],
        parts: list[frozenset[int]],
        steps: Steps,
        row: int,
        ranks: int,
        first_step: int,
    ) -> str | None:
        """Whose part these samples are, if they are one."""
        if given in parts:
            return f"was given the part of rank {parts.index(given)}"
        for distance in range(1, NEAR_STEPS + 1):
            for other in (row - distance, row + distance):
                if (near := self._parts(steps, other, ranks)) is not None and given in near:
                    return f"was given what rank {near.index(given)} has at step {first_step + other}"
        return None


def _as_set(ids: _Ints) -> frozenset[int]:
    return frozenset(ids[ids >= 0].tolist())


BLOCK_POSITIONS = 1 << 18  # checked at once: about 20 MB of temporaries

_Words = npt.NDArray[np.uint64]

_Bools = npt.NDArray[np.bool_]

_Which = slice | npt.NDArray[np.intp]


class Checker:
    """Follows a run from `position` on; `finish` closes the books."""

    def __init__(
        self, expected: Expectation, findings: Findings, hashing: SampleHash, *, position: int = 0
    ) -> None:
        self.expected, self.findings = expected, findings
        self.position = self.origin = position
        self.steps = self.samples = self.padding = self.dropped = 0
        self.epochs_proved = self.epochs_wrong = 0
        self.partial: list[tuple[str, int, int]] = []
        """(stream, epoch, samples) of epochs that were not delivered whole."""
        self.usage = np.zeros(len(expected.shard_starts) - 1, dtype=np.int64)
        """Samples delivered of each shard."""
        self.dropped_usage = np.zeros_like(self.usage)
        self.whole_epochs = [0] * len(expected.streams)
        self._hashing = hashing
        self._digest = hashlib.blake2b(digest_size=16)
        self._origins = self._indices = expected.indices_at(position)
        self._tallies: dict[tuple[int, int], Tally] = {}
        self._of_index: dict[int, Tally] = {}
        self._broken: list[tuple[int, int]] = []  # ranges of positions that nobody delivered or logged
        self.offences = Offences(expected, findings)

    @property
    def digest(self) -> str:
        """Of the sets of all steps, in their order, under this audit's key: the same for any world size."""
        return self._digest.hexdigest()

    def deliver(self, ids: _Ints) -> None:
        """The next steps: int64[steps, ranks, batch]."""
        count, ranks, batch = ids.shape
        done = 0
        while done < count:
            most = min(count - done, max(1, BLOCK_POSITIONS // (ranks * batch)))
            steps = self.expected.tiling.steps(self.position, ranks * batch, most)
            if steps.start > self.position:
                self._drop(self.position, steps.start)
            self._check(steps, ids[done : done + steps.count])
            done += steps.count
            settled = self.expected.tiling.settle(steps.end, ranks * batch)
            if settled > steps.end:  # a loader moves on at once, whatever the next step's size
                self._drop(steps.end, settled)

    def skip(self, position: int) -> None:
        """What lies before `position` was not delivered, or is not known: its epochs are not proved."""
        assert position >= self.position
        if position > self.position:
            self._broken.append((self.position, position))
            self.position = position
            self._indices = self.expected.indices_at(position)
            self._close_epochs()

    def finish(self) -> None:
        """All has been delivered: account for epochs that are not whole, for shards, for what was moved."""
        for (stream, epoch), tally in sorted(self._tallies.items()):
            if tally.count:
                self.partial.append((self.expected.names[stream], epoch, tally.count))
        self.offences.settle()
        check_shards(self.shard_uses(), self.expected, self.findings)

    def shard_uses(self) -> ShardCounts:
        """Samples delivered of each shard, and what they should be."""
        parts = [0] * len(self.expected.streams)
        for stream, _ in self._tallies:
            parts[stream] += 1
        return ShardCounts.of(self.expected, self.usage, self.dropped_usage, self.whole_epochs, parts)

    def _drop(self, start: int, end: int) -> None:
        """The tail "drop" left these positions out: they count as seen, or no epoch could be whole."""
        self.dropped += end - start
        for begin in range(start, end, BLOCK_POSITIONS):
            steps = Steps(begin, min(BLOCK_POSITIONS, end - begin), 1)
            for stream, edges in enumerate(self.expected.edges(steps)):
                indices = np.arange(edges[0], edges[-1], dtype=np.int64)
                if len(indices):
                    ids = self.expected.samples_at(stream, indices)
                    self._count(stream, indices, ids, self._hashing(ids))
                    shards = self.expected.shards_of(ids)
                    self.dropped_usage += np.bincount(shards, minlength=len(self.usage))
        self.position = end
        self._indices = self.expected.indices_at(end)
        self._close_epochs()

    def _check(self, steps: Steps, delivered: _Ints) -> None:
        count, ranks, batch = delivered.shape
        ids = delivered.reshape(count, ranks * batch)
        real = self._real(steps, ids)
        low, high = self._hashing(ids)
        if not real.all():
            low, high = np.where(real, low, 0).astype(np.uint64), np.where(real, high, 0).astype(np.uint64)
        # Low and high side by side: how steps are cut into blocks must not show.
        sums = np.stack([words.sum(axis=1, dtype=np.uint64) for words in (low, high)], axis=1)
        self._digest.update(sums.astype("<u8").tobytes())
        edges = self.expected.edges(steps)
        rows = np.repeat(np.arange(count), ranks * batch)
        flat = ids.ravel()
        where: _Which = slice(None) if real.all() else np.flatnonzero(real)
        faulty: set[int] = set()
        for stream, own in enumerate(self._by_stream(flat, where)):
            faulty |= self._check_stream(
                stream,
                flat[own],
                rows[own],
                edges[stream],
                (low.ravel()[own], high.ravel()[own]),
                own,
                (ranks, batch),
            )
        counted = flat[where]
        self.usage += np.bincount(self.expected.shards_of(counted), minlength=len(self.usage))
        self.samples += len(counted)
        self.padding += flat.size - len(counted)
        if faulty:
            self.offences.explain(steps, delivered, sorted(faulty), self.steps)
        self.steps += count
        self.position = steps.end
        self._indices = [int(each[-1]) for each in edges]
        self._close_epochs()

    def _real(self, steps: Steps, ids: _Ints) -> _Bools:
        """Which entries are samples; findings for misplaced padding, and for what is no row at all."""
        real: _Bools = ids >= 0
        if ids.shape[1] != steps.size or not real.all():
            counts = real.sum(axis=1)
            for row in np.flatnonzero(counts != steps.size).tolist():
                problem = f"{counts[row]:,} samples in a step that has {steps.size:,}"
                self._found("padding", problem, steps, row)
        foreign = (ids < -1) | (ids >= self.expected.samples)
        if foreign.any():
            for row, column in np.argwhere(foreign)[:1].tolist():
                problem = f"{int(foreign.sum()):,} ids from here on that the dataset does not have"
                self._found("foreign", f"{problem}, the first {ids[row, column]}", steps, row)
        excluded = np.zeros_like(real)
        for stream, one in enumerate(self.expected.data):
            if one.exclusions is not None:
                first, end = self.expected.first_samples[stream : stream + 2].tolist()
                own = real & (ids >= first) & (ids < end)
                excluded[own] = self.expected.is_excluded(stream, ids[own] - first)
        for row, column in np.argwhere(excluded).tolist():
            place = self.expected.place(int(ids[row, column])) if self.findings.wants("excluded") else {}
            self._found("excluded", "an excluded row was delivered", steps, row, **place)
        return real & ~foreign & ~excluded

    def _found(self, kind: str, problem: str, steps: Steps, number: int, **place: object) -> None:
        position = steps.start + number * steps.size
        facts = {"step": self.steps + number, "position": position} | place
        self.findings.add(Finding(kind=kind, problem=problem, **facts))  # type: ignore[arg-type]

    def _by_stream(self, flat: _Ints, where: _Which) -> Sequence[_Which]:
        """Which of the entries `where` belong to each stream, ascending."""
        if len(self.expected.streams) == 1:
            return [where]
        where = np.arange(len(flat))[where]
        stream = np.searchsorted(self.expected.first_samples, flat[where], side="right") - 1
        by_stream = np.argsort(stream.astype(np.int16), kind="stable")
        cuts = np.searchsorted(stream[by_stream], np.arange(1, len(self.expected.streams)))
        return [where[part] for part in np.split(by_stream, cuts)]

    def _check_stream(
        self,
        stream: int,
        ids: _Ints,
        rows: _Ints,
        edges: _Ints,
        words: tuple[_Words, _Words],
        where: _Which,
        shape: tuple[int, int],
    ) -> set[int]:
        """One stream's samples of a block of steps; gives the rows of steps in which something is wrong."""
        first, end = int(edges[0]), int(edges[-1])
        if not len(ids) and first == end:
            return set()
        indices = self._indices_of(stream, ids - self.expected.first_samples[stream], rows, edges)
        self._count(stream, indices, ids, words)
        fits = (indices >= edges[rows]) & (indices < edges[rows + 1])
        if fits.all() and len(ids) == end - first:
            times = np.bincount(indices - first, minlength=end - first)
            if int(times.max(initial=1)) == 1:
                return set()
        ranks, batch = shape
        entries = np.arange(len(rows)) if isinstance(where, slice) else where
        of_rank = entries // batch % ranks
        return self.offences.add(stream, Misfits(ids, indices, rows, of_rank, edges, fits), self.steps)

    def _indices_of(self, stream: int, own_ids: _Ints, rows: _Ints, edges: _Ints) -> _Ints:
        """The index of each sample in the epoch of its step.

        In a step with samples of several epochs, it is the epoch in which the sample fits, or else one in
        which the step lacks a sample: that is the epoch whose sample it replaced.
        """
        order = self.expected.streams[stream]
        size = max(order.samples, 1)
        first, end = int(edges[0]), int(edges[-1])
        if not order.samples or first == end or first // size == (end - 1) // size:
            return order.positions_of(own_ids, first // size) if order.samples else own_ids
        indices = np.full(len(own_ids), -1, dtype=np.int64)
        for epoch in range(first // size, (end - 1) // size + 1):
            begin, stop = max(first, epoch * size), min(end, (epoch + 1) * size)
            steps = np.searchsorted(edges, (begin, stop), side="right") - 1
            low, high = np.searchsorted(rows, (steps[0], steps[1] + 1)).tolist()  # rows ascend
            free = low + np.flatnonzero(indices[low:high] < 0)
            found = order.positions_of(own_ids[free], epoch)
            fits = (found >= np.maximum(edges[rows[free]], begin)) & (
                found < np.minimum(edges[rows[free] + 1], stop)
            )
            # Of a sample that comes twice in a step, the other one may belong to the next epoch.
            found, firsts = np.unique(found[fits], return_index=True)
            indices[free[fits][firsts]] = found
        left = np.flatnonzero(indices < 0)
        epochs = edges[rows[left]] // size
        is_missing = np.ones(end - first, dtype=np.bool_)
        is_missing[indices[indices >= 0] - first] = False
        for row in np.unique(rows[left][epochs != (edges[rows[left] + 1] - 1) // size]).tolist():
            begin, stop = int(edges[row]), int(edges[row + 1])
            missing = begin + np.flatnonzero(is_missing[begin - first : stop - first])
            low, high = np.searchsorted(rows[left], (row, row + 1)).tolist()
            missing = missing[: high - low]
            epochs[low : low + len(missing)] = missing // size
        for epoch in np.unique(epochs).tolist():
            which = left[epochs == epoch]
            indices[which] = order.positions_of(own_ids[which], epoch)
        return indices

    def _count(self, stream: int, indices: _Ints, ids: _Ints, words: tuple[_Words, _Words]) -> None:
        """Add to the sums of the epochs that these are in."""
        if not len(ids):
            return
        size = max(self.expected.streams[stream].samples, 1)
        low, high = int(indices.min()) // size, int(indices.max()) // size
        if low == high:
            self._tally(stream, low).add(ids, words)
            return
        epochs = indices // size
        by_epoch = np.argsort(epochs, kind="stable")
        cuts = np.flatnonzero(np.diff(epochs[by_epoch])) + 1
        for which in np.split(by_epoch, cuts):
            tally = self._tally(stream, int(epochs[which[0]]))
            tally.add(ids[which], (words[0][which], words[1][which]))

    def _tally(self, stream: int, epoch: int) -> Tally:
        return self._tallies.setdefault((stream, epoch), Tally())

    def _close_epochs(self) -> None:
        """Compare the sums of the epochs that lie behind with the index."""
        for stream, epoch in [key for key in self._tallies if self._is_over(*key)]:
            size = self.expected.streams[stream].samples
            if epoch * size < self._origins[stream] or self._is_broken(stream, epoch * size, size):
                continue
            tally, whole = self._tallies.pop((stream, epoch)), self._tally_of_index(stream)
            self.whole_epochs[stream] += 1
            if tally == whole:
                self.epochs_proved += 1
                continue
            self.epochs_wrong += 1
            name = self.expected.names[stream] if self.expected.mixture is not None else None
            problem = f"{tally.count:,} samples, the index has {whole.count:,}"
            if tally.count == whole.count:
                problem = f"{tally.count:,} samples, as the index has, but not the same ones"
            self.findings.add(Finding(kind="epoch", problem=problem, epoch=epoch, stream=name))

    def _is_over(self, stream: int, epoch: int) -> bool:
        return (epoch + 1) * self.expected.streams[stream].samples <= self._indices[stream]

    def _is_broken(self, stream: int, start: int, size: int) -> bool:
        for begin, end in self._broken:
            low, high = (self.expected.indices_at(position)[stream] for position in (begin, end))
            if low < start + size and high > start:
                return True
        return False

    def _tally_of_index(self, stream: int) -> Tally:
        """The sums of all kept rows, counted once."""
        if stream not in self._of_index:
            tally = self._of_index[stream] = Tally()
            first, end = self.expected.first_samples[stream : stream + 2].tolist()
            for begin in range(0, end - first, BLOCK_POSITIONS):
                rows = np.arange(begin, min(begin + BLOCK_POSITIONS, end - first), dtype=np.int64)
                rows = rows[~self.expected.is_excluded(stream, rows)] + first
                tally.add(rows, self._hashing(rows))
        return self._of_index[stream]
