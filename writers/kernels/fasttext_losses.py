"""Probabilities of a fastText model's labels for the vector of a text: products with outputs, then a loss.

The sums and their order are the same for every text, so scores have the same bits wherever they are computed.
"""

from __future__ import annotations

import math

from shardkit.writers.kernels.numba_support import Float32s, Float64s, Int32s, kernel

_EPSILON = 1e-5  # fastText adds it to every probability before its logarithm


@kernel(allocates=False)
def products(total: Float64s, columns: Float32s, values: Float64s) -> None:
    """Write the products of a vector with all outputs to `values`.

    `columns` [dimensions, labels] are the transposed outputs. The sums of all labels advance together, each
    in the order of dimensions: this vectorizes, while in one sum every addition waits for the one before.
    """
    labels = columns.shape[1]
    values[:labels] = 0
    for i in range(len(total)):
        for label in range(labels):
            values[label] += total[i] * columns[i, label]


@kernel(allocates=False)
def descend(values: Float64s, tree: Int32s, nodes: Float64s, scores: Float32s, text: int) -> None:
    """Compute a hierarchical softmax: multiply the probabilities along the path to each label."""
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
    """Compute a softmax (loss 1), or one sigmoid per label from fastText's table of 512 between -8 and 8."""
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
