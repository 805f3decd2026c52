"""What a step of decoding reads from a GPU's memory, and how near it comes to the limit.

A forward of a few rows takes as long as reading its weights and its cache. What is counted: the target's weights and
the cache of its rows once per step, and the draft model's weights once per level of a draft. Embeddings, of which a
forward reads a few rows, draft models' caches and activations are left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn

from spectrain.decoding import Drafter
from spectrain.measure.results import QuestionRow
from spectrain.target import TargetModel

MODELS = ("draft_model", "reader", "model", "drafter")  # what drafts, as methods call it


def loop_steps(forwards: Sequence[int], batch_size: int) -> int:
    """Count the steps of a loop whose rows take these numbers of steps: the next row joins where one has ended."""
    ends = [0] * batch_size
    for n in forwards:
        heapq.heapreplace(ends, ends[0] + n)
    return max(ends)


def step_costs(
    rows: Sequence[QuestionRow], of_target: int, of_drafter: int, of_token: int, bytes_per_s: float | None
) -> dict[str, float | None]:
    """Compute what an average step of a method costs, as keys of results.json.

    Args:
        rows: of the method. A row reads its prompt and, on average, half of its reply.
        of_target: bytes of its weights.
        of_drafter: bytes of the draft model's weights; 0: there is none.
        of_token: bytes in the target's cache.
        bytes_per_s: that the GPU's memory gives; None: unknown.
    """
    steps, row_steps = sum(r.steps for r in rows), sum(r.target_forwards for r in rows)
    if not steps:
        return dict.fromkeys(("outside_forward_ms", "bytes_per_step", "bandwidth_share"))
    forward_s = sum(r.time_s["forward"] for r in rows if r.steps)
    decode_s = sum(sum(r.time_s.values()) for r in rows)
    # A level of a draft is one read, unless its tokens were looked up.
    reads = sum(min(sum(r.steps_by_depth), r.drafted_by_source.get("draft", 0)) for r in rows)
    cached = sum(r.target_forwards * _context_tokens(r) for r in rows)  # tokens
    read = of_target + reads / row_steps * of_drafter + cached / steps * of_token
    return {
        "outside_forward_ms": 1e3 * (decode_s - forward_s) / steps,
        "bytes_per_step": read,
        "bandwidth_share": read * steps / decode_s / bytes_per_s if bytes_per_s and decode_s else None,
    }


def _context_tokens(row: QuestionRow) -> float:
    """Return the average tokens in the cache over the steps of a row, which turns have by the tokens of their reply."""
    turns = [(len(reply), n + len(reply) / 2) for n, reply in zip(row.prompt_tokens, row.replies, strict=True)]
    return sum(n * tokens for n, tokens in turns) / max(1, row.n_tokens)


def weight_bytes(model: TargetModel | Drafter | nn.Module) -> int:
    """Return the bytes of weights that a forward of a model, or a level of a method's drafts, reads.

    Of several methods those of the one that reads the most; 0: no model drafts.
    """
    if isinstance(model, Drafter):
        models = [getattr(model, name, None) for name in MODELS] + [arm.drafter for arm in getattr(model, "arms", ())]
        return max((weight_bytes(one) for one in models if one is not None), default=0)
    if isinstance(model, TargetModel):
        model = model.model
        embedding, unembedding = model.get_input_embeddings(), model.get_output_embeddings().weight
    else:
        embedding, unembedding = getattr(model, "embed_tokens", None), model.unembedding
    apart = {one.data_ptr() for one in (getattr(embedding, "weight", None), unembedding) if one is not None}
    # Weights of 8 bits are plain attributes of their layers.
    own = (chain(vars(one).values(), one._parameters.values(), one._buffers.values()) for one in model.modules())
    weights = {one.data_ptr(): one.nbytes for one in chain.from_iterable(own) if isinstance(one, Tensor)}
    return unembedding.nbytes + sum(n_bytes for place, n_bytes in weights.items() if place not in apart)
