"""Rung 6: one launch of as many blocks as are resident at once. For every kernel, each block strides over the elements.

python examples/launch_lab/06_persistent.py --elements 65536
"""

from lab.alone import main
from lab.chain import Chain, Step


def prepare(chain: Chain) -> Step:
    gpu = chain.gpu
    kernel = gpu.kernel("persistent.cu", "chain_persistent")
    num_blocks = min(gpu.num_resident(kernel), chain.num_blocks)
    launch = gpu.launch(kernel, num_blocks, chain.x, chain.num, chain.num_kernels, chain.stamp())

    def step() -> None:
        launch()
        gpu.synchronize()

    return step


if __name__ == "__main__":
    main(__file__)
