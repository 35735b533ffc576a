/// Managed buffers that a block writes, as they were before: it must see them so when it runs again, and must not
/// change them twice. Running statistics of batch norm are such buffers; they are small.
///
/// One thread at a time.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace terrace {

/// Whether a tensor is, or shares the bytes of, a buffer of a managed module.
bool is_managed_buffer(const at::Tensor& tensor) noexcept;

class BufferSnapshots {
 public:
  /// Copies the buffer's bytes, when it hears of it for the first time.
  void before_write(const at::Tensor& buffer);

 private:
  friend class BufferScope;

  struct Snapshot {
    c10::Storage storage;
    std::vector<std::byte> bytes;
  };
  std::vector<Snapshot> snapshots_;
};

/// The buffers hold what was copied when this is made, and afterwards what they held before. Versions stay.
class BufferScope {
 public:
  explicit BufferScope(const BufferSnapshots& snapshots);
  ~BufferScope();
  BufferScope(const BufferScope&) = delete;
  BufferScope& operator=(const BufferScope&) = delete;

 private:
  void put_back() noexcept;

  std::vector<BufferSnapshots::Snapshot> now_;
};

}  // namespace terrace
