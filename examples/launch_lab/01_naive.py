"""Rung 1: many small kernels; the host waits for each. The baseline of the other rungs.

python examples/launch_lab/01_naive.py --elements 65536
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
