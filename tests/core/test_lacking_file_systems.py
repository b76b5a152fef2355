"""File systems that lack a call: a library that answers for folders called LACKING stands in for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit as sk
from support.loader_data import make_dataset
from support.small_build import make_corpus, tree

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
static int lacks(const char *call, int fd) {
  char link[64], path[4096];
  const char *calls = getenv("LACKS"), *number = getenv("LACKS_ERRNO");
  if (!calls || !strstr(calls, call)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  if (!strstr(path, "LACKING")) return 0;
  return atoi(number);
}
#define NEXT(name) __typeof__(&name) next = (__typeof__(&name)) dlsym(RTLD_NEXT, #name)
void *mmap(void *a, size_t n, int prot, int flags, int fd, off_t at) {
  NEXT(mmap);
  int e = fd < 0 ? 0 : lacks(flags & MAP_SHARED ? "shared" : "private", fd);
  if (e) { errno = e; return MAP_FAILED; }
  return next(a, n, prot, flags, fd, at);
}
int flock(int fd, int op) {
  NEXT(flock);
  int e = lacks("flock", fd);
  if (e) { errno = e; return -1; }
  return next(fd, op);
}
int posix_fallocate(int fd, off_t a, off_t n) {
  NEXT(posix_fallocate);
  int e = lacks("fallocate", fd);
  return e ? e : next(fd, a, n);
}
int posix_fallocate64(int fd, off_t a, off_t n) { return posix_fallocate(fd, a, n); }
int fsync(int fd) {
  NEXT(fsync);
  struct stat s;
  int e = !fstat(fd, &s) && S_ISDIR(s.st_mode) ? lacks("fsync", fd) : 0;
  if (e) { errno = e; return -1; }
  return next(fd);
}
static int at(const char *call, int folder, const char *path) {
  char whole[4096];
  const char *calls = getenv("LACKS");
  if (!calls || !strstr(calls, call) || !path) return 0;
  if (folder >= 0 && path[0] != '/') return lacks(call, folder);
  if (path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
  else if (!getcwd(whole, sizeof whole)) return 0;
  return strstr(whole, "LACKING") ? atoi(getenv("LACKS_ERRNO")) : 0;
}
#define FAIL(number) { int e = number; if (e) { errno = e; return -1; } }
int linkat(int a, const char *from, int b, const char *to, int flags) {
  NEXT(linkat);
  FAIL(at("hardlink", b, to));
  return next(a, from, b, to, flags);
}
int link(const char *from, const char *to) { return linkat(-100, from, -100, to, 0); }
static int moves(const char *from, const char *to) {
  struct stat s, t;
  if (stat(from, &s)) return 0;
  int is_over = !stat(to, &t) && !S_ISDIR(t.st_mode);
  if (is_over && at("overwrite", -1, to)) return EEXIST;
  return S_ISDIR(s.st_mode) ? at("move_folders", -1, to) : 0;
}
int rename(const char *from, const char *to) {
  NEXT(rename);
  FAIL(moves(from, to));
  return next(from, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  NEXT(renameat2);
  FAIL(at("noreplace", b, to));
  return next(a, from, b, to, flags);
}
int chmod(const char *path, mode_t mode) {
  NEXT(chmod);
  FAIL(at("chmod", -1, path));
  return next(path, mode);
}
int fchmod(int fd, mode_t mode) {
  NEXT(fchmod);
  FAIL(lacks("chmod", fd));
  return next(fd, mode);
}
/* As NFS and FUSE do: a file that is open stays in its folder under another name until it is closed. */
int unlink(const char *path) {
  char link[64], target[4096], hidden[4200];
  NEXT(unlink);
  for (int fd = 3; at("silly", -1, path) && fd < 64; fd++) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, target, sizeof target - 1);
    if (n <= 0) continue;
    target[n] = 0;
    if (strcmp(target, path)) continue;
    snprintf(hidden, sizeof hidden, "%.*s/.nfs-%d", (int) (strrchr(path, '/') - path), path, fd);
    return rename(path, hidden);
  }
  return next(path);
}
int close(int fd) {
  char link[64], target[4096];
  int (*closes)(int) = (int (*)(int)) dlsym(RTLD_NEXT, "close");
  int (*unlinks)(const char *) = (int (*)(const char *)) dlsym(RTLD_NEXT, "unlink");
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, target, sizeof target - 1);
  int done = closes(fd);
  if (n > 0) {
    target[n] = 0;
    if (strstr(target, "LACKING") && strstr(target, "/.nfs-")) unlinks(target);
  }
  return done;
}
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
  NEXT(utimensat);
  FAIL(at("utime", folder, path));
  return next(folder, path, times, flags);
}
int futimens(int fd, const struct timespec times[2]) {
  NEXT(futimens);
  FAIL(lacks("utime", fd));
  return next(fd, times);
}
"""

