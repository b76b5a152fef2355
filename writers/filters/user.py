"""Filters that users write: any function over an Arrow record batch.

The function receives the remaining documents (columns of `DOCUMENT_SCHEMA`, rows/documents.py, with the text
as edited so far) and the recipe's parameters as keyword arguments. It returns, for each row, whether the
document stays: a boolean Arrow array, NumPy array or list without nulls. If the recipe lists `reasons`, it
returns for each row one of these reasons, or null or "" if the document stays. The result for a row must not
depend on other rows or calls, because batch boundaries are arbitrary. The digest of its source file is part
of a task's identity, so changing the code runs the task again; changes to modules that it imports do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shardkit.errors import BuildError
from shardkit.settings import FieldName, Listed
from shardkit.writers.filters.base import FilterSettings, Rule
from shardkit.writers.filters.user_code import UserCode

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch

_KEY = "filters: python"


class PythonConfig(UserCode, FilterSettings):
    """Settings of `python`: a function that judges Arrow batches, and its arguments."""

    reasons: Listed[FieldName] = Field(
        default=(), description="Reasons that the function may return; none: it returns what to keep."
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if len(set(self.reasons)) < len(self.reasons):
            raise ValueError(f"a reason is listed twice: {', '.join(self.reasons)}")
        return self

    @property
    def may_edit(self) -> bool:
        """See FilterSettings.may_edit."""
        return True

    def build(self, folder: Path) -> PythonFilter:
        """See FilterSettings.build."""
        return PythonFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """Return the function's source file, whose digest is part of the identity of a task."""
        return (self.source_file(_KEY),)


class PythonFilter:
    """Drops the documents that the user's function rejects."""

    def __init__(self, config: PythonConfig, folder: Path) -> None:
        self._config = config
        self._name = f"{_KEY}: {config.function}"
        self.reasons = config.reasons or ("rejected",)
        self._function = config.load(_KEY, folder)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Raises BuildError if the function fails or returns invalid values."""
        import pyarrow as pa

        chosen, documents = np.flatnonzero(batch.wanted), batch.documents
        if len(chosen) < len(batch):
            documents = documents.take(pa.array(chosen))
        codes = np.zeros(len(batch), np.int64)
        if len(chosen):
            codes[chosen] = self._codes(documents)
        return [Rule(name, codes == number) for number, name in enumerate(self.reasons, 1)]

    def _codes(self, documents: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return int64[n]: 0 where a document stays, else 1 + the index of its reason."""
        import pyarrow as pa

        try:
            answer: Any = self._function(documents, **self._config.parameters)
        except Exception as error:  # the user's code may raise anything
            first = documents.column("text")[0].as_py()[:60]
            raise BuildError(
                f"{self._name}: {type(error).__name__}: {error} (a batch of {documents.num_rows} documents, "
                f"the first begins {first!r})"
            ) from error
        try:
            values = (answer if hasattr(answer, "to_pylist") else pa.array(answer)).to_pylist()
        except (pa.ArrowException, TypeError) as error:
            raise BuildError(f"{self._name}: the function did not return an array: {error}") from None
        if len(values) != documents.num_rows:
            raise BuildError(
                f"{self._name}: the function returned {len(values)} values for {documents.num_rows} documents"
            )
        known: dict[Any, int] = {None: 0, "": 0} if self._config.reasons else {True: 0, False: 1}
        known |= {reason: number for number, reason in enumerate(self._config.reasons, 1)}
        codes = [known.get(value, -1) if isinstance(value, bool | str | None) else -1 for value in values]
        if -1 in codes:
            wanted = f"one of {', '.join(self.reasons)} or null" if self._config.reasons else "true or false"
            raise BuildError(
                f"{self._name}: the function returned {values[codes.index(-1)]!r}; expected {wanted}"
            )
        return np.array(codes, np.int64)
