"""Models, recipes and comparisons for the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deferred_init.te.probe import is_quantized

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TE")
te_recipes = pytest.importorskip("transformer_engine.common.recipe")

ROWS, WIDTH = 1024, 128
BF16 = torch.bfloat16
RECIPES: dict[str, Callable[[], Any]] = {
    "bf16": lambda: None,
    "delayed": te_recipes.DelayedScaling,
    "current": te_recipes.Float8CurrentScaling,
    "block": te_recipes.Float8BlockScaling,
}


def ops_model(kind: str, device: str) -> nn.Module:
    ops = te.ops
    linear = {"device": device, "dtype": BF16}
    made: dict[str, Callable[[], Any]] = {
        "BasicLinear": lambda: ops.BasicLinear(WIDTH, WIDTH, **linear),
        "Bias": lambda: ops.Bias(WIDTH, **linear),
        "LayerNorm": lambda: ops.LayerNorm(WIDTH, **linear),
        "RMSNorm": lambda: ops.RMSNorm(WIDTH, **linear),
        "Linear": lambda: ops.Linear(WIDTH, WIDTH, **linear),
        "GroupedLinear": lambda: ops.GroupedLinear(2, WIDTH, WIDTH, **linear),
    }
    if kind == "all":
        # TE cannot quantize between a linear op and a grouped one next to it.
        order = ("BasicLinear", "Bias", "LayerNorm", "Linear", "RMSNorm")
        return ops.Sequential(*(made[each]() for each in (*order, "GroupedLinear")))
    if kind == "nested":
        inner = ops.Sequential(made["LayerNorm"](), made["Linear"](), made["Bias"]())
        return ops.Sequential(made["RMSNorm"](), inner, made["BasicLinear"]())
    return ops.Sequential(made[kind]())


def module_model(kind: str, device: str) -> nn.Module:
    shared: dict[str, Any] = {"device": device, "params_dtype": BF16}
    if kind == "TransformerLayer":
        return nn.Sequential(
            *(
                te.TransformerLayer(
                    WIDTH,
                    2 * WIDTH,
                    2,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    fuse_qkv_params=True,
                    output_layernorm=last,
                    **shared,
                )
                for last in (False, True)
            )
        )
    if kind == "MultiheadAttention":
        return te.MultiheadAttention(
            WIDTH, 2, attention_dropout=0.0, fuse_qkv_params=True, **shared
        )
    if kind == "LayerNormMLP":
        return nn.Sequential(
            te.LayerNormMLP(WIDTH, 2 * WIDTH, **shared),
            te.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **shared),
            te.Linear(WIDTH, WIDTH, bias=False, **shared),
            te.RMSNorm(WIDTH, device=device, dtype=BF16),
        )
    assert kind == "GroupedLinear"
    return te.GroupedLinear(2, WIDTH, WIDTH, **shared)


def build(make: Callable[[], nn.Module], te_recipe: Any) -> nn.Module:
    if te_recipe is None:
        return make()
    with te.quantized_model_init(enabled=True, recipe=te_recipe):
        return make()


def autocast(te_recipe: Any) -> AbstractContextManager[Any]:
    if te_recipe is None:
        return nullcontext()
    found: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=te_recipe)
    return found


def batch(step: int, *, sequence: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS // 2, 2, WIDTH) if sequence else (ROWS, WIDTH)
    return torch.randn(shape, generator=generator).to("cuda", BF16)


def call(model: nn.Module, x: Tensor) -> Tensor:
    grouped_ops = [m for m in model.modules() if type(m) is te.ops.GroupedLinear]
    if isinstance(model, te.GroupedLinear):
        return model(x, [ROWS // 2, ROWS // 2])
    splits = torch.tensor([ROWS // 2] * 2, dtype=torch.int64, device="cuda")
    return model(x, *(splits for _ in grouped_ops))


def forward_backward(
    model: nn.Module, te_recipe: Any, step: int, *, sequence: bool = False
) -> Tensor:
    x = batch(step, sequence=sequence).requires_grad_()
    with autocast(te_recipe):
        out = call(model, x)
    out = out[0] if isinstance(out, tuple) else out
    (out.float() * batch(1000 + step, sequence=sequence).float()).sum().backward()
    return out.detach().clone()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    te_recipe: Any,
    *,
    sequence: bool = False,
    steps: int = 3,
) -> list[Tensor]:
    """Train; return all outputs and gradients."""
    seen: list[Tensor] = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        seen.append(forward_backward(model, te_recipe, step, sequence=sequence))
        for param in model.parameters():
            assert param.grad is not None
            seen.append(param.grad.detach().clone())
        optimizer.step()
    return seen


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, te_recipe: Any) -> Any:
    """Train; return a digest of all outputs and gradients, or how TE refused."""
    try:
        seen = train(model, optimizer, te_recipe)
    except RuntimeError as error:
        return type(error), str(error).splitlines()[0]
    return [tensor.cpu().view(torch.uint8).numpy().tobytes() for tensor in seen]


def data_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return everything that a tensor keeps, by name."""
    if type(tensor) in (Tensor, nn.Parameter):
        return {"": tensor.detach()}
    if not is_quantized(tensor):  # a grouped tensor in high precision
        return {"": tensor.rowwise_data}
    # Scales are padded with whatever was there, so they are compared by effect.
    inner = {"dequantized": tensor.detach().dequantize()}
    for name in ("_data", "_rowwise_data", "_columnwise_data", "rowwise_data"):
        value = getattr(tensor, name, None)
        if isinstance(value, Tensor):
            inner[name] = value
    transpose = vars(tensor).get("_transpose")
    if transpose is not None and not vars(tensor).get("_transpose_invalid"):
        inner["_transpose"] = transpose
    return inner


def same(one: Tensor, other: Tensor) -> bool:
    first, second = data_of(one), data_of(other)
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.requires_grad == other.requires_grad
        and set(first) == set(second)
        and all(torch.equal(first[name], second[name]) for name in first)
    )


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(first) == list(second)
    different = [name for name in first if not same(first[name], second[name])]
    assert not different, different
