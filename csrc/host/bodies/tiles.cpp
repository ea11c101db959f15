// Whether AMX tiles may be used: permission by the kernel and by the user (tiles.h).
#include "host/bodies/tiles.h"

#if DISTMK_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace distmk::tiles {

namespace {

bool allowed = true;

#if DISTMK_TILES
// Asks once for the whole process. Linux refuses if a signal stack has no room for the registers.
bool request_permission() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;  // asm/prctl.h, since Linux 5.16
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

}  // namespace

bool available() {
#if DISTMK_TILES
  static const bool permitted = request_permission();
  return allowed && permitted;
#else
  return false;
#endif
}

}  // namespace distmk::tiles

// Whether task bodies may use tiles. To be called before a launch, because results differ in their last bits.
extern "C" void distmk_allow_tiles(int allow) { distmk::tiles::allowed = allow != 0; }
