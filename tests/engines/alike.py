"""Whether an engine drafts, accepts and writes what our loop does, with drafters that know some of a target's texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding import generate
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.methods.autoregressive import Autoregressive
from spectrain.models.drafter_model import DrafterModel
from spectrain.target import TargetModel
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.engines.engine import Engine, saved
from tests.engines.test_vanilla import accepted_per_position
from tests.models.test_artifacts import tiny_tokenizer

GAMMA, NEW, N_LAYER = 4, 24, 8


@cache
def target() -> TargetModel:
    """As wide as that of test_spire.py, so that rounding changes no draft."""
    sizes = {"hidden_size": 128, "num_key_value_heads": 2, "num_hidden_layers": N_LAYER, "eos_token_id": None}
    return TargetModel(tiny_model("llama", initializer_range=0.15, **sizes), tiny_tokenizer())


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Tokens that the target writes, [B, L], and the states of all of its blocks."""
    prompts = random_prompts([6] * 8, seed=1)
    found = generate(target(), Autoregressive(), prompts, 58)
    tokens = torch.tensor([prompt + one.tokens for prompt, one in zip(prompts, found, strict=True)])
    return tokens, target().with_capture(range(N_LAYER)).features(tokens).captured.detach()


def learned(drafter: DrafterModel, drafts: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> DrafterModel:
    """Train a drafter on its target's texts, so that some of its drafts are accepted, and others not.

    `drafts` returns the inputs [B, L, D] of the unembedding for each token of a draft.
    """
    for name, weight in drafter.named_parameters():
        torch.nn.init.normal_(weight, *((1.0, 0.3) if "norm" in name else (0.0, 0.08)))
    if drafter.kept is not None:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE)[: len(drafter.kept)])
    optimizer, (tokens, states) = torch.optim.Adam(drafter.parameters(), lr=3e-3), texts()
    states = states[:, :, list(drafter.config.target_layers)]
    for _ in range(60):
        logits = drafter.spread(F.linear(torch.stack(drafts(tokens, states)), drafter.unembedding), -20.0)
        loss = sum(F.cross_entropy(one[:, 1 : 60 - i].mT, tokens[:, 2 + i : 61]) for i, one in enumerate(logits))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.requires_grad_(False).eval()


def check_alike(engine: Engine, folder: Path, speculative: dict, new: Callable[[], ModelDrafter]) -> None:
    """Compare drafts, and how many are accepted at each position. `new` returns our drafter; GAMMA tokens are drafted.

    The target is saved in `folder`.
    """
    engine.load(saved(target(), folder), speculative | {"num_speculative_tokens": GAMMA})
    engine.ask("record")
    prompts, generations, counts = [*random_prompts([3, 40, 130]), texts()[0][0, :20].tolist()], [], torch.zeros(GAMMA)
    for prompt in prompts:
        method, ours = new(), []
        draft = method.draft
        method.draft = lambda context, gamma, draft=draft, ours=ours: _kept(draft(context, gamma), ours)
        (found,) = generate(target(), method, [prompt], NEW + GAMMA)
        served, generations = engine.generate([prompt], NEW, ignore_eos=True), [*generations, found]
        assert served.tokens == [found.tokens[:NEW]]
        theirs = engine.ask("drafted")
        full = [own for own in ours[: len(theirs)] if len(own) == GAMMA]  # the last ones may be cut
        assert len(full) > 3
        assert theirs[: len(full)] == full
        counts += torch.tensor(served.accepted_per_position)
    assert counts.tolist() == accepted_per_position(generations, NEW)
    assert sum(counts) > 3


def _kept(tree, drafts: list[list[int]]):
    drafts.append(tree.tokens[0, 1:].tolist())
    return tree
