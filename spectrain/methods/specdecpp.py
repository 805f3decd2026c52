"""`method=specdecpp`: a drafter that knows when to stop (SpecDec++, Huang et al. 2024).

An acceptance head reads the drafter's final state of each drafted token; the draft ends once a rejection is likelier
than the threshold. Any drafter with a hidden state will do: an ordinary draft model, or SPIRe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from spectrain.config.values import Dtype, Nodes, Probability, Whole
from spectrain.decoding import Drafter
from spectrain.drafting.draft_chain import candidates_within
from spectrain.drafting.stopping import HeadStop
from spectrain.errors import UserError
from spectrain.methods.options import find_artifact, method_of_kind
from spectrain.models.artifacts import check_weights
from spectrain.models.draft_states import DraftStates
from spectrain.models.head import AcceptanceHead, DrafterFacts, HeadFacts, load_head, own_drafter, read_head_facts
from spectrain.target import TargetModel, fingerprint
from spectrain.target.weights import Int8Linear, RowsLinear, draft_dtype_of, on_cpu


@dataclass(frozen=True)
class OpenDrafter:
    """A drafter with a hidden state, to be decoded with or to be trained on."""

    facts: DrafterFacts
    states: DraftStates

    def open_head(self, folder: Path, facts: HeadFacts, draft_dtype: str) -> AcceptanceHead:
        """Load a head for decoding with this drafter, where the drafter stands; see `load_head`.

        It computes in float32. Its blocks have 8 bits where `draft_dtype` gives them to the drafter.
        """
        head = load_head(folder, facts, self.facts)
        device = next(self.states.module.parameters()).device
        dtype = draft_dtype_of(draft_dtype, device, torch.float32)
        if device.type == "cpu":
            head.blocks = on_cpu(head.blocks, Int8Linear if dtype == torch.int8 else RowsLinear)
        return head.to(device).eval().requires_grad_(False)


def open_drafter(target: TargetModel, kind: str, folder: str, rollout_tokens: int = 10) -> OpenDrafter:
    """Open a drafter of the target, whose kind has a method with `open_states` and `of_states`.

    `folder` is its export; of a vanilla drafter, any Hugging Face folder or id. For `rollout_tokens` see
    `RolloutStates`.
    """
    states: DraftStates = method_of_kind(kind).open_states(target, folder, rollout_tokens)
    return OpenDrafter(DrafterFacts(kind, str(folder), states.fingerprint()), states)


def open_given_drafter(given: Mapping[str, str], target: TargetModel, rollout_tokens: int = 10) -> OpenDrafter:
    """Open the drafter that a head is trained on: of the folders `given` by kind, else the newest vanilla one."""
    if len(given) > 1:
        raise UserError(f"drafter=[{','.join(given.values())}] are several; a head belongs to one drafter, so give one")
    kind, folder = next(iter(given.items()), None) or ("vanilla", find_artifact("vanilla", target))
    return open_drafter(target, kind, folder, rollout_tokens)


def build(
    target: TargetModel,
    head: str,
    drafter: str | None = None,
    threshold: Probability = 0.7,
    min_candidates: Whole = 1,
    max_candidates: Whole = 20,
    judge: Literal["current", "previous"] = "current",
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
) -> Drafter:
    """Build the method from the folders of an exported head and of the drafter that it was trained on.

    drafter: None takes the one inside the head's folder, else the one that it was trained on, else the one that fits.

    The draft ends once the probability of a rejection is above the threshold h; see `HeadStop`. `max_nodes` counts the
    root, too, and caps max_candidates.
    """
    gamma = candidates_within(min_candidates, max_candidates, max_nodes)
    facts = read_head_facts(Path(head), fingerprint(target.model, target.tokenizer))
    kind, inside = facts.drafter.kind, own_drafter(head)
    if inside is not None:
        check_weights(inside, "drafter")
    recorded = inside or (facts.drafter.path if Path(facts.drafter.path).exists() else None)
    folder = str(drafter or recorded or find_artifact(kind, target))
    opened, warns = open_drafter(target, kind, folder), partial(facts.why_off, head)
    rule = HeadStop(opened.open_head(Path(head), facts, draft_dtype), threshold, min_candidates, judge, warns)
    method = method_of_kind(kind).of_states(opened.states, gamma, rule, draft_dtype)
    return method.describe(artifacts={"head": head, kind: folder})
