from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import random
import re
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import brotli
import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from warcio.statusandheaders import StatusAndHeadersParser

from shardkit.errors import BuildError
from shardkit.writers.inputs import pages as web
from shardkit.writers.inputs import read_warc
from support.read_inputs import data_folder, put, read

PARAGRAPH = "A sentence about tokens that is long enough to be taken for the content of a page. " * 6
_HTML = ("text/html", "application/xhtml")
PAGE = f"<html><head><title>t</title></head><body><nav>menu</nav><p>{PARAGRAPH}</p></body></html>".encode()


def record(kind: str, content: bytes, url: str = "http://a.example/", **headers: str) -> bytes:
    lines = {
        "WARC-Type": kind,
        "WARC-Record-ID": f"<urn:{len(content)}>",
        "WARC-Date": "2026-01-01T00:00:00Z",
    }
    lines |= {"WARC-Target-URI": url} if url else {}
    lines |= {"Content-Length": str(len(content))} | {k.replace("_", "-"): v for k, v in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return b"WARC/1.0\r\n" + head.encode() + b"\r\n" + content + b"\r\n\r\n"


def response(body: bytes, status: str = "200 OK", kind: str = "text/html", **headers: str) -> bytes:
    lines = {"Content-Type": kind} if kind else {}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


def chunked(body: bytes, size: int = 100) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def arc(*records: tuple[str, bytes]) -> bytes:
    version = b"1 0 Somebody\nURL IP-address Archive-date Content-type Archive-length\n"
    header = b"filedesc://a.arc 0.0.0.0 20260101000000 text/plain %d\n" % len(version)
    body = (
        f"{url} 1.2.3.4 20260101000000 text/html {len(content)}\n".encode() + content
        for url, content in records
    )
    return b"\n".join([header + version, *body]) + b"\n"


def dropped(ledger: Any) -> dict[str, int]:
    return {reason: count.documents for reason, count in ledger.dropped.items()}


def test_pages_come_out_whatever_they_were_wrapped_in(tmp_path: Path) -> None:
    bodies = {
        "plain": (PAGE, {}),
        "gzip": (gzip.compress(PAGE), {"Content_Encoding": "gzip"}),
        "deflate": (zlib.compress(PAGE), {"content-encoding": "deflate"}),
        "raw deflate": (zlib.compress(PAGE, wbits=-15), {"Content_Encoding": "deflate"}),
        "br": (brotli.compress(PAGE), {"Content_Encoding": "br"}),
        "zstd": (zstandard.compress(PAGE), {"Content_Encoding": "zstd"}),
        "chunked": (chunked(PAGE), {"Transfer_Encoding": "chunked"}),
        "both": (chunked(gzip.compress(PAGE)), {"Transfer_Encoding": "Chunked", "Content_Encoding": "GZIP"}),
        "said only": (PAGE, {"Transfer_Encoding": "chunked", "Content_Encoding": "gzip"}),
        "cut short": (chunked(PAGE)[:-90], {"Transfer_Encoding": "chunked"}),
    }
    data = b"".join(record("response", response(body, **headers)) for body, headers in bodies.values())
    table, bad, ledger = read(
        tmp_path, put(tmp_path, "a.warc", data), extract="none", metadata=["date", "status"]
    )
    assert not bad
    texts = dict(zip(bodies, table["text"].to_pylist(), strict=True))
    assert PAGE.decode().startswith(texts.pop("cut short"))
    assert set(texts.values()) == {PAGE.decode()}
    assert set(table["url"].to_pylist()) == {"http://a.example/"}
    assert table["id"][0].as_py().startswith("<urn:")
    assert table["metadata"][0].as_py() == '{"date":"2026-01-01T00:00:00Z","status":200}'
    table, bad, ledger = read(tmp_path, "a.warc")
    assert set(table["text"].to_pylist()[:-1]) == {PARAGRAPH.strip()}
    assert ledger.dropped["html/markup"].bytes > 10 * (len(PAGE) - len(PARAGRAPH)) - 200


_HEADER_PARTS = [
    "WARC-Type",
    "a",
    "é",
    ":",
    " ",
    "\t",
    "\r",
    "\n",
    "\r\n",
    "\x1c",
    "\x85",
    "\u2028",
    "x: y",
    "",
]


@given(
    st.lists(st.sampled_from(_HEADER_PARTS), max_size=30).map("".join), st.sampled_from(["1.0", "1.1", "2"])
)
def test_headers_that_are_read_at_once_are_those_that_warcio_reads(text: str, version: str) -> None:
    line = f"WARC/{version}\r\n".encode()
    block = text.encode() + b"\r\n\r\n"
    block = block[: block.index(b"\r\n\r\n") + 4]
    found = read_warc._plain_headers(line, block)
    if found is not None:
        stream = io.BytesIO(block + b"the content")
        parsed = StatusAndHeadersParser(["WARC/1.0", "WARC/1.1"]).parse(stream, line)
        assert found == {name.lower(): value for name, value in parsed.headers}
        assert stream.tell() == len(block)
    elif version != "2":
        assert any(not part or part[0].isspace() for part in block.decode().split("\n")[:-2])


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_what_is_no_page_is_dropped_and_says_why(tmp_path: Path, suffix: str) -> None:
    records = [
        record("warcinfo", b"software: x\r\n", url=""),
        record("request", b"GET / HTTP/1.1\r\n\r\n"),
        record("response", response(PAGE)),
        record("response", response(PAGE, "404 Not Found")),
        record("response", response(b"", "301 Moved")),
        record("response", b""),
        record("response", response(b"\x89PNG", kind="image/png")),
        record("response", b"a.example. 1 IN A 1.2.3.4", "dns:a.example"),
        record("response", response(b"{}", kind="")),
        record("response", response(PAGE, kind="")),
        record("response", response(gzip.compress(PAGE)[:90] + b"?" * 400, Content_Encoding="gzip")),
        record("response", response(PAGE, Content_Encoding="rot13")),
        record("response", response(b"<html><body></body></html>")),
        record("revisit", b"", WARC_Profile="x"),
    ]
    packs: dict[str, Callable[[bytes], bytes]] = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": zstandard.compress,
    }
    table, bad, ledger = read(
        tmp_path, put(tmp_path, f"a.warc{suffix}", b"".join(map(packs[suffix], records)))
    )
    assert not bad
    assert table["record"].to_pylist() == [2, 9]
    assert dropped(ledger) == {
        "warc/not_a_response": 3,
        "warc/http_status": 3,
        "warc/not_html": 3,
        "warc/bad_body": 2,
        "html/no_text": 1,
        "html/markup": 0,
    }
    assert ledger.read.documents == len(records)


