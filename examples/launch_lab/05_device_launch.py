"""Rung 5: one kernel launches the others on the GPU (dynamic parallelism).

python examples/launch_lab/05_device_launch.py --elements 65536
"""

from lab.alone import main
from lab.chain import Chain, Step
from lab.gpu import NUM_THREADS


def prepare(chain: Chain) -> Step:
    gpu = chain.gpu
    kernel = gpu.kernel("device_launch.cu", "chain_parent")
    sizes = (chain.num, chain.num_kernels, chain.num_blocks, NUM_THREADS)
    launch = gpu.launch(kernel, 1, chain.x, *sizes, chain.stamp(), chain.status)

    def step() -> None:
        launch()
        gpu.synchronize()  # the parent ends after all its children

    return step


if __name__ == "__main__":
    main(__file__)
