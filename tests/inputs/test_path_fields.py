"""`path_fields`: what the names of files say becomes metadata of their documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import RecipeError
from support.read_inputs import read, recipe


def test_folders_of_hive_give_metadata_beside_what_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d/lang=de/year=2024/name=a%2Fb/x=__HIVE_DEFAULT_PARTITION__/plain"
    folder.mkdir(parents=True)
    (folder / "k=v.jsonl").write_text('{"text": "a", "year": 1, "n": 2}\n')
    table, bad, _ = read(tmp_path, "d", path_fields="hive")
    assert (bad, table["metadata"].to_pylist()) == ([], ['{"lang":"de","year":"2024","name":"a/b"}'])
    table, _, _ = read(tmp_path, "d", path_fields="hive", metadata=["n", "year"])
    assert table["metadata"].to_pylist() == ['{"lang":"de","year":1,"name":"a/b","n":2}']
    assert read(tmp_path, "d")[0]["metadata"].to_pylist() == [None]
    base = read(tmp_path, "d", path_fields="hive", base="d/lang=de")[0]
    assert base["metadata"].to_pylist() == ['{"year":"2024","name":"a/b"}']


def test_named_groups_of_an_expression_are_metadata_and_every_file_has_to_match(tmp_path: Path) -> None:
    for name in ("CC-MAIN-2024-10/de/a.txt", "CC-MAIN-2024-18/en/b.txt"):
        (tmp_path / "d" / name).parent.mkdir(parents=True)
        (tmp_path / "d" / name).write_text("text")
    expression = r"(?P<dump>CC-MAIN-\d{4}-\d{2})/(?P<lang>..)/(?P<rare>zz)?"
    table, _, _ = read(tmp_path, "d", path_fields=expression)
    assert table["metadata"].to_pylist() == [
        '{"dump":"CC-MAIN-2024-10","lang":"de"}',
        '{"dump":"CC-MAIN-2024-18","lang":"en"}',
    ]
    with pytest.raises(
        RecipeError, match=r"inputs\[0\].path_fields: the expression .* does not match the name d/"
    ):
        read(tmp_path, "d", path_fields="(?P<lang>de)/a")
    assert read(tmp_path, "d", path_fields="(?P<lang>de)/a", exclude="en")[0].num_rows == 1


@pytest.mark.parametrize("expression", ["", "lang", "(", "(unnamed)", "Hive"])
def test_an_expression_for_paths_has_named_groups(tmp_path: Path, expression: str) -> None:
    with pytest.raises(RecipeError, match=r"inputs\[0\].path_fields"):
        recipe(tmp_path, {"path": "d", "path_fields": expression})
