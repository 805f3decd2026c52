"""Functions that programs need and numba lacks: access to memory by its address, and float32 functions in vectors.

Everything here is compiled into the operations of `operations.py` and `attention.py`.
"""

from __future__ import annotations

import math
import platform

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function, int32_t
from numba.extending import intrinsic

from spectrain.compiled import inner

MATHS = {"reassoc", "contract", "arcp", "nsz"}  # not: that there are no NaN

fast = inner(fastmath=MATHS, error_model="numpy")  # a check for a division by zero would keep a loop from vectors
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())
give_up_core = types.ExternalFunction("sched_yield", types.int32())


def _cast(operation: str, given: types.Type, returned: types.Type):
    @intrinsic
    def cast(typing, value):
        def build(context, builder, signature, arguments):
            return getattr(builder, operation)(arguments[0], context.get_value_type(signature.return_type))

        return returned(given), build

    return cast


def _pointer_to(kind: types.Type):
    return _cast("inttoptr", types.int64, types.CPointer(kind))


floats, wholes, flags = _pointer_to(types.float32), _pointer_to(types.int64), _pointer_to(types.uint8)
halves, words, doubles = _pointer_to(types.uint16), _pointer_to(types.int32), _pointer_to(types.float64)
# The bits of a float32 as int32, and the float32 that has such bits.
bits_of, float_of = _cast("bitcast", types.float32, types.int32), _cast("bitcast", types.int32, types.float32)


@intrinsic
def call(typing, function, arguments, piece, n_pieces):
    """Call the function at an address with the address of its arguments, and the piece that it is to compute."""

    def build(context, builder, signature, given):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


def _atomic(operation: str):
    @intrinsic
    def changed(typing, address, value):
        def build(context, builder, signature, given):
            place = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw(operation, place, given[1], "acq_rel")

        return types.int64(types.int64, types.int64), build

    return changed


# Change the int64 at an address, which other threads change meanwhile. Return what stood there before.
atomic_add, atomic_or = _atomic("add"), _atomic("or")


@intrinsic
def atomic_read(typing, address):
    """The int64 at an address, which other threads change meanwhile."""

    def build(context, builder, signature, given):
        place = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), build


@intrinsic
def pause(typing):
    """Wait for some forty cycles, in which another thread of the same core may run."""

    def build(context, builder, signature, given):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def widened(typing, upper):
    """The float32 whose upper half a bfloat16 is."""

    def build(context, builder, signature, given):
        return builder.bitcast(builder.shl(builder.zext(given[0], int32_t), int32_t(16)), ir.FloatType())

    return types.float32(types.uint16), build


@intrinsic
def power_of_two(typing, n):
    """2 ** n as float32, n an int32 in -126 .. 127."""

    def build(context, builder, signature, given):
        shifted = builder.shl(builder.add(given[0], int32_t(127)), int32_t(23))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(types.int32), build


@fast
def exp(x):
    """e ** x in float32, to the last bits; a loop over it is vectorized, which one over math.exp is not."""
    x = types.float32(-87.0) if x < types.float32(-87.0) else x
    x = types.float32(88.0) if x > types.float32(88.0) else x
    half = types.float32(0.5) if x > types.float32(0.0) else types.float32(-0.5)
    n = types.int32(x * types.float32(1.44269504) + half)
    r = x - types.float32(n) * types.float32(0.6931471805599453)
    y = types.float32(1.9875691e-4) * r + types.float32(1.3981999e-3)
    y = y * r + types.float32(8.3334519e-3)
    y = y * r + types.float32(4.1665796e-2)
    y = y * r + types.float32(1.6666666e-1)
    y = y * r + types.float32(0.5)
    y = y * r * r + r + types.float32(1.0)
    return y * power_of_two(n)


@fast
def inverse_norm(x, size, eps):
    """1 / sqrt(mean(x^2) + eps)"""
    total = types.float32(0.0)
    for d in range(size):
        total += x[d] * x[d]
    return types.float32(1.0) / math.sqrt(total / types.float32(size) + eps)