READ = """
import sys, warnings
warnings.simplefilter("always")
import shardkit as sk
from shardkit.storage import open_store
path, cache = sys.argv[1:]
remote = "memory://lacking"
from support.remote_harness import put_folder
from pathlib import Path
if cache != "-":
    put_folder(Path(path), open_store(remote))
options = {} if cache == "-" else {"cache_dir": cache}
try:
    source = path if cache == "-" else remote
    with sk.StreamingLoader(source, batch_size=53, layout=sk.Layout(tensors="numpy"), **options) as loader:
        print(sorted(int(row[0]) for row in next(iter(loader))["tokens"]) == list(range(1, 54)))
except sk.errors.ShardkitError as error:
    print(type(error).__name__, error)
"""
PUT = """
import sys
from shardkit.storage import open_store
from shardkit.storage.store import ObjectExistsError
from concurrent.futures import ThreadPoolExecutor
from shardkit.storage.store import StoreError
store = open_store(sys.argv[1])
try:
    store.put("a/b", b"1", if_absent=True)
except StoreError as error:
    sys.exit(print(error))
store.put("a/c", b"2")
try:
    store.put("a/b", b"3", if_absent=True)
except ObjectExistsError:
    print(store.get("a/b"), [info.key for info in store.list()], end=" ")

def create(number):
    try:
        return bool(store.put("raced", b"%d" % number, if_absent=True))
    except ObjectExistsError:
        return False

with ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(create, range(8))))
"""
BUILD = """
import sys
import shardkit as sk
try:
    sk.build(sys.argv[1], workers=1, progress=False)
    print("built")
except sk.errors.ShardkitError as error:
    print(error)
"""
WRITE = """
import sys
from pathlib import Path
import shardkit as sk
from shardkit.cli.main import main
from shardkit.formats.mds import MdsWriter
data, folder = sys.argv[1], Path(sys.argv[2])
with MdsWriter(folder / "written", columns={"number": "int"}, shard_bytes=200) as writer:
    for number in range(50):
        writer.write({"number": number})
assert main(["upload", data, str(folder / "sent"), "--quiet"]) == 0
assert main(["upload", data, str(folder / "sent"), "--quiet"]) == 0  # nothing is left to send
assert main(["download", str(folder / "sent"), str(folder / "fetched"), "--quiet"]) == 0
assert main(["convert", data, str(folder / "converted"), "--quiet"]) == 0
rows = [sk.open(data)[n]["tokens"].tolist() for n in range(53)]
same = [
    [sk.open(folder / name)[n]["tokens"].tolist() for n in range(53)] == rows
    for name in ("sent", "fetched", "converted")
]
print(*same, len(sk.open(folder / "written")))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled."""
    if shutil.which("gcc") is None or sys.platform != "linux":
        pytest.skip("needs gcc and Linux")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "lacking.c").write_text(SHIM)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", "lacking.so", "lacking.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return folder / "lacking.so"


