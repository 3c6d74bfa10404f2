"""What the nodes' metrics say over time: samples, then what they mean, then rates. Pure: the text and the time come from the caller.

`pd-cache top` and the proxy's `/ui` stand on this, and differ only in how they ask nodes and how they draw.
"""

from launch.figures.rates import LONGEST_WINDOW_S, NodeHistory, Rates
from launch.figures.readings import NodeReading, read_node
from launch.figures.samples import Samples, read_samples, total

__all__ = ["LONGEST_WINDOW_S", "NodeHistory", "NodeReading", "Rates", "Samples", "read_node", "read_samples", "total"]