def test_conversions_are_text_as_it_is(tmp_path: Path) -> None:
    texts = ["first line\r\n\u2028 <b>not markup</b>", "", "é" * 1000]
    data = b"".join(gzip.compress(record("conversion", text.encode())) for text in texts)
    data += gzip.compress(record("conversion", b"bad \xff text")) + gzip.compress(
        record("conversion", b"last")
    )
    table, bad, _ = read(tmp_path, put(tmp_path, "a.warc.wet.gz", data))
    assert table["text"].to_pylist() == [*texts, "last"]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(3, "bad_utf8")]


def test_arc_files_are_read_too(tmp_path: Path) -> None:
    data = arc(("http://a.example/x y", response(PAGE)), ("dns:a", b"1.2.3.4"), ("http://b/", response(PAGE)))
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.arc.gz", gzip.compress(data)), metadata=["date"])
    assert not bad
    assert table["url"].to_pylist() == ["http://a.example/x%20y", "http://b/"]
    assert table["metadata"][0].as_py() == '{"date":"20260101000000"}'
    assert dropped(ledger) == {"warc/not_a_response": 1, "html/markup": 0, "warc/not_html": 1}


def test_charsets_are_found_in_header_page_and_bytes(tmp_path: Path) -> None:
    text = "Äpfel, Öl und Übermut — “quoted”. " * 8
    pages = [
        (f"<p>{text}", "cp1252", "text/html; charset=ISO-8859-1"),
        (f"<p>{text}", "utf-16-le", "text/html; charset='utf-16le'"),
        (f"<meta charset=windows-1252><p>{text}", "cp1252", "text/html"),
        (f"<p>{text}", "utf-8", "text/html"),
        (f"<p>{text}", "utf-8-sig", "text/html; charset=latin-1"),
        (f"<p>{text}", "utf-8", "text/html; charset=no-such-thing"),
    ]
    data = b"".join(record("response", response(p.encode(code), kind=kind)) for p, code, kind in pages)
    table, bad, _ = read(tmp_path, put(tmp_path, "a.warc", data), extract="none")
    assert not bad
    assert table["text"].to_pylist() == [page for page, _, _ in pages]


