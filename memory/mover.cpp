#include "memory/mover.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace terrace {
namespace {

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

/// A fixed set of host blocks. A holder always gives its block back without needing another, so waiting for
/// one ends.
class Mover::Staging {
 public:
  explicit Staging(HostArena& arena) : arena_(arena), free_(arena.allocate(staging_blocks)), all_(free_) {}
  ~Staging() { arena_.free(all_); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  class Block {
   public:
    explicit Block(Staging& staging) : staging_(staging), data_(staging.take()) {}
    ~Block() { staging_.give_back(data_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::byte* data() const noexcept { return data_; }

   private:
    Staging& staging_;
    std::byte* data_;
  };

 private:
  std::byte* take() {
    std::unique_lock lock(mutex_);
    given_back_.wait(lock, [&] { return !free_.empty(); });
    std::byte* block = free_.back();
    free_.pop_back();
    return block;
  }

  void give_back(std::byte* block) {
    {
      const std::unique_lock lock(mutex_);
      free_.push_back(block);
    }
    given_back_.notify_one();
  }

  HostArena& arena_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<std::byte*> free_;
  const std::vector<std::byte*> all_;
};

Mover::Mover(Device& device, HostArena& arena, NvmeStore* store)
    : device_(device), arena_(arena), store_(store), staging_(std::make_unique<Staging>(arena)) {}

Mover::~Mover() {
  for (ChunkId id = 0; id < places_.size(); ++id) {
    for (const Tier tier : all_tiers) {
      vacate({id, tier});
    }
  }
}

std::array<std::uint64_t, tier_count> Mover::room_bytes(std::uint64_t bytes) const {
  const std::uint64_t granules = round_up(bytes, arena_.granule_bytes());
  return {device_.slot_bytes(bytes), granules, granules};
}

void Mover::add_chunk(ChunkId id, const ChunkInfo& info) {
  if (id != places_.size()) {
    throw LogicError("mover: chunks are added in the order of their ids");
  }
  places_.push_back(std::make_unique<ChunkPlace>());
  places_.back()->info = info;
}

void Mover::vacate(const Vacate& vacate) {
  ChunkPlace& place = *places_[vacate.chunk];
  switch (vacate.tier) {
    case Tier::device:
      if (place.device != nullptr) {
        device_.unmap_slot(place.device, place.info.bytes);
        place.device = nullptr;
      }
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

void Mover::run(const Transfer& transfer, ChunkPlace& place) {
  take_room(transfer.to, place);
  const Kind kind = place.info.kind;
  if (transfer.fill) {
    for_each_block(place, [&](std::size_t block, std::uint64_t offset, std::size_t bytes) {
      if (transfer.to == Tier::device) {
        device_.fill_zero(place.device + offset, bytes);
      } else if (transfer.to == Tier::host) {
        std::memset(place.host[block], 0, bytes);
      } else {
        throw LogicError("mover: nothing is filled on NVMe");
      }
    });
    return;
  }
  for_each_block(place, [&](std::size_t block, std::uint64_t offset, std::size_t bytes) {
    if (transfer.from == Tier::host && transfer.to == Tier::device) {
      device_.copy_in(place.device + offset, place.host[block], bytes);
    } else if (transfer.from == Tier::device && transfer.to == Tier::host) {
      device_.copy_out(place.host[block], place.device + offset, bytes);
    } else if (transfer.from == Tier::host && transfer.to == Tier::nvme) {
      write_extent(place, block, {place.host[block], bytes});
    } else if (transfer.from == Tier::nvme && transfer.to == Tier::host) {
      store_->read(place.nvme[block], {place.host[block], bytes});
    } else if (transfer.from == Tier::nvme && transfer.to == Tier::device) {
      const Staging::Block staging(*staging_);
      store_->read(place.nvme[block], {staging.data(), bytes});
      device_.copy_in(place.device + offset, staging.data(), bytes);
    } else if (transfer.from == Tier::device && transfer.to == Tier::nvme) {
      const Staging::Block staging(*staging_);
      device_.copy_out(staging.data(), place.device + offset, bytes);
      write_extent(place, block, {staging.data(), bytes});
    } else {
      throw LogicError("mover: a chunk cannot move to the tier that it is on");
    }
  });
  const std::uint64_t bytes = place.info.bytes;
  if (transfer.from == Tier::nvme) {
    count(Link::nvme_to_host, kind, bytes);
  }
  if (transfer.from == Tier::device) {
    count(Link::device_to_host, kind, bytes);
  }
  if (transfer.to == Tier::nvme) {
    count(Link::host_to_nvme, kind, bytes);
  }
  if (transfer.to == Tier::device) {
    count(Link::host_to_device, kind, bytes);
  }
}

MemoryUsage::Moved Mover::moved() const {
  MemoryUsage::Moved moved{};
  for (std::size_t link = 0; link < link_count; ++link) {
    for (std::size_t kind = 0; kind < kind_count; ++kind) {
      moved[link][kind] = moved_[link][kind].load(std::memory_order_relaxed);
    }
  }
  return moved;
}

template <class OnBlock>
void Mover::for_each_block(const ChunkPlace& place, OnBlock&& on_block) const {
  std::size_t block = 0;
  for (std::uint64_t offset = 0; offset < place.info.bytes; offset += granule_bytes(), ++block) {
    on_block(block, offset,
             static_cast<std::size_t>(std::min<std::uint64_t>(granule_bytes(), place.info.bytes - offset)));
  }
}

void Mover::take_room(Tier tier, ChunkPlace& place) {
  const std::size_t granules = static_cast<std::size_t>(round_up(place.info.bytes, granule_bytes()) / granule_bytes());
  switch (tier) {
    case Tier::device:
      if (place.device == nullptr) {
        place.device = device_.map_slot(place.info.bytes);
      }
      break;
    case Tier::host:
      if (place.host.empty()) {
        place.host = arena_.allocate(granules);
      }
      break;
    case Tier::nvme:
      if (store_ == nullptr) {
        throw LogicError("mover: there is no NVMe tier");
      }
      if (place.nvme.empty()) {
        try {
          place.nvme = store_->reserve(granules);
        } catch (...) {
          std::rethrow_exception(place.write_error ? place.write_error : std::current_exception());
        }
      }
      break;
  }
}

void Mover::write_extent(ChunkPlace& place, std::size_t block, std::span<const std::byte> bytes) {
  try {
    store_->write(place.nvme[block], bytes);
  } catch (...) {
    // The extent is bad: the next attempt takes another one, or all of them anew if there is none.
    place.write_error = std::current_exception();
    store_->retire(place.nvme[block]);
    place.nvme.erase(place.nvme.begin() + static_cast<std::ptrdiff_t>(block));
    store_->release(place.nvme);
    place.nvme.clear();
    throw;
  }
}

void Mover::count(Link link, Kind kind, std::uint64_t bytes) noexcept {
  moved_[index_of(link)][index_of(kind)].fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace terrace
