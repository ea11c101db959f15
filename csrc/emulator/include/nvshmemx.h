// Part of NVSHMEM's interface, for the emulator: nvshmem.h has all of it.
#pragma once