def test_a_damaged_record_costs_itself_and_reading_goes_on_at_the_next(tmp_path: Path) -> None:
    good = record("response", response(PAGE))
    damages = {
        good.replace(b"Content-Length: ", b"Content-Length: x", 1): "its header has the length 'x",
        good.replace(b"Content-Length: ", b"X-Length: ", 1): "its header has the length ''",
        good.replace(b"WARC/1.0", b"WARC/9.9", 1): "unreadable header",
        b"WARC/1.0\r\n" + b"x: y\r\n" * 180_000 + b"\r\n": "the header is longer than one megabyte",
    }
    data = good + b"".join(damage + good for damage in damages)
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.warc", data))
    assert table.num_rows == 1 + len(damages)
    assert [entry["reason"] for entry in bad] == ["bad_record"] * len(damages)
    at = 0
    for entry, (damage, words) in zip(bad, damages.items(), strict=True):
        at += len(good)
        assert entry["byte_offset"] == at
        assert words in entry["error"]
        at += len(damage)
    assert ledger.quarantined["bad_record"].bytes == sum(map(len, damages))
    with pytest.raises(BuildError, match=r"a.warc: record 1 \(byte \d+\): bad_record: its header"):
        read(tmp_path, "a.warc", allowed=0)


@pytest.mark.parametrize("by", [-40, -1, 300])
@pytest.mark.parametrize("kind", ["response", "conversion", "request"])
def test_a_record_whose_length_is_wrong_is_quarantined_with_the_bytes_behind_it(
    tmp_path: Path, kind: str, by: int
) -> None:
    content = PAGE if kind == "conversion" else response(PAGE)
    good, other = record("conversion", b"good"), record(kind, content)
    size = len(content)
    wrong = other.replace(b"Content-Length: %d" % size, b"Content-Length: %d" % (size + by))
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.warc", good + wrong + other + good), extract="none")
    swallowed = by > 4  # the next record begins inside of this one, and its end is all that is left of it
    assert [entry["reason"] for entry in bad] == ["bad_record"]
    assert (bad[0]["record"], bad[0]["byte_offset"]) == (1, len(good))
    assert f"its header says {size + by:,} bytes, but no record begins after them" in bad[0]["error"]
    assert ledger.quarantined["bad_record"].bytes == len(wrong) + (len(other) if swallowed else 0)
    texts = table["text"].to_pylist()
    assert texts == ["good"] + ([PAGE.decode()] if kind != "request" and not swallowed else []) + ["good"]


