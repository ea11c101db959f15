"""Rung 4: the kernels of the step fused into one, which keeps each element in a register.

python examples/launch_lab/04_fused.py --elements 65536
"""

from lab.alone import main
from lab.chain import Chain, Step


def prepare(chain: Chain) -> Step:
    gpu = chain.gpu
    kernel = gpu.kernel("fused.cu", "chain_fused")
    launch = gpu.launch(kernel, chain.num_blocks, chain.x, chain.num, chain.num_kernels, chain.stamp())

    def step() -> None:
        launch()
        gpu.synchronize()

    return step


if __name__ == "__main__":
    main(__file__)
