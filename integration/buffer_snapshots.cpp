#include "integration/buffer_snapshots.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "integration/byte_copies.h"
#include "integration/program_memory.h"

namespace terrace {
namespace {

std::vector<std::byte> bytes_of(const c10::Storage& storage) {
  std::vector<std::byte> bytes(storage.nbytes());
  copy_bytes(bytes.data(), c10::DeviceType::CPU, storage.data(), storage.device(), bytes.size());
  return bytes;
}

/// A buffer that was resized in between keeps what it holds.
void set_bytes(const c10::Storage& storage, const std::vector<std::byte>& bytes) {
  if (!bytes.empty() && storage.nbytes() == bytes.size()) {
    copy_bytes(storage.mutable_data(), storage.device(), bytes.data(), c10::DeviceType::CPU, bytes.size());
  }
}

}  // namespace

bool is_managed_buffer(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.has_storage()) {
    return false;
  }
  // With checks, the pointer of a managed parameter throws.
  return kind_of(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()) == Kind::buffer;
}

void BufferSnapshots::before_write(const at::Tensor& buffer) {
  const c10::Storage& storage = buffer.storage();
  const bool known = std::any_of(snapshots_.begin(), snapshots_.end(), [&](const Snapshot& snapshot) {
    return snapshot.storage.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
  });
  if (!known) {
    snapshots_.push_back({storage, bytes_of(storage)});
  }
}

BufferScope::BufferScope(const BufferSnapshots& snapshots) {
  for (const auto& [storage, bytes] : snapshots.snapshots_) {
    now_.push_back({storage, bytes_of(storage)});
  }
  try {
    for (const auto& [storage, bytes] : snapshots.snapshots_) {
      set_bytes(storage, bytes);
    }
  } catch (...) {
    put_back();
    throw;
  }
}

BufferScope::~BufferScope() { put_back(); }

void BufferScope::put_back() noexcept {
  for (const auto& [storage, bytes] : now_) {
    try {
      set_bytes(storage, bytes);
    } catch (const std::exception& error) {  // a device that copies nothing fails the program's next op, too
      log(LogLevel::error, std::string("block: a buffer could not be put back: ") + error.what());
    }
  }
}

}  // namespace terrace
