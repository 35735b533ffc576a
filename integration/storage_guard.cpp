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

// The address alone: other threads read context and deleter meanwhile, to find out whether the storage is managed.
template <c10::detail::UniqueVoidPtr c10::DataPtr::*pointer, void* c10::detail::UniqueVoidPtr::*address>
struct ReachAddress {
  friend void set_address(c10::DataPtr& data, void* to) { (data.*pointer).*address = to; }
};
void set_address(c10::DataPtr& data, void* to);
template struct ReachAddress<&c10::DataPtr::ptr_, &c10::detail::UniqueVoidPtr::data_>;

}  // namespace

void close_storage(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void close_storage(c10::StorageImpl& storage) {
  set_throws_on_access(storage, true);
  set_address(storage._mutable_data_ptr_no_checks(), nullptr);
}

void open_storage(c10::StorageImpl& storage, void* data) {
  set_address(storage._mutable_data_ptr_no_checks(), data);
  set_throws_on_access(storage, false);
}

void reset_storage(c10::StorageImpl& storage, c10::DataPtr data) {
  storage._mutable_data_ptr_no_checks().release_context();
  set_throws_on_access(storage, false);
  storage.set_data_ptr_noswap(std::move(data));
}

}  // namespace terrace
