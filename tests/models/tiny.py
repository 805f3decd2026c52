"""What tiny drafters of all kinds of our blocks share: nobody trained them, and some are often right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.kinds import module_of
from spectrain.target import TargetModel, fingerprint

Drafter = TypeVar("Drafter", bound=DrafterModel)


def randomised(drafter: Drafter, seed: int) -> Drafter:
    """The drafter with random weights and uneven norms, and with random tokens that it can draft."""
    draws, config = torch.Generator().manual_seed(seed), drafter.config
    for name, weight in drafter.requires_grad_(False).named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=draws)
    if config.draft_vocab:
        drafter.kept.copy_(torch.randperm(config.shape.vocab_size, generator=draws)[: config.draft_vocab])
    return drafter.eval()


@torch.no_grad()
def fitted(drafter: Drafter, target: TargetModel, first_states: Callable[[Drafter, Tensor, Tensor], Tensor]) -> Drafter:
    """The drafter with the unembedding that comes nearest to the target's logits after its own states."""
    draws = torch.Generator().manual_seed(2)
    tokens = torch.randint(4 % target.vocab_size, target.vocab_size, (8, 64), generator=draws)
    features = target.with_capture(drafter.config.captured_layers).features(tokens)
    states = first_states(drafter, tokens, features.captured)[:, 1:].flatten(0, 1)
    logits = target.logits_of(features.final_hidden)[:, 1:].flatten(0, 1)
    logits = logits if drafter.kept is None else logits[:, drafter.kept]
    drafter.lm_head.weight.copy_(torch.linalg.lstsq(states.float(), logits.float()).solution.mT)
    return drafter


def exported(kind: str, folder: Path, target: TargetModel, drafter: DrafterModel) -> Path:
    folder.mkdir()
    module_of(kind).save(folder, drafter)
    write_manifest(folder, trained_artifact(kind, "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder
