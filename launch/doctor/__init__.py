"""`pd-cache doctor`: checks this machine and the cluster, explains what it finds, and names the repair.

There is one module per subject; each turns what it reads into findings: `libraries`, `rdma`, `memory`, `files`, `open_files`, `clock`,
`network` (ports, and which nodes reach which), `cluster` (what nodes report), `probe` (a real put and get to each segment). `examine`
calls them in order, `report` shows the outcome. docs/doctor.md explains each check. Nothing is changed, and whatever is put into the pool
is removed again.
"""

from launch.doctor.examine import examine
from launch.doctor.finding import DoctorReport, Finding, Verdict
from launch.doctor.report import as_json, report_table

__all__ = ["DoctorReport", "Finding", "Verdict", "as_json", "examine", "report_table"]
