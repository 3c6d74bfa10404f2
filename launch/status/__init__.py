"""`pd-cache status`: the nodes that discovery finds and what each is doing, asked of each, in one table.

Cache servers on this machine are asked over their own connection, all others for `/health` and `/metrics`. A node that does not answer
gets a row that says so. Beside the rows there is what no node knows alone: whether discovery answers, and which nodes will never share
a hit with the others.
"""

from launch.status.look import cluster_status, read_metrics, watch
from launch.status.node_status import ClusterStatus, NodeStatus
from launch.status.table import as_json, status_table

__all__ = ["ClusterStatus", "NodeStatus", "as_json", "cluster_status", "read_metrics", "status_table", "watch"]
