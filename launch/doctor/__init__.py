"""`pd-cache doctor`: checks this machine and the cluster, explains what it finds, and tells the repair.

A module a subject; each turns what it reads into findings: `libraries`, `rdma`, `memory`, `files`, `clock`, `network` (ports, and who
reaches whom), `cluster` (what nodes say), `probe` (a real put and get to each segment). `examine` calls them in order, `report`
shows the outcome. docs/doctor.md tells what each check means. Nothing is changed: of what it puts into the pool nothing stays.
"""

from launch.doctor.examine import examine
from launch.doctor.finding import Finding, Report, Verdict
from launch.doctor.report import as_json, report_table

__all__ = ["Finding", "Report", "Verdict", "as_json", "examine", "report_table"]
