"""Which samples a tar holds: members grouped by key, as WebDataset groups them.

A key is the path up to the first dot of its last component, the extension is the rest in lower case.
Consecutive members with one key are one sample. Members under a `__name__` at the top level are metadata and
names without an extension are not data: both are skipped, as `webdataset` does. A repeated extension inside a
sample is an error. The index is a few arrays: about 20 bytes a member, and the keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.tar.headers import Member

__all__ = ["TarIndex", "group_members", "split_name"]

MAX_MEMBERS = 1 << 23  # of one shard: 8 million members are an index of about a gigabyte


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Samples of one tar: sample i has the members `starts[i]` up to `starts[i + 1]`.

    `offsets` and `sizes` are the members' payloads, `kinds` number their extensions.
    """

    keys: Sequence[str]
    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int32]
    extensions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def fits(self, size: int) -> bool:
        """Whether all payloads lie in a file of `size` bytes."""
        ends = self.offsets + self.sizes
        return not len(ends) or (int(self.offsets.min()) >= 0 and int(ends.max()) <= size)

    def members_of(self, extension: str) -> npt.NDArray[np.int64] | None:
        """The member of each sample that has `extension`, or None unless every sample has one."""
        if extension not in self.extensions:
            return None
        members = np.flatnonzero(self.kinds == self.extensions.index(extension))
        # An extension occurs at most once in a sample, so as many members as samples means one in each.
        return members if len(members) == len(self) else None


def split_name(name: str) -> tuple[str, str] | None:
    """(key, extension) of a member's name, or None if it is no part of any sample."""
    first = name.split("/", 1)[0]
    if len(first) >= 4 and first.startswith("__") and first.endswith("__"):
        return None
    folder = name.rfind("/") + 1
    dot = name.find(".", folder)
    if dot < 0:
        return None
    if dot == folder:
        # A hidden file: its folder is the key, as in webdataset, unless that has a dot in its name too.
        parent = name.rfind("/", 0, max(folder - 1, 0)) + 1
        if folder == 0 or "." in name[parent:folder]:
            return None
    return name[:dot], name[dot + 1 :].lower()


def group_members(members: Iterable[Member], file: str | PathLike[str]) -> TarIndex:
    """The index of a tar from its members; ShardError on a repeated extension."""
    keys: list[str] = []
    starts, offsets, sizes, kinds = array("q"), array("q"), array("q"), array("i")
    numbers: dict[str, int] = {}
    present: set[int] = set()
    for member in members:
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if not keys or key != keys[-1]:
            keys.append(key)
            starts.append(len(offsets))
            present.clear()
        number = numbers.setdefault(extension, len(numbers))
        if number in present or extension == "__key__":
            problem = f"member {member.name[:200]!r}: its sample already has {extension!r}"
            raise ShardError(file, problem, offset=member.header)
        present.add(number)
        offsets.append(member.offset)
        sizes.append(member.size)
        kinds.append(number)
        if len(offsets) > MAX_MEMBERS:
            raise ShardError(file, f"more than {MAX_MEMBERS:,} members; write smaller shards")
    starts.append(len(offsets))
    return TarIndex(
        keys=keys,
        starts=np.array(starts, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        kinds=np.array(kinds, dtype=np.int32),
        extensions=tuple(numbers),
    )
