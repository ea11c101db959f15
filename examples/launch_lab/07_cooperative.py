"""Rung 7: one cooperative launch with a grid barrier (grid.sync()) between the phases, so that data may cross blocks.

python examples/launch_lab/07_cooperative.py --elements 65536
"""

from distmk.errors import UsageError
from lab.alone import main
from lab.chain import Chain, Step


def prepare(chain: Chain) -> Step:
    gpu = chain.gpu
    if not gpu.cooperative:
        raise UsageError("this GPU has no cooperative launch")
    kernel = gpu.kernel("cooperative.cu", "chain_cooperative")
    num_blocks = min(gpu.num_resident(kernel), chain.num_blocks)  # a grid barrier needs all blocks resident
    arguments = (chain.x, chain.num, 0, chain.num_kernels, chain.stamp())
    launch = gpu.launch(kernel, num_blocks, *arguments, cooperative=True)

    def step() -> None:
        launch()
        gpu.synchronize()

    return step


def prepare_fallback(chain: Chain) -> Step:
    """Without cooperative launch: one launch per phase, and a wait of the host in place of each barrier."""
    gpu = chain.gpu
    kernel = gpu.kernel("cooperative.cu", "chain_cooperative")
    num_blocks = min(gpu.num_resident(kernel), chain.num_blocks)
    launches = [
        gpu.launch(kernel, num_blocks, chain.x, chain.num, phase, phase + 1, chain.stamp())
        for phase in range(chain.num_kernels)
    ]

    def step() -> None:
        for launch in launches:
            launch()
            gpu.synchronize()

    return step


if __name__ == "__main__":
    main(__file__)
