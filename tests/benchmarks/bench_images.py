"""Images a second: random crops of 256 pixels and flips of JPEG photos, on two cores, beside other loaders.

    python tests/benchmarks/bench_images.py [--runs 5] [--batches 24] [--photos 2000] [--sides A,B,...]
                                            [--venvs DIR] [--json]

Photos are crops of those that scikit-image ships, resized to 500 x 375 at quality 90, as ImageNet's are. All
sides read local files in the page cache and use torchvision's RandomResizedCrop(256) and
RandomHorizontalFlip; each run is a process of its own. `shardkit` decodes by decode="torchrgb8" (simplejpeg)
in two worker processes, `shardkit, threads` draws the crop from its generator in two threads, and `shardkit,
Pillow` decodes as its peers do. `ImageFolder, simplejpeg` is a peer that a user has tuned.

    ratio    shardkit over this side, the median of the ratios of all runs
    CPU ms   processor time of an image, which a busy machine changes little
    MiB      the memory (PSS) of the process and its workers

Packages that the peers need are installed without their dependencies in a folder under --venvs.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Heads, give, in_turns
from peer_processes import SideError, median_ratio, peer_parser, site_folder
from shardkit.formats.mds import MdsWriter

SCRIPT = Path(__file__).with_name("image_sides.py")
DECLARED = Path(__file__).resolve().parent.parent / "trainers" / "site"
"""Makes a torchvision for CUDA work beside a torch without it."""
SIDES = (
    *("shardkit", "shardkit, threads", "shardkit, Pillow"),
    *("ImageFolder", "ImageFolder, simplejpeg", "webdataset", "streaming", "litdata"),
)
SOURCES = (
    *("astronaut.png", "chelsea.png", "coffee.png", "retina.jpg", "rocket.jpg", "hubble_deep_field.jpg"),
    *("motorcycle_left.png", "motorcycle_right.png"),
)
WIDTH, HEIGHT, QUALITY = 500, 375, 90
CLASSES, BATCH, CROP = 10, 64, 256
SIDE_SECONDS = 180.0
HEADS: Heads = {
    "side": ("", ""),
    "images_per_s": ("images/s", ",.0f"),
    "ratio": ("ratio", ".2f"),
    "cpu_ms": ("CPU ms/image", ".2f"),
    "first_batch_s": ("first batch s", ".2f"),
    "pss_mib": ("MiB", ",.0f"),
}


def cut_photos(folder: Path, count: int) -> Iterator[bytes]:
    """JPEG files of crops of the photos in `folder`."""
    images = [Image.open(folder / name).convert("RGB") for name in SOURCES]
    rng = np.random.default_rng(0)
    for number in range(count):
        image = images[number % len(images)]
        wide = int(rng.integers(min(image.width, 320), image.width + 1))
        high = min(image.height, wide * HEIGHT // WIDTH)
        wide = min(wide, high * WIDTH // HEIGHT)
        x, y = int(rng.integers(image.width - wide + 1)), int(rng.integers(image.height - high + 1))
        size = (WIDTH, HEIGHT) if rng.random() < 0.7 else (HEIGHT, WIDTH)
        cut = image.resize(size, Image.Resampling.BICUBIC, (x, y, x + wide, y + high))
        stream = io.BytesIO()
        cut.save(stream, "JPEG", quality=QUALITY)
        yield stream.getvalue()


def write_all(folder: Path, site: Path, count: int) -> int:
    """The same photos as files in folders of classes, tars and MDS; returns their mean size in bytes."""
    import webdataset

    total = 0
    (folder / "tars").mkdir()
    tars = webdataset.ShardWriter(str(folder / "tars" / "photos-%04d.tar"), maxcount=250, verbose=0)
    columns = {"jpg": "jpeg", "cls": "int"}
    with tars, MdsWriter(folder / "mds", columns=columns, shard_bytes=16 << 20) as mds:
        for number, data in enumerate(cut_photos(site / "skimage" / "data", count)):
            label, total = number % CLASSES, total + len(data)
            file = folder / "photos" / f"{label}" / f"{number:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            tars.write({"__key__": f"{number:06d}", "jpg": data, "cls": label})
            mds.write({"jpg": data, "cls": label})
    return total // count


def run_side(side: str, settings: dict[str, Any], variables: dict[str, str]) -> dict[str, float]:
    """The figures of one run; SideError with the last line of its output if it fails or takes too long."""
    command = [sys.executable, str(SCRIPT), side, json.dumps(settings)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SIDE_SECONDS, env=variables)
    except subprocess.TimeoutExpired:
        raise SideError(f"no end within {SIDE_SECONDS:g} s") from None
    if done.returncode or (side in SIDES and not done.stdout.strip()):
        raise SideError((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    return json.loads(done.stdout.splitlines()[-1]) if side in SIDES else {}


def measure(sides: list[str], settings: dict[str, Any], variables: dict[str, str], runs: int) -> list[Any]:
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for run in range(runs):
        for side in in_turns(sides, run):
            if side not in taken:
                continue
            try:
                taken[side].append(run_side(side, settings, variables))
            except SideError as error:
                print(f"left out: {side}: {error}", file=sys.stderr)
                del taken[side]
    rates = {side: [each["images_per_s"] for each in found] for side, found in taken.items()}
    ours = rates.get("shardkit", [])
    return [
        {"side": side, "ratio": median_ratio(ours, rates[side]), "runs": rates[side]}
        | {key: statistics.median(each[key] for each in found) for key in found[0]}
        for side, found in taken.items()
    ]


def main() -> None:
    parser = peer_parser(__doc__, runs=5, corpus=False)
    parser.add_argument("--sides", default=";".join(SIDES), help="separated by semicolons")
    parser.add_argument("--batches", type=int, default=24, help=f"of {BATCH} images; default: %(default)s")
    parser.add_argument("--photos", type=int, default=2000, help="default: %(default)s")
    arguments = parser.parse_args()
    site = site_folder("images", arguments.venvs)
    declared = [str(DECLARED)] if "+cpu" in version("torch") else []
    paths = [*declared, *filter(None, [os.environ.get("PYTHONPATH")]), str(site)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    sides = arguments.sides.split(";")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_all(folder, site, arguments.photos)
        names = ("photos", "tars", "mds", "litdata")
        settings: dict[str, Any] = {name: str(folder / name) for name in names}
        settings |= {"batch": BATCH, "size": CROP, "batches": arguments.batches}
        if "litdata" in sides:
            try:
                run_side("write litdata", settings, variables)
            except SideError as error:
                print(f"left out: litdata: {error}", file=sys.stderr)
                sides.remove("litdata")
        rows = measure(sides, settings, variables, arguments.runs)
    give(arguments, rows, HEADS, title=f"photos of {size // 1000} kB, crops of {CROP} px, two cores")


if __name__ == "__main__":
    main()
