"""Rung 2: the same kernels, launched asynchronously into a stream; the host waits once, at the end of the step.

python examples/launch_lab/02_async.py --elements 65536
"""

from lab.alone import main
from lab.chain import Chain, Step


def prepare(chain: Chain) -> Step:
    launches, gpu = chain.short_kernels(), chain.gpu

    def step() -> None:
        for launch in launches:
            launch()
        gpu.synchronize()

    return step


if __name__ == "__main__":
    main(__file__)
