#include "integration/buffer_snapshots.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <torch/csrc/autograd/variable.h>

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

c10::VariableVersion version_counter_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? c10::VariableVersion() : torch::autograd::impl::version_counter(tensor);
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
    const Snapshot counted{storage, {}, version_counter_of(buffer)};
    snapshots_.push_back(counted.again());
  }
}

BufferSnapshots::Snapshot BufferSnapshots::Snapshot::again() const {
  return {storage, bytes_of(storage), version_counter,
          version_counter.enabled() ? version_counter.current_version() : 0};
}

void BufferSnapshots::Snapshot::restore() const {
  set_bytes(storage, bytes);
  if (version_counter.enabled()) {
    c10::VariableVersion counter = version_counter;  // the same one
    counter.set_version(version);
  }
}

BufferScope::BufferScope(const BufferSnapshots& snapshots) : snapshots_(snapshots) {
  for (const auto& snapshot : snapshots.snapshots_) {
    now_.push_back(snapshot.again());
  }
  try {
    for (const auto& snapshot : snapshots.snapshots_) {
      snapshot.restore();
    }
  } catch (...) {
    put_back();
    throw;
  }
}

BufferScope::~BufferScope() { put_back(); }

void BufferScope::put_back() noexcept {
  const std::vector<BufferSnapshots::Snapshot>& all = snapshots_.snapshots_;
  for (std::size_t i = 0; i < all.size(); ++i) {
    try {
      (i < now_.size() ? now_ : all)[i].restore();
    } catch (const std::exception& error) {  // a device that copies nothing fails the program's next op, too
      log(LogLevel::error, std::string("block: a buffer could not be put back: ") + error.what());
    }
  }
}

}  // namespace terrace