def lost_ranges(bad: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The stored bytes that entries of damaged members say are lost."""
    found = [re.search(r"stored bytes ([\d,]+) to ([\d,]+) are lost", entry["error"]) for entry in bad]
    return [(int(one[1].replace(",", "")), int(one[2].replace(",", ""))) for one in found if one]


def test_a_damaged_gzip_member_costs_itself_and_reading_goes_on_at_the_next(tmp_path: Path) -> None:
    packed = [gzip.compress(record("conversion", b"text %d" % n), mtime=0) for n in range(4)]
    packed[2] = packed[2][:-6] + b"xx" + packed[2][-4:]
    name = put(tmp_path, "a.warc.wet.gz", b"".join(packed))
    table, (entry,), ledger = read(tmp_path, name)
    assert table["text"].to_pylist() == ["text 0", "text 1", "text 3"]
    assert table["record"].to_pylist() == [0, 1, 3]
    assert (entry["record"], entry["reason"]) == (2, "damaged_file")
    assert entry["byte_offset"] == 2 * len(record("conversion", b"text 0"))
    start = len(packed[0]) + len(packed[1])
    assert lost_ranges([entry]) == [(start, start + len(packed[2]))]
    assert (ledger.read.documents, ledger.quarantined["damaged_file"].bytes) == (4, len(packed[2]))
    with pytest.raises(BuildError, match=r"record 2 .*damaged_file: bad checksum in gzip member 3"):
        read(tmp_path, name, allowed=0)


def _unpacked(member: bytes | bytearray) -> bytes | None:
    try:
        return gzip.decompress(member)
    except (EOFError, OSError, zlib.error):
        return None


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_stored_bytes_of_sound_members_and_of_lost_ranges_add_up_to_the_file(
    tmp_path: Path, data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 32)))
    kept, stored, at = [], [], 0
    damages = data.draw(st.lists(st.sampled_from("sssscmdhgz"), min_size=1, max_size=9))
    for number, damage in enumerate(damages):
        text = b"text %d " % number + rng.randbytes(rng.randrange(300)).hex().encode()
        member = bytearray(sound := gzip.compress(record("conversion", text), mtime=0))
        if damage == "c":  # the checksum
            member[-7] ^= 1
        elif damage == "m":  # the magic
            member[rng.randrange(3)] ^= 0xFF
        elif damage == "d":  # the data
            member[rng.randrange(15, len(member) - 8)] ^= 1 << rng.randrange(8)
            if _unpacked(member) == gzip.decompress(sound):  # the bit had no meaning
                kept.append((text.decode(), at, at + len(member)))
        elif damage == "h":  # its second half is missing
            del member[len(member) // 2 :]
        elif damage == "g":  # bytes of something else
            member[:] = rng.randbytes(rng.randrange(1, 2000))
        elif damage == "z":
            member[:] = bytes(len(member))
        else:
            kept.append((text.decode(), at, at + len(member)))
        stored.append(bytes(member))
        at += len(member)
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.warc.wet.gz", b"".join(stored)))
    assert table["text"].to_pylist() == [text for text, _, _ in kept]
    ranges = sorted(lost_ranges(bad) + [(start, end) for _, start, end in kept])
    padding = b""  # zeros between members are no damage
    at = 0
    for start, end in [*ranges, (sum(map(len, stored)), 0)]:
        assert at <= start
        padding += b"".join(stored)[at:start]
        at = end
    assert not any(padding)
    assert sum(count.bytes for count in ledger.quarantined.values()) == sum(
        end - start for start, end in lost_ranges(bad)
    )


def test_a_damaged_member_whose_record_lies_in_two_costs_that_record_whole(tmp_path: Path) -> None:
    records = [record("conversion", b"text %d" % n * 40) for n in range(4)]
    content = b"".join(records[:2])
    halves = [gzip.compress(part, mtime=0) for part in (content[:-90], content[-90:])]
    halves[1] = halves[1][:-5] + b"\xff" + halves[1][-4:]
    data = b"".join([*halves, *(gzip.compress(one, mtime=0) for one in records[2:])])
    table, (entry,), ledger = read(tmp_path, put(tmp_path, "a.warc.gz", data))
    assert [text[:6] for text in table["text"].to_pylist()] == ["text 0", "text 2", "text 3"]
    assert (entry["record"], entry["byte_offset"]) == (1, len(records[0]))
    assert ledger.quarantined["damaged_file"].bytes == len(records[1]) - 90 + len(halves[1])


def test_an_arc_file_goes_on_behind_a_damaged_member_too(tmp_path: Path) -> None:
    pages = [(f"http://a/{n}", response(PAGE[:90] + b"%d</p>" % n)) for n in range(4)]
    whole = arc(*pages)
    ends = [len(arc(*pages[:n])) - 1 for n in range(5)]
    packed = [gzip.compress(whole[a:b], mtime=0) for a, b in zip([0, *ends], [*ends, None], strict=True)]
    packed[2] = packed[2][:20] + b"\0\0\0\0" + packed[2][24:]
    table, bad, _ = read(tmp_path, put(tmp_path, "a.arc.gz", b"".join(packed)), extract="none")
    assert table["url"].to_pylist() == ["http://a/0", "http://a/2", "http://a/3"]
    assert len(bad) == 1


def test_long_records_cost_themselves_and_what_is_no_page_may_be_long(tmp_path: Path) -> None:
    data = record("response", response(b"x" * 90_000, kind="video/mp4"))
    data += record("conversion", b"x" * 9000) + record("response", response(b"<p>" + b"x" * 9000))
    data += record("response", response(gzip.compress(bytes(90_000)), Content_Encoding="gzip"))
    data += record("conversion", b"fine")
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.warc", data), limit=5000)
    assert table["text"].to_pylist() == ["fine"]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(1, "too_long"), (2, "too_long")]
    assert dropped(ledger) == {"warc/not_html": 1, "warc/bad_body": 1}


@pytest.mark.parametrize("kind", ["warc", "warc.gz", "arc"])
def test_a_file_cut_anywhere_gives_the_pages_before_and_hides_nothing(tmp_path: Path, kind: str) -> None:
    contents = [response(PAGE[:90] + b"%d</p>" % i) for i in range(10)]
    if kind == "arc":
        rows = [(f"http://a/{i}", content) for i, content in enumerate(contents)]
        whole, ends = arc(*rows), [len(arc(*rows[:n])) for n in range(11)]
    else:
        records = [record("response", content) for content in contents]
        packed = [gzip.compress(r) if kind == "warc.gz" else r for r in records]
        whole, ends = b"".join(packed), [sum(map(len, packed[:n])) for n in range(11)]
    for length in range(0, len(whole), 61):
        name = put(tmp_path, f"a.{kind}", whole[:length])
        table, bad, _ = read(tmp_path, name, extract="none")
        count = table.num_rows
        assert [text[-5:-4] for text in table["text"].to_pylist()] == list("0123456789")[:count]
        if kind != "arc":
            assert bad or any(0 <= length - end <= 0 or (end - length) in (1, 2, 3, 4) for end in ends), (
                length
            )
        assert len(bad) <= 1
        assert {entry["reason"] for entry in bad} <= {"damaged_file", "bad_record"}


def test_flipped_bits_never_raise_anything_else(tmp_path: Path) -> None:
    data = b"".join(
        record("response", response(chunked(PAGE[:200]), Transfer_Encoding="chunked")) for _ in "abc"
    )
    data += arc(("http://a/", response(PAGE[:200])))
    rng = random.Random(3)
    for _ in range(100):
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        read(tmp_path, put(tmp_path, "a.warc", bytes(flipped)), extract="none")


@pytest.mark.data
def test_real_archives_give_what_warcio_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data_folder() / "warc/dev"
    seen: list[str] = []
    decode = web.decode_body

    def spy(*args: Any) -> bytes:
        page = decode(*args)
        seen.append(sha256(page).hexdigest())
        return page

    monkeypatch.setattr(read_warc, "decode_body", spy)
    damaged = {  # name: (records beyond warcio's, quarantined)
        "bad.arc": (0, 3),  # lengths of -1 and "abc"
        "example-bad-non-chunked.warc.gz": (5, 0),  # one gzip member for all, which warcio refuses to seek in
        "example-bad.warc.gz.bad": (5, 0),  # gzip that its name hides, which the first bytes show
        "example-space-in-url.arc": (0, 1),  # ends 12 bytes before its record does
        "example-trunc.warc": (0, 1),  # two bytes more than Content-Length says
        "example-wrong-chunks.warc.gz": (1, 1),  # changed by hand: its digests are those of another block
    }
    for entry in json.loads((folder / "expected_warcio.json").read_text())["files"]:
        name = Path(entry["file"]).name
        seen.clear()
        put(tmp_path, name, (folder / entry["file"]).read_bytes())
        _, bad, ledger = read(tmp_path, name, format="warc", extract="none")
        more, quarantined = damaged.get(name, (0, 0))
        assert (ledger.read.documents, len(bad)) == (len(entry["records"]) + more, quarantined), name
        if name in damaged:
            continue
        pages = [
            found["payload_sha256"]
            for found in entry["records"]
            if (found["type"], found["http_status"]) == ("response", "200")
            and (found["http_content_type"] or "text/html")
            .lower()
            .startswith(("text/html", "application/xhtml"))
        ]
        assert seen == pages, name


@pytest.mark.data
def test_generated_archives_read_to_the_byte(tmp_path: Path) -> None:
    folder = data_folder() / "warc/gen_dev"
    for stem, suffix in (("wet-00000", "warc.wet.gz"), ("html-00000", "warc.gz")):
        expected = orjson.loads((folder / f"{stem}.expected.json").read_bytes())
        wanted = [entry for entry in expected if entry.get("status", 200) == 200]
        name = put(tmp_path, f"{stem}.{suffix}", (folder / f"{stem}.{suffix}").read_bytes())
        table, bad, _ = read(tmp_path, name, extract="none")
        assert not bad
        assert table["url"].to_pylist() == [entry["url"] for entry in wanted]
        for text, entry in zip(table["text"].to_pylist(), wanted, strict=True):
            digests = {sha256(text.encode(code)).hexdigest() for code in ("utf-8", "utf-8-sig")}
            if entry.get("encoding") == "latin-1":
                digests = {sha256(text.encode("latin-1")).hexdigest()}
            assert entry.get("sha256", entry.get("decoded_sha256")) in digests, entry["url"]


def digest(algorithm: str, form: str, data: bytes) -> str:
    """A digest as the writers of archives spell it."""
    raw = hashlib.new(algorithm, data).digest()
    spelled = {
        "base32": base64.b32encode(raw).decode(),
        "base32 without padding": base64.b32encode(raw).decode().rstrip("="),
        "base32 in lower case": base64.b32encode(raw).decode().lower(),
        "base64": base64.b64encode(raw).decode(),
        "hex": raw.hex(),
        "hex in upper case": raw.hex().upper(),
    }
    return spelled[form]


SHA1 = digest("sha1", "base32", b"something else")
SPELLINGS = [
    *[
        ("sha1", name, form)
        for name in ("sha1", "SHA-1")
        for form in ("base32", "base32 in lower case", "hex")
    ],
    *[("md5", "md5", form) for form in ("base32", "base32 without padding", "hex in upper case")],
    *[("sha256", name, form) for name in ("sha256", "SHA-256") for form in ("base32", "hex", "base64")],
    ("sha512", "sha-512", "hex"),
]


@pytest.mark.parametrize("kind", ["Block", "Payload"])
@pytest.mark.parametrize(("algorithm", "name", "form"), SPELLINGS)
def test_a_record_that_its_own_digest_contradicts_is_quarantined(
    tmp_path: Path, algorithm: str, name: str, form: str, kind: str
) -> None:
    content = response(PAGE)
    stated = f"{name}:{digest(algorithm, form, content if kind == 'Block' else PAGE)}"
    good = record("response", content, **{f"WARC_{kind}_Digest": stated})
    text = record(
        "conversion",
        b"plain text",
        **{f"WARC_{kind}_Digest": f"{name}:" + digest(algorithm, form, b"plain text")},
    )
    data = (
        good
        + good.replace(b"about tokens", b"about tokenz", 1)
        + text
        + text.replace(b"plain", b"plane")
        + good
    )
    table, bad, _ = read(tmp_path, put(tmp_path, "a.warc", data))
    assert table["record"].to_pylist() == [0, 2, 4]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(1, "bad_digest"), (3, "bad_digest")]
    assert all(f"WARC-{kind}-Digest {name}:" in entry["error"] for entry in bad)
    with pytest.raises(BuildError, match=r"record 1 .*bad_digest"):
        read(tmp_path, "a.warc", allowed=0)


@pytest.mark.parametrize("form", ["stored", "without chunks", "decoded"])
def test_the_digest_of_a_body_may_be_of_any_form_of_it(tmp_path: Path, form: str) -> None:
    zipped = gzip.compress(PAGE, mtime=0)
    forms = {"stored": chunked(zipped), "without chunks": zipped, "decoded": PAGE}
    content = response(forms["stored"], Transfer_Encoding="chunked", Content_Encoding="gzip")
    good = record("response", content, WARC_Payload_Digest=f"sha1:{digest('sha1', 'base32', forms[form])}")
    table, bad, _ = read(tmp_path, put(tmp_path, "a.warc", good))
    assert (table.num_rows, bad) == (1, [])
    wrong = record("response", content, WARC_Payload_Digest=f"sha1:{SHA1}")
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.warc", wrong))
    assert (table.num_rows, entry["reason"]) == (0, "bad_digest")


@pytest.mark.parametrize(
    "headers",
    [
        {"WARC_Block_Digest": "xxh3:0011223344556677"},  # an algorithm that nobody knows
        {"WARC_Block_Digest": "sha1:short"},
        {"WARC_Block_Digest": "sha1:" + "!" * 32},
        {"WARC_Block_Digest": SHA1},  # no algorithm
        {"WARC_Block_Digest": ""},
        {"WARC_Payload_Digest": f"sha1:{SHA1}", "WARC_Truncated": "length"},
        {"WARC_Block_Digest": f"sha1:{SHA1}", "WARC_Truncated": "disconnect"},
        {"WARC_Payload_Digest": f"sha1:{SHA1}", "WARC_Segment_Number": "1"},
        # The block is proved: what the writer took for the payload is its own affair.
        {
            "WARC_Payload_Digest": f"sha1:{SHA1}",
            "WARC_Block_Digest": "sha1:" + digest("sha1", "base32", response(PAGE)),
        },
    ],
)
def test_a_digest_that_proves_nothing_refuses_no_record(tmp_path: Path, headers: dict[str, str]) -> None:
    table, bad, _ = read(tmp_path, put(tmp_path, "a.warc", record("response", response(PAGE), **headers)))
    assert (table.num_rows, bad) == (1, [])
    kept = {name: value for name, value in headers.items() if "Truncated" not in name}
    revisit = record("revisit", response(b""), **kept)
    _, bad, ledger = read(tmp_path, put(tmp_path, "a.warc", revisit))
    assert (dropped(ledger), bad) == ({"warc/not_a_response": 1}, [])
