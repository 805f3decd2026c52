"""Products of a few rows with a matrix on the CPU, compiled by LLVM for the machine at hand.

A decoding step multiplies a few rows by every matrix of the model, so it should cost what reading the matrices costs.
`F.linear` reads them several times as soon as there are two rows, and only in the dtype that it computes in. The kernel
here reads each weight once for several rows, from the model's own memory. It computes in float32 from weights of
float32 or bfloat16: a checkpoint in bfloat16 is decoded in float32 at the price of reading bfloat16.

Rows of x that meet weights of 8 bits are rounded to 16 bits first. Sums of products of whole numbers are exact, and
processors multiply and add pairs of them at once, where they would have to widen each weight to a float before.

One function computes R rows of the matrix with T rows of x at a time, in R T vector registers along K. The R rows are
far apart, so a thread reads R streams at once: a CPU prefetches several streams faster than one. Threads share the
rows of the matrix among them; see `operations.py`.

Letters: M rows of x, K inputs, N outputs (rows of the matrix), R and T as above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from torch import Tensor

from spectrain.kernels.cpu.processor import cpu_features, width

BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8}  # of a weight
MOST_T = 7  # rows that are multiplied in one pass: four rows twice are faster than eight
MOST_QUERIES = 4  # that attention multiplies at a time: five to eight were slower on Zen 5, and need more registers
STREAMS = 4  # places in the values of a cache that are read by turns; a product has R of them
LEAST_OUTPUTS = 8  # the most rows that a kernel takes at a time
ARGUMENTS = ("x", "weight", "y", "scale", "n_out", "n_in", "n_rows")  # of a kernel: addresses, then sizes
ROUNDED_BYTES = 128 * 1024  # of rounded rows on a thread's stack, or MOST_T rows of up to MOST_ROUNDED inputs
MOST_ROUNDED = 2**15  # inputs of a matrix of 8 bits
LANE = (2**31 - 1) // 128  # the most that inputs of 16 bits may add up to in 32 bits, times weights of 8 bits
INT, WORD, SHORT, BYTE, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.FloatType()


def kernel(dtype: torch.dtype, n_rows: int) -> tuple[int, int]:
    """Return the address of the function that multiplies so many rows by weights of a dtype.

    Also return the rows of the matrix that it takes at a time.
    """
    t = _rows_together(n_rows)
    return _compiled(dtype)[f"rows{t}"], _matrix_rows(t, dtype == torch.int8)


@cache
def _rows_together(n_rows: int) -> int:
    """Return T for M rows: in several passes few rows are computed twice, and four to six a pass are the fastest."""
    most = _most_together()
    if n_rows <= most:
        return n_rows
    return min(range(4, min(most, 6) + 1), key=lambda t: (-(-n_rows // t) * t, t))


def _most_together() -> int:
    """Return the largest T. With one row of the matrix at a time, each input that is read would be used only once."""
    return max(t for t in range(1, MOST_T + 1) if _matrix_rows(t) > 1)


def attention_kernels() -> list[int]:
    """Return the addresses of what one thread multiplies with: T queries with keys, and T weights with values.

    T is 1 .. MOST_QUERIES. The first are those of a product, for keys that are read once. The next take the same
    arguments, and are faster for keys that a cache has. The last add p @ v to y: x is p [T rows, n_in], weight is v
    [n_in, n_out], and in place of a scale stands the distance between rows of y.
    """
    compiled = _compiled(torch.float32)
    return [compiled[f"{name}{t}"] for name in ("rows", "near", "mix") for t in range(1, MOST_QUERIES + 1)]


def takes(weight: Tensor) -> bool:
    """Whether a matrix [N, K] has a shape and dtype that the kernels are written for."""
    n_out, n_in = weight.shape
    return (
        weight.dtype in BITS
        and weight.is_contiguous()
        and n_in % width() == 0
        and n_out >= LEAST_OUTPUTS
        and (weight.dtype != torch.int8 or n_in <= MOST_ROUNDED)
    )


def _pair_sums() -> str | None:
    """Return the name of what multiplies neighbours of 16 bits and adds each two, of two full registers."""
    if width() == 16 and cpu_features().get("avx512bw"):
        return "llvm.x86.avx512.pmaddw.d.512"
    return "llvm.x86.avx2.pmadd.wd" if width() == 8 else None


def _n_registers() -> int:
    return 16 if width() == 8 else 32


def _matrix_rows(t: int, in_8_bits: bool = False) -> int:
    """Return R for T rows of x, so that what the innermost loop adds to and reads again stays in the registers.

    These are the R T sums, all of the weights or all of the inputs (whichever are fewer), one of the others, and for 8
    bits one product. A single one too many is written to memory and read again in every round, which then takes twice
    as long.
    """
    fitting = [r for r in range(1, LEAST_OUTPUTS + 1) if r * t + min(r, t) + 1 + in_8_bits <= _n_registers()]
    return max(fitting, default=1)


def _mixed_vectors(t: int) -> int:
    """Return the vectors of a row of values that stay in the registers for T rows of weights, likewise."""
    return next(n for n in (4, 2, 1) if t * n + n + 1 <= _n_registers())


def mixes(size: int) -> bool:
    """Whether the kernels of attention take heads of this width."""
    return size % (4 * width()) == 0


@cache
def _compiled(dtype: torch.dtype) -> dict[str, int]:
    """Compile the kernels of a dtype of weights. Return their addresses by name and T."""
    if not (cpu_features().get("fma") or cpu_features().get("neon")):
        raise RuntimeError("its vectors have no fused multiply-add")
    module = ir.Module("spectrain")
    written = [Kernel(module, dtype, t, f"rows{t}").build() for t in range(1, _most_together() + 1)]
    if dtype == torch.float32:
        for t in range(1, MOST_QUERIES + 1):
            written += [Kernel(module, dtype, t, f"near{t}", is_near=True).build()]
            written += [Kernel(module, dtype, t, f"mix{t}").build_mix()]
    return addresses(module, written)


def addresses(module: ir.Module, names: Sequence[str]) -> dict[str, int]:
    """Compile a module. Return the addresses of its functions, which live as long as the process."""
    own = llvm.get_host_cpu_features()
    removed = [f"-{name}" for name, has in own.items() if has and not cpu_features()[name]]
    features = [own.flatten(), "-prefer-256-bit", *removed]  # or wide vectors are cut in two
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=",".join(features), opt=2, jit=True)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    _engines.append(engine)  # the code lives as long as this
    return {name: engine.get_function_address(name) for name in names}


_engines: list[llvm.ExecutionEngine] = []


def n_compiled() -> int:
    """Count the modules that were compiled in this process."""
    return len(_engines)


def crossed(
    weights: Sequence[Callable[[], ir.Value]], inputs: Sequence[Callable[[], ir.Value]]
) -> Iterator[tuple[int, ir.Value, ir.Value]]:
    """Yield the place of each sum, with its weight and its input. The fewer of both are read first, and kept."""
    if len(weights) < len(inputs):
        kept = [read() for read in weights]
        for j, read in enumerate(inputs):
            value = read()
            yield from ((i * len(inputs) + j, weight, value) for i, weight in enumerate(kept))
    else:
        kept = [read() for read in inputs]
        for i, read in enumerate(weights):
            weight = read()
            yield from ((i * len(kept) + j, weight, value) for j, value in enumerate(kept))


class Kernel:
    """Writes the function for T rows of x in LLVM's language. A last part of fewer rows overlaps the one before.

    With `is_near` the rows of the matrix that are multiplied at a time are neighbours.
    """

    def __init__(self, module: ir.Module, dtype: torch.dtype, t: int, name: str, is_near: bool = False) -> None:
        self.is_near = is_near
        self.module, self.dtype, self.t, self.width = module, dtype, t, width()
        self.r, self.vector = _matrix_rows(t, dtype == torch.int8), ir.VectorType(FLOAT, self.width)
        self.weight_type = FLOAT if dtype == torch.float32 else ir.IntType(BITS[dtype])
        kind = ir.FunctionType(ir.VoidType(), [INT.as_pointer(), INT, INT])  # arguments, piece, pieces
        self.function = ir.Function(module, kind, name)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def build(self) -> str:
        """All outputs, by one thread. Return the name."""
        b, r, t = self.b, self.r, self.t
        x, weight, y, scale, n_out, n_in, n_rows = self.arguments()
        n_parts = b.sdiv(b.add(n_out, INT(r - 1)), INT(r))
        in_8_bits = self.dtype == torch.int8
        chunk, chunk_x = n_rows, x
        if in_8_bits:
            room = b.udiv(INT(ROUNDED_BYTES // 2), n_in)
            chunk = self.at_most(n_rows, b.select(b.icmp_signed("<", room, INT(t)), INT(t), room))
            chunk_x, units = b.alloca(SHORT, b.mul(chunk, n_in)), b.alloca(FLOAT, chunk)
        with self.loop(INT(0), n_rows, chunk) as (begin, _):
            begin = self.at_most(begin, b.sub(n_rows, chunk))
            if in_8_bits:
                with self.loop(INT(0), chunk, INT(1)) as (one, _):
                    to = b.gep(chunk_x, [b.mul(one, n_in)])
                    unit = self.round(b.gep(x, [b.mul(b.add(begin, one), n_in)]), to, n_in)
                    b.store(unit, b.gep(units, [one]))
            with self.loop(INT(0), n_parts, INT(1)) as (part, _):
                rows = self.rows(part, n_parts, n_out)
                scales = [b.load(b.gep(scale, [row])) for row in rows] if in_8_bits else []
                with self.loop(INT(0), chunk, INT(t)) as (start, _):
                    column = self.at_most(start, b.sub(chunk, INT(t)))
                    sums = self.sums(chunk_x, weight, rows, column, n_in)
                    for j in range(t):
                        total, to = self.reduced(sums[j::t]), b.mul(b.add(b.add(begin, column), INT(j)), n_out)
                        if self.is_near:
                            self.store(total, b.gep(y, [b.add(to, rows[0])]))
                            continue
                        unit = b.load(b.gep(units, [b.add(column, INT(j))])) if in_8_bits else None
                        for i, row in enumerate(rows):
                            one = b.extract_element(total, WORD(i))
                            one = b.fmul(one, b.fmul(scales[i], unit)) if in_8_bits else one
                            b.store(one, b.gep(y, [b.add(to, row)]))
        b.ret_void()
        return self.function.name

    def rows(self, part: ir.Value, n_parts: ir.Value, n_out: ir.Value) -> list[ir.Value]:
        """Return which R rows of the matrix a part computes."""
        b, r = self.b, self.r
        if self.is_near:
            first = self.at_most(b.mul(part, INT(r)), b.sub(n_out, INT(r)))
            return [b.add(first, INT(i)) for i in range(r)]
        return [self.at_most(b.add(part, b.mul(n_parts, INT(i))), b.sub(n_out, INT(1))) for i in range(r)]

    def build_mix(self) -> str:
        """Add p @ v to y, T rows of p, in registers along the rows of v. Return the name."""
        b, t, n_vectors = self.b, self.t, _mixed_vectors(self.t)
        p, v, y, stride, n_out, n_in, _ = self.arguments()
        stride, zero = b.ptrtoint(stride, INT), ir.Constant(self.vector, [0.0] * self.width)
        fma = self.declared("llvm.fma", self.vector, [self.vector] * 3)
        with self.loop(INT(0), n_out, INT(self.width * n_vectors)) as (column, _):
            length = b.sdiv(n_in, INT(STREAMS))
            sums = [zero] * (t * n_vectors)

            def add(k: ir.Value, sums: list[ir.Value]) -> None:
                line = b.gep(v, [b.add(b.mul(k, n_out), column)])
                values = [self.load(b.gep(line, [INT(i * self.width)]), FLOAT) for i in range(n_vectors)]
                for j in range(t):
                    weight = self.spread(b.load(b.gep(p, [b.add(b.mul(INT(j), n_in), k)])))
                    for i, value in enumerate(values):
                        sums[j * n_vectors + i] = b.call(fma, [weight, value, sums[j * n_vectors + i]])

            with self.loop(INT(0), length, INT(1), sums) as (k, carried):
                for i in range(STREAMS):
                    add(b.add(k, b.mul(INT(i), length)), carried)
            with self.loop(b.mul(INT(STREAMS), length), n_in, INT(1), carried) as (k, carried):
                add(k, carried)
            for j in range(t):
                for i in range(n_vectors):
                    place = b.gep(y, [b.add(b.add(b.mul(INT(j), stride), column), INT(i * self.width))])
                    self.store(b.fadd(self.load(place, FLOAT), carried[j * n_vectors + i]), place)
        b.ret_void()
        return self.function.name

    def arguments(self) -> list[ir.Value]:
        """Return the arguments of the function: four addresses, three sizes."""
        b, types = self.b, [FLOAT, self.weight_type, FLOAT, FLOAT]
        given = [b.load(b.gep(self.function.args[0], [INT(i)])) for i in range(len(ARGUMENTS))]
        addresses = [b.inttoptr(one, kind.as_pointer()) for one, kind in zip(given, types, strict=False)]
        return [*addresses, *given[len(types) :]]

    def spread(self, value: ir.Value, n: int | None = None) -> ir.Value:
        """Return a vector of n equal numbers."""
        vector = ir.VectorType(FLOAT, n or self.width)
        single = self.b.insert_element(ir.Constant(vector, ir.Undefined), value, WORD(0))
        return self.shuffled(single, single, [0] * vector.count)

    def shuffled(self, one: ir.Value, other: ir.Value, places: Sequence[int]) -> ir.Value:
        """Return the vector of these places, which count on from one vector to the other."""
        return self.b.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(places)), list(places)))

    def reduced(self, sums: Sequence[ir.Value]) -> ir.Value:
        """Add up the numbers of each of n vectors. Return the n sums as one vector.

        Neighbours are added until a sum is left, of two vectors at a time, which take the place of one.
        """
        vectors, n = list(sums), len(sums)
        if n > self.width:
            parts = self.reduced(vectors[: self.width]), self.reduced([*vectors[self.width :], *vectors][: self.width])
            return self.shuffled(*parts, range(n))
        n_lanes = 1 << (n - 1).bit_length()
        while len(vectors) > 1:
            vectors += vectors[-1:] * (len(vectors) % 2)
            vectors = [self.neighbours(one, other) for one, other in zip(vectors[::2], vectors[1::2], strict=True)]
        vector = vectors[0]
        while vector.type.count > n_lanes:
            vector = self.neighbours(vector)
        return vector if n == n_lanes else self.shuffled(vector, vector, range(n))

    def neighbours(self, one: ir.Value, other: ir.Value | None = None) -> ir.Value:
        """Add each two neighbours of a vector, or of two, whose sums then stand side by side."""
        places = range(one.type.count * (1 if other is None else 2))
        return self.b.fadd(*(self.shuffled(one, one if other is None else other, places[i::2]) for i in (0, 1)))

    def sums(
        self, x: ir.Value, weight: ir.Value, rows: Sequence[ir.Value], column: ir.Value, n_in: ir.Value
    ) -> list[ir.Value]:
        """Multiply R rows of the matrix with T of x, rounded for weights of 8 bits. Return R T vectors to add up."""
        b, r, t = self.b, self.r, self.t
        rows = [b.gep(weight, [b.mul(row, n_in)]) for row in rows]
        inputs = [b.gep(x, [b.mul(b.add(column, INT(j)), n_in)]) for j in range(t)]
        if self.dtype == torch.int8:
            return [b.sitofp(one, self.vector) for one in self.whole_sums(rows, inputs, n_in)]
        fma = self.declared("llvm.fma", self.vector, [self.vector] * 3)
        zero = ir.Constant(self.vector, [0.0] * self.width)
        with self.loop(INT(0), n_in, INT(self.width), [zero] * (r * t)) as (k, carried):
            for one in rows:
                self.fetch(b.gep(one, [b.add(k, b.mul(INT(r if self.is_near else 1), n_in))]))
            weights = [lambda one=one: self.widened(self.load(b.gep(one, [k]), self.weight_type)) for one in rows]
            values = [lambda one=one: self.load(b.gep(one, [k]), FLOAT) for one in inputs]
            added = list(carried)
            for place, weight, value in crossed(weights, values):
                carried[place] = b.call(fma, [weight, value, added[place]])
        return carried

    def whole_sums(self, rows: Sequence[ir.Value], inputs: Sequence[ir.Value], n_in: ir.Value) -> list[ir.Value]:
        """Multiply rows of 8 bits with inputs of 16 bits. Return the sums as vectors of 32 bits."""
        b, words = self.b, ir.VectorType(WORD, self.width)
        sums, done = [ir.Constant(words, None)] * (len(rows) * len(inputs)), INT(0)
        if found := _pair_sums():
            pairs = ir.VectorType(SHORT, 2 * self.width)
            multiplied = self.declared(found, words, [pairs, pairs])
            done = b.sub(n_in, b.urem(n_in, INT(2 * self.width)))
            sums = self.added(rows, inputs, INT(0), done, pairs, lambda *both: b.call(multiplied, both), sums)
        return self.added(rows, inputs, done, n_in, words, b.mul, sums)

    def added(
        self,
        rows: Sequence[ir.Value],
        inputs: Sequence[ir.Value],
        first: ir.Value,
        end: ir.Value,
        wide: ir.VectorType,
        multiply: Callable[[ir.Value, ir.Value], ir.Value],
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """Add the products of rows of 8 bits with inputs of 16 bits to sums, from one place to another, as vectors."""
        b = self.b
        with self.loop(first, end, INT(wide.count), sums) as (k, carried):
            for one in rows:
                self.fetch(b.gep(one, [b.add(k, end)]))
            weights = [lambda one=one: b.sext(self.load(b.gep(one, [k]), BYTE, wide.count), wide) for one in rows]
            values = [lambda one=one: b.sext(self.load(b.gep(one, [k]), SHORT, wide.count), wide) for one in inputs]
            before = list(carried)
            for place, weight, value in crossed(weights, values):
                carried[place] = b.add(before[place], multiply(weight, value))
        return carried

    def round(self, x: ir.Value, to: ir.Value, n_in: ir.Value) -> ir.Value:
        """Round a row of x to 16 bits. Return the float that its unit stands for; NaN if the row is not finite.

        The largest number becomes 32767, or less where sums of so many products would not fit in 32 bits.
        """
        b, zero = self.b, ir.Constant(self.vector, [0.0] * self.width)
        most = self.declared("llvm.maxnum", self.vector, [self.vector] * 2)
        size = self.declared("llvm.fabs", self.vector, [self.vector])
        with self.loop(INT(0), n_in, INT(self.width), [zero, zero]) as (k, carried):
            values = self.load(b.gep(x, [k]), FLOAT)
            carried[0] = b.call(most, [carried[0], b.call(size, [values])])
            carried[1] = b.fadd(carried[1], b.fmul(values, zero))  # 0, or NaN
        reduce = self.declared("llvm.vector.reduce.fmax", FLOAT, [self.vector])
        add = self.declared("llvm.vector.reduce.fadd", FLOAT, [FLOAT, self.vector])
        largest = b.call(reduce, [carried[0]])
        unfit = b.call(add, [FLOAT(0.0), carried[1]], fastmath=("reassoc",))
        limit = self.at_most(INT(2**15 - 1), b.udiv(INT(self.width * LANE), n_in))
        limit = b.sitofp(limit, FLOAT)
        least = FLOAT(torch.finfo(torch.float32).tiny * 2**16)
        largest = b.select(b.fcmp_ordered("<", largest, least), least, largest)
        factor = self.spread(b.fdiv(limit, largest))
        nearest = self.declared("llvm.rint", self.vector, [self.vector])
        with self.loop(INT(0), n_in, INT(self.width)) as (k, _):
            scaled = b.call(nearest, [b.fmul(self.load(b.gep(x, [k]), FLOAT), factor)])
            words = b.fptosi(scaled, ir.VectorType(WORD, self.width))
            self.store(b.trunc(words, ir.VectorType(SHORT, self.width)), b.gep(to, [k]))
        return b.fadd(b.fdiv(largest, limit), unfit)

    @contextmanager
    def loop(
        self, start: ir.Value, stop: ir.Value, step: ir.Value, initial: Sequence[ir.Value] = ()
    ) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
        """Yield the counter, and a list of values to replace by those of the next round. After it they are the last."""
        b, before = self.b, self.b.block
        body, after = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed("<", start, stop), body, after)
        b.position_at_end(body)
        counter, phis = b.phi(INT), [b.phi(one.type) for one in initial]
        carried = list(phis)
        yield counter, carried
        following, last = b.add(counter, step), b.block
        for phi, old, new in zip((counter, *phis), (start, *initial), (following, *carried), strict=True):
            phi.add_incoming(old, before)
            phi.add_incoming(new, last)
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)
        for i, (old, new) in enumerate(zip(initial, list(carried), strict=True)):
            carried[i] = b.phi(old.type)
            carried[i].add_incoming(old, before)
            carried[i].add_incoming(new, last)

    def load(self, address: ir.Value, kind: ir.Type, n: int | None = None) -> ir.Value:
        vector = ir.VectorType(kind, n or self.width)
        loaded = self.b.load(self.b.bitcast(address, vector.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, vector: ir.Value, address: ir.Value) -> None:
        self.b.store(vector, self.b.bitcast(address, vector.type.as_pointer())).align = 1

    def widened(self, values: ir.Value) -> ir.Value:
        """Return weights as float32: a bfloat16 is the upper half of one."""
        if self.dtype == torch.float32:
            return values
        words = ir.VectorType(WORD, self.width)
        upper = self.b.shl(self.b.zext(values, words), ir.Constant(words, [16] * self.width))
        return self.b.bitcast(upper, self.vector)

    def fetch(self, address: ir.Value, nearness: int = 3) -> None:
        """Ask for a line of memory ahead, into the first cache if `nearness` is 3. Past the matrix it does nothing."""
        fetch = self.declared("llvm.prefetch", ir.VoidType(), [BYTE.as_pointer(), WORD, WORD, WORD])
        self.b.call(fetch, [self.b.bitcast(address, BYTE.as_pointer()), WORD(0), WORD(nearness), WORD(1)])

    def at_most(self, value: ir.Value, limit: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed("<", value, limit), value, limit)

    def declared(self, name: str, returned: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        """Declare a function of OpenMP, or of LLVM, whose names end with the type that they work on."""
        if name.startswith("llvm.") and not name.startswith("llvm.x86."):
            name += ".p0" if name == "llvm.prefetch" else f".v{self.width}f32"
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(returned, arguments), name)
