"""Board power, read from NVIDIA's management library (NVML)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Power meter of the GPU at `bus_id`. It measures None if nvidia-ml-py is not installed or the board has no counter."""

    def __init__(self, bus_id: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._nvml = pynvml
        except Exception:  # the library has many error types, and power is optional
            return

    @property
    def driver_version(self) -> str:
        if self._nvml is None:
            return "unknown"
        version = self._nvml.nvmlSystemGetDriverVersion()
        return str(version.decode() if isinstance(version, bytes) else version)

    def watts(self, run: Callable[[], None]) -> float | None:
        """Mean power in W while `run` runs, from the board's energy counter; exact only if `run` takes seconds."""
        if self._nvml is None:
            run()
            return None
        began, energy = time.perf_counter(), self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)  # mJ
        run()
        spent_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - energy
        return float(spent_mj / 1e3 / (time.perf_counter() - began))
