#include "tools/random_bytes.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>

namespace terrace {

void fill_with_random_bytes(std::span<std::byte> memory) {
  std::mt19937_64 generator(7);
  const std::span words(reinterpret_cast<std::uint64_t*>(memory.data()), memory.size() / sizeof(std::uint64_t));
  std::generate(words.begin(), words.end(), std::ref(generator));
}

}  // namespace terrace
