"""Operations that Numba cannot express in Python: unaligned loads, and work on 64 bytes at a time.

Each function is a few instructions of LLVM's portable vector language, so it runs on any processor, with the
widest registers it has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["load_8_bytes", "trailing_zeros", "word_mask"]

_BYTE = ir.IntType(8)
_WORD = ir.IntType(64)
_BLOCK = ir.VectorType(_BYTE, 64)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(view.data, [index]), kind.as_pointer())


def _block_of(byte: int) -> Any:
    return ir.Constant(_BLOCK, [byte] * 64)


def _load_8_bytes(_typing: Any, array: Any, index: Any) -> Any:
    """uint64: array[index:index + 8] of a uint8 array, lowest byte first. Bounds are the caller's care."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, position = arguments
        value = builder.load(_address(context, builder, signature.args[0], data, position, _WORD))
        value.align = 1
        return value

    return types.uint64(array, types.intp), generate


def _trailing_zeros(_typing: Any, value: Any) -> Any:
    """int64: number of zero bits below the lowest one bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _word_mask(_typing: Any, source: Any, index: Any, lower: Any) -> Any:
    """uint64: a bit for each of source[index:index + 64] that is an ASCII letter or digit, _ or >= 0x80.

    Writes the 64 bytes to lower[index:], ASCII letters in lower case. Bounds are the caller's care.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        text, position, out = arguments
        load = builder.load(_address(context, builder, signature.args[0], text, position, _BLOCK))
        load.align = 1
        low = builder.or_(load, _block_of(0x20))
        letter = builder.icmp_unsigned("<", builder.sub(low, _block_of(ord("a"))), _block_of(26))
        digit = builder.icmp_unsigned("<", builder.sub(load, _block_of(ord("0"))), _block_of(10))
        underscore = builder.icmp_unsigned("==", load, _block_of(ord("_")))
        beyond = builder.icmp_signed("<", load, _block_of(0))
        chosen = builder.or_(builder.or_(letter, digit), builder.or_(underscore, beyond))
        store = builder.store(
            builder.select(letter, low, load),
            _address(context, builder, signature.args[2], out, position, _BLOCK),
        )
        store.align = 1
        # The first byte's bit is the lowest on little-endian machines, the only ones this package runs on.
        return builder.bitcast(chosen, _WORD)

    return types.uint64(source, types.intp, lower), generate


# Called from kernels with the arguments after the first.
load_8_bytes: Any = intrinsic(_load_8_bytes)

trailing_zeros: Any = intrinsic(_trailing_zeros)

word_mask: Any = intrinsic(_word_mask)
