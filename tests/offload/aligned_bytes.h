/// Memory for transfers of direct files, which need whole pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <random>
#include <vector>

namespace terrace {

template <class T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{4096};

  PageAllocator() = default;
  template <class Other>
  PageAllocator(const PageAllocator<Other>&) noexcept {}  // NOLINT(google-explicit-constructor): allocators convert

  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* memory, std::size_t) noexcept { ::operator delete(memory, kAlignment); }
  bool operator==(const PageAllocator&) const = default;
};

using AlignedBytes = std::vector<std::byte, PageAllocator<std::byte>>;

/// Bytes that only this seed gives.
inline AlignedBytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  AlignedBytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0xff);
  return bytes;
}

}  // namespace terrace
