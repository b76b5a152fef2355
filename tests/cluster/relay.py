"""Relays TCP connections and holds all bytes back for a while: distance, where the kernel has no netem.

python tests/cluster/relay.py --listen 10.77.0.10:8000 --to 127.0.0.1:7480 --delay 0.001
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

_PIECE_BYTES = 256 << 10
_WAITING_PIECES = 64  # of a direction; a sender that is faster waits


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Hand on what comes, each piece `delay` seconds later, until the end."""
    clock = asyncio.get_running_loop().time
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING_PIECES)

    async def read() -> None:
        data = b"-"
        while data:
            data = await reader.read(_PIECE_BYTES)
            await waiting.put((clock() + delay, data))

    reading = asyncio.create_task(read())
    try:
        while (piece := await waiting.get())[1]:
            await asyncio.sleep(max(0.0, piece[0] - clock()))
            writer.write(piece[1])
            await writer.drain()
        await reading
    finally:
        reading.cancel()
        writer.close()


async def serve(listen: str, to: str, delay: float) -> None:
    """Relay until cancelled."""

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            host, _, port = to.rpartition(":")
            there = await asyncio.open_connection(host, int(port))
            both = (_carry(reader, there[1], delay), _carry(there[0], writer, delay))
            await asyncio.gather(*both, return_exceptions=True)
        writer.close()

    host, _, port = listen.rpartition(":")
    async with await asyncio.start_server(meet, host, int(port)) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="A TCP relay that holds bytes back.")
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--to", required=True, help="HOST:PORT of the server behind it")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds, each way (default: %(default)s)")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.listen, options.to, options.delay))


if __name__ == "__main__":
    main()
