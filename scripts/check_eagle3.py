"""Compare our EAGLE-3 and DFlash drafters with the code of those who train such drafters, on the same weights.

    python scripts/check_eagle3.py                          # speculators' Eagle3DraftModel, with all flags, 4 steps,
                                                            # and its DFlashDraftModel
    python scripts/check_eagle3.py --eagle <checkout>       # and SafeAILab's training forward, 7 steps

It needs an environment of its own, in which `pip install --no-deps speculators==0.9.0` has put speculators, and loguru,
pydantic-settings, hs-connectors and python-dotenv beside it; and a checkout of github.com/SafeAILab/EAGLE. Each model
gets random weights and is saved as its own code saves it; ours is opened from that folder, which tests the reader, too.
What we write for speculators is opened by it. The exit code is 1 where logits differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from spectrain.exports.eagle3 import write_speculators
from spectrain.models import dflash
from spectrain.models.eagle3 import FLAGS, LAYERS, load, save, unrolled
from spectrain.stores.files import load_json
from spectrain.target.target import TargetModel

V, D, KEPT, N_LAYER, N_TOKENS, BLOCK = 61, 32, 20, 8, 24, 6
SIZES = {"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}


def filled(model: nn.Module) -> nn.Module:
    """Give a model random weights, and a draft vocabulary."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, *((1.0, 0.2) if "norm" in name else (0.0, 0.15)))
    tokens = torch.randperm(V)[:KEPT].sort().values
    model.d2t, model.t2d = tokens - torch.arange(KEPT), torch.isin(torch.arange(V), tokens)
    return model.eval()


def texts() -> tuple[Tensor, Tensor]:
    """Tokens [1, L], and states of three layers [1, L, 3 D] of any target."""
    torch.manual_seed(1)
    return torch.randint(V, (1, N_TOKENS)), 3 * torch.randn(1, N_TOKENS, 3 * D)


def logits_of(model: nn.Module, *inputs: Tensor, **options: object) -> list[Tensor]:
    """Return the logits [1, rows, K] of each step of a model's forward."""
    found: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output))
    model(*inputs, **options)
    return found


def largest_difference(folder: Path, target: TargetModel, theirs: list[Tensor]) -> float:
    """Return by how much the logits of the drafter in a folder differ from theirs, in all rows within the text."""
    drafter, (tokens, states) = load(folder, target), texts()
    ours = unrolled(drafter, tokens, states.unflatten(-1, (3, D)), len(theirs))
    ours = [F.linear(one, drafter.unembedding)[:, 1:] for one in ours]  # their row p is the draft after token p + 1
    pairs = enumerate(zip(ours, theirs, strict=True), 1)
    return max(float((a[:, :-i] - b[:, : N_TOKENS - 1][:, :-i]).abs().max()) for i, (a, b) in pairs)


def of_speculators(target: TargetModel, folder: Path, family: str, flags: dict[str, bool]) -> float:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = AutoConfig.for_model(family, **SIZES, num_hidden_layers=1)
    layer._attn_implementation = "eager"
    facts = {"algorithm": "eagle3", "default_proposal_method": "greedy"}
    facts["proposal_methods"] = [GreedyTokenProposalConfig(speculative_tokens=4)]
    facts["verifier"] = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    options = flags | {"transformer_layer_config": layer, "draft_vocab_size": KEPT, LAYERS: [2, 4, 5]}
    config = Eagle3SpeculatorConfig(**options, speculators_config=SpeculatorsConfig(**facts))
    model, (tokens, states) = filled(Eagle3DraftModel(config)), texts()
    model.save_pretrained(folder / "theirs")
    rows = {"hidden_states": states[:, :-1], "input_ids": tokens[:, 1:], "document_ids": torch.zeros(1, N_TOKENS - 1)}
    theirs = logits_of(model, **rows, ttt_steps=4)
    if family == "llama":  # what we write is read by it, and is the same drafter
        ours = folder / "ours"
        (ours / "speculators").mkdir(parents=True)
        save(ours, load(folder / "theirs", target))
        target.model.save_pretrained(folder / "target")
        facts, tensors = load_json(ours / "config.json"), load_file(ours / "model.safetensors")
        write_speculators(ours / "speculators", facts, tensors, str(folder / "target"), target)
        again = Eagle3DraftModel.from_pretrained(ours / "speculators")
        assert all(getattr(again.config, flag) == model.config.to_dict()[flag] for flag in (*FLAGS, LAYERS))
        known = {name: one for name, one in model.state_dict().items() if not name.startswith("verifier")}
        assert all(torch.equal(again.state_dict()[name], one) for name, one in known.items())
    return largest_difference(folder / "theirs", target, theirs)


