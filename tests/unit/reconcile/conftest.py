"""A simulated world, and a node in it whose threads the test steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.reconcile.controlled_node import Node
from tests.unit.simulation.world import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    with world.running():
        yield world


@pytest.fixture
def node(world: World) -> Node:
    return Node(world)
