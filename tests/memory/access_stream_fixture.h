/// What the tests of the access stream build on: streams over memories of a few chunks, each of one granule.
#pragma once

#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "memory/access_stream.h"
#include "tests/memory/stream_world.h"

namespace terrace {

inline constexpr std::uint64_t KiB = 1024;
inline constexpr std::uint64_t granule = 16 * KiB;
inline constexpr auto device = Tier::device;
inline constexpr auto host = Tier::host;
inline constexpr auto nvme = Tier::nvme;
inline constexpr auto read = Access::read;
inline constexpr auto write = Access::write;

/// The text of the exception of the given type that `act` throws.
template <class Type, class Act>
std::string thrown_text(Act&& act) {
  try {
    act();
  } catch (const Type& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// Chunks of one granule.
class AccessStreamTest : public testing::Test {
 protected:
  static StreamSizes sizes(std::uint64_t device_chunks, std::uint64_t host_chunks, std::uint64_t nvme_chunks) {
    return {.granule_bytes = granule,
            .device_bytes = device_chunks * granule,
            .host_bytes = host_chunks * granule,
            .nvme_extents = nvme_chunks};
  }

  static ChunkId add(StreamWorld& world, Tier home, Kind kind = Kind::parameter) {
    return world.stream.add_chunk(kind, 0, granule, home);
  }
  static void write_at(StreamWorld& world, ChunkId chunk, Tier tier, std::uint64_t stamp) {
    const Pin pin = world.acquire(chunk, tier, write);
    write_pattern(pin, 0, tier, granule, stamp);
  }
  static bool reads_at(StreamWorld& world, ChunkId chunk, Tier tier, std::uint64_t stamp) {
    const Pin pin = world.acquire(chunk, tier, read);
    return holds_pattern(pin, 0, tier, granule, stamp);
  }
  /// Has every chunk that can leave the device do so.
  static void empty_device(StreamWorld& world) {
    const std::uint64_t bytes = world.device.budget().capacity() - world.device.budget().used(Kind::other);
    world.stream.allocate(bytes, Kind::other);
    world.stream.free(bytes, Kind::other);
  }
};

}  // namespace terrace
