"""A list of paths is read as the files that it names, wherever they are; what leads nowhere is named."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from servers.web import Fault, WebServer, web_server
from shardkit.errors import BuildError, RecipeError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import StorageOptions
from shardkit.writers.init_recipe import draft_recipe
from shardkit.writers.inputs.files import find_files
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.scan import parts_of, scan_inputs
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.rows.ledger import Ledger, Quarantine
from support.remote_harness import fresh_url

NAMES = [f"crawl/seg{n % 3}/part-{n:03d}.jsonl.gz" for n in range(40)]


def body(name: str) -> bytes:
    return gzip.compress(json.dumps({"text": f"words of {name}"}).encode(), mtime=0)


def listing(names: Sequence[str]) -> bytes:
    return gzip.compress("".join(f"{name}\n" for name in names).encode(), mtime=0)


@pytest.fixture
def web() -> Iterator[WebServer]:
    files = {name: body(name) for name in NAMES}
    with web_server(files | {"crawl/data.paths.gz": listing(NAMES)}) as running:
        yield running


def listed(folder: Path, limit: int | None = None, **config: Any) -> Recipe:
    stub = {"tokenizer": {"path": "x", "eos": "x"}, "output": "x", "limit": limit}
    return recipe_from_mapping(stub | {"inputs": [{"list": True} | config]}, folder=folder)


def names_of(built: Recipe, storage: StorageOptions | None = None) -> list[str]:
    return [split.file for split in parts_of(scan_inputs(built, storage))]


def texts(built: Recipe) -> list[str]:
    rows: list[str] = []
    for split in scan_inputs(built):
        for batch in read_split(split, built.inputs[0], Ledger(), Quarantine()):
            rows += batch.column("text").to_pylist()
    return rows


def write_files(folder: Path) -> None:
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body(name))


def test_a_list_on_a_web_server_a_bucket_and_this_machine_gives_the_same_documents(
    web: WebServer, tmp_path: Path
) -> None:
    store = MemoryStore(fresh_url())
    write_files(tmp_path / "copy")
    for name in NAMES:
        store.put(name, body(name))
    store.put("some.paths", "\n".join(NAMES).encode())
    (tmp_path / "files.txt.xz").write_bytes(lzma.compress("\r\n".join(NAMES).encode()))
    places = {
        f"{web.url}/crawl/data.paths.gz": web.url,
        f"{store.url}/some.paths": store.url,
        "files.txt.xz": "copy",
    }
    for path, base in places.items():
        built = listed(tmp_path, path=path, base=base)
        assert names_of(built) == sorted(NAMES)  # so documents have the same ids
        assert texts(built) == [f"words of {name}" for name in sorted(NAMES)]
    # A list on this machine of files elsewhere, and one from elsewhere of files on this machine.
    assert names_of(listed(tmp_path, path="files.txt.xz", base=web.url)) == sorted(NAMES)
    assert names_of(listed(tmp_path, path=f"{web.url}/crawl/data.paths.gz", base="copy")) == sorted(NAMES)


def test_lines_start_at_the_folder_of_their_list_and_whole_urls_stay(web: WebServer, tmp_path: Path) -> None:
    write_files(tmp_path / "sub")
    absolute = tmp_path / "sub" / NAMES[1]
    lines = [
        "# a comment",
        "",
        f"  {NAMES[0]}\t",
        f"./{NAMES[2]}",
        str(absolute),
        f"{web.url}/{NAMES[3]}",
        "",
    ]
    (tmp_path / "sub/list.txt").write_text("\ufeff" + "\n".join(lines))
    expected = [f"{web.url}/{NAMES[3]}", *(f"sub/{NAMES[n]}" for n in (0, 1, 2))]
    assert names_of(listed(tmp_path, path="sub/list.txt")) == sorted(expected)
    web.files["crawl/near.paths"] = b"seg0/part-000.jsonl.gz\n"
    assert names_of(listed(tmp_path, path=f"{web.url}/crawl/near.paths")) == [f"{web.url}/{NAMES[0]}"]
    web.files["crawl/near.paths"] = f"/{NAMES[0]}\n".encode()
    assert names_of(listed(tmp_path, path=f"{web.url}/crawl/near.paths", base=web.url)) == [NAMES[0]]


def test_several_lists_are_one_input_and_files_named_twice_are_read_once(
    web: WebServer, tmp_path: Path
) -> None:
    web.files |= {"a.paths": listing(NAMES[:20]), "b.paths": listing(NAMES[15:])}
    with pytest.warns(RuntimeWarning, match=r"names files again in 5 lines; each file is read once"):
        found = names_of(listed(tmp_path, path=f"{web.url}/{{a,b}}.paths", base=web.url))
    assert found == sorted(NAMES)


def test_a_number_of_files_grows_by_more_files_and_asks_for_no_others(web: WebServer, tmp_path: Path) -> None:
    path: dict[str, Any] = {"path": f"{web.url}/crawl/data.paths.gz", "base": web.url}
    few, more = (names_of(listed(tmp_path, **path, files=count)) for count in (5, 9))
    assert len(few) == 5
    assert {*few} < {*more}
    assert len({name.split("/")[1] for name in more}) > 1  # spread over the list
    web.files["crawl/data.paths.gz"] = listing([*reversed(NAMES), "crawl/zz.jsonl"])
    web.requests.clear()
    assert names_of(listed(tmp_path, **path, files=5)) == few  # the order of lines decides nothing
    assert len([one for one in web.requests if "part" in one]) == 5
    assert names_of(listed(tmp_path, **path, files=99, exclude="zz*")) == sorted(NAMES)
    write_files(tmp_path / "x")
    globbed = listed(tmp_path, path="x", list=False, base="x", files=5)
    assert names_of(globbed) == few


def test_a_trial_asks_for_no_more_files_than_documents(web: WebServer, tmp_path: Path) -> None:
    path: dict[str, Any] = {"path": f"{web.url}/crawl/data.paths.gz", "base": web.url}
    assert len(names_of(listed(tmp_path, limit=3, **path))) == 3
    assert len([one for one in web.requests if "part" in one]) == 3


@pytest.mark.parametrize(
    ("exclude", "left"),
    [("seg[01]", 13), ("*-00?.jsonl.gz", 30), ("crawl/seg0/*", 26), ("seg0/**", 26), ("{seg0,seg1}", 13)],
)
def test_lines_are_excluded_by_names_and_ends_of_paths(
    web: WebServer, tmp_path: Path, exclude: str, left: int
) -> None:
    built = listed(tmp_path, path=f"{web.url}/crawl/data.paths.gz", base=web.url, exclude=exclude)
    assert len(names_of(built)) == left
    whole = listed(
        tmp_path, path=f"{web.url}/crawl/data.paths.gz", base=web.url, exclude=f"{web.url}/crawl/**"
    )
    with pytest.raises(RecipeError, match="lists 40 files, but all are excluded by `exclude`"):
        names_of(whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"list.txt lists no file"),
        (b"# nothing\n\n", r"lists no file"),
        (
            b"a.jsonl\nnone.jsonl\n",
            r"line 2: .*none.jsonl: No such file.*remove the line, .*`base`",
        ),
        (b"a.jsonl\n.\n", r"line 2: .* is not a file; a line names one file"),
        (b"<!doctype html><html>", r"is not a list of paths: it is HTML"),
        (b"%PDF-1.4\n%...", r"is not a list of paths: it is a PDF"),
        (gzip.compress(b"a.jsonl\n" * 99, mtime=0)[:-9], r"list.txt: is damaged"),
        (b"a.jsonl\n\xff\xfe.jsonl", r"byte 8 is not UTF-8"),
        (b"a.jsonl\nb\0.jsonl", r"line 2: is not the path of a file"),
        (b"https:///x.jsonl\n", r"line 1: .*https:///x.jsonl"),
        (b"http://127.0.0.1:9/x.jsonl\n", r"line 1: http://127.0.0.1:9/x.jsonl: .*attempts"),
    ],
)
def test_a_list_that_leads_nowhere_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    (tmp_path / "a.jsonl").write_text("{}")
    quickly = StorageOptions(first_contact_seconds=0.2, retry_seconds=0.5)
    with pytest.raises(RecipeError, match=rf"inputs\[0\].path: .*{message}"):
        names_of(listed(tmp_path, path="list.txt"), quickly)


def test_a_file_that_a_server_lacks_or_refuses_names_list_and_line(web: WebServer, tmp_path: Path) -> None:
    web.files["x.paths"] = listing([*NAMES[:30], "crawl/none.jsonl", *NAMES[30:]])
    built = listed(tmp_path, path=f"{web.url}/x.paths", base=web.url)
    with pytest.raises(RecipeError, match=r"x.paths: line 31: .*none.jsonl: there is no such file.*remove"):
        names_of(built)
    built = listed(tmp_path, path=f"{web.url}/x.paths", base=web.url, exclude="none*")
    assert len(names_of(built)) == 40
    web.faults[f"/{NAMES[7]}"] = [Fault(403, method="*", repeat=True)]
    with pytest.raises(RecipeError, match=r"x.paths: line 8: .*the server refuses"):
        names_of(built)
    with pytest.raises(RecipeError, match=r"inputs\[0\].path: .*y.paths: there is no such file"):
        names_of(listed(tmp_path, path=f"{web.url}/y.paths"))


def test_a_list_from_elsewhere_names_no_file_of_this_machine_and_no_bucket(
    web: WebServer, tmp_path: Path
) -> None:
    store = MemoryStore(fresh_url())
    store.put("a.jsonl", b"{}")
    (tmp_path / "secret.jsonl").write_text("{}")
    path: dict[str, Any] = {"path": f"{web.url}/bad.paths"}
    for line, message in (
        (f"file://{tmp_path}/secret.jsonl", "cannot name files of this machine"),
        (f"{store.url}/a.jsonl", "would be read with your credentials"),
        ("../../x.jsonl", "are not folders of a store"),
    ):
        web.files["bad.paths"] = line.encode()
        with pytest.raises(RecipeError, match=rf"bad.paths: line 1: .*{message}"):
            names_of(listed(tmp_path, **path))
    web.files["bad.paths"] = f"{tmp_path}/secret.jsonl".encode()
    with pytest.raises(RecipeError, match=r"line 1: http.*there is no such file"):
        names_of(listed(tmp_path, **path))
    web.files["bad.paths"] = b"../secret.jsonl"
    with pytest.raises(RecipeError, match=r"line 1: ../secret.jsonl leaves"):
        names_of(listed(tmp_path, **path, base="data"))
    web.files["bad.paths"] = f"{store.url}/a.jsonl".encode()
    assert names_of(listed(tmp_path, **path), StorageOptions(follow_urls=True)) == [f"{store.url}/a.jsonl"]
    assert names_of(listed(tmp_path, **path, base=store.url)) == ["a.jsonl"]


def test_two_files_of_one_name_are_refused(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "crawl/seg0").mkdir(parents=True)
    (tmp_path / NAMES[0]).write_bytes(body("other"))
    (tmp_path / "list.txt").write_text(f"{NAMES[0]}\nfile://{tmp_path}/{NAMES[0]}\n")
    with pytest.raises(RecipeError, match=r"line 1\) and .*line 2\) would both be called"):
        names_of(listed(tmp_path, path="list.txt", base=web.url))


def test_files_of_a_long_list_are_found_at_the_same_time_and_slower_when_asked(
    web: WebServer, tmp_path: Path
) -> None:
    many = {f"m/{n}.jsonl": b'{"text": "x"}' for n in range(400)}
    web.files |= many | {"m.paths": listing([*many])}
    web.faults["/m/7.jsonl"] = [Fault(503, {"Retry-After": "0"}, method="HEAD")] * 3
    web.delay_seconds = 0.01
    built = listed(tmp_path, path=f"{web.url}/m.paths")
    assert len(names_of(built, StorageOptions(connections=16))) == 400
    assert 4 < web.busiest <= 17


class Counted(MemoryStore):
    asked: list[str]

    def head(self, key: str) -> Any:
        self.asked.append(key)
        return super().head(key)


def test_a_folder_of_a_bucket_with_many_listed_files_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit.writers.inputs import remote_files

    store = Counted(fresh_url().rpartition("/")[0])
    store.asked = []
    monkeypatch.setattr(remote_files, "connect_root", lambda root, storage: PinnedHere(store))
    for number in range(100):
        store.put(f"many/{number:03d}.jsonl", b"{}")
    store.put("few/a.jsonl", b"{}")
    urls = [f"{store.url}/many/{number:03d}.jsonl" for number in range(0, 100, 2)]
    found = remote_files.look_up([*urls, f"{store.url}/few/a.jsonl"], None)
    assert [*found] == [*urls, f"{store.url}/few/a.jsonl"]
    assert store.asked == ["few/a.jsonl"]
    with pytest.raises(remote_files.MissingObjectError, match="many/none"):
        remote_files.look_up([*urls, f"{store.url}/many/none"], None)


class PinnedHere:
    def __init__(self, store: MemoryStore) -> None:
        self.store, self.url = store, store.url

    def pinned(self) -> MemoryStore:
        return self.store


def test_a_list_given_as_text_is_refused_with_the_right_key(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "warc.paths.gz").write_bytes(listing(NAMES))
    for format in (None, "text"):
        with pytest.raises(RecipeError, match=r"is a list of paths; set inputs\[0\].list: true"):
            names_of(listed(tmp_path, path="warc.paths.gz", list=False, format=format))
    (tmp_path / "files.txt").write_text("\n".join(NAMES))
    built = listed(tmp_path, path="files.txt", list=False)
    (split,) = scan_inputs(built)
    with pytest.raises(BuildError, match=r"a list of paths; set inputs\[0\].list: true"):
        list(read_split(split, built.inputs[0], Ledger(), Quarantine()))
    chosen = listed(tmp_path, path="files.txt", list=False, format="text")
    assert texts(chosen) == ["\n".join(NAMES)]


def test_init_says_how_to_read_a_list(tmp_path: Path) -> None:
    (tmp_path / "warc.paths.gz").write_bytes(listing(NAMES))
    (tmp_path / "files.txt").write_text("\n".join(NAMES))
    for name in ("warc.paths.gz", "files.txt"):
        with pytest.raises(RecipeError, match=r"is a list of paths; .*list: true"):
            draft_recipe([str(tmp_path / name)], tmp_path, tokenizer="x", eos="x", bos=None)


def test_the_storage_of_an_input_is_laid_over_that_of_the_build(tmp_path: Path) -> None:
    store = MemoryStore(fresh_url())
    store.put("a.jsonl", b"{}")
    whole = StorageOptions(endpoint_url="http://own:9000", profile="mine", region="r")
    given = {"anonymous": True, "endpoint_url": "https://s3.amazonaws.com"}
    built = listed(tmp_path, path=f"{store.url}/a.jsonl", list=False, storage=given)
    (file,) = find_files(built, built.inputs[0], "inputs[0].path", whole).files.values()
    assert file.storage == StorageOptions(
        anonymous=True, endpoint_url="https://s3.amazonaws.com", region="r", profile=None
    )
    plain = listed(tmp_path, path=f"{store.url}/a.jsonl", list=False)
    assert built.content() == plain.content()  # how a file is reached decides no byte
    with pytest.raises(RecipeError, match="give either anonymous or profile"):
        listed(tmp_path, path="x", storage={"anonymous": True, "profile": "p"})
