#include "offload/processors.h"

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <new>

#include "base/fallback.h"
#include "offload/errno_text.h"
#include "offload/hwloc_handle.h"

namespace terrace {
namespace {

/// Binding needs one, and nothing of what it shows. Never destroyed: threads may be bound while the process exits.
hwloc_topology_t binding_topology() {
  static auto& topology = *new HwlocTopology(load_hwloc_without_devices());
  if (!topology) errno = ENOSYS;
  return topology.get();
}

HwlocBitmap bitmap_of(const Processors& processors) {
  HwlocBitmap bitmap(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
  if (!bitmap) throw std::bad_alloc();
  for (const unsigned number : processors) {
    if (hwloc_bitmap_set(bitmap.get(), number) != 0) throw std::bad_alloc();
  }
  return bitmap;
}

}  // namespace

std::string ranges_of(const Processors& processors) {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, bitmap_of(processors).get()) < 0) throw std::bad_alloc();
  const std::unique_ptr<char, decltype(&std::free)> owner(text, &std::free);
  return text;
}

Processors processors_of_this_thread() noexcept {
  try {
    const HwlocBitmap bitmap(hwloc_bitmap_alloc(), &hwloc_bitmap_free);
    hwloc_topology_t topology = binding_topology();
    if (topology == nullptr || !bitmap || hwloc_get_cpubind(topology, bitmap.get(), HWLOC_CPUBIND_THREAD) != 0) {
      return {};
    }
    return processors_in(bitmap.get());
  } catch (...) {
    return {};
  }
}

void bind_this_thread(const Processors& processors) noexcept {
  if (processors.empty()) return;
  try {
    hwloc_topology_t topology = binding_topology();
    if (topology != nullptr && hwloc_set_cpubind(topology, bitmap_of(processors).get(), HWLOC_CPUBIND_THREAD) == 0) {
      return;
    }
    const std::string reason = errno_text(errno);
    note_fallback("threads: updates and transfers may run on cores that computation has",
                  "binding one to hardware threads " + ranges_of(processors) + " failed: " + reason);
  } catch (...) {
    // Without memory it stays where it was, and nobody can be told.
  }
}

BoundThread::BoundThread(const Processors& processors) noexcept {
  if (processors.empty()) return;
  before_ = processors_of_this_thread();
  // Where it could not be put back it is left alone.
  if (!before_.empty()) bind_this_thread(processors);
}

}  // namespace terrace
