"""Views within a model on meta: what they are of their base, eager's views are too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import deferred_init as di


class Complex(nn.Module):
    """A complex weight, and all kinds of views of it."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        empty = torch.empty(3, 2, dtype=torch.complex64, device=device)
        self.weight = nn.Parameter(empty)
        nn.init.normal_(self.weight)
        self.real = self.weight.real
        self.imag = self.weight[1:].imag
        self.pairs = torch.view_as_real(self.weight)
        self.conjugate = self.weight.conj()
        self.adjoint = self.weight.mH
        self.negated = self.weight.conj().imag

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Pairs(nn.Module):
    """A real weight that is read as complex numbers."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 2, device=device))
        nn.init.normal_(self.weight)
        self.all = torch.view_as_complex(self.weight)
        self.some = self.all[3:]
        self.conjugate = self.all.conj()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Buffers(nn.Module):
    """Buffers in one storage, of which the first conjugates what nobody holds."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        table = torch.empty(4, dtype=torch.complex64, device=device)
        self.register_buffer("conjugate", table.conj())
        self.register_buffer("table", table[:3])
        self.register_buffer("bits", torch.empty(3, device=device))
        self.register_buffer("integers", self.bits.view(torch.int32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.conjugate.copy_(torch.complex(torch.rand(4), torch.rand(4)))
        self.bits.copy_(torch.rand(3))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    plain = {k: v for k, v in vars(model).items() if isinstance(v, Tensor)}
    return plain | model._parameters | model._buffers


@pytest.mark.parametrize("build", [Complex, Pairs, Buffers])
@pytest.mark.parametrize("recorded", [False, True])
def test_views_have_the_values_and_the_gradients_of_eager_ones(
    build: type[nn.Module], recorded: bool
) -> None:
    torch.manual_seed(4)
    expected = build()
    model = di.deferred_init(build) if recorded else build("meta")
    di.materialize(model, "cpu", seed=4, verify="full")
    made = _tensors(model)
    for name, eager in _tensors(expected).items():
        ours = made[name]
        assert torch.equal(ours, eager), name
        assert (ours.is_conj(), ours.is_neg()) == (eager.is_conj(), eager.is_neg())
        assert (ours.requires_grad, ours.is_leaf) == (
            eager.requires_grad,
            eager.is_leaf,
        )
        if eager.requires_grad and not eager.is_leaf:
            factor = torch.arange(1.0, 1 + eager.numel()).view(eager.shape)
            for each, owner in ((ours, model), (eager, expected)):
                (each * factor).sum().abs().backward(retain_graph=True)
                assert owner.weight.grad is not None, name
            assert torch.equal(model.weight.grad, expected.weight.grad), name


@pytest.mark.parametrize("build", [Complex, Pairs])
def test_a_view_follows_what_is_written_to_its_base(build: type[nn.Module]) -> None:
    model = build("meta")
    di.materialize(model, "cpu", seed=4)
    with torch.no_grad():
        model.weight.fill_(0)
    for name, view in _tensors(model).items():
        assert not view.any(), name
        assert view is model.weight or view._base is model.weight, name


class Windows(nn.Module):
    """A row of a weight, and a part of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, device="meta")
        self.row = self.linear.weight[:1]
        self.register_buffer("table", torch.empty(4, device="meta"))
        self.register_buffer("window", self.table[1:3])

    def reset_parameters(self) -> None:
        self.table.fill_(1)


@pytest.mark.parametrize("grad", [False, True])
def test_views_can_be_used_as_if_made_with_gradients_on(grad: bool) -> None:
    model = Windows()
    with torch.set_grad_enabled(grad):
        di.materialize(model, "cpu", seed=0)
    model.row.sum().backward()
    assert model.linear.weight.grad.tolist() == [[1, 1], [0, 0]]
    model.window.mul_(model.linear.bias)  # refused for what was made under `no_grad`
    model.table.sum().backward()
    assert model.linear.bias.grad.tolist() == [1, 1]


def test_a_part_of_shared_memory_that_nobody_writes_is_found() -> None:
    class Gap(Windows):
        def reset_parameters(self) -> None:
            self.window.fill_(1)

    with pytest.raises(di.DeferredInitError, match="`table`"):
        di.materialize(Gap(), "cpu", verify="full")
