"""The HTTP interface of the Hugging Face Hub, in threads of the test process: dataset repositories only.

It speaks what the Hub documents and `huggingface_hub` uses: revisions, trees in pages, paths-info, resolve,
preupload, the batch requests of git LFS (one request, or parts), and commits. Repositories are git-like: a
commit is a whole tree with a parent, branches and tags point to commits. Contents are large files (LFS) by
their names' endings or sizes, otherwise blobs of git. Large files are read and written at another port, which
is another host to clients; it refuses requests that carry a token.

    with running_hub() as hub:
        name = hub.new_repository()
        hub.commit(name, {"a.jsonl": b"..."})
        hub.rules.replace([Rule(fault="status", status=429, path="/resolve/", count=2)])

Faults of rules: status, delay, truncate and reset (of bodies), hang (before the head, or in a body),
lost_acknowledgement.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from servers.faults import Rule, RuleBook

__all__ = ["TOKEN", "HubServer", "Repository", "Rule", "running_hub"]

TOKEN = "hf_of-the-tests"
_LARGE_BYTES = 10_000_000  # as of the Hub
_LARGE_ENDINGS = (".mds", ".parquet", ".tar", ".zstd", ".zst", ".gz", ".bin")
_MULTIPART_BYTES = 20 << 20  # larger files are sent in parts
_PART_BYTES = 8 << 20


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a commit: the hash of its blob in git, and its SHA-256 if that is only a pointer."""

    bytes: int
    oid: str
    sha256: str | None


@dataclass
class Repository:
    """Commits with their trees, and what points to them."""

    name: str
    is_private: bool = False
    is_gated: bool = False
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    subjects: list[str] = field(default_factory=list)
    """Of all commits, in order."""

    def find(self, revision: str) -> str:
        """The commit of a branch, tag or commit."""
        found = self.branches.get(revision) or self.tags.get(revision)
        if found is None and revision not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found or revision


