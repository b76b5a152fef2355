"""Checks delivered steps in order: every sample exactly once per epoch, and in the promised order.

Two independent proofs, in memory that does not grow with the number of samples:

    exact   every delivered id is mapped back to its index in the stream (`positions_of`, a function of id
            and epoch). A step's indices must be exactly the indices of its positions, each once. Because
            `positions_of` is a function, different indices come from different ids. So no id is delivered
            twice in an epoch, and N different ids out of N are all ids. The set of ids in a step then
            depends on its positions alone.
    sums    the ids of each epoch, as a multiset, must have the same sums as all kept rows of the index
            (`sums`); this does not use the arithmetic of the order.

The use of shards is checked as well: E whole epochs use E * k samples of a shard with k kept rows, and each
partial epoch uses 0 to k more. Samples that the tail "drop" leaves out are not deliveries, but count towards
the expected use of a shard.

Deliveries are int64[steps, ranks, batch]; -1 is padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Ints, Words
from shardkit.tools.audit.discrepancies import Delivered, Discrepancies
from shardkit.tools.audit.expectation import Expectation, Steps
from shardkit.tools.audit.findings import AuditReport, Finding, ShardUse, Walk
from shardkit.tools.audit.sums import SampleHash, Tally

BLOCK_POSITIONS = 1 << 18  # number of positions checked per block; temporaries take about 20 MB
MAX_SHARDS_LISTED = 1000

_Bools = npt.NDArray[np.bool_]
_Which = slice | npt.NDArray[np.intp]


class Checker:
    """Checks the steps of a walk, which begins at `position`; `finish` adds the results to `report`."""

    def __init__(
        self,
        expected: Expectation,
        report: AuditReport,
        hashing: SampleHash,
        name: str,
        *,
        runs: int = 1,
        position: int = 0,
    ) -> None:
        self.expected, self.findings = expected, report.findings
        self.walk = Walk(name, runs, start=position, end=position)
        self._report = report
        self._hashing = hashing
        self._digest = hashlib.blake2b(digest_size=16)
        self._origins = self._indices = expected.indices_at(position)
        self._tallies: dict[tuple[int, int], Tally] = {}
        self._of_index: dict[int, Tally] = {}
        self._whole_epochs = [0] * len(expected.streams)
        self._delivered = np.zeros(expected.shards, dtype=np.int64)  # samples delivered per shard
        self._dropped = np.zeros_like(self._delivered)
        self._broken: list[tuple[int, int]] = []  # [begin, end) of positions that were skipped as unknown
        self._discrepancies = Discrepancies(expected, report.findings)

    @property
    def position(self) -> int:
        """The position after the last checked step, where the next begins unless the tail drops samples."""
        return self.walk.end

    def deliver(self, ids: Ints) -> None:
        """Check the ids of the next steps, int64[steps, ranks, batch]; -1 is padding."""
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
            # Count dropped samples right after the step, as a loader does: the next step's size is unknown.
            if settled > steps.end:
                self._drop(steps.end, settled)

    def skip(self, position: int) -> None:
        """Continue at `position`; epochs that contain a skipped position are not proved."""
        assert position >= self.position
        if position > self.position:
            self._broken.append((self.position, position))
            self._move_to(position, self.expected.indices_at(position))

    def found(
        self,
        kind: str,
        problem: str,
        *,
        step: int | None = None,
        position: int | None = None,
        rank: int | None = None,
        sample: int | None = None,
    ) -> None:
        """Add a finding about `step` (None: the next step) and `sample`, the first sample with the problem.

        The argument `step` is counted from 0, the finding's step from 1.
        """
        step = 1 + (self.walk.steps if step is None else step)
        found = Finding(kind=kind, problem=problem, step=step, position=position, rank=rank)
        if sample is not None and self.findings.wants(kind):
            found = replace(found, **self.expected.place(sample))
        self.findings.add(found)

    def finish(self, *, seconds: float, superseded: int = 0) -> None:
        """End the walk: add it to the report, with its incomplete epochs, wrong deliveries and shard use."""
        for (stream, epoch), tally in sorted(self._tallies.items()):
            if tally.count:
                self.walk.partial.append((self.expected.names[stream], epoch, tally.count))
        self.walk.digest = self._digest.hexdigest()
        self.walk.seconds, self.walk.superseded = seconds, superseded
        self._report.walks.append(self.walk)
        self._discrepancies.settle()
        self._report.shards, self._report.shard_count = self._checked_shards(), self.expected.shards

    def _checked_shards(self) -> list[ShardUse]:
        """Return the use of up to MAX_SHARDS_LISTED shards, wrong use first; add findings for wrong use."""
        whole, part = [], []
        for stream, order in enumerate(self.expected.streams):
            kept = np.diff(order.order.shard_starts)
            whole.append(kept * self._whole_epochs[stream])
            part.append(kept * sum(1 for of, _ in self._tallies if of == stream))
        least = np.concatenate(whole)
        most = least + np.concatenate(part)
        used = self._delivered + self._dropped
        is_wrong = (used < least) | (used > most)
        found = []
        for shard in np.argsort(~is_wrong, kind="stable")[:MAX_SHARDS_LISTED].tolist():
            numbers = (int(counts[shard]) for counts in (self._delivered, self._dropped, least, most))
            found.append(use := ShardUse(self.expected.shard_name(shard), *numbers))
            if is_wrong[shard]:
                due = f"{use.least:,}" if use.least == use.most else f"{use.least:,} to {use.most:,}"
                problem = f"{use.delivered:,} samples delivered, {due} expected"
                self.findings.add(Finding(kind="shard", problem=problem, shard=use.shard))
        if (unlisted := int(is_wrong.sum()) - MAX_SHARDS_LISTED) > 0:
            self.findings.counts["shard"] += unlisted
        return found

    def _move_to(self, position: int, indices: list[int]) -> None:
        self.walk.end, self._indices = position, indices
        self._close_epochs()

    def _drop(self, start: int, end: int) -> None:
        """Count samples from `start` to `end`, which the tail drops, so that their epoch is complete."""
        self.walk.dropped += end - start
        for begin in range(start, end, BLOCK_POSITIONS):
            steps = Steps(begin, min(BLOCK_POSITIONS, end - begin), 1)
            for stream, edges in enumerate(self.expected.edges(steps)):
                indices = np.arange(edges[0], edges[-1], dtype=np.int64)
                if len(indices):
                    ids = self.expected.samples_at(stream, indices)
                    self._count(stream, indices, ids, self._hashing(ids))
                    shards = self.expected.shards_of(ids)
                    self._dropped += np.bincount(shards, minlength=len(self._dropped))
        self._move_to(end, self.expected.indices_at(end))

    def _check(self, steps: Steps, delivered: Ints) -> None:
        count, ranks, batch = delivered.shape
        ids = delivered.reshape(count, ranks * batch)
        real = self._real(steps, ids)
        low, high = self._hashing(ids)
        if not real.all():
            low, high = np.where(real, low, 0).astype(np.uint64), np.where(real, high, 0).astype(np.uint64)
        # Order the sums by step, not by hash word, so that the digest does not depend on the block size.
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
        self._delivered += np.bincount(self.expected.shards_of(counted), minlength=len(self._delivered))
        self.walk.samples += len(counted)
        self.walk.padding += flat.size - len(counted)
        if faulty:
            self._discrepancies.explain(steps, delivered, sorted(faulty), self.walk.steps)
        self.walk.steps += count
        self._move_to(steps.end, [int(each[-1]) for each in edges])

    def _real(self, steps: Steps, ids: Ints) -> _Bools:
        """Return a mask of `ids`: True for a valid id, which is neither padding nor excluded.

        Adds findings for wrong padding, excluded rows and ids that the dataset does not have.
        """

        def at(row: int) -> dict[str, int]:
            return {"step": self.walk.steps + row, "position": steps.start + row * steps.size}

        real: _Bools = ids >= 0
        if ids.shape[1] != steps.size or not real.all():
            counts = real.sum(axis=1)
            for row in np.flatnonzero(counts != steps.size).tolist():
                self.found("padding", f"{counts[row]:,} samples in a step of {steps.size:,}", **at(row))
        foreign = (ids < -1) | (ids >= self.expected.samples)
        if foreign.any():
            row, column = np.argwhere(foreign)[0].tolist()
            problem = f"{int(foreign.sum()):,} ids from this step on are not in the dataset"
            self.found("foreign", f"{problem}; the first is {ids[row, column]}", **at(row))
        excluded = np.zeros_like(real)
        for stream, order in enumerate(self.expected.streams):
            if order.exclusions is not None:
                first, end = self.expected.first_samples[stream : stream + 2].tolist()
                own = real & (ids >= first) & (ids < end)
                excluded[own] = order.exclusions.contains(ids[own] - first)
        for row, column in np.argwhere(excluded).tolist():
            sample = int(ids[row, column])
            self.found("excluded", "an excluded row was delivered", sample=sample, **at(row))
        return real & ~foreign & ~excluded

    def _by_stream(self, flat: Ints, where: _Which) -> Sequence[_Which]:
        """Split `where`, indices into the ids `flat`, by stream; return each stream's indices, ascending."""
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
        ids: Ints,
        rows: Ints,
        edges: Ints,
        words: tuple[Words, Words],
        where: _Which,
        shape: tuple[int, int],
    ) -> set[int]:
        """Check a stream's samples in a block of steps; return its first faulty steps, counted from 0."""
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
        delivered = Delivered(ids, indices, rows, of_rank, edges, fits)
        return self._discrepancies.add(stream, delivered, self.walk.steps)

    def _indices_of(self, stream: int, own_ids: Ints, rows: Ints, edges: Ints) -> Ints:
        """Return each sample's index in the stream, in the epoch of the step that delivered it.

        A step can contain samples of several epochs. A sample then belongs to the epoch in which it is due at
        this step. A sample that is not due at all is assigned to an epoch of which the step lacks a sample,
        because it was delivered in place of that sample.
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
            low, high = np.searchsorted(rows, (steps[0], steps[1] + 1)).tolist()  # `rows` is sorted
            free = low + np.flatnonzero(indices[low:high] < 0)
            found = order.positions_of(own_ids[free], epoch)
            fits = (found >= np.maximum(edges[rows[free]], begin)) & (
                found < np.minimum(edges[rows[free] + 1], stop)
            )
            # Use each index once: if a step has a sample twice, the second may belong to the next epoch.
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

    def _count(self, stream: int, indices: Ints, ids: Ints, words: tuple[Words, Words]) -> None:
        """Add `ids` to the sums of their epochs, which follow from `indices`; `words` is H(ids)."""
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
        """Compare the sums of each finished epoch with the sums of all kept rows; add findings."""
        for stream, epoch in [key for key in self._tallies if self._is_over(*key)]:
            size = self.expected.streams[stream].samples
            if epoch * size < self._origins[stream] or self._is_broken(stream, epoch * size, size):
                continue
            tally, whole = self._tallies.pop((stream, epoch)), self._tally_of_index(stream)
            self._whole_epochs[stream] += 1
            if tally == whole:
                self.walk.epochs_proved += 1
                continue
            self.walk.epochs_wrong += 1
            name = self.expected.names[stream] if self.expected.mixture is not None else None
            problem = f"{tally.count:,} samples were delivered, but the index has {whole.count:,}"
            if tally.count == whole.count:
                problem = f"{tally.count:,} samples were delivered, as many as in the index, but not the same"
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
        """Return the sums over all rows of a stream that are not excluded, each counted once."""
        if stream not in self._of_index:
            tally = self._of_index[stream] = Tally()
            excluded = self.expected.streams[stream].exclusions
            first, end = self.expected.first_samples[stream : stream + 2].tolist()
            for begin in range(0, end - first, BLOCK_POSITIONS):
                rows = np.arange(begin, min(begin + BLOCK_POSITIONS, end - first), dtype=np.int64)
                rows = first + (rows if excluded is None else rows[~excluded.contains(rows)])
                tally.add(rows, self._hashing(rows))
        return self._of_index[stream]
