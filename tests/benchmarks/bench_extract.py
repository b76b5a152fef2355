r"""Web archives to main text: CPU against loops over the same libraries, and quality on pages with a gold.

    python tests/benchmarks/bench_extract.py --gold FOLDER [--megabytes 60] [--runs 5] [--json]

FOLDER is a checkout of https://github.com/scrapinghub/article-extraction-benchmark: 181 pages of news and
blogs, html/ID.html.gz, and the text of each article in ground-truth.json. The pages, again and again up to
--megabytes of HTML, become one WARC file whose records are gzipped one by one.

    resiliparse     fastwarc reads the records, resiliparse guesses the encoding and extracts (main content)
    trafilatura     warcio reads the records, trafilatura decodes and extracts with its own defaults
    shardkit        what a build's reader makes of the file, with `extract: resiliparse`, and with
                    `extract: trafilatura`: digests and lengths checked, encodings as of browsers, quarantine

All run in this process, in turns; CPU is its user and system time. "x ours" is the median over the runs of a
loop's CPU by that of the build's reader with the same library. F1, precision and recall are of multisets of
4-grams of the words (`\w+`) of a page, added up over its pages, as in that benchmark; a page of which no text
comes counts as empty.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trafilatura
import warcio
from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from figures import Heads, benchmark_parser, give, in_turns
from support.read_inputs import read

Texts = Mapping[str, str]
WORDS = 4
URL = "https://example.org/"
HEADS: Heads = {
    "side": ("side", ""),
    "cpu_s": ("CPU s", ".2f"),
    "MB_s": ("MB of HTML/s and core", ".1f"),
    "x": ("x ours", ".2f"),
    "f1": ("F1", ".3f"),
    "precision": ("precision", ".3f"),
    "recall": ("recall", ".3f"),
}


def by_resiliparse(file: Path) -> Texts:
    texts = {}
    with file.open("rb") as stream:
        for record in ArchiveIterator(stream, record_types=WarcRecordType.response, parse_http=True):
            body = record.reader.read()
            page = bytes_to_str(body, detect_encoding(body) or "utf-8")
            texts[record.headers["WARC-Target-URI"]] = extract_plain_text(page, main_content=True)
    return texts


def by_trafilatura(file: Path) -> Texts:
    texts = {}
    with file.open("rb") as stream:
        for record in warcio.ArchiveIterator(stream):
            if record.rec_type == "response":
                url = record.rec_headers.get_header("WARC-Target-URI")
                texts[url] = trafilatura.extract(record.content_stream().read()) or ""
    return texts


def by_shardkit(file: Path, extractor: str) -> Texts:
    table = read(file.parent, file.name, extract=extractor)[0]
    return dict(zip(table["url"].to_pylist(), table["text"].to_pylist(), strict=True))


SIDES: Mapping[str, tuple[Callable[[Path], Texts], str | None]] = {
    "shardkit, resiliparse": (lambda file: by_shardkit(file, "resiliparse"), None),
    "resiliparse": (by_resiliparse, "shardkit, resiliparse"),
    "shardkit, trafilatura": (lambda file: by_shardkit(file, "trafilatura"), None),
    "trafilatura": (by_trafilatura, "shardkit, trafilatura"),
}


def write_warc(file: Path, pages: Mapping[str, bytes], megabytes: float) -> int:
    """Write the pages, repeated, as responses; return the bytes of HTML."""
    headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
    size = turn = 0
    with file.open("wb") as out:
        writer = WARCWriter(out)
        while not turn or size < megabytes * 1e6:
            for name, page in pages.items():
                url = URL + name + (f"?{turn}" if turn else "")
                record = writer.create_warc_record(
                    url, "response", payload=io.BytesIO(page), http_headers=headers
                )
                writer.write_record(record)
                size += len(page)
            turn += 1
    return size


def quality(texts: Texts, gold: Texts) -> dict[str, float]:
    found = expected = common = 0.0
    for name, text in gold.items():
        ours, theirs = _ngrams(texts.get(URL + name, "")), _ngrams(text)
        both = sum((ours & theirs).values())
        total = max(1, sum((ours | theirs).values()))  # of a page: each has the same weight
        common += both / total
        found += sum(ours.values()) / total
        expected += sum(theirs.values()) / total
    precision, recall = common / max(found, 1e-9), common / expected
    return {"f1": 2 * common / (found + expected), "precision": precision, "recall": recall}


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[at : at + WORDS]) for at in range(max(1, len(words) - WORDS + 1)))


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--gold", type=Path, required=True, help="the checkout with the pages")
    parser.add_argument("--megabytes", type=float, default=60, help="of HTML (default: %(default)s)")
    options = parser.parse_args()
    articles = json.loads((options.gold / "ground-truth.json").read_text())
    gold = {name: article["articleBody"] for name, article in articles.items()}
    pages = {name: gzip.decompress((options.gold / f"html/{name}.html.gz").read_bytes()) for name in gold}
    cpu: dict[str, list[float]] = {name: [] for name in SIDES}
    qualities = {}
    with tempfile.TemporaryDirectory() as folder:
        once, file = Path(folder) / "once.warc.gz", Path(folder) / "pages.warc.gz"
        write_warc(once, pages, 0)
        size = write_warc(file, pages, options.megabytes)
        for name, (extract, _) in SIDES.items():
            qualities[name] = quality(extract(once), gold)
        for run in range(options.runs):
            for name in in_turns(list(SIDES), run):
                start = time.process_time()
                SIDES[name][0](file)
                cpu[name].append(time.process_time() - start)
    rows: list[dict[str, Any]] = []
    for name, (_, ours) in SIDES.items():
        taken = statistics.median(cpu[name])
        x = None if ours is None else statistics.median(map(float.__truediv__, cpu[name], cpu[ours]))
        rows.append({"side": name, "cpu_s": taken, "MB_s": size / 1e6 / taken, "x": x, **qualities[name]})
    give(options, rows, HEADS, title="Web archives to main text")


if __name__ == "__main__":
    main()
