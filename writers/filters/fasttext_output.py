"""From the mean vector of a text to the probabilities of labels, for each of fastText's losses."""

from __future__ import annotations

import math

import numba

__all__ = ["activate", "descend"]

_EPSILON = 1e-5  # that fastText adds to every probability before its logarithm


@numba.njit(nogil=True, cache=True, inline="always")
def _product(total, outputs, row):  # type: ignore[no-untyped-def]
    value = 0.0
    for i in range(len(total)):
        value += total[i] * outputs[row, i]
    return value


@numba.njit(nogil=True, cache=True)
def descend(total, outputs, tree, nodes, scores, text):  # type: ignore[no-untyped-def]
    """Hierarchical softmax: the probability of a label is the product along its path."""
    labels = len(outputs)
    nodes[2 * labels - 2] = 1.0
    for inner in range(labels - 2, -1, -1):
        right = 1.0 / (1.0 + math.exp(-_product(total, outputs, inner)))
        here = nodes[labels + inner]
        nodes[tree[inner, 0]] = here * (1.0 - right + _EPSILON)
        nodes[tree[inner, 1]] = here * (right + _EPSILON)
    for label in range(labels):
        scores[text, label] = nodes[label]


@numba.njit(nogil=True, cache=True)
def activate(total, outputs, loss, values, scores, text):  # type: ignore[no-untyped-def]
    """Softmax (1), or one sigmoid for each label from fastText's table of 512 between -8 and 8."""
    labels = len(outputs)
    for label in range(labels):
        values[label] = _product(total, outputs, label)
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


@numba.njit(nogil=True, cache=True)
def _table_sigmoid(value):  # type: ignore[no-untyped-def]
    if value < -8:
        return 0.0
    if value > 8:
        return 1.0
    return 1.0 / (1.0 + math.exp(-(math.floor((value + 8) * 32) / 32 - 8)))
