"""The board's power, from NVIDIA's management library; it only reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Of the GPU at `bus_id`. Measures nothing (None) where nvidia-ml-py is not installed or the board does not tell."""

    def __init__(self, bus_id: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._nvml = pynvml
        except Exception:  # of the import or the library, which has many: without it there is no power to report
            return

    @property
    def driver_version(self) -> str:
        if self._nvml is None:
            return "unknown"
        version = self._nvml.nvmlSystemGetDriverVersion()
        return str(version.decode() if isinstance(version, bytes) else version)

    def watts(self, run: Callable[[], None]) -> float | None:
        """Mean power while `run` runs, from the board's own count of energy. Takes seconds to be exact."""
        if self._nvml is None:
            run()
            return None
        began, energy = time.perf_counter(), self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)  # mJ
        run()
        spent_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - energy
        return float(spent_mj / 1e3 / (time.perf_counter() - began))
