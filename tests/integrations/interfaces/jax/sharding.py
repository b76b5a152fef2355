"""Meshes and shardings of JAX 0.10.2, without devices."""

from __future__ import annotations

from typing import Any

__all__ = ["Mesh", "NamedSharding", "PartitionSpec"]


class Mesh:
    def __init__(self, devices: Any, axis_names: Any) -> None:
        self.devices, self.axis_names = devices, axis_names


class PartitionSpec:
    def __init__(self, *partitions: Any) -> None:
        self.partitions = partitions


class NamedSharding:
    def __init__(self, mesh: Mesh, spec: PartitionSpec) -> None:
        self.mesh, self.spec = mesh, spec
