/// The storages that a value holds: those of its tensors, and of a sparse tensor, which has none, those of its parts.
#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/ivalue.h>

namespace terrace {

/// Calls `visit` with each `c10::StorageImpl&`.
template <class Visit>
void visit_storages(const c10::TensorImpl& tensor, const Visit& visit) {
  if (c10::StorageImpl* const storage = tensor.unsafe_storage().unsafeGetStorageImpl()) {
    visit(*storage);
  } else if (tensor.is_sparse()) {
    if (const auto* const sparse = dynamic_cast<const at::SparseTensorImpl*>(&tensor)) {  // or it wraps one
      visit_storages(*sparse->indices().unsafeGetTensorImpl(), visit);
      visit_storages(*sparse->values().unsafeGetTensorImpl(), visit);
    }
  } else if (tensor.is_sparse_compressed()) {
    if (const auto* const sparse = dynamic_cast<const at::SparseCsrTensorImpl*>(&tensor)) {
      visit_storages(*sparse->compressed_indices().unsafeGetTensorImpl(), visit);
      visit_storages(*sparse->plain_indices().unsafeGetTensorImpl(), visit);
      visit_storages(*sparse->values().unsafeGetTensorImpl(), visit);
    }
  }
}

/// The same for a tensor or a list of them, of whatever depth.
template <class Visit>
void visit_storages(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit_storages(*value.unsafeToTensorImpl(), visit);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_storages(element, visit);
    }
  }
}

}  // namespace terrace
