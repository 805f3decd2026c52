"""What the SPIRe paper prints, and its cost model once more: one cell at a time, in plain Python."""

from __future__ import annotations

from spectrain.measure.cost import CostModel, Hardware, Method, Shape, SparseBudget

TARGET = Shape(n_layer=8, hidden_size=512, n_head=8, n_kv_head=8, head_dim=128, intermediate_size=4096)
VANILLA = Shape(n_layer=4, hidden_size=256, n_head=8, n_kv_head=8, head_dim=64, intermediate_size=2048)
SPIRE = Shape(n_layer=2, hidden_size=512, n_head=8, n_kv_head=8, head_dim=128, intermediate_size=4096)
LLAMA_70B = Shape(n_layer=80, hidden_size=8192, n_head=64, n_kv_head=8, head_dim=128, intermediate_size=28672)
LLAMA_8B = Shape(n_layer=32, hidden_size=4096, n_head=32, n_kv_head=8, head_dim=128, intermediate_size=14336)
LLAMA_20 = Shape(n_layer=20, hidden_size=8192, n_head=64, n_kv_head=8, head_dim=128, intermediate_size=28672)
H100_FP8 = Hardware("H100 in FP8", operational_intensity=600)
SHARE = SparseBudget(sink_tokens=1, window_tokens=None, share=8)


def paper_methods(vanilla: Shape = VANILLA, target: Shape = TARGET, spire: Shape = SPIRE) -> dict[str, Method]:
    """With the published tau at L = 512 (Table 1)."""
    return {
        "vanilla": Method("vanilla", vanilla, k=4, tau=2.647),
        "magicdec": Method("magicdec", target, k=4, tau=3.891, budget=SHARE),
        "spire": Method("spire", spire, k=4, tau=3.401, budget=SHARE, feedback=True),
        "spire_dense": Method("spire_dense", spire, k=4, tau=3.401, feedback=True),
    }


def paper_model() -> CostModel:
    return CostModel(TARGET, H100_FP8)


BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FIGURE_4 = {
    "vanilla": """
        1.76 1.76 1.75 1.73 1.70 1.65 1.59 1.51 1.44
        1.76 1.75 1.73 1.70 1.65 1.59 1.51 1.44 1.39
        1.75 1.73 1.70 1.65 1.59 1.51 1.44 1.39 1.36
        1.73 1.70 1.65 1.59 1.51 1.44 1.39 1.36 1.34
        1.70 1.65 1.59 1.51 1.44 1.39 1.36 1.34 1.33
        1.65 1.59 1.51 1.44 1.39 1.36 1.34 1.33 1.33
        1.59 1.51 1.44 1.39 1.36 1.34 1.33 1.33 1.33
        1.46 1.44 1.39 1.36 1.34 1.33 1.33 1.33 1.32""",
    "magicdec": """
        0.78 0.79 0.79 0.81 0.84 0.90 1.01 1.20 1.46
        0.79 0.79 0.81 0.84 0.90 1.01 1.20 1.46 1.77
        0.79 0.81 0.84 0.90 1.01 1.20 1.46 1.77 2.06
        0.81 0.84 0.90 1.01 1.20 1.46 1.77 2.06 2.28
        0.84 0.90 1.01 1.19 1.46 1.77 2.06 2.28 2.42
        0.90 1.01 1.19 1.45 1.76 2.06 2.28 2.42 2.50
        1.00 1.19 1.45 1.76 2.05 2.28 2.42 2.50 2.55
        1.15 1.44 1.75 2.04 2.27 2.42 2.50 2.55 2.57""",
    "spire": """
        1.71 1.71 1.72 1.75 1.79 1.86 1.99 2.18 2.40
        1.71 1.72 1.75 1.79 1.86 1.99 2.18 2.40 2.62
        1.72 1.74 1.79 1.86 1.99 2.18 2.40 2.62 2.78
        1.74 1.79 1.86 1.99 2.18 2.40 2.62 2.78 2.89
        1.78 1.86 1.99 2.17 2.40 2.61 2.78 2.89 2.95
        1.86 1.98 2.17 2.40 2.61 2.78 2.89 2.95 2.99
        1.98 2.17 2.39 2.61 2.78 2.89 2.95 2.99 3.00
        2.07 2.38 2.60 2.77 2.89 2.95 2.99 3.00 3.01""",
}


def figure_4(method: str) -> list[list[str]]:
    """[B][L], as printed."""
    return [line.split() for line in FIGURE_4[method].strip().splitlines()]


def slow_multiplier(target: Shape, method: Method, hoi: float, bytes_a_value: float, batch: int, context: int) -> float:
    """One cell from the paper's words: parameters are added up matrix by matrix, costs compared one by one."""

    def parameters(shape: Shape) -> int:
        total = 0
        for _ in range(shape.n_layer):
            total += shape.hidden_size + shape.hidden_size  # both norms
            total += shape.hidden_size * shape.n_head * shape.head_dim  # queries
            total += shape.hidden_size * shape.n_kv_head * shape.head_dim  # keys
            total += shape.hidden_size * shape.n_kv_head * shape.head_dim  # values
            total += shape.n_head * shape.head_dim * shape.hidden_size  # output
            for _ in range(3):  # gate, up, down
                total += shape.hidden_size * shape.intermediate_size
        return total

    def cost(shape: Shape, tokens: int, cached: int, memory: bool) -> float:
        flops = 2 * parameters(shape) * tokens * batch
        if memory:  # one key and one value projection a layer more
            flops += 2 * batch * shape.n_layer * 2 * shape.hidden_size * shape.n_kv_head * shape.head_dim
        cache = 0
        for _ in range(shape.n_layer):
            cache += batch * cached * 2 * shape.n_kv_head * shape.head_dim
        waiting = (parameters(shape) + cache) * bytes_a_value * hoi
        return flops if flops > waiting else waiting

    cached = context
    if method.budget is not None:
        budget = method.budget
        window = context // budget.share if budget.window_tokens is None else budget.window_tokens
        cached = budget.sink_tokens + window
        if budget.window_tokens is not None and cached > context:
            cached = context
    step = sum(cost(method.shape, 1, cached, method.feedback) for _ in range(method.k))
    step += cost(target, method.k + 1, context, False)
    return method.tau * cost(target, 1, context, False) / step
