"""Traces: a record of every task of all ranks on one clock, as a timeline for Perfetto and as tables.

`LLM(..., trace_iterations=N).trace` and `Session.run_traced` return a `Trace`. To trace a launch made by hand:

    running = session.launch(LaunchSpec(num_iterations=100, trace_capacity=session.room_for(8)))
    for _ in running:
        pass
    trace = running.trace(8)  # on all ranks; a Trace on rank 0
    print(report(trace))
    write(trace, Path("trace.json"))

`Trace.rows` is an array of `ROW`, for any other statistic. `Launch.trace()` returns the raw records of this rank's
workers and schedulers; `collect` makes a trace from the records of all ranks.
"""

from distmk.trace.chrome import check_writable, write
from distmk.trace.chrome_reader import read
from distmk.trace.collect import capacity_for, collect
from distmk.trace.record import ROW, Trace
from distmk.trace.report import report

__all__ = ["ROW", "Trace", "capacity_for", "check_writable", "collect", "read", "report", "write"]
