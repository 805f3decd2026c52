"""Trains DFlash drafters: blocks from many roots of a row, each token of a block weighing less than the one before."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from spectrain.decoding import Drafter
from spectrain.models.dflash import DFlashConfig, DFlashDrafter, default_layers, drafted, load, save
from spectrain.models.dflash_folders import read
from spectrain.models.pruned_init import NEW
from spectrain.training.data import RowBatch
from spectrain.training.eagle3 import Eagle3Experiment, Eagle3Training
from spectrain.training.losses import LossSettings

OF_CONFIG = ("unembedding", "n_layer", "block_tokens")


class DFlashTraining(Eagle3Training):
    """Trains a DFlash drafter: a token is learned at each place at which a block from one of the roots has it."""

    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        drafts = drafted(self.drafter, batch.tokens, captured, self.roots_every, first_root, batch.starts)
        return torch.stack(drafts, dim=2)


class DFlashExperiment(Eagle3Experiment):
    """A DFlash drafter. Its blocks are Qwen 3's, whatever the target's are."""

    exports = "dflash"
