"""`method=eagle3`: decoding computes what training trains on, with a window or without, and stays lossless."""

from __future__ import annotations

import pytest
import torch

from spectrain.decoding import Verified
from spectrain.drafting import runtime
from spectrain.drafting.stopping import StopRule
from spectrain.drafting.window_keys import WholeKeys
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, unrolled
from spectrain.target import KVCache, TargetModel
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.decoding.reference import follow
from tests.methods.test_spire import ForcedContext

FLAGS = [
    {},
    {"family": "qwen3", "window_tokens": 8},
    {"norm_before_residual": True, "fc_norm": True},
    {"norm_output": True, "norm_before_fc": True, "window_tokens": 8, "unembedding": "target"},
    {"norm_output": True, "norm_before_residual": True, "own_embedding": True, "draft_vocab": 30},
    {"unembedding": "target", "draft_vocab": 30},
]


def make(family: str = "llama_gqa", seed: int = 1, **options) -> tuple[TargetModel, Eagle3Drafter]:
    """A tiny target and a random drafter of it; norms are uneven."""
    model = tiny_model(family)
    config = Eagle3Config(shape_of(model), (0, 1, 2), **options)
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, TargetModel(model)).requires_grad_(False)
    for name, weight in drafter.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3)
    if config.draft_vocab:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE)[: config.draft_vocab])
    return TargetModel(model, capture_layers=config.captured_layers), drafter.eval()


def begun(method: Eagle3, target: TargetModel, sequences: torch.Tensor, lengths: list[int]) -> tuple:
    """A context whose draws are the sequences' next tokens, and the target's cache, once the prompts were read."""
    cache, context = KVCache(max_rows=2, block_tokens=16), ForcedContext(sequences, lengths)
    method.start(target, cache)
    padded, read = sequences[:, : max(lengths)], method.read_of_prompts(torch.tensor(lengths))
    method.prefill(context, target.prefill(padded, lengths, cache, range(2), read), range(2))
    return context, cache


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("options", FLAGS, ids=str)
def test_decoding_equals_the_unrolled_draft(options, fuses, monkeypatch):
    """Two rows of different length, two rounds: after prefill, and after a step that accepted part of the path."""
    if not fuses:
        monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    target, drafter = make(**options)
    k, lengths, sequences = 4, [24, 12], torch.randint(4, VOCAB_SIZE, (2, 40))
    steps = unrolled(drafter, sequences, target.features(sequences).captured, k)
    expected = [drafter.spread(step @ drafter.unembedding.mT) for step in steps]
    method = Eagle3(drafter, stop=StopRule())  # a rule: step by step
    context, cache = begun(method, target, sequences, lengths)
    assert method.runtime.compiles == fuses
    assert isinstance(method.keys, WholeKeys) == ("window_tokens" not in options)
    for round_ in range(2):
        context.asked = []
        tree = method.propose(context)
        for step, logits in enumerate(context.asked):
            for row, length in enumerate(lengths):
                place = expected[step][row, length + 3 * round_]
                torch.testing.assert_close(logits[row].softmax(-1), place.softmax(-1), atol=1e-4, rtol=0)
        assert len(context.asked) == k
        # Two drafts accepted, two rejected.
        output = target.score(tree, cache)
        path = torch.tensor([[0, 1, 2, -1, -1]]).expand(2, -1)
        verified = Verified(path, torch.tensor([2, 2]), context.following(2))
        cache.keep(3)
        emitted = [sequences[r, n : n + 3].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 2], emitted)