def of_dflash(target: TargetModel, folder: Path, n_kept: int) -> float:
    """Blocks from each token of two documents, with a draft vocabulary or without."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    n_blocks = N_TOKENS - BLOCK  # theirs end within the text
    layer = Qwen3Config(**SIZES, num_hidden_layers=2)
    layer._attn_implementation = "eager"
    facts = {"algorithm": "dflash", "default_proposal_method": "greedy"}
    facts |= {"proposal_methods": [GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)]}
    facts |= {"verifier": VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])}
    options = {"transformer_layer_config": layer, "speculators_config": SpeculatorsConfig(**facts)}
    options |= {"draft_vocab_size": n_kept, "block_size": BLOCK, "mask_token_id": V - 1}
    config = DFlashSpeculatorConfig(**options, aux_hidden_state_layer_ids=[2, 4, 5])
    model, (tokens, states) = filled(DFlashDraftModel(config)), texts()
    model.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)  # which they read of the target, too
    if n_kept == V:
        model.lm_head.weight.copy_(target.model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    starts = torch.tensor([[0] * 10 + [10] * (N_TOKENS - 10)])
    rows = {"hidden_states": states, "input_ids": tokens, "document_ids": starts, "loss_mask": torch.ones_like(tokens)}
    rows["verifier_last_hidden_states"] = torch.zeros(1, N_TOKENS, D)
    # Their loss is a kernel in Triton, which has no driver on a CPU.
    theirs = model._backbone_forward(**rows, max_anchors=n_blocks)[1]
    drafter = dflash.load(folder, target)
    ours = dflash.drafted(drafter, tokens, states.unflatten(-1, (3, D)), starts=starts)
    own = F.linear(torch.stack(ours, 2)[:, :n_blocks], drafter.unembedding)
    return float((own - theirs.unflatten(1, (n_blocks, BLOCK))[:, :, 1:]).abs().max())


def of_safeailab(target: TargetModel, folder: Path, checkout: Path) -> float:
    for name in ("modeling_llama_kv", "configs", "datasets", "transformers.integrations.deepspeed"):
        sys.modules[name] = MagicMock()
    spec = importlib.util.spec_from_file_location("cnets", checkout / "eagle/traineagle3/cnets.py")
    cnets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cnets)
    known = LlamaConfig(**SIZES).to_dict() | {"pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0}
    config = types.SimpleNamespace(**known)
    model, (tokens, states) = cnets.Model.__new__(cnets.Model), texts()
    nn.Module.__init__(model)
    model.midlayer, model.norm = cnets.LlamaDecoderLayeremb(config), cnets.LlamaRMSNorm(D, eps=config.rms_norm_eps)
    model.fc, model.lm_head = nn.Linear(3 * D, D, bias=False), nn.Linear(D, KEPT, bias=False)
    model.embed_tokens, model.length, model.gradient_checkpointing = nn.Embedding(V, D), 7, False
    filled(model)
    rows = states, torch.zeros(1, N_TOKENS, V), torch.ones(1, N_TOKENS, 1), F.pad(tokens[:, 1:], (0, 1))
    model.dataprepare = lambda *_: rows
    theirs = logits_of(model, tokens)
    facts = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": KEPT}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts | {"rms_norm_eps": config.rms_norm_eps}))
    torch.save(model.state_dict() | {"d2t": model.d2t, "t2d": model.t2d}, folder / "pytorch_model.bin")
    return largest_difference(folder, target, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eagle", type=Path, help="checkout of github.com/SafeAILab/EAGLE")
    eagle, found = parser.parse_args().eagle, []
    target = TargetModel(LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=N_LAYER)).eval())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        choices = itertools.product(
            ("llama", "qwen3"), (False, True), (None, "norm_before_fc", "fc_norm"), (False, True)
        )
        for i, (family, residual, norm, output) in enumerate(choices):
            flags = {"norm_before_residual": residual, "norm_output": output} | ({norm: True} if norm else {})
            found.append(of_speculators(target, Path(folder, str(i)), family, flags))
            print(f"speculators, {family}, {', '.join(one for one in flags if flags[one]) or 'plain'}: {found[-1]:.1e}")
        for n_kept in (KEPT, V):
            found.append(of_dflash(target, Path(folder, f"dflash_{n_kept}"), n_kept))
            print(f"speculators, DFlash, {n_kept} of {V} tokens: {found[-1]:.1e}")
        if eagle:
            found.append(of_safeailab(target, Path(folder, "eagle"), eagle))
            print(f"SafeAILab, 7 steps: {found[-1]:.1e}")
    print(f"largest difference: {max(found):.1e}")
    sys.exit(max(found) > 1e-5)


if __name__ == "__main__":
    main()
