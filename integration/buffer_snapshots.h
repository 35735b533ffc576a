/// Managed buffers that a block writes, as they were before: it must see them so when it runs again, and must not
/// change them twice. Running statistics of batch norm are such buffers; they are small. With their bytes goes their
/// version: what the block saves for backward must have the one that it had at first.
///
/// One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace terrace {

/// Whether a tensor is, or shares the bytes of, a buffer of a managed module.
bool is_managed_buffer(const at::Tensor& tensor) noexcept;

class BufferSnapshots {
 public:
  /// Copies the buffer's bytes and notes its version, when it hears of its storage for the first time.
  void before_write(const at::Tensor& buffer);

 private:
  friend class BufferScope;

  struct Snapshot {
    c10::Storage storage;
    std::vector<std::byte> bytes;
    c10::VariableVersion version_counter;  ///< of the tensor; none where it is an inference tensor
    std::uint32_t version = 0;

    /// The same storage and counter, as they are now.
    Snapshot again() const;
    void restore() const;
  };
  std::vector<Snapshot> snapshots_;
};

/// The buffers are what they were at the time of the snapshots when this is made, and afterwards what they were before:
/// those too of which snapshots were only taken meanwhile, as where a block that has not ended yet runs again for a
/// backward of its own.
class BufferScope {
 public:
  explicit BufferScope(const BufferSnapshots& snapshots);
  ~BufferScope();
  BufferScope(const BufferScope&) = delete;
  BufferScope& operator=(const BufferScope&) = delete;

 private:
  void put_back() noexcept;

  const BufferSnapshots& snapshots_;
  std::vector<BufferSnapshots::Snapshot> now_;  ///< of the first of them, when this was made
};

}  // namespace terrace
