"""Products with weights of bfloat16 by a processor's matrix unit (AMX), which lose nothing of inputs in float32.

The unit multiplies tiles of bfloat16 and adds up in float32. A number of float32 is the exact sum of three of bfloat16:
its 24 bits, eight at a time. So three products of tiles make one in float32, and sixteen rows cost little more than
one row does, the time in which the matrix is read.

A tile of the matrix is loaded as it lies in memory: 16 rows of 32 inputs. Rows of x are packed by `split` first, in
groups of up to 16 rows. A group has a block for each 32 inputs: three tiles of 16 lines, one for each part of the
numbers, and one line more. A line holds two neighbouring inputs of every row; those of the last line are written whole.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from spectrain.kernels.cpu import products
from spectrain.kernels.cpu.intrinsics import call, fast
from spectrain.kernels.cpu.processor import has, width
from spectrain.kernels.cpu.products import BYTE, FLOAT, INT, SHORT, WORD, Kernel

SIZE = 16  # lines of a tile, and the most numbers of 32 bits in one
DEEP = 2 * SIZE  # inputs of a tile
PARTS = 3  # numbers of bfloat16 that add up to one of float32
MATRIX, INPUTS = PARTS, PARTS + 1  # tiles, of eight: after those of the sums
N_TILES = INPUTS + PARTS
LINE_BYTES = 64
ARGUMENTS = ("x", "packed", "n_in", "n_rows")  # of `split`
LEAST_ROWS = 8  # fewer are multiplied without tiles as fast as the matrix is read
MOST_ROWS = 8 * SIZE  # that are packed together: the second cache keeps them
FEATURE = "amx-bf16"
PERMISSION = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, the state of tiles), once per process


@cache
def available() -> bool:
    """Whether this processor has tiles, and this process may use them."""
    usable = has(FEATURE) and width() == SIZE and sys.platform == "linux"
    return usable and ctypes.CDLL(None).syscall(*PERMISSION) == 0


def takes(x: Tensor, weight: Tensor, least_rows: int = LEAST_ROWS) -> bool:
    """Whether x [M, K] @ weight [N, K].T is computed by tiles, as it is from so many rows on."""
    fits = x.shape[1] % DEEP == 0 and len(weight) >= SIZE
    return fits and len(x) >= least_rows and weight.dtype == torch.bfloat16 and available()


def packed_size(n_rows: int, n_in: int) -> int:
    """Return the numbers of 32 bits that packed rows [M, K] take."""
    n_groups = -(-n_rows // SIZE)
    return n_groups * (n_in // DEEP) * SIZE * (PARTS * -(-n_rows // n_groups) + 1)


def splitting(x: Tensor, packed: Tensor) -> Tensor:
    """Return the arguments of `split`, int64, for rows x [M, K] and memory that they are packed in."""
    return torch.tensor([x.data_ptr(), packed.data_ptr(), x.shape[1], len(x)])


@fast
def split(op, thread, n_threads):
    """Pack rows of x for a product by tiles."""
    call(op[1], op[2], thread, n_threads)


@cache
def kernels() -> dict[str, int]:
    """Return the addresses of two functions: `split` packs x [M, K], and `multiply` takes that as a product takes x."""
    module = ir.Module("tiles")
    written = [getattr(_TileKernel(module, torch.bfloat16, 1, name), name)() for name in ("split", "multiply")]
    return products.addresses(module, written)


class _TileKernel(Kernel):
    def split(self) -> str:
        """Pack one thread's share of the inputs. Return the name."""
        b, (given, piece, n_pieces) = self.b, self.function.args
        x, packed, n_in, n_rows = (b.load(b.gep(given, [INT(i)])) for i in range(len(ARGUMENTS)))
        x, packed = b.inttoptr(x, FLOAT.as_pointer()), b.inttoptr(packed, WORD.as_pointer())
        n_groups, n_columns, tile, block = self.groups(n_rows)
        n_deep = b.sdiv(n_in, INT(DEEP))
        first, stop = (b.sdiv(b.mul(n_deep, one), n_pieces) for one in (piece, b.add(piece, INT(1))))
        with self.loop(INT(0), n_groups, INT(1)) as (group, _), self.loop(first, stop, INT(1)) as (k, _):
            to = b.gep(packed, [b.mul(b.add(b.mul(group, n_deep), k), block)])

            def parts_of(m: int) -> list[ir.Value]:
                row = self.at_most(b.add(b.mul(group, n_columns), INT(m)), b.sub(n_rows, INT(1)))
                return self.parts(b.gep(x, [b.add(b.mul(row, n_in), b.mul(k, INT(DEEP)))]))

            for p, rows in enumerate(zip(*map(parts_of, range(SIZE)), strict=True)):
                for i, line in enumerate(self.transposed(rows)):  # what is not of this group is overwritten by the next
                    self.store(line, b.gep(to, [b.add(b.mul(tile, INT(p)), b.mul(n_columns, INT(i)))]))
        b.ret_void()
        return self.function.name

    def parts(self, at: ir.Value) -> list[ir.Value]:
        """Cut 32 numbers of float32 in three, without rounding. Two neighbours share 32 bits of each part."""
        b, words = self.b, ir.VectorType(WORD, SIZE)
        upper, shift = (ir.Constant(words, [n] * SIZE) for n in (-(2**16), 16))
        both = [self.load(b.gep(at, [INT(i)]), FLOAT) for i in (0, SIZE)]
        left, found = [self.shuffled(*both, range(i, DEEP, 2)) for i in (0, 1)], []
        for _ in range(PARTS):
            one, other = cut = [b.and_(b.bitcast(value, words), upper) for value in left]
            found.append(b.or_(other, b.lshr(one, shift)))
            left = [b.fsub(value, b.bitcast(part, self.vector)) for value, part in zip(left, cut, strict=True)]
        return found

    def groups(self, n_rows: ir.Value) -> tuple[ir.Value, ...]:
        """Return the number of groups, the rows of each (the last may have fewer), and the sizes of tile and block."""
        b = self.b
        n_groups = b.sdiv(b.add(n_rows, INT(SIZE - 1)), INT(SIZE))
        n_columns = b.sdiv(b.add(n_rows, b.sub(n_groups, INT(1))), n_groups)
        tile = b.mul(n_columns, INT(SIZE))
        return n_groups, n_columns, tile, b.add(b.mul(tile, INT(PARTS)), INT(SIZE))

    def transposed(self, vectors: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """Return the columns of 16 rows of 16 numbers, as vectors."""
        places = [[SIZE * (j % 2) + first + j // 2 for j in range(SIZE)] for first in (0, SIZE // 2)]
        for _ in range(SIZE.bit_length() - 1):
            pairs = zip(vectors[: SIZE // 2], vectors[SIZE // 2 :], strict=True)
            vectors = [self.shuffled(*pair, place) for pair in pairs for place in places]
        return vectors

    def multiply(self) -> str:
        """All outputs of packed rows, by one thread. Return the name."""
        b = self.b
        x, weight, y, _, n_out, n_in, n_rows = self.arguments()
        n_groups, n_columns, tile, block = self.groups(n_rows)
        line = b.mul(n_columns, INT(4))  # bytes of inputs and sums
        self.configure(line)
        sums = b.alloca(FLOAT, INT(PARTS * SIZE * SIZE))
        sums.align = LINE_BYTES
        n_parts = b.sdiv(b.add(n_out, INT(SIZE - 1)), INT(SIZE))
        with self.loop(INT(0), n_parts, INT(1)) as (part, _), self.loop(INT(0), n_groups, INT(1)) as (group, _):
            row = self.at_most(b.mul(part, INT(SIZE)), b.sub(n_out, INT(SIZE)))
            rows, is_first = b.gep(weight, [b.mul(row, n_in)]), b.icmp_signed("==", group, INT(0))
            inputs = b.gep(x, [b.mul(b.mul(group, b.sdiv(n_in, INT(DEEP))), block)])
            for p in range(PARTS):
                self.tile("tilezero", p)
            with self.loop(INT(0), n_in, INT(DEEP)) as (k, _):
                here = b.gep(inputs, [b.mul(b.sdiv(k, INT(DEEP)), block)])
                with b.if_then(is_first):
                    for i in range(SIZE):
                        self.fetch(b.gep(rows, [b.add(b.mul(INT(SIZE + i), n_in), k)]), nearness=2)
                self.tile("tileloadd64", MATRIX, b.gep(rows, [k]), b.mul(n_in, INT(2)))
                for p in range(PARTS):
                    self.tile("tileloadd64", INPUTS + p, b.gep(here, [b.mul(tile, INT(p))]), line)
                    self.tile("tdpbf16ps", p, MATRIX, INPUTS + p)
            for p in range(PARTS):
                self.tile("tilestored64", p, b.gep(sums, [b.mul(tile, INT(p))]), line)

            def total(offset: ir.Value) -> ir.Value:
                """The sums of 16 numbers."""
                parts = [self.load(b.gep(sums, [b.add(b.mul(tile, INT(p)), offset)]), FLOAT) for p in range(PARTS)]
                return b.fadd(parts[0], b.fadd(*parts[1:]))

            begin, last = b.mul(group, n_columns), b.sub(n_rows, INT(1))
            found = self.transposed([total(b.mul(n_columns, INT(r))) for r in range(SIZE)])
            for m in reversed(range(SIZE)):  # what is not of this group is overwritten
                at = b.mul(self.at_most(b.add(begin, INT(m)), last), n_out)
                self.store(found[m], b.gep(y, [b.add(at, row)]))
        b.call(self.declared("llvm.x86.tilerelease", ir.VoidType(), []), [])
        b.ret_void()
        return self.function.name

    def configure(self, line: ir.Value) -> None:
        """Write the sizes of tiles: lines of the matrix have 64 bytes, all others so many."""
        b, config = self.b, self.b.alloca(BYTE, INT(LINE_BYTES))
        for i in range(0, LINE_BYTES, 8):
            b.store(INT(0), b.bitcast(b.gep(config, [INT(i)]), INT.as_pointer())).align = 1
        b.store(BYTE(1), config)
        for i in range(N_TILES):
            n_bytes = SHORT(LINE_BYTES) if i == MATRIX else b.trunc(line, SHORT)
            b.store(n_bytes, b.bitcast(b.gep(config, [INT(16 + 2 * i)]), SHORT.as_pointer())).align = 1
            b.store(BYTE(SIZE), b.gep(config, [INT(48 + i)]))
        b.call(self.declared("llvm.x86.ldtilecfg", ir.VoidType(), [BYTE.as_pointer()]), [config])

    def tile(self, name: str, *arguments: int | ir.Value) -> None:
        """An instruction on tiles, which are given by number."""
        given = [BYTE(one) if isinstance(one, int) else one for one in arguments]
        given = [self.b.bitcast(one, BYTE.as_pointer()) if one.type.is_pointer else one for one in given]
        self.b.call(self.declared(f"llvm.x86.{name}", ir.VoidType(), [one.type for one in given]), given)
