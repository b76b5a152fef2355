"""The explorer shows what the tables hold, page by page, whatever texts say and whatever is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("starlette", reason="the pages need shardkit[view]")
pytest.importorskip("uvicorn", reason="the pages need shardkit[view]")

from shardkit.card import DatasetCard
from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.text import read_rows
from shardkit.errors import ShardkitError
from shardkit.formats import mds
from shardkit.tools.explore.export import export_site
from shardkit.tools.explore.overview import cost_rows, funnel_rows, read_costs
from shardkit.tools.explore.scan import Equal, Place, scan
from shardkit.tools.explore.server import page_address
from shardkit.tools.explore.site import Site, shown
from shardkit.writers import build
from shardkit.writers.report.costs import StepCost
from support.explored_build import (
    HOSTILE,
    TOKEN,
    Page,
    cookie,
    explore,
    lines_of,
    links_to,
    make_explored,
    served,
    show,
    text_of,
)
from support.small_build import EOS, make_corpus, train_bpe, tree

SHORT = "length/too_few_words"
MOST_OF_A_PAGE = 6  # that the crawl visits


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    return make_explored(tmp_path_factory.mktemp("explore") / "corpus")


@pytest.fixture(scope="module")
def site(out: Path) -> Site:
    return Site(explore(out))


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    with served(site) as found:
        yield found


def assert_harmless(html: str) -> None:
    tags = {tag for tag, _ in Page(html).tags}
    assert not tags & {"script", "img", "iframe", "object", "base"}
    names = {name for _, attributes in Page(html).tags for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("src", "style")}
    assert not [c for c in html if (ord(c) < 32 and c not in "\n\t") or c in "\u202e\u202c\x7f"]


def test_a_number_is_shown_with_what_it_is_about(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path, 80)
    question = {"question": " ".join(f"word{number}" for number in range(30)), "answer": "yes"}
    (tmp_path / "eval.jsonl").write_text(json.dumps(question))
    (tmp_path / "plain-0.jsonl").write_text(json.dumps({"text": question["question"], "number": 1}) + "\n")
    decontamination = {"evaluations": [{"path": "eval.jsonl", "name": "<b>set</b>"}], "questions": {}}
    overrides = [f"filters={json.dumps([{'decontamination': decontamination}])}"]
    made = Site(explore(Path(build(recipe, overrides=overrides, progress=False).output)))
    page = show(made, "rule", rule="decontamination/question")
    assert "1 <b>set</b>:0 bound 0.8" in page.words
    assert links_to(page, "removed")


def test_every_link_of_the_site_leads_to_a_harmless_page(site: Site, address: str) -> None:
    waiting, seen, counts = ["/"], {"/"}, Counter({"/": 1})
    while waiting:
        asked = urllib.request.Request(address + waiting.pop(), headers=cookie(address))
        with urllib.request.urlopen(asked) as response:
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            if response.headers["Content-Type"].startswith("text/css"):
                continue
            html = response.read().decode()
        assert_harmless(html)
        for link in Page(html).links:
            if link.startswith("https://site"):  # of a document
                continue
            link = link if link.startswith("/") else f"/{link}"
            page = urllib.parse.urlsplit(link).path
            if link not in seen and "row=random" not in link and counts[page] < MOST_OF_A_PAGE:
                seen.add(link)
                counts[page] += 1
                waiting.append(link)
    assert set(counts) == {"/", "/style.css"} | {f"/{name}" for name in site.pages} - {"/funnel"}


def test_only_who_has_the_token_is_answered_and_only_reading(address: str) -> None:
    known = cookie(address)

    def status(path: str, headers: Mapping[str, str] = known, **options: Any) -> int:
        request = urllib.request.Request(address + path, headers=dict(headers), **options)
        try:
            with urllib.request.urlopen(request) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status("/") == 200
    assert status("/", known | {"Host": "evil.example"}) == 400
    assert status(f"/?token={TOKEN}", {"Host": "evil.example"}) == 400
    assert status("/", data=b"x", method="POST") == 405
    for page in ("/", "/row", "/style.css", "/nowhere", "/removed?table=dropped&at=0.0.0"):
        assert status(page, {}) == 403
        for cookies in ("", "x", f"shardkit-view={TOKEN}", f"shardkit-view-1={TOKEN}", f"{TOKEN}"):
            assert status(page, {"Cookie": cookies}) == 403
        for token in ("", "x", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "%00", "%ff", "é"):
            separator = "&" if "?" in page else "?"
            assert status(f"{page}{separator}token={urllib.parse.quote(token, safe='%')}", {}) == 403
    assert status("/nowhere") == 404
    assert status("/row?row=x") == 400
    assert status("/rule?rule=" + urllib.parse.quote(HOSTILE)) == 404
    assert status("/style.css/../../site.py") == 404


def test_the_funnel_leads_to_a_rule_and_its_documents_near_the_bound_first(site: Site, out: Path) -> None:
    front = show(site, "funnel")
    assert {"rule": SHORT} in links_to(front, "rule")
    page = show(site, "rule", rule=SHORT)
    values = [int(n) for n in re.findall(r"(\d) bound 5", page.words)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 4
    far = show(site, "rule", rule=SHORT, view="far")
    assert re.findall(r"(\d) bound 5", far.words)[0] == "1"
    dropped = [line for line in lines_of(out, "dropped") if line["rule"] == SHORT]
    assert sum(map(int, re.findall(r": (\d+) dropped", page.words))) == len(dropped)


def test_pages_of_a_rule_list_each_of_its_documents_once(site: Site, out: Path) -> None:
    found: list[str] = []
    params = {"rule": SHORT, "view": "all"}
    while params:
        page = show(site, "rule", **params)
        found += [link["at"] for link in links_to(page, "removed")]
        params = next((link for link in links_to(page, "rule") if "at" in link), {})
    dropped = [line for line in lines_of(out, "dropped") if line["rule"] == SHORT]
    assert len(found) == len(set(found)) == len(dropped)


def test_a_text_that_was_not_kept_comes_from_the_input_file(out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, out.parent / "without")
    for file in (out.parent / "without" / "dropped").iterdir():
        table = pq.read_table(file)
        texts = pa.nulls(table.num_rows, pa.string())
        pq.write_table(table.set_column(table.schema.get_field_index("text"), "text", texts), file)
    opened = explore(out.parent / "without", out.parent)
    page = show(Site(opened), "removed", table="dropped", at="0.0.0")
    line = pq.read_table(out.parent / "without" / "dropped").slice(0, 1).to_pylist()[0]
    text = json.loads((out.parent / line["file"]).read_text().split("\n")[line["record"]])["text"]
    assert text.strip() in page.words
    opened = explore(out.parent / "without", tmp_path)
    page = show(Site(opened), "removed", table="dropped", at="0.0.0")
    assert f"{line['file']} is not a file in {tmp_path}" in page.words
    page = show(Site(explore(out.parent / "without")), "removed", table="dropped", at="0.0.0")
    assert "--inputs FOLDER" in page.words


SECRET = "the line of a file that is none of the dataset's"


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "name",
    [
        "{root}/secret.txt", "../secret.txt", "sub/../../secret.txt", "./../secret.txt",
        "{inputs}/../secret.txt", "link.txt", "folder/secret.txt", "sub/deep/link.txt", "loop", "fifo",
        "/dev/stdin", "/proc/self/environ", "a\0b", "", ".", "~/secret.txt", "$ROOT/secret.txt", "*", "file://{root}/secret.txt",
        "{inputs}/link.txt", "x" * 5000,
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_inputs", [True, False])
def test_no_file_outside_of_the_named_folder_is_read_whatever_a_dataset_says(
    out: Path, tmp_path: Path, name: str, has_inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tmp_path / "inputs"
    (inputs / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text(f"{SECRET}\n")
    for link, target in (("link.txt", "secret.txt"), ("folder", "."), ("sub/deep/link.txt", "secret.txt")):
        (inputs / link).symlink_to(tmp_path / target)
    (inputs / "loop").symlink_to("loop")
    os.mkfifo(inputs / "fifo")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a" / "dataset"
    shutil.copytree(out, folder)
    card = json.loads((folder / "dataset.json").read_bytes())
    card["recipe"]["inputs"] = [{"path": "x", "base": str(tmp_path), "format": "text", "lines": True}] * 2
    (folder / "dataset.json").write_text(json.dumps(card))
    for file in (folder / "dropped").iterdir():
        table = pq.read_table(file)
        told = {"text": None, "file": name.format(root=tmp_path, inputs=inputs), "record": 0}
        for column, value in told.items():
            at, kind = table.schema.get_field_index(column), table.schema.field(column)
            table = table.set_column(at, kind, pa.array([value] * len(table), kind.type))
        pq.write_table(table, file)
    page = show(Site(explore(folder, inputs if has_inputs else None)), "removed", table="dropped", at="0.0.0")
    assert SECRET not in page.words
    assert "No text was kept of this document" in page.words


def test_half_requests_are_closed_after_a_while(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardkit.tools.explore.server.REQUEST_SECONDS", 0.3)
    with served(site) as address, ExitStack() as opened:
        port = int(address.rpartition(":")[2])
        head = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        halves = []
        for sent in ("", "G", head, f"{head}Content-Length: 9\r\n\r\nx", f"{head}\r\n{head}"):
            halves.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            halves[-1].sendall(sent.encode())
        for half in halves:
            while half.recv(1 << 16):
                pass
        slow = opened.enter_context(socket.create_connection(("127.0.0.1", port), 20))
        began = time.monotonic()
        with suppress(OSError):
            for byte in (head * 100).encode():
                slow.sendall(bytes([byte]))
                time.sleep(0.01)
        assert time.monotonic() - began < 5
        with urllib.request.urlopen(f"{address}/?token={TOKEN}") as response:
            cookies = response.headers["Set-Cookie"]
    assert cookies == f"shardkit-view-{port}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"


def test_kept_documents_are_listed_by_source(site: Site, out: Path) -> None:
    kept = {line["document_id"] for line in lines_of(out, "provenance") if line["source"] == 1}
    found: set[str] = set()
    params: dict[str, str] = {"source": "second"}
    while params:
        page = show(site, "kept", **params)
        found |= {link["id"] for link in links_to(page, "document")}
        params = next((link for link in links_to(page, "kept") if "at" in link), {})
    assert found == {one.hex() for one in kept if isinstance(one, bytes)}


def test_a_row_is_shown_as_it_was_packed(site: Site, out: Path) -> None:
    lines = lines_of(out, "provenance")
    dataset = open_dataset(out)
    [(_, tokens)] = read_rows(dataset, [0])
    spans = [each for tag, each in show(site, "row", row=0).tags if tag == "span" and "title" in each]
    found = [re.findall(r"id ([\d, ]+), pos", str(span["title"])) for span in spans]
    assert [int(one) for [text] in found for one in text.split(", ")] == tokens.tolist()
    pieces = [line for line in lines if (line["shard"], line["row"]) == (0, 0)]
    assert sum(" start" in str(span["class"]) for span in spans) == len(pieces)
    used = max(int(str(line["token_end"])) for line in pieces)
    padded = [span for span in spans if span["class"] == "pad"]
    assert len(padded) == len(tokens) - used
    assert all("label −100" in str(span["title"]) for span in padded)
    text = "".join(site.explored.decoder.piece(None, [one]) for one in tokens[:5].tolist())  # type: ignore[union-attr]
    assert text in show(site, "row", row=0).words


@pytest.mark.parametrize("form", ["mds", "wds"])
def test_a_row_shows_what_its_loss_mask_leaves_out(tmp_path: Path, form: str, inline_builds: None) -> None:
    made = train_bpe(["what is two", "it is two"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"p": "what is two", "c": " it is two"}) + "\n")
    recipe = {
        "inputs": [{"path": str(tmp_path / "a.jsonl"), "prompt": "p", "completion": "c"}],
        "tokenizer": {"path": str(tmp_path / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": {"path": str(tmp_path / "out"), "format": form},
    }
    build(recipe, workers=1, progress=False)
    [stored] = open_dataset(tmp_path / "out")
    row = {name.removesuffix(".npy"): value for name, value in stored.items()}
    page = show(Site(explore(tmp_path / "out")), "row", row=0)
    spans = [each for tag, each in page.tags if tag == "span" and "title" in each]
    kinds = Counter(str(span["class"]).split()[0] for span in spans)
    mask = np.asarray(row["loss_mask"])
    length = int(np.flatnonzero(np.asarray(row["tokens"]) == made.token_to_id(EOS))[0]) + 1
    assert kinds == {"masked": length - mask.sum(), "d0": mask.sum(), "pad": 64 - length}
    assert sum("label −100 (masked)" in str(span["title"]) for span in spans) == kinds["masked"] > 0
    assert f"the loss mask lets {mask.sum()} be trained on" in page.words


def test_a_cluster_marks_the_words_that_differ(site: Site) -> None:
    clusters = [show(site, "cluster", **link) for link in links_to(show(site, "clusters"), "cluster")]
    marked = [page for page in clusters if any(tag == "del" for tag, _ in page.tags)]
    assert len(marked) == 3
    assert all("changedword" in page.words for page in marked)
    assert len(links_to(show(site, "clusters", order="drawn"), "cluster")) == len(clusters) == 4


def test_the_rows_of_a_step_are_those_that_trace_finds(
    site: Site, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = show(site, "step", step=1, batch_size=2, world_size=2, seed=3)
    shown_rows = [link["row"] for link in links_to(page, "row") if link.get("row", "random") != "random"]
    words = [
        "trace",
        str(out),
        "--step",
        "1",
        "--batch-size",
        "2",
        "--world-size",
        "2",
        "--seed",
        "3",
        "--json",
    ]
    assert main(words) == 0
    assert shown_rows == [str(row["row"]) for row in json.loads(capsys.readouterr().out)["rows"]]


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("https://site2.org/a.jsonl", "document"),
        ("a.jsonl-2", "document"),
        ("site2.org/*", "removed"),
        ("b.jsonl-1", "removed"),
        ("TOO SHORT", "removed"),
    ],
)
def test_search_finds_documents(site: Site, words: str, page: str) -> None:
    assert links_to(show(site, "search", q=words), page)


def test_search_finds_words_in_rows(site: Site) -> None:
    for number in (7, 105):
        words = " ".join(text_of(number).split()[10:14])
        rows = [link["row"] for link in links_to(show(site, "search", q=words), "row") if "row" in link]
        assert rows
        assert all(words in show(site, "row", row=row).words for row in rows)
    assert "Nothing found" in show(site, "search", q="no such words anywhere").words


def test_words_of_a_removed_text_are_shown_where_they_stand(site: Site) -> None:
    html = site.render("search", {"q": "SHORT short", "part": "dropped"}, page_address)
    assert "…too <mark>short short</mark>" in html
    assert_harmless(site.render("search", {"q": "alert(1)"}, page_address))


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_all_rows_of_texts_with_the_words_are_found_however_little_time_there_is(
    tmp_path: Path, inline_builds: None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_corpus(tmp_path, 400)
    output = json.dumps({"path": "texts", "format": form, "shard_bytes": "64KiB"})
    made = Path(build(recipe, overrides=[f"output={output}"], progress=False).output)
    with open_dataset(made) as dataset:
        texts = [str(dataset[row]["text"]) for row in range(len(dataset))]
    counts = Counter(word for text in texts for word in set(text.split()))
    word = min(
        (word for word, count in counts.items() if count < len(texts)), key=lambda one: (-counts[one], one)
    )
    wanted = [row for row, text in enumerate(texts) if word.lower() in text.lower()]
    assert 10 < len(wanted) < len(texts)
    monkeypatch.setattr("shardkit.tools.explore.search._SECONDS", 0.0)
    searched, found, asked = Site(explore(made)), list[int](), 0
    params: dict[str, str] = {"q": word.upper(), "part": "rows"}
    while params:
        page = show(searched, "search", **params)
        found += [int(link["row"]) for link in links_to(page, "row") if link.get("row", "").isdecimal()]
        params = next((link for link in links_to(page, "search") if "at" in link), {})
        asked += 1
    assert found == wanted
    assert asked > len(wanted) / 10


def test_a_scan_that_runs_out_of_time_continues_where_it_stopped(site: Site) -> None:
    folder = site.explored.dropped
    places: list[object] = []
    start: Place | None = Place()
    steps = 0
    while start is not None:
        steps += 1
        found = scan(folder, Equal({"rule": SHORT}), start=start, limit=7, seconds=0)
        places += [line["at"] for line in found.lines]
        start = found.next
    assert steps > 3
    assert places == [line["at"] for line in scan(folder, Equal({"rule": SHORT}), limit=1000).lines]
    with pytest.raises(ShardkitError, match="not a place"):
        Place.parse("1.2.-3")


def test_hostile_characters_become_visible() -> None:
    assert shown("a\x00\x1b\u202e\ud800\x7f\tb\n") == "a␀␛⟨U+202E⟩\ufffd␡\tb\n"


def test_a_dataset_of_another_tool_shows_its_rows_and_says_what_is_missing(tmp_path: Path) -> None:
    with mds.MdsWriter(tmp_path / "plain", columns={"text": "str"}) as writer:
        writer.write({"text": HOSTILE})
    site = Site(explore(tmp_path / "plain"))
    front = show(site, "funnel")
    assert "No card" in front.words
    assert "alert(1)" in show(site, "row").words
    for page in ("kept", "clusters"):
        assert "This dataset has no" in show(site, page).words
    assert links_to(show(site, "step"), "row")
    for page in ("rule", "document"):
        with pytest.raises(ShardkitError):
            show(site, page)
    assert "Nothing found" not in show(site, "search", q="x").words


def test_a_build_without_its_tables_says_how_to_have_them(out: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("dropped", "duplicates", "provenance"))
    site = Site(explore(copy))
    words = show(site, "funnel").words
    for name in ("dropped", "duplicates", "provenance"):
        assert f"No {name}/*.parquet" in words
    assert "build it again" in show(site, "rule", rule=SHORT).words
    assert not links_to(show(site, "row", row=0), "document")


def test_two_builds_are_compared_by_step_and_document(out: Path, tmp_path: Path, inline_builds: None) -> None:
    other = make_explored(tmp_path / "corpus", min_words=3)
    page = show(Site(explore(out), explore(other)), "compare")
    lost, kept = ({line["document_id"] for line in lines_of(path, "provenance")} for path in (out, other))
    gained = len(kept - lost)
    assert gained > 0
    assert f"+{gained}" in page.words
    assert "too_few_words" in page.words
    back = show(Site(explore(other), explore(out)), "compare")
    assert f"−{gained}" in back.words
    assert re.search(rf"{SHORT}\s*\d+", back.words)


@pytest.mark.extended
def test_an_export_needs_no_server_and_all_its_links_lead_to_files(site: Site, tmp_path: Path) -> None:
    pages = export_site(site, tmp_path / "site")
    files = tree(tmp_path / "site")
    assert pages == len(files) - 1
    assert {"index.html", "style.css", "rule-001.html", "cluster-001.html"} <= set(files)
    for name in files:
        if name.endswith(".html"):
            html = (tmp_path / "site" / name).read_text()
            assert_harmless(html)
            links = [link for link in Page(html).links if not link.startswith("https://site")]
            assert set(links) <= set(files), name
    with pytest.raises(ShardkitError, match="not empty"):
        export_site(site, tmp_path / "site")


def test_the_command_exports(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(out), "--export", str(tmp_path / "site")]) == 0
    assert "index.html" in capsys.readouterr().out
    assert "too_few_words" in Page((tmp_path / "site" / "index.html").read_text()).words
    assert main(["view", str(tmp_path / "nowhere")]) == 1


def test_the_costs_of_steps_come_from_the_file_with_the_times_of_the_build(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inline_builds: None
) -> None:
    recipe, timings = str(out.parent / "recipe.yaml"), tmp_path / "t.json"
    command = ["build", recipe, "--quiet", "--output", str(tmp_path / "out"), "--timings"]
    assert main([*command, str(timings)]) == 0
    told = json.loads(timings.read_text())
    shown_at = ["view", str(out), "--export"]  # the same dataset, in another place
    assert main([*shown_at, str(tmp_path / "site"), "--timings", str(timings)]) == 0
    words = re.sub(r"\s+", " ", Page((tmp_path / "site/index.html").read_text()).words)
    table = words[words.index("Cost of the steps") : words.index("Sources")]
    length, ratios, exact, near = told["costs"]
    assert [one["step"] for one in told["costs"]] == ["length", "ratios", "exact", "near"]
    total = sum(one["seconds"] for one in told["costs"])
    for step, label in ((length, ""), (ratios, ""), (exact, " duplicate"), (near, " duplicate")):
        name, seconds, documents = step["step"], step["seconds"], step["documents"]
        row = rf"{name} {documents} −{step['dropped']} −[0-9.]+ [KM]?B {seconds:,.2f} "
        assert re.search(row + rf"{1e6 * seconds / documents:,.1f}", table)
        left = documents - step["dropped"]
        funnel = words[words.index("steplost") : words.index("Cost of the steps")]
        found = re.search(rf"{name}{label} −{step['dropped']} −[0-9.]+ [KM]?B {left} ([0-9.]+)%", funnel)
        assert found is not None
        assert float(found[1]) == pytest.approx(100 * seconds / total, abs=0.051)
    assert "Cost of the steps" not in Site(explore(out)).render("funnel", {}, page_address)

    assert main([*command, str(tmp_path / "again.json")]) == 0
    assert main([*command, str(tmp_path / "t.html")]) == 0
    other = told | {"fingerprint": "0" * 32, "others": [{"output": "x", "fingerprint": "1" * 32}]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    odd = told | {"costs": [{"step": "length", "documents": "many", "dropped": 0}]}
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    capsys.readouterr()
    for name, message in {
        "again.json": "has no costs: the build had no steps, or found its output up to date",
        "t.html": "is no JSON of `shardkit build --timings FILE`",
        "other.json": "has the times of a build of other data",
        "odd.json": "is no JSON of `shardkit build --timings FILE`",
        "none.json": "cannot be read: No such file",
    }.items():
        assert main([*shown_at, str(tmp_path / "no"), "--timings", str(tmp_path / name)]) == 1
        error = re.sub(r"\s+", " ", capsys.readouterr().err)
        assert f"{name}: {message}" in error
    several = told | {
        "fingerprint": "0" * 32,
        "others": [{"output": "x", "fingerprint": told["fingerprint"]}],
    }
    timings.write_text(json.dumps(several))
    assert read_costs(timings, told["fingerprint"])


def test_a_step_that_is_listed_twice_has_no_text_of_its_own() -> None:
    funnel = {
        "read": {"documents": 10, "bytes": 100},
        "kept": {"documents": 4, "bytes": 40},
        "dropped": {
            "length/short": {"documents": 3, "bytes": 30},
            "exact_duplicate": {"documents": 2, "bytes": 20},
            "duplicate_lines": {"documents": 1, "bytes": 10},
        },
        "quarantined": {},
    }
    costs = [StepCost("length", 10, 2, 1.0), StepCost("exact", 8, 2), StepCost("lines", 6, 1)]
    card = DatasetCard({"funnel": funnel})
    rows = cost_rows(card, [*costs, StepCost("length", 5, 1, 0.5)])
    assert [(row.label, row.documents, row.dropped, row.bytes, row.seconds_per_million) for row in rows] == [
        ("length", 10, 2, None, 1e5),
        ("exact", 8, 2, 20, None),
        ("lines", 6, 1, 10, None),
        ("length", 5, 1, None, 1e5),
    ]
    once = [(row.label, row.bytes, row.share) for row in cost_rows(card, costs)]
    assert once[:2] == [("length", 30, None), ("exact", 20, None)], "what lines took is not known"
    measured = [StepCost("length", 10, 2, 1.0), StepCost("exact", 8, 2, 3.0, is_global=True)]
    assert [row.share for row in cost_rows(card, measured)] == [0.25, 0.75]
    funnels = {row.label: (row.seconds, row.share) for row in funnel_rows(card, measured)}
    assert funnels["length"] == (1.0, 0.25)
    assert funnels["exact duplicate"] == (3.0, 0.75)
    assert funnels["duplicate lines"] == (None, None)
