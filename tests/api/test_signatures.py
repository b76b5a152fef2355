"""Editors, notebooks and `help()` show the arguments that people type."""

from __future__ import annotations

import inspect
import pydoc

import jedi
import pytest

import shardkit as sk
from shardkit.loaders.pytorch import StreamingDataset

COMMON = (
    *("labels", "columns", "sequence_length", "decode", "transform", "endless", "cache_dir", "cache_bytes"),
    *("layout", "order", "run"),
)
GROUPS = {"Layout": "cu_seqlens", "Order": "global_batch", "Run": "prefetch_batches", "Stream": "weight"}


def shown_by_editor(code: str) -> list[str]:
    """The arguments in the call tip at the end of `code`."""
    [signature] = jedi.Script(f"import shardkit as sk\n{code}").get_signatures()
    return [parameter.name for parameter in signature.params]


@pytest.mark.parametrize("loader", [sk.StreamingLoader, StreamingDataset])
def test_the_common_options_of_a_loader_are_in_its_signature(loader: type) -> None:
    assert {*COMMON} <= inspect.signature(loader).parameters.keys()
    text = pydoc.plain(pydoc.render_doc(loader))
    assert [name for name in COMMON if f"{name}: " not in text] == []


def test_the_docstring_of_the_loader_explains_each_argument() -> None:
    text = inspect.getdoc(sk.StreamingLoader)
    assert text is not None
    named = [name for name in inspect.signature(sk.StreamingLoader).parameters if name != "options"]
    assert [name for name in named if f"`{name}`" not in text] == []


def test_an_editor_shows_the_common_options_and_completes_the_groups() -> None:
    assert {*COMMON} <= {*shown_by_editor("sk.StreamingLoader(")}
    for group, option in GROUPS.items():
        assert option in shown_by_editor(f"sk.{group}(")
        assert option in inspect.signature(getattr(sk, group)).parameters


def test_an_option_outside_of_the_signature_is_still_checked_by_name() -> None:
    with pytest.raises(TypeError, match="'pad_ids'; did you mean pad_id"):
        sk.StreamingLoader("data", batch_size=2, pad_ids=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'num_workers'; in shardkit: the loader prefetches"):
        sk.StreamingLoader("data", batch_size=2, num_workers=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"cu_seqlens belongs to a group of options: pass layout=Layout"):
        sk.StreamingLoader("data", batch_size=2, cu_seqlens=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"layout must be a shardkit.loaders.Layout\(…\), not None"):
        sk.StreamingLoader("data", batch_size=2, layout=None)  # type: ignore[arg-type]