@pytest.fixture(scope="module")
def usual_build(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of a dataset that is built where nothing lacks."""
    folder = tmp_path_factory.mktemp("usual")
    sk.build(make_corpus(folder / "corpus", 60), workers=1, progress=False)
    return tree(folder / "corpus" / "out")


def run(shim: Path, code: str, *arguments: object, lacks: str, number: int) -> tuple[str, str]:
    """What a process prints for which folders called LACKING lack some calls."""
    environment = {
        "LD_PRELOAD": str(shim),
        "LACKS": lacks,
        "LACKS_ERRNO": str(number),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip(), done.stderr


ENODEV, EINVAL, ENOLCK, ENOSYS, EOPNOTSUPP, EPERM = 19, 22, 37, 38, 95, 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lacks", "number", "warnings"),
    [
        ("shared", ENODEV, 0),
        ("shared private", ENODEV, 1),
        ("shared private", EINVAL, 1),
        ("flock", ENOLCK, 0),
    ],
)
@pytest.mark.parametrize("kind", ["mds", "tar"])
def test_a_local_dataset_is_read_without_shared_maps_or_any(
    shim: Path, tmp_path: Path, kind: str, lacks: str, number: int, warnings: int
) -> None:
    data = make_dataset(tmp_path / "LACKING" / "data", kind)
    printed, warned = run(shim, READ, data, "-", lacks=lacks, number=number)
    assert printed == "True"
    assert warned.count("RuntimeWarning") == warnings


@pytest.mark.parametrize(
    ("lacks", "number", "works"),
    [
        ("fallocate", EOPNOTSUPP, True),
        pytest.param("fsync", EINVAL, True, marks=pytest.mark.extended),
        pytest.param("hardlink", EPERM, True, marks=pytest.mark.extended),
        pytest.param("private", ENODEV, True, marks=pytest.mark.extended),
        ("flock", ENOLCK, False),
        pytest.param("flock", ENOSYS, False, marks=pytest.mark.extended),
        pytest.param("flock", EOPNOTSUPP, False, marks=pytest.mark.extended),
        ("shared private", ENODEV, False),
    ],
)
def test_a_cache_works_or_is_refused_by_name(
    shim: Path, tmp_path: Path, lacks: str, number: int, works: bool
) -> None:
    data, cache = make_dataset(tmp_path / "data", "mds"), tmp_path / "LACKING" / "cache"
    printed, _ = run(shim, READ, data, cache, lacks=lacks, number=number)
    if works:
        assert printed == "True"
    else:
        assert printed.startswith(f"CacheFolderError {cache}: ")
        assert "on a local disk: this file system lacks a call that a cache needs" in printed


@pytest.mark.parametrize(
    ("lacks", "number"),
    [
        ("hardlink", EPERM),
        ("hardlink noreplace", EINVAL),
        pytest.param("hardlink fsync utime chmod", EOPNOTSUPP, marks=pytest.mark.extended),
        pytest.param("hardlink noreplace fsync", ENOSYS, marks=pytest.mark.extended),
    ],
)
def test_a_folder_without_hard_links_still_creates_objects_once(
    shim: Path, tmp_path: Path, lacks: str, number: int
) -> None:
    printed, _ = run(shim, PUT, tmp_path / "LACKING", lacks=lacks, number=number)
    assert printed == "b'1' ['a/b', 'a/c'] 1"


def test_no_empty_file_is_left_where_nothing_can_be_created_in_one_step(shim: Path, tmp_path: Path) -> None:
    folder = tmp_path / "LACKING"
    printed, _ = run(shim, PUT, folder, lacks="hardlink noreplace overwrite", number=EPERM)
    assert printed == f"{folder}/a/b: cannot write: this file system cannot rename over an existing file"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("lacks", "number"),
    [
        ("hardlink fsync fallocate chmod utime noreplace silly", EOPNOTSUPP),
        ("hardlink chmod utime", EPERM),
        ("silly fsync", EINVAL),
        ("shared private", ENODEV),
    ],
)
def test_a_build_gives_the_same_dataset_without_these_calls(
    shim: Path, usual_build: dict[str, str], tmp_path: Path, lacks: str, number: int
) -> None:
    folder = tmp_path / "LACKING"
    assert run(shim, BUILD, make_corpus(folder, 60), lacks=lacks, number=number)[0] == "built"
    assert tree(folder / "out") == usual_build
    assert not (folder / "out.work").exists()


@pytest.mark.parametrize(
    ("lacks", "number", "problem"),
    [
        ("flock", ENOLCK, r"out\.work: cannot be used as work folder: .*\(flock\).*; set `work` to another"),
        pytest.param("flock", ENOSYS, r"\(flock\)", marks=pytest.mark.extended),
        pytest.param(
            *("move_folders", ENOSYS, r"cannot rename folders; use a folder on a local disk"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_build_names_what_its_work_folder_lacks(
    shim: Path, tmp_path: Path, lacks: str, number: int, problem: str
) -> None:
    folder = tmp_path / "LACKING"
    printed, _ = run(shim, BUILD, make_corpus(folder, 60), lacks=lacks, number=number)
    assert re.search(problem, printed)
    assert not (folder / "out" / "index.json").exists()


@pytest.mark.parametrize(
    ("lacks", "number"),
    [
        ("hardlink fsync fallocate chmod utime noreplace flock silly", ENOSYS),
        pytest.param("shared private", ENODEV, marks=pytest.mark.extended),
        pytest.param("hardlink", EPERM, marks=pytest.mark.extended),
        pytest.param("hardlink flock", EOPNOTSUPP, marks=pytest.mark.extended),
        pytest.param("fsync", EINVAL, marks=pytest.mark.extended),
    ],
)
def test_datasets_are_written_converted_and_published_without_these_calls(
    shim: Path, tmp_path: Path, lacks: str, number: int
) -> None:
    data, folder = make_dataset(tmp_path / "data", "mds"), tmp_path / "LACKING"
    folder.mkdir()
    printed, _ = run(shim, WRITE, data, folder, lacks=lacks, number=number)
    assert printed.splitlines()[-1] == "True True True 50"
