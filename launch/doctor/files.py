"""Files that the cluster's file names: models, keys, passwords and certificates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch.doctor.finding import Finding, broken, ok
from pd_cache.cluster import ClusterConfig, Node
from pd_cache.cluster.document import shown_path
from pd_cache.cluster.machine import file_problems


def file_findings(config: ClusterConfig, nodes: Sequence[Node]) -> Iterator[Finding]:
    """Checks whether the processes of `nodes`, those of this machine, can read the files that they need."""
    check = "files.readable"
    problems = list(file_problems(config, nodes))
    if not problems:
        yield ok(check, "every file that the nodes of this host need can be read")
    for problem in problems:
        yield broken(
            check, problem.message, shown_path(problem.path),
            why="`launch`, `up` and `config check` refuse the file on this machine",
            repair="put the file there and let this user read it, or correct its path in the cluster's file",
        )  # fmt: skip
