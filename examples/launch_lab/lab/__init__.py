"""The launch lab: what kernel launches cost on a GPU, and what each way to avoid them saves.

The rungs are the programs in the folder above. This package runs them:

    command, alone   entry points: `distmk lab`, and one rung by itself
    kernels, gpu     the rungs' programs and CUDA sources, compiled; a GPU to run them on
    workload         the work of every rung, and its float64 reference
    chain, run       measure one rung; measure all of them
    results, stats   the measurements: `LabReport`, saved as lab.json
    table, plots     a report as text and as pictures; `page` writes both into README.md
    advise           a report applied to a step of kernels
"""
