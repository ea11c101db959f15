"""What ran when: records of all ranks' tasks on one clock, as a timeline for Perfetto and as tables."""

from distmk.trace.chrome import check_writable, read, write
from distmk.trace.collect import capacity_for, collect
from distmk.trace.record import ROW, Trace
from distmk.trace.report import report

__all__ = ["ROW", "Trace", "capacity_for", "check_writable", "collect", "read", "report", "write"]
