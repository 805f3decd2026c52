"""Tiny EAGLE-3 drafters that nobody trained, of which some are often right."""

from __future__ import annotations

from pathlib import Path

import torch

from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.drafter_model import plain_shape
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, save, unrolled
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of


def new_eagle3(target: TargetModel, seed: int = 1, **options) -> Eagle3Drafter:
    """A random drafter that reads the inputs of all blocks of a tiny target; norms are uneven."""
    shape = plain_shape(shape_of(target.model))
    config = Eagle3Config(shape, tuple(range(target.config.num_hidden_layers)), **options)
    draws = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(config, target).requires_grad_(False)
    for name, weight in drafter.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=draws)
    if config.draft_vocab:
        drafter.kept.copy_(torch.randperm(shape.vocab_size, generator=draws)[: config.draft_vocab])
    return drafter.eval()


def fitted_eagle3(target: TargetModel, **options) -> Eagle3Drafter:
    """The same with the unembedding that comes nearest to the target's logits after its own random states."""
    drafter = new_eagle3(target, **options)
    tokens = torch.randint(
        4 % target.vocab_size, target.vocab_size, (8, 64), generator=torch.Generator().manual_seed(2)
    )
    features = target.with_capture(drafter.config.captured_layers).features(tokens)
    states = unrolled(drafter, tokens, features.captured, 1)[0][:, 1:].flatten(0, 1)
    logits = target.logits_of(features.final_hidden)[:, 1:].flatten(0, 1)
    logits = logits if drafter.kept is None else logits[:, drafter.kept]
    drafter.lm_head.weight.copy_(torch.linalg.lstsq(states.float(), logits.float()).solution.mT)
    return drafter


def export_eagle3(folder: Path, target: TargetModel, **options) -> Path:
    drafter = fitted_eagle3(target, **options)
    folder.mkdir()
    save(folder, drafter)
    write_manifest(folder, trained_artifact("eagle3", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder
