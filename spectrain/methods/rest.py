"""REST (He et al. 2023): the likeliest continuations of the last tokens in a datastore.

The longest suffix of 16 down to 2 tokens that the store holds gives up to 5,000 continuations of 10 tokens. The draft
tree is made of the 64 nodes that most of them share.

Differs from the reference, which samples every path of the tree on its own, also where paths share a node, and draws a
new token after a mismatch: its text does not follow the target's distribution. Here trees are verified as everywhere.
"""

from __future__ import annotations

from spectrain.decoding import TargetModel
from spectrain.methods.lookup import StoreDrafter
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import RetrievalOptions

TOKENS_ONLY = True  # a serving engine can run it; see loading.py


def build(
    target: TargetModel,
    datastore: str,
    max_suffix: int = 16,
    min_suffix: int = 2,
    max_matches: int = 5000,
    branch_tokens: int = 10,
    max_nodes: int | str = 65,
) -> StoreDrafter:
    """The method over the datastore of this folder.

    Args:
        target: whose tokens the store must hold.
        datastore: folder.
        max_suffix: longest suffix that is looked for.
        min_suffix: shortest suffix.
        max_matches: continuations read, the first ones in sorted order, as the reference reads them; of a store of
            several shards the first ones of each, by its share of all matches.
        branch_tokens: tokens of a continuation.
        max_nodes: of a tree, the root included.
    """
    options = RetrievalOptions(min_suffix, max_suffix, branch_tokens, max_matches, first_matches=True)
    return StoreDrafter(open_datastore(datastore, target), options, max_nodes)
