"""Optimizers and learning-rate schedule.

`MuonAdamW` steps weight matrices with Muon and everything else with AdamW as *one* optimizer, so that Lightning's
clipping, accumulation and checkpoints work as usual. Muon: Jordan et al. 2024; the update is scaled as AdamW's
(0.2 sqrt of the longer side, Moonlight 2025), so one learning rate serves both. It is not torch's own, which multiplies
in bfloat16 everywhere: a processor without bfloat16 arithmetic then takes 30 times as long as in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from spectrain.config.training import Optimizer as OptimizerSettings
from spectrain.kernels import multiplies

MOMENTUM = 0.95
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # coefficients of X, X X^T X, X X^T X X^T X
NEWTON_SCHULZ_STEPS = 5

SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the steps that is left -> share of the learning rate
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1 - math.cos(math.pi * left)),
}


class MuonAdamW(Optimizer):
    """Muon for the matrices, the first group, and AdamW for the rest, which shares this object's groups and state."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], settings: OptimizerSettings) -> None:
        self._adamw = AdamW(others, lr=settings.lr, weight_decay=0.0, betas=tuple(settings.betas), fused=True)
        by_muon = {"params": matrices, "lr": settings.lr, "weight_decay": settings.weight_decay}
        super().__init__([by_muon, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices(**self.param_groups[0])
        self._adamw.step()
        return loss

    @torch.no_grad()
    def _step_matrices(self, params: list[nn.Parameter], lr: float, weight_decay: float, **_: object) -> None:
        for matrix in params:
            if (gradient := matrix.grad) is None:
                continue
            state = self.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            mean = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(mean, MOMENTUM))
            matrix.mul_(1 - lr * weight_decay)
            matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix of the same singular vectors, whose singular values lie between 0.5 and 1.5."""
    fast = matrix.is_cuda or multiplies(torch.bfloat16)
    wide = matrix.to(torch.bfloat16 if fast else torch.float32)
    if is_tall := matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        products = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(products, products, products, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings) -> Optimizer:
    """Build the optimizer over all parameters that require gradients.

    Embeddings, norms, biases and feedback weights are not decayed; embeddings are never given to Muon.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    matrices = [p for name, p in trainable if is_matrix(name, p)]
    others = [p for name, p in trainable if not is_matrix(name, p)]
    if settings.name == "muon":
        return MuonAdamW(matrices, others, settings)
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), fused=True)
    optimizer._step_supports_amp_scaling = False  # Lightning would not clip; in bfloat16 nothing is scaled
    return optimizer


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is decayed, and stepped by Muon: no matrix that is read row by row, as an embedding is."""
    return parameter.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "feedback"))


def warmup_then_down(optimizer: Optimizer, settings: OptimizerSettings, steps_of_run: Callable[[], int]) -> LambdaLR:
    """Learning rate: up linearly over the warm-up, then down to `final_share` of it, linearly or as a half cosine.

    `steps_of_run` is asked at each step, because with `hours` the number is known only after the first ones.
    """
    shape, final = SCHEDULES[settings.schedule], settings.final_share

    def factor(step: int) -> float:
        total_steps = steps_of_run()
        if settings.warmup_share is None:
            warmup_steps = min(settings.warmup_steps, max(1, total_steps // 10))
        else:
            warmup_steps = round(settings.warmup_share * total_steps)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return final + (1 - final) * shape(max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps)))

    return LambdaLR(optimizer, factor)
