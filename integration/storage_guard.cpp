#include "integration/storage_guard.h"

#include <utility>

namespace terrace {
namespace {

// An explicit instantiation may name a private member, and a friend that it defines may use it: the way
// that the language leaves to reach a flag without a setter.
template <bool c10::StorageImpl::*flag>
struct Reach {
  friend void set_throws_on_access(c10::StorageImpl& storage, bool throws) { storage.*flag = throws; }
};
void set_throws_on_access(c10::StorageImpl& storage, bool throws);
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// The storage's pointer with another address, its context neither run nor lost.
c10::DataPtr readdressed(c10::StorageImpl& storage, void* data) {
  c10::DataPtr& old = storage._mutable_data_ptr_no_checks();
  const auto deleter = old.get_deleter();
  const auto device = old.device();
  return {data, old.release_context(), deleter, device};
}

}  // namespace

void close_storage(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void close_storage(c10::StorageImpl& storage) {
  set_throws_on_access(storage, true);
  storage.set_data_ptr_noswap(readdressed(storage, nullptr));
}

void open_storage(c10::StorageImpl& storage, void* data) {
  set_throws_on_access(storage, false);
  storage.set_data_ptr_noswap(readdressed(storage, data));
}

void reset_storage(c10::StorageImpl& storage, c10::DataPtr data) {
  storage._mutable_data_ptr_no_checks().release_context();
  set_throws_on_access(storage, false);
  storage.set_data_ptr_noswap(std::move(data));
}

}  // namespace terrace
