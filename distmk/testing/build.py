"""The input of a test of task types: a function that makes the graph, and the contents of what its tasks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distmk.graph.graph import Graph
from distmk.graph.regions import Region

Inputs = Mapping[Region, Any]
"""Contents of regions, as arrays or tensors."""

Build = Callable[[np.random.Generator], "Graph | tuple[Graph, Inputs]"]