class HubServer:
    """A Hub on two ports of this machine: `endpoint`, and `storage_url` for the bytes of large files."""

    def __init__(self) -> None:
        self.endpoint = self.storage_url = ""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """Large files by their SHA-256, committed or not."""
        self.rules = RuleBook(0)
        self.requests: list[str] = []
        """Method and target of each request since the test cleared the list."""
        self.on_request: Callable[[str], None] | None = None
        """Called with each of them before it is answered."""
        self.renamed: dict[str, str] = {}
        """{old ORG/NAME: new one}, to which requests are redirected."""
        self.page_entries = 1000
        self.tokens_seen: set[str | None] = set()
        self.lock = threading.RLock()
        self._blobs: dict[str, bytes] = {}
        self._parts: dict[tuple[str, int], bytes] = {}
        self._numbers = itertools.count()

    def new_repository(
        self, name: str | None = None, *, is_private: bool = False, is_gated: bool = False
    ) -> str:
        """ORG/NAME, new by default, of a repository with one commit, which has no files."""
        name = name or f"team/data-{os.getpid()}-{next(self._numbers)}"
        repository = Repository(name, is_private, is_gated)
        self.repositories[name] = repository
        self._add_commit(repository, "main", {}, "initial commit")
        return name

    def commit(self, name: str, files: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Add a commit to a branch, as another user would: files with their contents, None deletes one."""
        with self.lock:
            repository = self.repositories[name]
            tree = dict(repository.commits[repository.branches.get(branch, repository.branches["main"])])
            for path, data in files.items():
                if data is None:
                    del tree[path]
                else:
                    tree[path] = self._stored(path, data)
            return self._add_commit(repository, branch, tree, "by another user")

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """{path: content} of a revision."""
        with self.lock:
            repository = self.repositories[name]
            tree = repository.commits[repository.find(revision)]
            return {path: self.content(entry) for path, entry in tree.items()}

    def content(self, entry: Entry) -> bytes:
        return self._blobs[entry.oid] if entry.sha256 is None else self.objects[entry.sha256]

    def is_large(self, path: str, size: int) -> bool:
        return size > 0 and (size > _LARGE_BYTES or path.endswith(_LARGE_ENDINGS))

    def repository(self, name: str, token: str | None, *, writes: bool = False) -> Repository:
        """The repository, if this token may see it."""
        found = self.repositories.get(name)
        is_known = token == f"Bearer {TOKEN}"
        if found is None or (found.is_private and not is_known):
            raise RefusedError(404 if is_known else 401, "RepoNotFound", "Repository not found")
        if found.is_gated and not is_known:
            raise RefusedError(403, "GatedRepo", f"Access to dataset {name} is restricted.")
        if writes and not is_known:
            raise RefusedError(403, "", "Forbidden: you must use a write token")
        return found

    def batch(self, repository: Repository, request: Mapping[str, Any]) -> dict[str, Any]:
        """Where to send each large file, and nothing for those that are here."""
        objects = []
        for wanted in request["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.objects:
                href, header = f"{self.storage_url}/upload/{oid}", {}
                if size > _MULTIPART_BYTES and "multipart" in request["transfers"]:
                    count = -(-size // _PART_BYTES)
                    header = {"chunk_size": str(_PART_BYTES)}
                    header |= {f"{n:05d}": f"{href}?part={n}" for n in range(1, count + 1)}
                    href = f"{self.endpoint}/complete/{oid}"
                verify = {"href": f"{self.endpoint}/datasets/{repository.name}.git/info/lfs/verify"}
                answer["actions"] = {"upload": {"href": href, "header": header}, "verify": verify}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def receive(self, oid: str, part: int, data: bytes) -> str:
        """A large file, or (from 1) a part of one; returns its ETag."""
        with self.lock:
            if part:
                self._parts[oid, part] = data
            elif hashlib.sha256(data).hexdigest() != oid:
                raise RefusedError(400, "", "the content has another SHA-256")
            else:
                self.objects[oid] = data
        return hashlib.md5(data).hexdigest()

    def complete(self, oid: str, parts: int) -> None:
        with self.lock:
            data = b"".join(self._parts.pop((oid, number)) for number in range(1, parts + 1))
        self.receive(oid, 0, data)

    def apply(self, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> str:
        """A commit as `huggingface_hub` sends it: a header, then files and deletions."""
        with self.lock:
            if branch not in repository.branches:
                raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {branch}")
            head = repository.branches[branch]
            header = lines[0]["value"]
            if header.get("parentCommit", head) != head:
                raise RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
            tree = dict(repository.commits[head])
            for line in lines[1:]:
                self._apply_line(tree, line["key"], line["value"])
            for path in tree:
                parents = path.split("/")
                if any("/".join(parents[:n]) in tree for n in range(1, len(parents))):
                    raise RefusedError(400, "", f"{path}: a file cannot be below a file")
            return self._add_commit(repository, branch, tree, header["summary"])

    def _apply_line(self, tree: dict[str, Entry], key: str, value: dict[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            tree[path] = self._stored(path, base64.b64decode(value["content"]), is_large=False)
        elif key == "lfsFile":
            if value["oid"] not in self.objects:
                raise RefusedError(400, "", f"{path}: the object {value['oid']} has not been uploaded")
            tree[path] = self._pointer(value["oid"])
        elif path not in tree:
            raise RefusedError(404, "EntryNotFound", "A file with this name doesn't exist")
        else:
            del tree[path]

    def _stored(self, path: str, data: bytes, *, is_large: bool | None = None) -> Entry:
        if self.is_large(path, len(data)) if is_large is None else is_large:
            sha256 = hashlib.sha256(data).hexdigest()
            self.objects[sha256] = data
            return self._pointer(sha256)
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        self._blobs[oid] = data
        return Entry(len(data), oid, None)

    def _pointer(self, sha256: str) -> Entry:
        size = len(self.objects[sha256])
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return Entry(size, hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest(), sha256)

    def _add_commit(self, repository: Repository, branch: str, tree: dict[str, Entry], subject: str) -> str:
        with self.lock:
            facts = f"{repository.name} {next(self._numbers)} {sorted(tree)}"
            commit = hashlib.sha1(facts.encode()).hexdigest()
            repository.commits[commit] = tree
            repository.branches[branch] = commit
            repository.subjects.append(subject)
            return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    hub: HubServer
    is_storage: bool

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {self.path}")
            self._rule = self.hub.rules.pick(self.command, self.path, dict(self.headers))
        if self.hub.on_request is not None:
            self.hub.on_request(f"{self.command} {self.path}")
        rule = self._rule
        if rule is not None:
            time.sleep(rule.delay_seconds)
        if rule is not None and rule.fault == "hang" and rule.after_bytes is None:
            time.sleep(rule.hang_seconds or 0)
            self.close_connection = True
            return
        try:
            if rule is not None and rule.fault == "status":
                raise RefusedError(rule.status, "", rule.code)
            (self._storage if self.is_storage else self._hub)(body)
        except RefusedError as refusal:
            self._send(
                refusal.status,
                json.dumps({"error": refusal.message}).encode(),
                {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
                | ({"Retry-After": "0"} if refusal.status == 429 else {}),
            )

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _hub(self, body: bytes) -> None:
        hub, token = self.hub, self.headers.get("Authorization")
        hub.tokens_seen.add(token)
        parts = urlsplit(self.path)
        path, query = parts.path, parse_qs(parts.query)
        for old, new in hub.renamed.items():
            if f"/datasets/{old}/" in path:
                self._send(307, b"", {"Location": self.path.replace(old, new)})
                return
        if found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(hub.repository(found[1], token), unquote(found[2]), unquote(found[3]))
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/([a-z-]+)/([^/]+)(?:/(.*))?", path):
            verb, revision = found[2], unquote(found[3])
            repository = hub.repository(found[1], token, writes=verb in ("preupload", "commit"))
            self._api(repository, verb, revision, unquote(found[4] or ""), query, body)
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)", path):
            self._api(hub.repository(found[1], token), "revision", "main", "", query, body)
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)\.git/info/lfs/(objects/batch|verify)", path):
            repository = hub.repository(found[1], token, writes=True)
            self._json(hub.batch(repository, json.loads(body)) if found[2] != "verify" else {})
        elif found := re.fullmatch(r"/complete/([0-9a-f]{64})", path):
            hub.complete(found[1], len(json.loads(body)["parts"]))
            self._json({})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        else:
            raise RefusedError(404, "", f"no such address: {path}")

    def _api(
        self,
        repository: Repository,
        verb: str,
        revision: str,
        path: str,
        query: Mapping[str, list[str]],
        body: bytes,
    ) -> None:
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            commit = self.hub.apply(repository, revision, lines)
            address = f"{self.hub.endpoint}/datasets/{repository.name}/commit/{commit}"
            self._json({"commitOid": commit, "commitUrl": address})
            return
        commit = repository.find(revision)
        tree = repository.commits[commit]
        if verb == "revision":
            self._json({"id": repository.name, "sha": commit})
        elif verb == "preupload":
            files = json.loads(body)["files"]
            modes = {file["path"]: self.hub.is_large(file["path"], file["size"]) for file in files}
            self._json(
                {
                    "files": [
                        {"path": p, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                        for p, large in modes.items()
                    ]
                }
            )
        elif verb == "paths-info":
            is_json = "json" in self.headers.get("Content-Type", "")
            paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
            self._json([_listed(name, tree) for name in paths if name in tree or _is_folder(name, tree)])
        else:
            self._tree(repository, commit, path, query)

    def _tree(self, repository: Repository, commit: str, path: str, query: Mapping[str, list[str]]) -> None:
        """Folders and files below a path, in the order of git's own listings, which is not that of keys."""
        tree = repository.commits[commit]
        prefix = f"{path}/" if path else ""
        names = {name for name in tree if name.startswith(prefix)}
        if path and not names:
            raise RefusedError(404, "EntryNotFound", f"{path} does not exist on {commit}")
        names |= {
            "/".join(parts[:n])
            for parts in (name.split("/") for name in names)
            for n in range(prefix.count("/") + 1, len(parts))
        }
        if query.get("recursive", ["false"])[0].lower() != "true":
            names = {name for name in names if "/" not in name[len(prefix) :]}
        listed = sorted(names, key=lambda name: (name in tree, name[::-1]))
        start = int(query.get("cursor", ["0"])[0])
        stop = start + self.hub.page_entries
        headers = {}
        if stop < len(listed):
            address = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={stop}"
            headers["Link"] = f'<{address}>; rel="next"'
        self._json([_listed(name, tree) for name in listed[start:stop]], headers)

    def _resolve(self, repository: Repository, revision: str, path: str) -> None:
        commit = repository.find(revision)
        entry = repository.commits[commit].get(path)
        if entry is None:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if entry.sha256 is None:
            self._send_range(self.hub.content(entry), headers | {"ETag": f'"{entry.oid}"'})
            return
        headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.bytes)}
        address = f"{self.hub.storage_url}/object/{entry.sha256}?signature={quote(path, safe='')}"
        self._send(302, b"", headers | {"Location": address})

    def _storage(self, body: bytes) -> None:
        if "Authorization" in self.headers:
            raise RefusedError(400, "", "a token was sent to another host")
        parts = urlsplit(self.path)
        if found := re.fullmatch(r"/object/([0-9a-f]{64})", parts.path):
            data = self.hub.objects[found[1]]
            self._send_range(data, {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
        elif found := re.fullmatch(r"/upload/([0-9a-f]{64})", parts.path):
            number = int(parse_qs(parts.query).get("part", ["0"])[0])
            self._send(200, b"", {"ETag": f'"{self.hub.receive(found[1], number, body)}"'})
        else:
            raise RefusedError(404)

    def _send_range(self, data: bytes, headers: Mapping[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, data, headers)
            return
        first = int(wanted[1])
        stop = min(len(data), int(wanted[2]) + 1 if wanted[2] else len(data))
        if first >= len(data):
            raise RefusedError(416)
        part = memoryview(data)[first:stop]
        self._send(206, part, {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{len(data)}"})

    def _json(self, answer: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes | memoryview, headers: Mapping[str, str]) -> None:
        rule = self._rule
        fault = None if rule is None else rule.fault
        if fault == "lost_acknowledgement":
            self.close_connection = True
            return
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault in ("truncate", "reset", "hang") and rule is not None:
            body = body[: rule.after_bytes]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body)
        if fault == "hang" and rule is not None:
            self.wfile.flush()
            time.sleep(rule.hang_seconds or 0)

    def log_message(self, *arguments: object) -> None:
        """Tests have their own output."""


def _is_folder(name: str, tree: Mapping[str, Entry]) -> bool:
    return any(path.startswith(f"{name}/") for path in tree)


def _listed(name: str, tree: Mapping[str, Entry]) -> dict[str, Any]:
    entry = tree.get(name)
    if entry is None:
        return {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0}
    listed: dict[str, Any] = {"type": "file", "path": name, "oid": entry.oid, "size": entry.bytes}
    if entry.sha256 is not None:
        listed["lfs"] = {"oid": entry.sha256, "size": entry.bytes, "pointerSize": 134}
        listed["xetHash"] = hashlib.sha256(entry.sha256.encode()).hexdigest()
    return listed


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A Hub on two free ports, both gone at the end."""
    hub = HubServer()
    servers = []
    for is_storage in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_storage": is_storage})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.request_queue_size = 128
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
