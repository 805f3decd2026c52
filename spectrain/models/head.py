"""The acceptance head of SpecDec++ (Huang et al. 2024, section 4.3 and equation 4.1), and the folder that holds one.

It reads the drafter's final hidden state of a drafted token and predicts the probability that the token is accepted,
given that all drafted tokens before it are.

A folder of kind `head` holds `model.safetensors`, `HeadFacts` as `config.json`, and below `drafter/` the drafter itself
(format: docs/export.md).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.decoding.sampling import Sampling
from spectrain.errors import UserError
from spectrain.models.artifacts import check_artifact, damage_of
from spectrain.models.kinds import HEAD
from spectrain.stores.files import read_object, write_json

KIND = HEAD
DRAFTER = "drafter"  # its folder inside a head's
KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "README.md")  # of a drafter's files


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head."""

    hidden_size: int  # D, of the drafter's final hidden state
    n_blocks: int = 3  # residual blocks before the linear layer; the paper tries 0 to 4


class AcceptanceHead(nn.Module):
    """Blocks h <- h + SiLU(W h + b), then a linear layer to one logit. All in float32, whatever the drafter's dtype."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # Differs from the reference: every block has its own weights.
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.n_blocks))
        self.output = nn.Linear(size, 1)
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # a block starts as the identity, so that depth costs nothing at first
            nn.init.zeros_(block.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., D] any dtype -> [...] float32, log odds
        h = hidden.float()
        for block in self.blocks:
            h = h + F.silu(block(h))
        return self.output(h)[..., 0]

    def probability(self, hidden: Tensor) -> Tensor:
        """Return f, the predicted acceptance probability, [...] float32 for hidden [..., D]."""
        return torch.sigmoid(self(hidden))


@dataclass(frozen=True)
class DrafterFacts:
    """The drafter that a head belongs to."""

    kind: str  # vanilla | spire
    path: str  # its folder or id when the head was trained
    fingerprint: str


@dataclass(frozen=True)
class HeadFacts:
    """The content of a head's `config.json`."""

    head: HeadConfig
    drafter: DrafterFacts
    sampling: Sampling  # warped p and q for the labels
    w_rej: float  # weight of rejections in the loss
    mixing_share: float  # r
    w_acc: float = 1.0  # weight of acceptances in the loss
    rollout_tokens: int | None = None  # of a SPIRe drafter: the head was trained on drafts shorter than this

    def why_off(self, folder: Path | str, sampling: Sampling, verification: str) -> str | None:
        """Return a warning if the head at `folder` was trained for another sampling or verification; None: it was not.

        Its labels are the probabilities of verification token by token.
        """
        if sampling.shares_noise:
            return f"head={folder} was trained for tokens that are drawn, and sampling.draws=shared accepts others"
        if sampling.same_distribution(self.sampling):
            if verification == "token" or sampling.greedy:  # of greedy drafts both verifications accept the same
                return None
            return (
                f"head={folder} was trained for verification=token and is used with verification={verification}, which "
                "accepts more than it expects"
            )
        return (
            f"head={folder} was trained for {self.sampling.describe()} and is used for {sampling.describe()}: its "
            "probabilities are those of another acceptance"
        )


def save_head(folder: Path, head: AcceptanceHead, facts: HeadFacts) -> None:
    """Write weights and facts into an existing folder."""
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    write_json(folder / "config.json", facts)


def save_drafter(
    folder: Path, facts: DrafterFacts, module: nn.Module, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Put the drafter that a head belongs to into the head's folder.

    Its files are copied, because they may be of a higher precision than what was loaded. If it came from the hub, or
    from files that are not safetensors, the module is saved, with the tokenizer of a vanilla drafter.
    """
    source, destination = Path(facts.path), folder / DRAFTER
    destination.mkdir()
    if any(source.glob("*.safetensors")):
        for file in (file for pattern in KEPT for file in source.glob(pattern)):
            shutil.copyfile(file, destination / file.name)
        return
    module.save_pretrained(destination)  # an ordinary model: our own drafters are always safetensors
    if tokenizer is not None:
        tokenizer.save_pretrained(destination)


def own_drafter(folder: Path | str) -> Path | None:
    """Return the drafter inside an exported head; None: it lies elsewhere, as `HeadFacts` says."""
    drafter = Path(folder) / DRAFTER
    return drafter if drafter.is_dir() else None


def read_head_facts(folder: Path, target_fingerprint: str) -> HeadFacts:
    """Read `config.json` of a head. Raise UserError if it is none, is of another target, or is damaged."""
    check_artifact(folder, "head", target_fingerprint)
    return read_object(folder / "config.json", HeadFacts, "export it again")


def load_head(folder: Path, facts: HeadFacts, drafter: DrafterFacts) -> AcceptanceHead:
    """Open the head in a folder, which has these facts, for use with a drafter.

    Raises:
        UserError: the head was trained on another drafter, or is damaged.
    """
    if facts.drafter.fingerprint != drafter.fingerprint:
        raise UserError(
            f"head={folder} was trained on the {facts.drafter.kind} drafter {facts.drafter.path} "
            f"({facts.drafter.fingerprint}), not on {drafter.path} ({drafter.fingerprint}); give that drafter, or "
            "train a head for this one with +exp=specdecpp"
        )
    head = AcceptanceHead(facts.head)
    with damage_of(f"head={folder}"):
        head.load_state_dict(load_file(folder / "model.safetensors"))
    return head
