"""Tiny DFlash drafters that nobody trained, of which some are often right."""

from __future__ import annotations

from pathlib import Path

import torch

from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.dflash import DFlashConfig, DFlashDrafter, drafted, save
from spectrain.models.drafter_model import plain_shape
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of


def new_dflash(target: TargetModel, seed: int = 1, **options) -> DFlashDrafter:
    """A random drafter that reads the inputs of all blocks of a tiny target; norms are uneven."""
    shape = plain_shape(shape_of(target.model), qk_norm=True)
    options = {"n_layer": 2, "block_tokens": 4, "mask_token": shape.vocab_size - 1} | options
    config = DFlashConfig(shape, tuple(range(target.config.num_hidden_layers)), **options)
    draws = torch.Generator().manual_seed(seed)
    drafter = DFlashDrafter(config, target).requires_grad_(False)
    for name, weight in drafter.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=draws)
    if config.draft_vocab:
        drafter.kept.copy_(torch.randperm(shape.vocab_size, generator=draws)[: config.draft_vocab])
    return drafter.eval()


@torch.no_grad()
def fitted_dflash(target: TargetModel, **options) -> DFlashDrafter:
    """The same with the unembedding that comes nearest to the target's logits of the first token of each block."""
    drafter, draws = new_dflash(target, unembedding="trained", **options), torch.Generator().manual_seed(2)
    tokens = torch.randint(4 % target.vocab_size, target.vocab_size, (8, 64), generator=draws)
    features = target.with_capture(drafter.config.captured_layers).features(tokens)
    states = drafted(drafter, tokens, features.captured)[0][:, 1:].flatten(0, 1)
    logits = target.logits_of(features.final_hidden)[:, 1:].flatten(0, 1)
    logits = logits if drafter.kept is None else logits[:, drafter.kept]
    drafter.lm_head.weight.copy_(torch.linalg.lstsq(states.float(), logits.float()).solution.mT)
    return drafter


def export_dflash(folder: Path, target: TargetModel, drafter: DFlashDrafter | None = None, **options) -> Path:
    drafter = drafter or fitted_dflash(target, **options)
    folder.mkdir()
    save(folder, drafter)
    write_manifest(folder, trained_artifact("dflash", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder
