"""DFlash exports in a running vLLM, by its own method and classes: they draft what our loop drafts, losslessly."""

from __future__ import annotations

import pytest
import torch

from spectrain.exports.cards import json_argument
from spectrain.exports.dflash import write_for_engine
from spectrain.methods.dflash import DFlash
from spectrain.models.dflash import DFlashConfig, DFlashDrafter, drafted
from spectrain.models.drafter_model import plain_shape
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE
from tests.engines.alike import GAMMA, check_alike, learned, target
from tests.models.tiny_dflash import export_dflash

pytestmark = pytest.mark.slow
CASES = {
    "the target's tables": {},
    "its own unembedding, few tokens": {"draft_vocab": 40, "unembedding": "trained"},
}


def trained(**options) -> DFlashDrafter:
    torch.manual_seed(0)
    shape, layers = plain_shape(shape_of(target().model), qk_norm=True), (1, 4, 6)
    config = DFlashConfig(shape, layers, n_layer=2, block_tokens=GAMMA + 1, mask_token=VOCAB_SIZE - 1, **options)
    drafter = DFlashDrafter(config, target())

    def drafts(tokens, states):
        first, second = (block.key_norm.weight.data for block in drafter.blocks)
        second.copy_(first)  # vLLM 0.32.0 for CPUs norms the context's keys of all blocks by the weights of the first
        return drafted(drafter, tokens, states)

    drafter = learned(drafter, drafts)
    drafter.blocks[1].key_norm.weight.copy_(drafter.blocks[0].key_norm.weight)
    return drafter


@pytest.mark.parametrize("case", CASES)
def test_the_engine_drafts_and_accepts_what_our_loop_does(engine, case, tmp_path):
    drafter = trained(**CASES[case])
    folder = export_dflash(tmp_path / "drafter", target(), drafter)
    speculative = {"method": "dflash", "model": str(folder)}
    said = write_for_engine(folder, str(folder), "tiny", target())
    assert json_argument(**speculative, num_speculative_tokens=GAMMA) in said
    check_alike(engine, tmp_path, speculative, lambda: DFlash(drafter, GAMMA, draft_dtype="float32"))
