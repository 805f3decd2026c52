"""The acceptance head of SpecDec++ (Huang et al. 2024, section 4.3 and equation 4.1), and the folder that holds one.

It reads the drafter's final hidden state of a drafted token and says how probable it is that the token is accepted,
given that all drafted tokens before it are.

A folder of kind `head` holds `model.safetensors`, a `config.json` with what `HeadFacts` says, and below `drafter/` the
drafter itself, whose fingerprint `config.json` has. docs/export.md has the format.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.sampling import Sampling
from spectrain.models.artifacts import check_artifact
from spectrain.stores.folder import read_json, write_json

DRAFTER = "drafter"  # folder of it inside a head's
KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "README.md")  # of a drafter's files


@dataclass(frozen=True)
class HeadConfig:
    """What fixes a head's computation.

    Args:
        hidden_size: D, of the drafter's final hidden state.
        n_blocks: residual blocks before the linear layer; the paper tries 0 to 4.
    """

    hidden_size: int
    n_blocks: int = 3

    def __post_init__(self) -> None:
        check_whole("hidden_size", self.hidden_size, 1)
        if isinstance(self.n_blocks, bool) or not isinstance(self.n_blocks, int) or not 0 <= self.n_blocks <= 4:
            raise UserError(f"n_blocks={self.n_blocks} must be a whole number from 0 to 4")


class AcceptanceHead(nn.Module):
    """Blocks h <- h + SiLU(W h + b), then a linear layer to one logit. All in float32, whatever the drafter's dtype."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # Differs from the reference: every block has weights of its own.
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.n_blocks))
        self.output = nn.Linear(size, 1)
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # a block starts as the identity, so that depth costs nothing at first
            nn.init.zeros_(block.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., D] any dtype -> [...] float32, log odds
        h = hidden.float()
        for block in self.blocks:
            h = h + F.silu(F.linear(h, block.weight, block.bias))
        return F.linear(h, self.output.weight, self.output.bias)[..., 0]

    def probability(self, hidden: Tensor) -> Tensor:
        """f: the predicted acceptance probability, [...] float32 of hidden [..., D]."""
        return torch.sigmoid(self(hidden))


@dataclass(frozen=True)
class DrafterFacts:
    """The drafter that a head belongs to."""

    kind: str  # vanilla | spire
    path: str  # where it lay
    fingerprint: str


@dataclass(frozen=True)
class HeadFacts:
    """What a head's `config.json` says."""

    head: HeadConfig
    drafter: DrafterFacts
    sampling: Sampling  # by which p and q were warped for the labels
    w_rej: float  # weight of rejections in the loss
    mixing_share: float  # r
    w_acc: float = 1.0  # and of acceptances
    rollout_tokens: int | None = None  # of a SPIRe drafter: the head has seen drafts shorter than this

    def why_off(self, folder: Path | str, sampling: Sampling) -> str | None:
        """What a reader of numbers under this sampling must know of the head at `folder`; None: nothing."""
        if sampling.same_distribution(self.sampling):
            return None
        return (
            f"head={folder} was trained for {self.sampling.describe()} and is used for {sampling.describe()}: its "
            "probabilities are those of another acceptance"
        )


def save_head(folder: Path, head: AcceptanceHead, facts: HeadFacts) -> None:
    """Writes weights and facts into an existing folder."""
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    write_json(folder / "config.json", dataclasses.asdict(facts))


def save_drafter(
    folder: Path, facts: DrafterFacts, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Puts the drafter that a head belongs to into the head's folder.

    Args:
        folder: of the head; exists.
        facts: where the drafter lay. Its files are copied: they may be of a higher precision than what was loaded.
        module: the drafter; written where it came from the hub, or from a format that exports do not hold.
        tokenizer: of a vanilla drafter.
    """
    source, destination = Path(facts.path), folder / DRAFTER
    destination.mkdir()
    if any(source.glob("*.safetensors")):
        for pattern in KEPT:
            for file in source.glob(pattern):
                shutil.copyfile(file, destination / file.name)
        return
    module.save_pretrained(destination)  # ours is always safetensors
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)


def own_drafter(folder: Path | str) -> Path | None:
    """The drafter that an exported head brings along; None of one exported before they did."""
    drafter = Path(folder) / DRAFTER
    return drafter if drafter.is_dir() else None


def read_head_facts(folder: Path, target_fingerprint: str) -> HeadFacts:
    """Raises UserError where it is no head, was trained for another target, or is damaged; see `check_artifact`."""
    check_artifact(folder, "head", target_fingerprint)
    try:
        values = read_json(folder / "config.json")
        return HeadFacts(
            head=HeadConfig(**values.pop("head")),
            drafter=DrafterFacts(**values.pop("drafter")),
            sampling=Sampling(**values.pop("sampling")),
            **values,
        )
    except UserError:
        raise
    except Exception as error:  # json and dataclasses each raise their own types here
        raise _damaged(folder, error) from error


def load_head(folder: Path, facts: HeadFacts, drafter: DrafterFacts, hidden_size: int) -> AcceptanceHead:
    """The head for the drafter at hand.

    Args:
        folder: of the export.
        facts: what `read_head_facts` said of it.
        drafter: what is at hand.
        hidden_size: of its final state.

    Raises:
        UserError: the head was trained on another drafter, or is damaged.
    """
    if facts.head.hidden_size != hidden_size:
        raise UserError(
            f"head={folder} reads states of width {facts.head.hidden_size}, but the drafter {drafter.path} has "
            f"{hidden_size}; give drafter={facts.drafter.path}, or train a head for this one with +exp=specdecpp"
        )
    if facts.drafter.fingerprint != drafter.fingerprint:
        raise UserError(
            f"head={folder} was trained on the {facts.drafter.kind} drafter {facts.drafter.path} "
            f"({facts.drafter.fingerprint}), not on {drafter.path} ({drafter.fingerprint}); give that drafter, or "
            "train a head for this one with +exp=specdecpp"
        )
    head = AcceptanceHead(facts.head)
    try:
        head.load_state_dict(load_file(folder / "model.safetensors"))
    except Exception as error:  # safetensors and torch each raise their own types here
        raise _damaged(folder, error) from error
    return head


def _damaged(folder: Path, error: Exception) -> UserError:
    return UserError(f"head={folder} is damaged ({type(error).__name__}); export it again")
