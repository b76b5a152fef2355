"""File systems that lack a call: a library that answers for folders called LACKING stands in for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.loader_data import make_dataset

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
int linkat(int a, const char *from, int b, const char *to, int flags) {
  NEXT(linkat);
  const char *calls = getenv("LACKS");
  if (calls && strstr(calls, "hardlink") && strstr(to, "LACKING")) {
    errno = atoi(getenv("LACKS_ERRNO"));
    return -1;
  }
  return next(a, from, b, to, flags);
}
int link(const char *from, const char *to) { return linkat(-100, from, -100, to, 0); }
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
    with sk.StreamingLoader(source, batch_size=53, tensors="numpy", **options) as loader:
        print(sorted(int(row[0]) for row in next(iter(loader))["tokens"]) == list(range(1, 54)))
except sk.errors.ShardkitError as error:
    print(type(error).__name__, error)
"""
PUT = """
import sys
from shardkit.storage import open_store
from shardkit.storage.store import ObjectExistsError
store = open_store(sys.argv[1])
store.put("a/b", b"1", if_absent=True)
store.put("a/c", b"2")
try:
    store.put("a/b", b"3", if_absent=True)
except ObjectExistsError:
    print(store.get("a/b"), [info.key for info in store.list()])
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


@pytest.mark.parametrize(("lacks", "number"), [("hardlink", EPERM), ("hardlink fsync", EOPNOTSUPP)])
def test_a_folder_without_hard_links_still_creates_objects_once(
    shim: Path, tmp_path: Path, lacks: str, number: int
) -> None:
    printed, _ = run(shim, PUT, tmp_path / "LACKING", lacks=lacks, number=number)
    assert printed == "b'1' ['a/b', 'a/c']"
