"""A crawl on a web server is built from the list of its files, and a killed build goes on where it was."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servers.web import Fault, WebServer, web_server
from shardkit.writers import build
from support.small_build import EOS, train_bpe, tree

NAMES = [f"crawl-data/X/segments/{n}/warc/{n:05d}.warc.gz" for n in range(3)]
WAIT_SECONDS = 60.0


def page(number: int) -> bytes:
    draw = random.Random(number)
    words = " ".join(f"word{draw.randrange(997)}" for _ in range(120))
    body = f"<html><body><article><p>{words}.</p></article></body></html>".encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"
    header = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/{number}\r\n"
        f"Content-Type: application/http\r\nContent-Length: {len(head + body)}\r\n\r\n"
    )
    return gzip.compress(header.encode() + head + body + b"\r\n\r\n")


def write_recipe(folder: Path, web: WebServer) -> Path:
    recipe = {
        "inputs": [{"path": f"{web.url}/warc.paths.gz", "list": True, "base": web.url}],
        "dedup": {"exact": {}, "near": {}},
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": "out",
    }
    train_bpe(f"word{n}" for n in range(997)).save(str(folder / "tokenizer.json"))
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


@pytest.mark.extended  # starts a program
def test_a_killed_build_of_a_crawl_goes_on_and_reads_no_finished_file_again(tmp_path: Path) -> None:
    files = {name: b"".join(page(20 * number + n) for n in range(20)) for number, name in enumerate(NAMES)}
    with web_server(files | {"warc.paths.gz": gzip.compress("\n".join(NAMES).encode())}) as web:
        path = write_recipe(tmp_path, web)
        web.faults[f"/{NAMES[2]}"] = [Fault(503, {"Retry-After": "1"}, method="GET", repeat=True)]
        command = [sys.executable, "-m", "shardkit", "build", str(path), "--workers", "1", "--quiet"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            ends = time.monotonic() + WAIT_SECONDS
            while f"GET /{NAMES[2]}" not in web.requests:
                assert process.poll() is None, process.communicate()[1].decode()
                assert time.monotonic() < ends
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=WAIT_SECONDS)
        assert not (tmp_path / "out").exists()
        web.faults.clear()
        web.requests.clear()
        result = build(path, workers=1, progress=False)
        read = {one for one in web.requests if one.startswith("GET") and "warc.gz" in one}
        assert read == {f"GET /{NAMES[2]}"}
        resumed = tree(tmp_path / "out")
        assert result.funnel.kept.documents == 60
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "out.work", ignore_errors=True)
        build(path, workers=2, progress=False)
        again = tree(tmp_path / "out")
    times = ("dataset.json", "report.html")
    assert {name: one for name, one in again.items() if name not in times} == {
        name: one for name, one in resumed.items() if name not in times
    }
