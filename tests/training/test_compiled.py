"""Compiled blocks and losses: gradients of the plain ones, the same names of weights, and no silent way back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._inductor.exc import InvalidCxxCompiler

from spectrain.errors import UserError
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.llama import LlamaDecoder
from spectrain.training import fit as fitting
from spectrain.training.base import Training, compile_methods, compiled
from spectrain.training.data import TokenRows
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.spire import SpireTraining
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.training.test_eagle3 import eagle3_training
from tests.training.trainers import config_of

PREVIOUS = {"input": "projected", "unembedding": "target", "previous_state": True}


def trainings() -> dict[str, Training]:
    target = TargetModel(tiny_model())
    shape, layers = shape_of(target.model), last_layers(target.model, 2)
    drafter = new_drafter(target, SpireConfig(shape, layers, k=3, window_tokens=8, **PREVIOUS), "pruned")
    language = LanguageModelTraining(tiny_model().train().requires_grad_(True), OptimizerSettings())
    spire = SpireTraining(drafter, target, LossSettings(), OptimizerSettings())
    return {"spire": spire, "eagle3": eagle3_training(target), "vanilla": language}


def losses_and_gradients(module: Training, n_tokens: int) -> list[torch.Tensor]:
    """Loss and gradients of a batch, on the device that the module is on."""
    tokens = torch.randint(4, VOCAB_SIZE, (2, n_tokens), generator=torch.Generator().manual_seed(1))
    module.zero_grad()
    batch = TokenRows(tokens.int())[[0, 1]]
    batch.tokens = batch.tokens.to(module.device)
    loss = module.objective(batch)
    loss.backward()
    return [loss, *(one.grad for one in module.parameters() if one.requires_grad)]


def check(kind: str, backend: str, most_graphs: int, device: str = "cpu") -> None:
    plain, ours = (trainings()[kind].to(device) for _ in range(2))
    for module in (plain, ours):
        module.setup("fit")  # which brings the target there
    names, counts = list(ours.state_dict()), torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counts.clear()
    ours.compile_blocks(backend)
    assert list(ours.state_dict()) == names
    for recomputes in (False, True):
        if recomputes:
            ours.recompute_activations()
        for n_tokens in (24, 45):
            expected, found = (losses_and_gradients(module, n_tokens) for module in (plain, ours))
            for one, other in zip(found, expected, strict=True):  # both are 2.5e-5 from what float64 computes
                assert (one - other).norm() < 1e-4 * max(other.norm(), 1e-3)
    assert 0 < counts["unique_graphs"] <= most_graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spire", "eagle3"])
def test_compiled_parts_have_the_plain_ones_losses_for_rows_of_any_length(kind):
    check(kind, "aot_eager", 7)  # five parts, and one or two more where sizes happen to be equal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_inductor_s_parts_have_the_plain_ones_losses(kind):
    try:
        compiled(torch.sin, "inductor")(torch.ones(4))
    except InvalidCxxCompiler:
        pytest.skip("Inductor finds no C++ compiler")
    check(kind, "inductor", 7)


def test_one_graph_serves_all_blocks_of_a_target():
    model = tiny_model()
    decoder = LlamaDecoder(shape_of(model), 3).requires_grad_(False)
    tokens, positions = torch.randint(4, VOCAB_SIZE, (2, 9)), torch.arange(9)[None]
    expected = decoder(tokens, positions)[0]
    graphs = []
    compile_methods(
        decoder.blocks,
        ("before_in_text", "after_in_text"),
        lambda graph, examples: graphs.append(graph) or graph.forward,
    )
    torch.testing.assert_close(decoder(tokens, positions)[0], expected)
    assert len(graphs) == 2


@dynamo.patch(recompile_limit=1)  # monkeypatch would remove the option at the end
def test_a_refused_recompilation_is_an_error_that_names_the_remedy():
    double = compiled(lambda x: 2 * x, "eager")
    double(torch.ones(3))
    said = "torch.compile refused.*recompile limit exceeded.*give trainer.compile=none"
    with pytest.raises(UserError, match=said), fitting.naming_the_remedy({}, None):
        double(torch.ones(3, 3))


def test_blocks_are_compiled_on_gpus_alone_and_not_under_zero_3(monkeypatch):
    options, plain = config_of("+exp=spire").trainer, SimpleNamespace(strategy=None)
    on_gpu = replace(options, accelerator="gpu")
    monkeypatch.setattr(fitting, "has_triton", lambda: True)
    assert not fitting.compiles(options, plain)
    assert fitting.compiles(on_gpu, plain)
    assert not fitting.compiles(replace(on_gpu, compile="none"), plain)
    assert not fitting.compiles(on_gpu, SimpleNamespace(strategy=SimpleNamespace(zero_stage_3=True)))
    monkeypatch.setattr(fitting, "has_triton", lambda: False)
    assert not fitting.compiles(on_gpu, plain)
