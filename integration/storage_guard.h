/// Opens and closes a LibTorch storage: while it is closed, touching its bytes throws with a message.
///
/// LibTorch can close a storage for good (`release_data_and_set_meta_custom_data_ptr_error_msg_`) but has no
/// public way back; the flag and the address behind it are reached here, in one place. Opening and closing change
/// nothing else, so that other threads may look at the pointer's context and deleter meanwhile.
#pragma once

#include <string>

#include <c10/core/StorageImpl.h>

namespace terrace {

/// Sets what access throws while the storage is closed, and closes it.
void close_storage(c10::StorageImpl& storage, std::string message);
/// Closes it again, with the message it has. The address is forgotten.
void close_storage(c10::StorageImpl& storage);
/// Gives access to `data`. Context and deleter of the storage's pointer stay what they are.
void open_storage(c10::StorageImpl& storage, void* data);
/// Replaces pointer, context and deleter without running the old deleter, and gives access.
void reset_storage(c10::StorageImpl& storage, c10::DataPtr data);

}  // namespace terrace
