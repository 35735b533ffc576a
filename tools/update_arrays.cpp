#include "tools/update_arrays.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sys/mman.h>

#include "base/error.h"
#include "base/units.h"

namespace terrace {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20U;

std::array<std::size_t, 5> element_bytes(const UpdateRun& run) {
  const std::size_t moment = bytes_of(moment_type(run.states));
  return {bytes_of(run.parameter_type), bytes_of(run.gradient_type), master_bytes(run.states, run.parameter_type),
          moment, moment};
}

}  // namespace

UpdateArrays::UpdateArrays(ElementType parameter_type, ElementType gradient_type, StateFormat states, std::size_t count)
    : run_{.parameter_type = parameter_type,
           .gradient_type = gradient_type,
           .states = states,
           .parameter = nullptr,
           .gradient = nullptr,
           .master = nullptr,
           .momentum = nullptr,
           .variance = nullptr,
           .count = count} {
  const auto room = [&](std::size_t bytes) { return (bytes * count + kPage - 1) / kPage * kPage; };
  // So that arrays do not all begin at one place of the caches.
  constexpr std::size_t apart = 5 * 4096 + 256;
  const auto all = element_bytes(run_);
  for (const std::size_t bytes : all) bytes_ += room(bytes) + kPage;
  void* const mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutOfMemory("bench: " + format_bytes(bytes_) + " to update cannot be had", "lower --parameters");
  }
  memory_ = static_cast<std::byte*>(mapped);
  ::madvise(mapped, bytes_, MADV_HUGEPAGE);
  std::size_t offset = 0;
  std::array<std::byte*, 5> arrays{};
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    arrays.at(i) = memory_ + offset + i * apart;
    std::memset(arrays.at(i), 0x3a, all.at(i) * count);  // small numbers in every type
    offset += room(all.at(i)) + kPage;
  }
  run_.parameter = arrays[0];
  run_.gradient = arrays[1];
  run_.master = all[2] == 0 ? nullptr : arrays[2];
  run_.momentum = arrays[3];
  run_.variance = arrays[4];
}

UpdateArrays::~UpdateArrays() { ::munmap(memory_, bytes_); }

std::size_t UpdateArrays::bytes_per_parameter() const noexcept {
  const auto [parameter, gradient, master, momentum, variance] = element_bytes(run_);
  return gradient + 2 * (parameter + master + momentum + variance);
}

void UpdateArrays::update(const UpdateThreads& threads) const {
  constexpr AdamWOptions options{
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  adamw_update(AdamWStep(options, 10), run_, threads);
}

}  // namespace terrace
