"""What the SPIRe paper reports of its own 8-layer target: tau of each drafter, and what a step costs (Figure 5)."""

from __future__ import annotations

from spectrain.measure.cost import CostModel, Hardware, Method, Shape, SparseBudget

# tau at k = 4 and contexts of 512 tokens: Table 1 and Figure 5, by the names of conf/ablation/. Of a dense cache the
# paper assumes SPIRe's own ("conservatively", section 4.2).
TAU = {
    "spire": 3.401,
    "random_init": 3.105,
    "distill": 3.375,
    "hard": 3.069,
    "no_feedback": 3.352,
    "no_target_activations": 2.959,
    "dense_kv": 3.401,
    "vanilla": 2.647,
    "magicdec": 3.891,
}
K = 4
BATCH, CONTEXT_TOKENS = 64, 512  # the cells that the paper highlights

_TARGET = Shape(n_layer=8, hidden_size=512, n_head=8, n_kv_head=8, head_dim=128, intermediate_size=4096)
_SPIRE = Shape(n_layer=2, hidden_size=512, n_head=8, n_kv_head=8, head_dim=128, intermediate_size=4096)
_VANILLA = Shape(n_layer=4, hidden_size=256, n_head=8, n_kv_head=8, head_dim=64, intermediate_size=2048)
_HARDWARE = Hardware("H100, FP8", operational_intensity=600)
_DRAFTS = {  # what drafts, its cache, and whether memories are projected; all other names are SPIRe's
    "vanilla": (_VANILLA, None, False),
    "magicdec": (_TARGET, SparseBudget(), False),
    "dense_kv": (_SPIRE, None, True),
}


def multiplier(name: str, tau: float) -> float:
    """Modelled throughput at (64, 512) relative to plain decoding of the paper's target, of a drafter with this tau.

    A drafter without feedback is reckoned with the projections of one, as in the paper's figure.
    """
    shape, budget, feedback = _DRAFTS.get(name, (_SPIRE, SparseBudget(), True))
    method = Method(name, shape, K, tau, budget, feedback)
    return float(CostModel(_TARGET, _HARDWARE).multiplier(method, [BATCH], [CONTEXT_TOKENS])[0, 0])
