"""Every class of `torch.nn` that owns tensors, and how one of it is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Build = Callable[..., nn.Module]


def stack(**kw: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **kw)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8, **kw))


def _decoder(**kw: Any) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **kw), 2)


def _transformer(**kw: Any) -> nn.Module:
    return nn.Transformer(8, 2, 2, 3, 16, batch_first=True, **kw)


def _mha(**kw: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, add_bias_kv=True, **kw)


def _mha_split(**kw: Any) -> nn.Module:
    return nn.MultiheadAttention(8, 2, kdim=4, vdim=6, bias=False, **kw)


CASES: dict[str, tuple[type[nn.Module], Build]] = {
    "AdaptiveLogSoftmaxWithLoss": (
        nn.AdaptiveLogSoftmaxWithLoss,
        lambda **kw: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], **kw),
    ),
    "BatchNorm1d": (nn.BatchNorm1d, lambda **kw: nn.BatchNorm1d(4, **kw)),
    "BatchNorm1d-no-stats": (
        nn.BatchNorm1d,
        lambda **kw: nn.BatchNorm1d(4, track_running_stats=False, **kw),
    ),
    "BatchNorm2d": (nn.BatchNorm2d, lambda **kw: nn.BatchNorm2d(4, affine=False, **kw)),
    "BatchNorm3d": (nn.BatchNorm3d, lambda **kw: nn.BatchNorm3d(4, **kw)),
    "SyncBatchNorm": (nn.SyncBatchNorm, lambda **kw: nn.SyncBatchNorm(4, **kw)),
    "Bilinear": (nn.Bilinear, lambda **kw: nn.Bilinear(3, 4, 5, **kw)),
    "Conv1d": (nn.Conv1d, lambda **kw: nn.Conv1d(4, 6, 3, **kw)),
    "Conv2d": (nn.Conv2d, lambda **kw: nn.Conv2d(4, 6, 3, groups=2, **kw)),
    "Conv3d": (nn.Conv3d, lambda **kw: nn.Conv3d(4, 6, 3, bias=False, **kw)),
    "ConvTranspose1d": (
        nn.ConvTranspose1d,
        lambda **kw: nn.ConvTranspose1d(4, 6, 3, **kw),
    ),
    "ConvTranspose2d": (
        nn.ConvTranspose2d,
        lambda **kw: nn.ConvTranspose2d(4, 6, 3, **kw),
    ),
    "ConvTranspose3d": (
        nn.ConvTranspose3d,
        lambda **kw: nn.ConvTranspose3d(4, 6, 3, **kw),
    ),
    "Embedding": (nn.Embedding, lambda **kw: nn.Embedding(7, 4, **kw)),
    "Embedding-padding": (
        nn.Embedding,
        lambda **kw: nn.Embedding(7, 4, padding_idx=2, **kw),
    ),
    "EmbeddingBag": (
        nn.EmbeddingBag,
        lambda **kw: nn.EmbeddingBag(7, 4, padding_idx=0, **kw),
    ),
    "GRU": (nn.GRU, lambda **kw: nn.GRU(3, 4, 2, bidirectional=True, **kw)),
    "GRUCell": (nn.GRUCell, lambda **kw: nn.GRUCell(3, 4, **kw)),
    "GroupNorm": (nn.GroupNorm, lambda **kw: nn.GroupNorm(2, 4, **kw)),
    "InstanceNorm1d": (
        nn.InstanceNorm1d,
        lambda **kw: nn.InstanceNorm1d(4, affine=True, track_running_stats=True, **kw),
    ),
    "InstanceNorm2d": (
        nn.InstanceNorm2d,
        lambda **kw: nn.InstanceNorm2d(4, affine=True, **kw),
    ),
    "InstanceNorm3d": (
        nn.InstanceNorm3d,
        lambda **kw: nn.InstanceNorm3d(4, track_running_stats=True, **kw),
    ),
    "LSTM": (nn.LSTM, lambda **kw: nn.LSTM(3, 4, 2, proj_size=2, **kw)),
    "LSTMCell": (nn.LSTMCell, lambda **kw: nn.LSTMCell(3, 4, bias=False, **kw)),
    "LayerNorm": (nn.LayerNorm, lambda **kw: nn.LayerNorm([2, 4], **kw)),
    "Linear": (nn.Linear, lambda **kw: nn.Linear(3, 4, **kw)),
    **(
        {
            "LinearCrossEntropyLoss": (
                nn.LinearCrossEntropyLoss,
                lambda **kw: nn.LinearCrossEntropyLoss(3, 4, bias=True, **kw),
            )
        }
        if hasattr(nn, "LinearCrossEntropyLoss")  # since torch 2.13
        else {}
    ),
    "MultiheadAttention": (nn.MultiheadAttention, _mha),
    "MultiheadAttention-split": (nn.MultiheadAttention, _mha_split),
    "PReLU": (nn.PReLU, lambda **kw: nn.PReLU(3, init=0.1, **kw)),
    "RMSNorm": (nn.RMSNorm, lambda **kw: nn.RMSNorm(4, **kw)),
    "RNN": (nn.RNN, lambda **kw: nn.RNN(3, 4, nonlinearity="relu", **kw)),
    "RNNBase": (nn.RNNBase, lambda **kw: nn.RNNBase("LSTM", 3, 4, **kw)),
    "RNNCell": (nn.RNNCell, lambda **kw: nn.RNNCell(3, 4, **kw)),
    "RNNCellBase": (nn.RNNCellBase, lambda **kw: nn.RNNCellBase(3, 4, True, 2, **kw)),
    "Transformer": (nn.Transformer, _transformer),
    "TransformerDecoder": (nn.TransformerDecoder, _decoder),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer,
        lambda **kw: nn.TransformerDecoderLayer(8, 2, 16, **kw),
    ),
    "TransformerEncoder": (nn.TransformerEncoder, stack),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer,
        lambda **kw: nn.TransformerEncoderLayer(8, 2, 16, **kw),
    ),
}
# Values that the caller gives: refused by name.
GIVEN = {
    "BCEWithLogitsLoss": lambda w: nn.BCEWithLogitsLoss(pos_weight=w),
    "BCELoss": nn.BCELoss,
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss,
    "MultiMarginLoss": lambda w: nn.MultiMarginLoss(weight=w),
    "NLLLoss": nn.NLLLoss,
    "FractionalMaxPool2d": lambda w: nn.FractionalMaxPool2d(
        2, output_size=2, _random_samples=w
    ),
    "FractionalMaxPool3d": lambda w: nn.FractionalMaxPool3d(
        2, output_size=2, _random_samples=w
    ),
    "ParameterList": lambda w: nn.ParameterList([nn.Parameter(w)]),
    "ParameterDict": lambda w: nn.ParameterDict({"w": nn.Parameter(w)}),
}
# They own nothing, or take their tensors from modules that stand in the table.
PASSIVE = {"Module", "NLLLoss2d"}
