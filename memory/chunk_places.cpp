#include "memory/chunk_places.h"

#include <algorithm>

#include "base/error.h"

namespace terrace {
namespace {

/// Whether it reads or writes a copy on the tier.
bool touches(const Transfer& transfer, Tier tier) {
  return transfer.to == tier || (!transfer.fill && transfer.from == tier);
}

}  // namespace

ChunkPlaces::~ChunkPlaces() {
  for (ChunkId id = 0; id < places_.size(); ++id) {
    for (const Tier tier : all_tiers) {
      if (places_[id] != nullptr) {
        vacate({id, tier});
      }
    }
  }
}

std::array<std::uint64_t, tier_count> ChunkPlaces::room_bytes(std::uint64_t bytes) const {
  const std::uint64_t in_granules = granules_of(bytes) * granule_bytes();
  return {device_.slot_bytes(bytes), in_granules, in_granules};
}

void ChunkPlaces::add_chunk(ChunkId id, const ChunkInfo& info) {
  if (id >= places_.size()) {
    places_.resize(id + 1);
  }
  places_[id] = std::make_unique<ChunkPlace>();
  places_[id]->info = info;
}

void ChunkPlaces::adopt(ChunkId id, const Allocation& allocation, std::uint64_t offset) {
  ChunkPlace& place = *places_.at(id);
  if (allocation.memory == nullptr) {
    place.adopted = {};
    place.device = nullptr;
    return;
  }
  if (place.device != nullptr) {
    throw LogicError(describe(place.info) + " is given memory on the device, and has some");
  }
  if (device_.allocation_bytes(allocation.bytes) != place.info.room_bytes[index_of(Tier::device)]) {
    throw LogicError(describe(place.info) + " is given memory of another size than it was promised");
  }
  place.adopted = allocation;
  place.device = allocation.memory + offset;
  place.last_use = uses_.issued();
}

void ChunkPlaces::vacate(const Vacate& vacate) {
  ChunkPlace& place = *places_[vacate.chunk];
  switch (vacate.tier) {
    case Tier::device:
      if (place.device != nullptr) {
        leave_device(place);
      }
      place.device = nullptr;
      place.adopted = {};
      break;
    case Tier::host:
      arena_.free(place.host);
      place.host.clear();
      break;
    case Tier::nvme:
      if (store_ != nullptr) {
        store_->release(place.nvme);
        place.nvme.clear();
      }
      break;
  }
}

void ChunkPlaces::leave_device(const ChunkPlace& place) noexcept {
  std::optional<Fence> last_use;
  try {
    last_use = uses_.after(place.last_use);
    vacated_ = std::max(vacated_, *last_use);
  } catch (...) {
    // The device finds out for itself, or meets the error and tells who uses it next.
  }
  if (place.adopted.memory != nullptr) {
    device_.deallocate(place.adopted.memory, place.adopted.bytes);
  } else {
    device_.unmap_slot(place.device, place.info.bytes, last_use);
  }
}

void ChunkPlaces::used(std::span<const ChunkAccess> accesses) {
  const auto on_device = [](const ChunkAccess& access) { return access.tier == Tier::device; };
  const auto first = std::find_if(accesses.begin(), accesses.end(), on_device);
  if (first == accesses.end()) {
    return;
  }
  const std::uint64_t use = uses_.issued();
  for (const ChunkAccess& access : accesses) {
    if (on_device(access)) {
      places_[access.chunk]->last_use = use;
    }
  }
  // Many ops in a row use one chunk: a point for each would be of no more use.
  if (std::exchange(last_used_, first->chunk) != first->chunk) {
    uses_.note_point();
  }
}

/// What has to be computed before the transfer may read or write its bytes on the device.
Fence ChunkPlaces::free_after(const Transfer& transfer, const ChunkPlace& place) {
  if (!touches(transfer, Tier::device)) {
    return {};
  }
  if (place.device != nullptr) {
    return uses_.after(place.last_use);
  }
  // It is to have a new slot, of the room that others have left.
  return device_.guards_slots() ? Fence{} : vacated_;
}

TransferRequest ChunkPlaces::request(const Transfer& transfer) {
  ChunkPlace& place = *places_.at(transfer.chunk);
  TransferRequest request;
  request.from = transfer.from;
  request.to = transfer.to;
  request.fill = transfer.fill;
  request.zeroes = begins_as_zeros(place.info.kind);
  request.kind = place.info.kind;
  request.index = place.info.index;
  request.bytes = place.info.bytes;
  request.priority = transfer.priority;
  request.after = free_after(transfer, place);
  request.prepare = [this, transfer, &place] { return take_room(transfer, place); };
  request.write_failed = [&place](ExtentId extent, std::exception_ptr error) {
    place.bad_extents.push_back(extent);
    place.write_error = std::move(error);
  };
  return request;
}

void ChunkPlaces::done(const Transfer& transfer) {
  if (transfer.to == Tier::nvme) {
    places_.at(transfer.chunk)->write_error = nullptr;
  }
}

void ChunkPlaces::failed(const Transfer& transfer) {
  ChunkPlace& place = *places_.at(transfer.chunk);
  if (transfer.to != Tier::nvme || place.bad_extents.empty()) {
    return;
  }
  // The next attempt takes other extents, or all of them anew if there are none.
  for (const ExtentId bad : place.bad_extents) {
    store_->retire(bad);
    place.nvme.erase(std::find(place.nvme.begin(), place.nvme.end(), bad));
  }
  place.bad_extents.clear();
  store_->release(place.nvme);
  place.nvme.clear();
}

void ChunkPlaces::abandon(const Transfer& transfer) {
  ChunkPlace& place = *places_.at(transfer.chunk);
  place.nvme.clear();
  if (transfer.to == Tier::host) {
    place.host.clear();  // nobody has it yet; where it is read from, whoever has pinned it may go on
  }
}

std::vector<ExtentId> ChunkPlaces::reserve_extents(std::uint64_t bytes) { return store_->reserve(granules_of(bytes)); }

TransferPlaces ChunkPlaces::take_room(const Transfer& transfer, ChunkPlace& place) {
  switch (transfer.to) {
    case Tier::device:
      if (place.device == nullptr) {
        place.device = device_.map_slot(place.info.bytes);
      }
      break;
    case Tier::host:
      if (place.host.empty()) {
        place.host = arena_.allocate(granules_of(place.info.bytes));
      }
      break;
    case Tier::nvme:
      if (place.nvme.empty()) {
        try {
          place.nvme = reserve_extents(place.info.bytes);
        } catch (...) {
          std::rethrow_exception(place.write_error ? place.write_error : std::current_exception());
        }
      }
      break;
  }
  return {.device = touches(transfer, Tier::device) ? place.device : nullptr,
          .host = touches(transfer, Tier::host) ? place.host : std::vector<std::byte*>{},
          .nvme = touches(transfer, Tier::nvme) ? place.nvme : std::vector<ExtentId>{}};
}

}  // namespace terrace
