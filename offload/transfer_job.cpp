#include "offload/transfer_job.h"

namespace terrace {

Route route_of(const TransferRequest& request) {
  if (request.fill) {
    return {Link::host_to_device, std::nullopt};  // crosses none; that thread is used to touching memory
  }
  if (request.from == Tier::nvme) {
    return {Link::nvme_to_host, request.to == Tier::device ? std::optional(Link::host_to_device) : std::nullopt};
  }
  if (request.from == Tier::device) {
    return {Link::device_to_host, request.to == Tier::nvme ? std::optional(Link::host_to_nvme) : std::nullopt};
  }
  return {request.to == Tier::device ? Link::host_to_device : Link::host_to_nvme, std::nullopt};
}

}  // namespace terrace
