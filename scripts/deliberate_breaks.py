"""Break the code on purpose, one line at a time, and see that a test fails for each.

    python scripts/deliberate_breaks.py                    # all, some 15 minutes on one core
    python scripts/deliberate_breaks.py only=verify,cost   # those whose file's path contains one of these words

Each break is applied to a copy of the checkout, so that nothing here changes. A break that no test notices is said at
the end, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("spectrain", "data_prep", "conf", "tests", "scripts", "pyproject.toml", "README.md", "docs")

BREAKS: list[tuple[str, str, str, str]] = [  # file, what stands there (once), what takes its place, tests
    # decoding
    (
        "spectrain/decoding/verify.py",
        "accepts = (uniforms * q_drafted < p_drafted)",
        "accepts = (uniforms * q_drafted <= 2 * p_drafted)",
        "tests/decoding/test_law.py -k speculative",
    ),
    (
        "spectrain/decoding/verify.py",
        "residual = (mass[:, None] * p_last - q_next).clamp_min(0)",
        "residual = p_last",
        "tests/decoding/test_law.py -k speculative",
    ),
    (
        "spectrain/decoding/verify.py",
        "h = torch.where(inner < 1, S / (S + 1 - inner), 1.0)",
        "h = torch.where(inner < 1, inner, 1.0)",
        "tests/decoding/test_verify_block.py",
    ),
    (
        "spectrain/decoding/verify.py",
        "reached = (matches[:, None] | ~tree.ancestors).all(-1)",
        "reached = matches",
        "tests/decoding/test_verify.py tests/decoding/test_random_trees.py",
    ),
    (
        "spectrain/decoding/verify.py",
        "bonus = torch.where(walked, drawn, bonus)",
        "bonus = drawn",
        "tests/decoding/test_verify.py tests/decoding/test_random_trees.py tests/decoding/test_law.py",
    ),
    (
        "spectrain/decoding/tree.py",
        "jump = jump.gather(1, jump)",
        "jump = jump",
        "tests/decoding/test_tree.py tests/decoding/test_random_trees.py",
    ),
    (
        "spectrain/decoding/tree.py",
        "return drafted if self.probe is None else drafted & ~self.probe",
        "return drafted",
        "tests/decoding/test_tree.py tests/decoding/test_random_trees.py tests/methods/test_lookahead.py",
    ),
    (
        "spectrain/decoding/kv_cache.py",
        "read = starts + torch.where(accepted, path, places)",
        "read = starts + places",
        "tests/decoding/test_kv_cache.py",
    ),
    (
        "spectrain/decoding/kv_cache.py",
        "self.lengths[row] = length",
        "pass",
        "tests/decoding/test_kv_cache.py tests/decoding/test_loop.py",
    ),
    (
        "spectrain/decoding/target.py",
        "mask = None if start == 0 else",
        "mask = None if start >= 0 else",
        "tests/decoding/test_target.py tests/decoding/test_loop.py",
    ),
    (
        "spectrain/decoding/target.py",
        "positions = (positions + tree.depth).clamp_max",
        "positions = (positions + torch.arange(n_nodes)).clamp_max",
        "tests/decoding/test_target.py tests/decoding/test_loop.py",
    ),
    (
        "spectrain/decoding/sampling.py",
        "before = ordered.cumsum(-1) - ordered",
        "before = ordered.cumsum(-1)",
        "tests/decoding/test_sampling.py",
    ),
    (
        "spectrain/decoding/sampling.py",
        "torch.searchsorted(cumulative, threshold, right=True)",
        "torch.searchsorted(cumulative, threshold)",
        "tests/decoding/test_sampling.py",
    ),
    (
        "spectrain/decoding/sampling.py",
        "mixed = (seed * 0x9E3779B1 + prompt_index)",
        "mixed = (seed * 0x9E3779B1)",
        "tests/decoding/test_sampling.py tests/decoding/test_loop.py",
    ),
    (
        "spectrain/decoding/generation.py",
        "end, reason = i + 1,",
        "end, reason = i,",
        "tests/decoding/test_loop.py",
    ),
    (
        "spectrain/decoding/context.py",
        "tokens[row, max(0, end - n) : end]",
        "tokens[row, end - n : end]",
        "tests/decoding/test_drafter.py",
    ),
    (
        "spectrain/decoding/text.py",
        'if text.endswith("\\ufffd") and len(self.pending) < LONGEST_CHARACTER:',
        "if False:",
        "tests/decoding/test_text.py",
    ),
    # methods
    (
        "spectrain/methods/lookup.py",
        "n_tokens - n_accepted - 1 : n_tokens",
        "n_tokens - n_accepted : n_tokens",
        "tests/methods/test_pld.py tests/methods/test_anpd.py",
    ),
    (
        "spectrain/methods/draft_chain.py",
        "left = [min(gamma, room - 1) for room in context.room]",
        "left = [gamma for room in context.room]",
        "tests/methods tests/decoding/test_loop.py",
    ),
    (
        "spectrain/methods/spire.py",
        "near = (positions > t - self.config.window_tokens)",
        "near = (positions >= t - self.config.window_tokens)",
        "tests/methods/test_spire.py",
    ),
    (
        "spectrain/methods/lookahead.py",
        "accepted = min(len(tokens) - 1, self.n_columns)",
        "accepted = 0",
        "tests/methods/test_lookahead.py",
    ),
    (
        "spectrain/methods/spectra_core.py",
        "for length in range(longest, 0, -1)",
        "for length in range(1, longest + 1)",
        "tests/methods/test_spectra_core.py",
    ),
    (
        "spectrain/methods/logitspec.py",
        "KEPT_BY_RANK = (4,) * 9 + (3,) * 24",
        "KEPT_BY_RANK = (4,) * 8 + (3,) * 24",
        "tests/methods/test_logitspec.py",
    ),
    (
        "spectrain/methods/magicdec.py",
        "turn = rotation(-skipped, self._inv_freq)",
        "turn = rotation(skipped, self._inv_freq)",
        "tests/methods/test_magicdec.py",
    ),
    (
        "spectrain/methods/registry.py",
        "folder = own or given",
        "folder = None",
        "tests/methods tests/decoding/test_loop.py",
    ),
    # models
    (
        "spectrain/models/head.py",
        "h = h + F.silu(F.linear(h, block.weight, block.bias))",
        "h = F.silu(F.linear(h, block.weight, block.bias))",
        "tests/models/test_head.py",
    ),
    (
        "spectrain/models/labels.py",
        "labels[rows, places] = (p / q).clamp(max=1.0)",
        "labels[rows, places] = p / q",
        "tests/models/test_labels.py",
    ),
    (
        "spectrain/models/labels.py",
        "drafted = may_draft & (uniforms >= share)",
        "drafted = may_draft & (uniforms < share)",
        "tests/models/test_labels.py",
    ),
    (
        "spectrain/models/spire.py",
        "weights = self.feedback_weight.softmax(dim=-1)",
        "weights = self.feedback_weight.softmax(dim=0)",
        "tests/models/test_spire.py",
    ),
    (
        "spectrain/models/rollout.py",
        "lead = -first_root % config.k",
        "lead = first_root % config.k",
        "tests/models/test_spire.py tests/measure/test_parity.py",
    ),
    # retrieval
    (
        "spectrain/retrieval/fusion.py",
        "heappush(queue, (-priority, *ties",
        "heappush(queue, (priority, *ties",
        "tests/retrieval/test_fusion.py",
    ),
    # stores and data_prep
    (
        "spectrain/stores/texts.py",
        'return unit_hash(f"held-out:{document_id}") < share',
        'return unit_hash(f"held-out:{document_id}") > share',
        "tests/stores/test_texts.py",
    ),
    (
        "spectrain/stores/folder.py",
        "return None if isinstance(value, float) and not math.isfinite(value) else value",
        "return value",
        "tests/stores tests/training/test_runs.py tests/test_cost.py",
    ),
    (
        "data_prep/select.py",
        'order = np.argsort(scores, kind="stable")',
        'order = np.argsort(-scores, kind="stable")',
        "tests/data_prep/test_select.py tests/data_prep/test_datastore.py",
    ),
    (
        "data_prep/pipeline.py",
        "mine = todo[fabric.global_rank :: fabric.world_size] if self.ranks_share else todo",
        "mine = todo[1:]",
        "tests/data_prep/test_pipeline.py tests/data_prep/test_acceptance.py",
    ),
    # training
    (
        "spectrain/training/losses.py",
        "alpha = torch.minimum(p, q).sum(dim=-1)",
        "alpha = torch.maximum(p, q).sum(dim=-1)",
        "tests/training/test_losses.py",
    ),
    (
        "spectrain/training/losses.py",
        "return (self.omega, 1 - self.omega)",
        "return (1 - self.omega, self.omega)",
        "tests/training/test_losses.py",
    ),
    (
        "spectrain/training/data.py",
        "(order[start : start + size][rank::world_size] for start in starts)",
        "(order[start : start + size] for start in starts)",
        "tests/training/test_modules.py tests/training/test_fit.py tests/training/test_strategies.py",
    ),
    (
        "spectrain/training/data.py",
        "manual_seed(self.seed * 1_000_003 + self.epoch)",
        "manual_seed(self.seed * 1_000_003)",
        "tests/training",
    ),
    (
        "spectrain/training/runs.py",
        "kept = {key: value for key, value in config.items() if key not in NOT_HASHED}",
        "kept = dict(config)",
        "tests/training/test_runs.py",
    ),
    # measure and reporting
    (
        "spectrain/measure/cost.py",
        "return np.maximum(flops, n_bytes * self.operational_intensity)",
        "return flops + n_bytes * self.operational_intensity",
        "tests/measure/test_cost.py",
    ),
    (
        "spectrain/measure/cost.py",
        "return 2 * self.n_layer * self.n_kv_head * self.head_dim",
        "return self.n_layer * self.n_kv_head * self.head_dim",
        "tests/measure/test_cost.py",
    ),
    (
        "spectrain/measure/pareto.py",
        "(b[1] - a[1]) * (c[0] - a[0])",
        "(b[1] - a[1]) * (c[0] - b[0])",
        "tests/measure/test_pareto.py",
    ),
    (
        "spectrain/measure/parity.py",
        "before = pad(kept.cumprod(1)[:, :-1], (1, 0), value=1.0)",
        "before = torch.ones_like(kept)",
        "tests/measure/test_parity.py",
    ),
    (
        "spectrain/reporting/render.py",
        "autoescape=True",
        "autoescape=False",
        "tests/reporting",
    ),
    (
        "spectrain/cli.py",
        r'text = text.replace("${", "\\${")',
        "pass",
        "tests/test_cli.py",
    ),
]


def apply(root: Path, file: str, old: str, new: str) -> None:
    """Replace the one occurrence of `old` in a file of the copy. Raises SystemExit where it is not there once."""
    path = root / file
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {text.count(old)} times: {old}")
    path.write_text(text.replace(old, new))


def main() -> None:
    wanted = next((a.removeprefix("only=").split(",") for a in sys.argv[1:] if a.startswith("only=")), [""])
    survived, started = [], time.time()
    chosen = [entry for entry in BREAKS if any(word in entry[0] for word in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        (root / "checkpoints").symlink_to(ROOT / "checkpoints")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for file, old, new, tests in chosen:
            whole = (root / file).read_text()
            apply(root, file, old, new)
            words = tests.split()
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
            (root / file).write_text(whole)
            caught = done.returncode == 1 and ("FAILED" in done.stdout or "ERROR" in done.stdout)
            failed = next((line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
            print(f"{'caught' if caught else 'SURVIVED'}  {file}: {new}  {failed}", flush=True)
            if not caught:
                survived.append(f"{file}: {old} -> {new}")
    print(f"{len(chosen) - len(survived)} of {len(chosen)} breaks were caught, {time.time() - started:.0f} s")
    for line in survived:
        print(f"survived: {line}")
    raise SystemExit(bool(survived))


if __name__ == "__main__":
    main()
