#include "offload/transfer_service.h"

#include <utility>

#include "offload/copy_worker.h"
#include "offload/nvme_worker.h"

namespace terrace {

TransferService::TransferService(Device& device, HostArena& arena, NvmeStore* store, IoEngine* engine,
                                 TransferObserver* observer)
    : board_(arena, staging_blocks_each_way, observer) {
  if (store != nullptr) {
    for (const Link link : {Link::nvme_to_host, Link::host_to_nvme}) {
      board_.set_worker(link, std::make_unique<NvmeWorker>(board_, *store, *engine, link));
    }
  }
  for (const Link link : {Link::host_to_device, Link::device_to_host}) {
    board_.set_worker(link, std::make_unique<CopyWorker>(board_, device, link));
  }
}

TransferService::~TransferService() { board_.wait_until_idle(); }

}  // namespace terrace
