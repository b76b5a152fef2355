"""Draws pictures of rectangles and ellipses, with their class and a caption, for the examples with images."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image, ImageDraw

__all__ = ["SHAPES", "draw_pictures"]

SHAPES = ("rectangle", "ellipse")  # the classes
COLORS = {"red": (230, 40, 30), "green": (40, 200, 60), "blue": (40, 70, 230), "yellow": (230, 220, 50)}


def draw_pictures(folder: Path, count: int = 200, per_tar: int = 50) -> None:
    """Write tars of .jpg, .cls (the number of the shape) and .txt (a caption), as webdataset does."""
    folder.mkdir(parents=True)
    for first in range(0, count, per_tar):
        with tarfile.open(folder / f"pictures-{first:06d}.tar", "w") as archive:
            for number in range(first, min(first + per_tar, count)):
                label, (name, color) = number % len(SHAPES), [*COLORS.items()][number // 2 % len(COLORS)]
                picture = Image.new("RGB", (96 + number % 5, 80), (number * 7 % 200, 120, 120))
                getattr(ImageDraw.Draw(picture), SHAPES[label])((20, 15, 70, 65), fill=color)
                file = io.BytesIO()
                picture.save(file, "JPEG", quality=90)
                caption = f"a {name} {SHAPES[label]}".encode()
                parts = {"jpg": file.getvalue(), "cls": str(label).encode(), "txt": caption}
                for extension, data in parts.items():
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
