"""The kernels that SGLang's Python calls on a CPU, in plain torch, for processors that its own ones do not support.

SGLang has no kernels for CPUs on PyPI. With this file's folder in PYTHONPATH and SGLANG_USE_CPU_ENGINE=1, the engine
of its wheel runs in float32: its scheduler, loader, model files and workers, with the functions below in place of its
compiled ones. It is slow and meant for checks. scripts/engines_eagle3.py uses it.

Functions write their results into the tensors that they are given, as the compiled ones do.

Letters: B requests, Q query heads, K key heads, E width of a head, N nodes of a draft with its root.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

QLEN_ONLY = 1  # the mask of a tree has only its own nodes as columns
Rows = list[tuple[int, int]]


def extend_attention_cpu(
    q, k, v, out, keys, values, k_scale, v_scale, req_to_token, requests, seq_lens, extend_lens, starts, longest, scale,
    cap, is_cross, window, encoder_lens, sinks, tree_mask, is_causal,
) -> None:  # fmt: skip
    """Attend from the last `extend_lens` tokens of each request, whose keys and values are in the buffers already."""
    _only_plain(cap, is_cross, sinks)
    masked = 0
    for request, n, new, start in zip(*_ints(requests, seq_lens, extend_lens, starts), strict=True):
        places = req_to_token[request, :n].long()
        at = torch.arange(n - new, n)[:, None]
        seen = torch.arange(n) <= at if is_causal else torch.ones(new, n, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, n - new :] = tree_mask.flatten()[masked : masked + new * new].view(new, new)
            masked += new * new
        if window > 0:
            seen &= torch.arange(n) > at - window
        rows = slice(start, start + new)
        out[rows] = _attend(q[rows], keys[places], values[places], scale, seen)


def decode_attention_cpu(
    q, keys, values, k_scale, v_scale, out, k, v, places, logits, req_to_token, requests, seq_lens, scale, cap,
    is_cross, window, encoder_lens, sinks,
) -> None:  # fmt: skip
    """Write keys and values of one token per request to its place, and attend from it."""
    _only_plain(cap, is_cross, sinks)
    if k is not None:
        keys[places] = k.view(len(places), *keys.shape[1:])
        values[places] = v.view(len(places), *values.shape[1:])
    for row, (request, n) in enumerate(zip(*_ints(requests, seq_lens), strict=True)):
        kept = req_to_token[request, max(0, n - window) if window > 0 else 0 : n].long()
        out[row : row + 1] = _attend(q[row : row + 1], keys[kept], values[kept], scale, None)


def _attend(q_MQE: Tensor, k_NKE: Tensor, v_NKE: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_MQE, k_NKE, v_NKE))
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _only_plain(cap: float, is_cross: bool, sinks: Tensor | None) -> None:
    if cap > 0 or is_cross or sinks is not None:
        raise NotImplementedError("capped logits, cross attention and sinks are not computed by this stand-in")


def _ints(*tensors: Tensor) -> list[list[int]]:
    return [tensor.tolist() for tensor in tensors]


def build_tree_kernel_efficient_cpu(
    parents, selected, seq_lens, mask, positions, index, first_child, sibling, topk, depth, n_nodes, mask_mode
) -> None:
    """Link the selected nodes of each request's draft, and say which nodes each of them sees.

    A candidate's number, divided by topk, says in which row of `parents` the number of its parent is; 0: the root.
    """
    if mask_mode != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {mask_mode}; this stand-in makes {QLEN_ONLY} only")
    mask = mask[: len(seq_lens) * n_nodes * n_nodes].view(-1, n_nodes, n_nodes)
    index[:] = torch.arange(index.numel()).view_as(index)
    for i, (chosen, known) in enumerate(zip(selected.tolist(), parents.tolist(), strict=True)):
        node_of = {candidate: node for node, candidate in enumerate(chosen, 1)}
        parent_of = [-1] + [node_of[known[c // topk]] if c // topk else 0 for c in chosen]
        mask[i] = torch.eye(n_nodes, dtype=torch.bool)
        children: list[list[int]] = [[] for _ in range(n_nodes)]
        for node in range(1, n_nodes):
            mask[i, node] |= mask[i, parent_of[node]]
            children[parent_of[node]].append(node)
        for parent, nodes in enumerate(children):
            first_child[i, parent] = nodes[0] if nodes else -1
            for node, following in pairwise(nodes):
                sibling[i, node] = following
        positions.view(-1, n_nodes)[i] = seq_lens[i] + mask[i].sum(1) - 1


def reconstruct_indices_from_tree_mask(
    mask, seq_lens, positions, index, first_child, sibling, n_requests, n_nodes
) -> None:
    """Link the nodes of drafts that come as masks [B, N, N], in which a node comes after its parent."""
    index.view(-1)[:] = torch.arange(n_requests * n_nodes)
    for i, seen in enumerate(mask.view(n_requests, n_nodes, n_nodes).bool().tolist()):
        parent_of = [max((j for j in range(node) if seen[node][j]), default=-1) for node in range(n_nodes)]
        for node, parent in enumerate(parent_of):
            later = range(node + 1, n_nodes)
            positions.view(-1, n_nodes)[i, node] = seq_lens[i] + sum(seen[node][:node])
            first_child.view(-1, n_nodes)[i, node] = next((j for j in later if parent_of[j] == node), -1)
            following = next((j for j in later if parent >= 0 and parent_of[j] == parent), -1)
            sibling.view(-1, n_nodes)[i, node] = following


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
) -> None:  # fmt: skip
    """Follow the target's most likely tokens through each draft from its root on, as far as they were drafted."""
    best = target_predict.flatten().tolist()
    links = zip(*_ints(candidates, retrive_index, retrive_next_token, retrive_next_sibling), strict=True)
    for i, (tokens, index, first_child, sibling) in enumerate(links):
        path = [0]
        while len(path) < accept_index.shape[1]:
            node = first_child[path[-1]]
            while node != -1 and tokens[node] != best[index[path[-1]]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(node)
        accept_token_num[i] = len(path) - 1
        for step, node in enumerate(path):
            accept_index[i, step] = index[node]
            predicts[index[node]] = best[index[node]]


def _each(starts: Tensor, ends: Tensor) -> Rows:
    return list(zip(*_ints(starts, ends), strict=True))


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, places, pool_len) -> None:
    """Note where tokens `starts` to `ends` of each request are kept; `places` has them one request after the other."""
    done = 0
    for request, (start, end) in zip(requests.tolist(), _each(starts, ends), strict=True):
        req_to_token[request, start:end] = places[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(requests, req_to_token, starts, ends, places, pool_len) -> None:
    """Read what `assign_req_to_token_pool_cpu` noted."""
    rows = zip(requests.tolist(), _each(starts, ends), strict=True)
    found = torch.cat([req_to_token[request, start:end] for request, (start, end) in rows])
    places[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(requests, req_to_token, seq_lens, places, pool_len, topk, n_steps) -> None:
    """Read where the topk * n_steps tokens behind each request's last one are kept."""
    assign_extend_cache_locs_cpu(requests, req_to_token, seq_lens, seq_lens + topk * n_steps, places, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, requests, seq_lens, topk, n_steps, pool_len) -> Tensor:
    """Return one row per branch: where the request's tokens are kept, and behind them the branch's own."""
    rows = req_to_token[requests.long()].repeat_interleave(topk, dim=0)
    for row, n in enumerate(seq_lens.repeat_interleave(topk).tolist()):
        own = n + row % topk * n_steps
        rows[row, n : n + n_steps] = rows[row, own : own + n_steps].clone()
    return rows


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """Take the last accepted token of each request."""
    bonus_tokens[:] = accept_tokens.view(-1, stride).gather(1, accept_lens.long()[:, None] - 1)[:, 0]


def fill_accept_out_cache_loc_cpu(accept_index, places, accepted_places) -> None:
    """Take the places of the accepted nodes; -1 stands for none."""
    found = places[accept_index[accept_index > -1].long()]
    accepted_places[: len(found)] = found


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources) -> None:
    """Copy rows of the KV cache of every layer, given by their addresses."""
    for base, n_bytes in _each(data_ptrs, strides):
        rows = [ctypes.string_at(base + n_bytes * source, n_bytes) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + n_bytes * target, row, n_bytes)


def rotate_input_ids_cpu(*given) -> None:
    raise NotImplementedError("drafters of several layers are not run by this stand-in")


sys.modules["sgl_kernel.speculative"] = sys.modules[__name__]  # where one function is imported from
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
