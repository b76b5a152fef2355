"""Operations that Numba cannot express in Python: unaligned loads, and work on 64 bytes at a time.

Each function is a few instructions of LLVM's portable vector language, so it runs on any processor, with the
widest registers it has. Floats are added in the order of the code, one lane per column, so that sums have the
same bits on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shardkit.kernels.numba_support import UInt8s

LANES = 16  # number of columns that `add_rows` and `add_vector` add at once

_BYTE = ir.IntType(8)
_WORD = ir.IntType(64)
_DOUBLE_WORD = ir.IntType(128)
_BLOCK = ir.VectorType(_BYTE, 64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    view = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(view.data, [index]), kind.as_pointer())


def _block_of(byte: int) -> Any:
    return ir.Constant(_BLOCK, [byte] * 64)


def _load_8_bytes(_typing: Any, array: Any, index: Any) -> Any:
    """Load array[index:index + 8] of a uint8 array as a uint64, lowest byte first. Bounds are not checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, position = arguments
        value = builder.load(_address(context, builder, signature.args[0], data, position, _WORD))
        value.align = 1
        return value

    return types.uint64(array, types.intp), generate


def _store_8_bytes(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Store a uint64 in array[index:index + 8] of a uint8 array, as `load_8_bytes` reads it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, position, eight = arguments
        place = _address(context, builder, signature.args[0], data, position, _WORD)
        builder.store(eight, place).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), generate


def _trailing_zeros(_typing: Any, value: Any) -> Any:
    """Return the int64 number of zero bits below the lowest one bit of a uint64, which must not be 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


def _count_ones(_typing: Any, value: Any) -> Any:
    """Return the int64 number of one bits in a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


def _leading_zeros(_typing: Any, value: Any) -> Any:
    """Return the int64 number of zero bits above the highest one bit of a uint64; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def _multiply_high(_typing: Any, one: Any, other: Any) -> Any:
    """Return the upper half of the 128-bit product of two uint64, as a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(value, _DOUBLE_WORD) for value in arguments]
        product = builder.lshr(builder.mul(*wide), ir.Constant(_DOUBLE_WORD, 64))
        return builder.trunc(product, _WORD)

    return types.uint64(types.uint64, types.uint64), generate


def _range_mask(_typing: Any, source: Any, index: Any, first: Any, count: Any) -> Any:
    """Return a uint64 with a bit for each of source[index:index + 64] that is in [first, first + count).

    Bounds are not checked.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        text, position, least, values = arguments
        load = builder.load(_address(context, builder, signature.args[0], text, position, _BLOCK))
        load.align = 1
        low, size = (_splat(builder, builder.trunc(value, _BYTE)) for value in (least, values))
        return builder.bitcast(builder.icmp_unsigned("<", builder.sub(load, low), size), _WORD)

    return types.uint64(source, types.intp, types.int64, types.int64), generate


def _splat(builder: Any, byte: Any) -> Any:
    one = builder.insert_element(ir.Constant(_BLOCK, ir.Undefined), byte, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
    return builder.shuffle_vector(one, ir.Constant(_BLOCK, ir.Undefined), zeros)


def _add_rows(_typing: Any, rows: Any, numbers: Any, count: Any, column: Any, out: Any, place: Any) -> Any:
    """Add rows[n, column:column + LANES], for n in numbers[:count], to out[place, column:column + LANES].

    `rows` and `out` are float32, `numbers` int32. Bounds are not checked.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tables = [
            context.make_array(signature.args[index])(context, builder, arguments[index]) for index in (0, 4)
        ]
        width = builder.extract_value(tables[0].shape, 1)
        listed = context.make_array(signature.args[1])(context, builder, arguments[1])

        def at(table: Any, row: Any) -> Any:
            index = builder.add(builder.mul(row, width), arguments[3])
            return builder.bitcast(builder.gep(table.data, [index]), _FLOATS.as_pointer())

        def load(table: Any, row: Any) -> Any:
            values = builder.load(at(table, row))
            values.align = 1  # rows of a mapped file may be unaligned
            return values

        total = cgutils.alloca_once_value(  # type: ignore[no-untyped-call]
            builder, load(tables[1], arguments[5])
        )
        with cgutils.for_range(builder, arguments[2]) as loop:
            number = builder.sext(builder.load(builder.gep(listed.data, [loop.index])), _WORD)
            builder.store(builder.fadd(builder.load(total), load(tables[0], number)), total)
        builder.store(builder.load(total), at(tables[1], arguments[5])).align = 1
        return context.get_dummy_value()

    return types.void(rows, numbers, types.intp, types.intp, out, types.intp), generate


def _add_vector(_typing: Any, vectors: Any, place: Any, column: Any, total: Any) -> Any:
    """Add vectors[place, column:column + LANES], float32, to total[column:column + LANES], float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table = context.make_array(signature.args[0])(context, builder, arguments[0])
        width = builder.extract_value(table.shape, 1)
        index = builder.add(builder.mul(arguments[1], width), arguments[2])
        values = builder.load(builder.bitcast(builder.gep(table.data, [index]), _FLOATS.as_pointer()))
        values.align = 1
        sums = _address(context, builder, signature.args[3], arguments[3], arguments[2], _DOUBLES)
        before = builder.load(sums)
        before.align = 1
        builder.store(builder.fadd(before, builder.fpext(values, _DOUBLES)), sums).align = 1
        return context.get_dummy_value()

    return types.void(vectors, types.intp, types.intp, total), generate


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Prefetch array[index] of a flat view of the array into the cache; the index may be out of bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.bitcast(builder.gep(view.data, [arguments[1]]), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[ir.IntType(32)] * 3])
        name = "llvm.prefetch.p0i8"
        fetch = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        # 0, 3, 1: for a read, into all cache levels, of data.
        builder.call(fetch, [place, *(ir.IntType(32)(value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _word_mask(_typing: Any, source: Any, index: Any, lower: Any) -> Any:
    """Return a uint64 with a bit for each of source[index:index + 64] that may be part of a word.

    These are ASCII letters and digits, _ and bytes >= 0x80. The 64 bytes are also written to lower[index:],
    with ASCII letters in lower case. Bounds are not checked.
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


# Kernels call these functions without the first argument, `_typing`.
_intrinsic: Any = intrinsic
_OfWord = Callable[[np.uint64], int]

load_8_bytes: Callable[[UInt8s, int], np.uint64] = _intrinsic(_load_8_bytes)

store_8_bytes: Any = _intrinsic(_store_8_bytes)

trailing_zeros: _OfWord = _intrinsic(_trailing_zeros)

leading_zeros: _OfWord = _intrinsic(_leading_zeros)

count_ones: _OfWord = _intrinsic(_count_ones)

multiply_high: Callable[[np.uint64, np.uint64], np.uint64] = _intrinsic(_multiply_high)

range_mask: Callable[[UInt8s, int, int, int], np.uint64] = _intrinsic(_range_mask)

word_mask: Any = _intrinsic(_word_mask)

prefetch: Any = _intrinsic(_prefetch)

add_rows: Any = _intrinsic(_add_rows)

add_vector: Any = _intrinsic(_add_vector)
