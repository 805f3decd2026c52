"""What a machine does fast: tensors in, tensors out. `decoding/` is its reader.

`cpu/` is compiled for the processor at hand; `cuda/` has kernels in Triton and records graphs. `reference.py` says in
torch what they compute.
"""

from spectrain.kernels import reference
from spectrain.kernels.cpu.accept import GOING, LENGTH, ROOM
from spectrain.kernels.cpu.candidates import first_by_noise, top_tokens
from spectrain.kernels.cpu.processor import multiplies
from spectrain.kernels.cpu.products import LEAST_OUTPUTS, n_compiled
from spectrain.kernels.cpu.program import MOST_TOKENS, Program, Programs
from spectrain.kernels.cpu.running import (
    accept,
    draw,
    fits,
    move,
    outruns_torch,
    product,
    reads,
    runner,
    warp,
    warp_and_draw,
    works,
)
from spectrain.kernels.cpu.tiles import LEAST_ROWS as LEAST_TILED
from spectrain.kernels.cpu.warping import TEMPERATURE
from spectrain.kernels.cuda import ACTIVATIONS
from spectrain.kernels.cuda.available import why_no_kernels
from spectrain.kernels.cuda.graphs import NODES, ROWS, Graphs, padded, unique
