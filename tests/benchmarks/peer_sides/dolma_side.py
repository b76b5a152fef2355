"""dolma's Gopher tagger: all values of quality and repetition rules for every document; it drops none."""

from __future__ import annotations

from peer_side import Request, serve


def tag(texts: list[str], request: Request) -> int:
    """Number of documents tagged."""
    from dolma.taggers.gopher import get_attributes

    return sum(get_attributes(text).character_count >= 0 for text in texts)


if __name__ == "__main__":
    serve({"gopher": tag})
