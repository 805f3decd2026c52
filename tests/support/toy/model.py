"""The toy: what follows a token is the unembedding of a linear layer over the target's final state before it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.models.artifacts import WEIGHTS, check_artifact
from spectrain.models.drafter_model import DrafterModel, TargetTables
from spectrain.models.kinds import Kind
from spectrain.stores.files import read_object, write_json
from spectrain.target import TargetModel, fingerprint
from spectrain.target.llama import LlamaShape, Rope
from spectrain.target.target import FINAL

KIND = Kind(
    *("drafter", "toy drafter", "spectrain.train +exp=toy"),
    method="toy",
    about="A linear layer over the target's final state.",
    auto={"toy": ()},
)


@dataclass(frozen=True)
class ToyConfig:
    """The content of `config.json`. Nothing is attended to."""

    shape: LlamaShape
    k: int = 3
    draft_vocab: int | None = None
    window_tokens: int = 8
    sink_tokens: int = 0
    own_key: bool = True
    previous_state: bool = True
    feedback: bool = False
    n_layer: int = 0
    captured_layers: tuple[int, ...] = (FINAL,)

    def sees_itself(self, others: Tensor) -> Tensor:
        return torch.ones_like(others[..., 0])


class ToyDrafter(DrafterModel):
    def __init__(self, config: ToyConfig, target: TargetModel) -> None:
        super().__init__()
        d = config.shape.hidden_size
        self.config, self.tables = config, TargetTables(target)
        self.previous, self.norm = nn.Linear(d, d, bias=False), nn.RMSNorm(d, config.shape.rms_norm_eps)
        self.blocks, self.rope = nn.ModuleList(), Rope(config.shape)
        self.register_buffer("kept", torch.arange(config.draft_vocab) if config.draft_vocab else None)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.norm.weight.new_zeros(*tokens.shape, self.config.shape.hidden_size)

    def joined(self, x: Tensor, previous: Tensor | None) -> Tensor:
        return x + self.previous(previous.to(x.dtype))

    def memories(self, states: list[Tensor]) -> list[Tensor]:
        return []

    def step(self, x, rope, past, mask) -> tuple[Tensor, list]:
        return self.norm(x), []


def save(folder: Path, drafter: ToyDrafter) -> None:
    save_file({name: one.contiguous() for name, one in drafter.state_dict().items()}, folder / WEIGHTS)
    write_json(folder / "config.json", drafter.config)


def load(folder: Path, target: TargetModel, option: str = "drafter") -> ToyDrafter:
    check_artifact(folder, "toy", fingerprint(target.model, target.tokenizer), option)
    drafter = ToyDrafter(read_object(folder / "config.json", ToyConfig, "export it again"), target)
    drafter.load_state_dict(load_file(folder / WEIGHTS))
    return drafter
