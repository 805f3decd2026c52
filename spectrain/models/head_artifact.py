"""An exported acceptance head: its weights, the drafter it was trained on, and how labels were warped.

A folder of kind `head` (see `artifacts.py`) holds `model.safetensors`, a `config.json` with what `HeadFacts` says, and
below `drafter/` the drafter itself, whose fingerprint `config.json` has. docs/export.md has the format.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from spectrain.decoding.errors import UserError
from spectrain.decoding.sampling import Sampling
from spectrain.models.acceptance_head import AcceptanceHead, HeadConfig
from spectrain.models.artifacts import check_artifact

DRAFTER = "drafter"  # folder of it inside a head's
KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "README.md")  # of a drafter's files


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
        if sampling.same_law(self.sampling):
            return None
        return (
            f"head={folder} was trained for {self.sampling.describe()} and is used for {sampling.describe()}: its "
            "probabilities are those of another acceptance"
        )


def save_head(folder: Path, head: AcceptanceHead, facts: HeadFacts) -> None:
    """Writes weights and facts into an existing folder."""
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")


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
        values = json.loads((folder / "config.json").read_text())
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
