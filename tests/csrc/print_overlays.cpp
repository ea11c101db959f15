// Prints where each overlay of a worker's shared memory lies: name, first byte, size and phases (test_overlays.py).
#include <cstdio>

#include "device/core/shared.cuh"

using namespace distmk;

// Bytes 8 to 23 and 16 to 31 of the work memory, and the bytes after them.
constexpr OverlayPlace ONE = {regions::WORK, 8, 16, GEMV | SLAB}, OTHER = {regions::BODY, 16, 16, SLAB},
                       LATER = {regions::BODY, 16, 16, HEAD}, BEHIND = {regions::WORK, 24, 16, SLAB};
static_assert(ONE.collides_with(OTHER) && OTHER.collides_with(ONE));
static_assert(!ONE.collides_with(LATER) && !ONE.collides_with(BEHIND));
static_assert(ONE.fits() && !OverlayPlace{regions::WORK, 8, WORK_BYTES, GEMV}.fits());

int main() {
#define DISTMK_PRINT(name, region, from, size, when) \
  std::printf("%s\t%u\t%u\t%s\n", #name, place_of(Overlay::name).first_byte(), overlay_bytes(Overlay::name), #when);
  DISTMK_OVERLAYS(DISTMK_PRINT)
#undef DISTMK_PRINT
}
