"""Rung 3: the step, captured once as a CUDA graph; one call replays it.

python examples/launch_lab/03_graph.py --elements 65536
"""

from lab.alone import main
from lab.chain import Chain, Step


def prepare(chain: Chain) -> Step:
    launches, gpu = chain.short_kernels(), chain.gpu

    def enqueue() -> None:
        for launch in launches:
            launch()

    replay = gpu.capture(enqueue)  # with fixed grids and arguments: another shape needs another graph

    def step() -> None:
        replay()
        gpu.synchronize()

    return step


if __name__ == "__main__":
    main(__file__)
