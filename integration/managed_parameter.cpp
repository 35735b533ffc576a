#include "integration/managed_parameter.h"

#include "base/error.h"

namespace terrace {

void ManagedParameter::require_manageable(c10::Device session_device) const {
  const auto refuse = [&](const std::string& why, const std::string& hint = "") {
    throw LogicError("parameter '" + name + "' cannot be managed: " + why, hint);
  };
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    refuse("it has no dense storage");
  }
  if (!tensor.device().is_cpu() && tensor.device() != session_device) {
    refuse("it is on " + tensor.device().str() + ", and the session's device is " + session_device.str());
  }
  if (tensor.storage_offset() != 0 || !tensor.is_non_overlapping_and_dense() ||
      storage_of(tensor).nbytes() != tensor.nbytes()) {
    refuse("it does not cover a storage of its own (a view of another tensor?)",
           "write to it in place, as by copy_, or give it a copy, as by clone");
  }
}

void ManagedParameter::forget_updates() {
  optimizer = nullptr;
  updated_by.clear();
  updates = std::make_shared<std::int64_t>(0);
}

}  // namespace terrace
