"""`method=confidence_stop` and `method=entropy_stop`: an ordinary draft model whose drafts end by a rule of thumb.

They are the baselines of SpecDec++ (appendix B.1 of its paper; Kim et al. 2024, Liu et al. 2024).
"""

from __future__ import annotations

from typing import Literal

from spectrain.config.values import Dtype, Nodes, Positive, Whole
from spectrain.drafting.draft_chain import candidates_within
from spectrain.drafting.stopping import UnsureStop
from spectrain.methods.speculative import Speculative, load_draft_model
from spectrain.target import TargetModel

DRAFTER = "vanilla"


def build(
    target: TargetModel,
    drafter: str,
    rule: Literal["confidence", "entropy"],
    threshold: Positive,
    min_candidates: Whole = 1,
    max_candidates: Whole = 20,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
) -> Speculative:
    """Build the method from a draft model, a Hugging Face folder or id.

    The rule "confidence" ends the draft where the largest probability of the next token is below the threshold,
    "entropy" where the entropy (nats) is above it. `max_nodes` counts the root, too, and caps max_candidates.
    """
    gamma = candidates_within(min_candidates, max_candidates, max_nodes)
    stop = UnsureStop(rule, threshold, min_candidates)
    return Speculative(load_draft_model(target, drafter, draft_dtype), gamma, stop=stop, draft_dtype=draft_dtype)
