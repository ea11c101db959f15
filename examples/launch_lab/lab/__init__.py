"""The launch lab: what launching kernels costs on this GPU, and what each way out of it brings.

The rungs are programs of their own in examples/launch_lab. This package gives them a GPU, the work and its reference
(`gpu`, `workload`), measures them (`run`), and says what follows (`table`, `plots`, `advice`): rungs -> measurements ->
`results.LabReport` -> table, lab.json, plots -> advice.
"""
