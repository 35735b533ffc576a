#include "tools/update_traffic.h"

#include <algorithm>
#include <cstdint>

#include "optimizer/adamw.h"

// The loop that computes nothing is compiled for the same registers as the kernels are.
#if defined(__x86_64__) && defined(__GNUC__)
#define TERRACE_FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TERRACE_FOR_EACH_WIDTH
#endif

namespace terrace {
namespace {

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

/// By words of a group in the parameters, the gradients, the masters, and the moments.
template <std::size_t parameter, std::size_t gradient, std::size_t master, std::size_t moment>
inline __attribute__((always_inline)) void pass(Arrays at, std::size_t groups, Word mask) {
  for (std::size_t i = 0; i < groups; ++i) {
    const Word nothing = read<gradient>(at.gradient + i * gradient) & mask;
    touch<parameter>(at.parameter + i * parameter, nothing);
    if constexpr (master != 0) touch<master>(at.master + i * master, nothing);
    touch<moment>(at.momentum + i * moment, nothing);
    touch<moment>(at.variance + i * moment, nothing);
  }
}

TERRACE_FOR_EACH_WIDTH void pass_long(Arrays at, std::size_t groups, Word mask) {
  pass<kLong, kLong, 0, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_long_short(Arrays at, std::size_t groups, Word mask) {
  pass<kLong, kLong, 0, kShort>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_with_master(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kShort, kLong, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kShort, kShort, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split_short(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kShort, kShort, kShort>(at, groups, mask);
}
// Beside gradients of 4 bytes.
TERRACE_FOR_EACH_WIDTH void pass_with_master_long(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kLong, kLong, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split_long(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kLong, kShort, kLong>(at, groups, mask);
}
TERRACE_FOR_EACH_WIDTH void pass_split_short_long(Arrays at, std::size_t groups, Word mask) {
  pass<kShort, kLong, kShort, kShort>(at, groups, mask);
}

using Pass = void (*)(Arrays, std::size_t, Word);

Pass pass_of(const UpdateRun& run) {
  const bool short_moments = moment_type(run.states) == ElementType::bfloat16;
  if (run.parameter_type == ElementType::float32) return short_moments ? pass_long_short : pass_long;
  const bool long_gradients = bytes_of(run.gradient_type) == 4;
  if (run.states == StateFormat::float32) return long_gradients ? pass_with_master_long : pass_with_master;
  if (short_moments) return long_gradients ? pass_split_short_long : pass_split_short;
  return long_gradients ? pass_split_long : pass_split;
}

volatile Word no_bits = 0;

}  // namespace

void pass_over(const UpdateRun& run, const UpdateThreads& threads) {
  const Pass pass = pass_of(run);
  const Word mask = no_bits;
  threads.for_each((run.count + kPart - 1) / kPart, [&](std::size_t i) {
    const UpdateRun part = part_of(run, i * kPart, std::min(kPart, run.count - i * kPart));
    pass({.parameter = static_cast<Word*>(part.parameter),
          .master = static_cast<Word*>(part.master),
          .momentum = static_cast<Word*>(part.momentum),
          .variance = static_cast<Word*>(part.variance),
          .gradient = static_cast<const Word*>(part.gradient)},
         part.count / kGroup, mask);
  });
}

}  // namespace terrace
