"""Probabilities of a fastText model's labels for the vector of a text: products with outputs, then a loss.

The sums and their order are the same for every text, so scores have the same bits wherever they are computed.
"""

from __future__ import annotations

import math

from shardkit.kernels.numba_support import Float32s, Float64s, Int32s, kernel

_EPSILON = 1e-5  # fastText adds this to every probability before it takes the logarithm


@kernel(allocates=False)
def products(total: Float64s, columns: Float32s, values: Float64s) -> None:
    """Write the dot product of the text vector `total` with each row of the output matrix to `values`.

    `columns` [dimensions, labels] is the transposed output matrix. The loop adds one dimension to the sums of
    all labels. This vectorizes; within the sum of one label, every addition would wait for the one before.
    """
    labels = columns.shape[1]
    values[:labels] = 0
    for i in range(len(total)):
        for label in range(labels):
            values[label] += total[i] * columns[i, label]


@kernel(allocates=False)
def descend(values: Float64s, tree: Int32s, nodes: Float64s, scores: Float32s, text: int) -> None:
    """Write the hierarchical softmax to scores[text]: per label, the product of probabilities on its path.

    `values` has one number per inner node of the tree; `nodes` is a scratch array.
    """
    labels = scores.shape[1]
    nodes[2 * labels - 2] = 1.0
    for inner in range(labels - 2, -1, -1):
        right = 1.0 / (1.0 + math.exp(-values[inner]))
        here = nodes[labels + inner]
        nodes[tree[inner, 0]] = here * (1.0 - right + _EPSILON)
        nodes[tree[inner, 1]] = here * (right + _EPSILON)
    for label in range(labels):
        scores[text, label] = nodes[label]


@kernel
def activate(values: Float64s, loss: int, scores: Float32s, text: int) -> None:
    """Write the softmax of `values` to scores[text] if `loss` is 1, else the sigmoid of each value.

    The sigmoids are those of fastText's table, which has 512 values between -8 and 8.
    """
    labels = scores.shape[1]
    if loss == 1:
        greatest = values[:labels].max()
        whole = 0.0
        for label in range(labels):
            values[label] = math.exp(values[label] - greatest)
            whole += values[label]
        for label in range(labels):
            scores[text, label] = values[label] / whole + _EPSILON
        return
    for label in range(labels):
        scores[text, label] = _table_sigmoid(values[label]) + _EPSILON


@kernel(allocates=False)
def _table_sigmoid(value: float) -> float:
    if value < -8:
        return 0.0
    if value > 8:
        return 1.0
    return 1.0 / (1.0 + math.exp(-(math.floor((value + 8) * 32) / 32 - 8)))
