#include "tools/update_arrays.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sys/mman.h>

#include "base/error.h"
#include "base/units.h"

// The loop that computes nothing is compiled for the same registers as the kernels are.
#if defined(__x86_64__) && defined(__GNUC__)
#define TERRACE_FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TERRACE_FOR_EACH_WIDTH
#endif

namespace terrace {
namespace {

constexpr std::size_t kPage = std::size_t{2} << 20U;
constexpr std::size_t kPart = update_part_elements;
constexpr std::size_t kGroup = 64;  // elements, of which each array is read and written in turn

using Word = std::uint64_t;

/// Reads and writes `n` words; what is added is zero, which the compiler does not know.
template <std::size_t n>
inline void touch(Word* words, Word added) {
  for (std::size_t i = 0; i < n; ++i) words[i] ^= added;
}

template <std::size_t n>
inline Word read(const Word* words) {
  Word all = 0;
  for (std::size_t i = 0; i < n; ++i) all |= words[i];
  return all;
}

struct Arrays {
  Word *parameter, *master, *momentum, *variance;
  const Word* gradient;
};

// Words of a group in arrays of 2 and of 4 bytes an element.
constexpr std::size_t kShort = kGroup * 2 / sizeof(Word);
constexpr std::size_t kLong = kGroup * 4 / sizeof(Word);

/// By words of a group in the parameters and gradients, the masters, and the moments.
template <std::size_t parameter, std::size_t master, std::size_t moment>
inline __attribute__((always_inline)) void pass(Arrays at, std::size_t groups, Word mask) {
  for (std::size_t i = 0; i < groups; ++i) {
    const Word nothing = read<parameter>(at.gradient + i * parameter) & mask;
    touch<parameter>(at.parameter + i * parameter, nothing);
    if constexpr (master != 0) touch<master>(at.master + i * master, nothing);
    touch<moment>(at.momentum + i * moment, nothing);
    touch<moment>(at.variance + i * moment, nothing);
  }
}

TERRACE_FOR_EACH_WIDTH void pass_long(Arrays at, std::size_t groups, Word mask) {
  pass<kLong, 0, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_long_short(Arrays at, std::size_t groups, Word mask) {
  pass<kLong, 0, kShort>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_with_master(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kLong, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kShort, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split_short(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kShort, kShort>(at, groups, mask);
}

using Pass = void (*)(Arrays, std::size_t, Word);

Pass pass_of(const UpdateRun& run) {
  const bool short_moments = moment_type(run.states) == ElementType::bfloat16;
  if (run.parameter_type == ElementType::float32) return short_moments ? pass_long_short : pass_long;
  if (run.states == StateFormat::float32) return pass_with_master;
  return short_moments ? pass_split_short : pass_split;
}

std::array<std::size_t, 5> element_bytes(const UpdateRun& run) {
  const std::size_t moment = bytes_of(moment_type(run.states));
  return {bytes_of(run.parameter_type), bytes_of(run.gradient_type), master_bytes(run.states, run.parameter_type),
          moment, moment};
}

volatile Word no_bits = 0;

}  // namespace

UpdateArrays::UpdateArrays(ElementType parameter_type, StateFormat states, std::size_t count)
    : run_{.parameter_type = parameter_type,
           .gradient_type = parameter_type,
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

void UpdateArrays::pass_over(const UpdateThreads& threads) const {
  const Pass pass = pass_of(run_);
  const Word mask = no_bits;
  threads.for_each((run_.count + kPart - 1) / kPart, [&](std::size_t i) {
    const UpdateRun part = part_of(run_, i * kPart, std::min(kPart, run_.count - i * kPart));
    pass({.parameter = static_cast<Word*>(part.parameter),
          .master = static_cast<Word*>(part.master),
          .momentum = static_cast<Word*>(part.momentum),
          .variance = static_cast<Word*>(part.variance),
          .gradient = static_cast<const Word*>(part.gradient)},
         part.count / kGroup, mask);
  });
}

}  // namespace terrace
