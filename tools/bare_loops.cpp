#include "tools/bare_loops.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <xxhash.h>

#include "base/clock.h"
#include "optimizer/adamw.h"

namespace terrace {
namespace {

constexpr std::size_t kBufferBytes = std::size_t{64} << 20U;
constexpr std::size_t kBlockBytes = std::size_t{1} << 20U;
constexpr std::size_t kUpdateElements = std::size_t{4} << 20U;

/// Calls `part(offset, size)` until parts of at most `most`, each within a buffer, add up to `total`.
template <class Part>
void in_parts(std::uint64_t total, std::size_t buffer, std::size_t most, Part&& part) {
  std::size_t offset = 0;
  while (total > 0) {
    const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(total, std::min(most, buffer - offset)));
    part(offset, size);
    total -= size;
    offset = (offset + size) % buffer;
  }
}

AdamWStep some_step() {
  return {{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1}, 1};
}

}  // namespace

BareLoops::BareLoops() : from_(kBufferBytes, std::byte{1}), to_(kBufferBytes, std::byte{2}) {
  for (auto& operand : update_) operand.assign(kUpdateElements, 1e-3F);
}

double BareLoops::copy_seconds(std::uint64_t bytes) {
  const Stopwatch watch;
  in_parts(bytes, kBufferBytes, kBlockBytes, [&](std::size_t offset, std::size_t size) {
    std::memcpy(to_.data() + offset, from_.data() + offset, size);
  });
  return watch.elapsed_seconds();
}

double BareLoops::checksum_seconds(std::uint64_t bytes) {
  const Stopwatch watch;
  in_parts(bytes, kBufferBytes, kBlockBytes,
           [&](std::size_t offset, std::size_t size) { used_ += XXH3_64bits(from_.data() + offset, size); });
  return watch.elapsed_seconds();
}

double BareLoops::update_seconds(std::uint64_t elements) {
  const AdamWStep step = some_step();
  const UpdateRun run{.parameter_type = ElementType::float32,
                      .gradient_type = ElementType::float32,
                      .states = StateFormat::float32,
                      .parameter = update_[0].data(),
                      .gradient = update_[1].data(),
                      .master = nullptr,
                      .momentum = update_[2].data(),
                      .variance = update_[3].data(),
                      .count = kUpdateElements};
  const Stopwatch watch;
  in_parts(elements, kUpdateElements, kBlockBytes,
           [&](std::size_t offset, std::size_t size) { adamw_update(step, part_of(run, offset, size)); });
  return watch.elapsed_seconds();
}

double BareLoops::fill_seconds(std::uint64_t bytes) {
  const Stopwatch watch;
  in_parts(bytes, kBufferBytes, kBlockBytes, [&](std::size_t offset, std::size_t size) {
    std::memset(to_.data() + offset, static_cast<int>(used_++ % 256), size);
  });
  return watch.elapsed_seconds();
}

double BareLoops::link_seconds(std::uint64_t bytes, double bytes_per_second) {
  const Stopwatch watch;
  const auto start_ns = static_cast<double>(monotonic_ns());
  double carried = 0;
  in_parts(bytes, kBufferBytes, kBlockBytes, [&](std::size_t offset, std::size_t size) {
    std::memcpy(to_.data() + offset, from_.data() + offset, size);
    carried += static_cast<double>(size);
    sleep_until(static_cast<std::int64_t>(start_ns + carried / bytes_per_second * 1e9));
  });
  return watch.elapsed_seconds();
}

double BareLoops::memory_rate() {
  const auto cores = std::max<std::size_t>(std::thread::hardware_concurrency(), 1);
  const std::size_t share = kBufferBytes / cores;
  constexpr int rounds = 4;
  const auto copy = [&](std::size_t core) {
    for (int round = 0; round < rounds; ++round) {
      std::memcpy(to_.data() + core * share, from_.data() + core * share, share);
    }
  };
  const Stopwatch watch;
  std::vector<std::jthread> others;
  for (std::size_t core = 1; core < cores; ++core) others.emplace_back(copy, core);
  copy(0);
  others.clear();  // waits for them
  return 2.0 * rounds * static_cast<double>(share * cores) / watch.elapsed_seconds();
}

}  // namespace terrace
