// What must always hold, whatever happened.
#include <algorithm>

#include "base/error.h"
#include "memory/policy.h"

namespace terrace {

void Policy::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) {
      throw LogicError(std::string("policy: broken invariant: ") + what);
    }
  };
  std::array<std::uint64_t, tier_count> rooms = vacating_bytes_;
  std::array<std::uint64_t, tier_count> leaving{};
  std::uint64_t limited = 0;
  std::uint64_t arriving = 0;
  std::uint64_t outgoing = 0;
  std::uint64_t being_read = 0;
  std::array<std::uint64_t, tier_count> sending{};
  for (const Residency& chunk : chunks_) {
    const ChunkInfo& info = chunk.info();
    require(chunk.at(info.home).state != CopyState::absent || (chunk.removed && !chunk.discard_when_idle),
            "a chunk keeps its room at home");
    for (const Tier tier : all_tiers) {
      const Residency::Copy& copy = chunk.at(tier);
      const std::uint64_t room = info.room_bytes[index_of(tier)];
      rooms[index_of(tier)] += copy.state != CopyState::absent ? room : 0;
      leaving[index_of(tier)] += copy.state == CopyState::leaving ? room : 0;
      limited += copy.state != CopyState::absent ? rooms_of(info, tier).limited : 0;
      arriving += copy.state == CopyState::arriving ? 1 : 0;
      outgoing += copy.outgoing;
      sending[index_of(tier)] += copy.outgoing * info.bytes;
      require(copy.write_pins <= copy.pins, "a write pin is a pin");
      require(copy.pins == 0 || copy.state == CopyState::valid || copy.state == CopyState::arriving,
              "a pinned copy is there or arriving");
      require(copy.state != CopyState::leaving || copy.outgoing > 0 || (tier == Tier::host && chunk.being_read),
              "a leaving copy is being written back, or read still");
      require(copy.state != CopyState::reserved || tier == info.home, "only a home keeps room without bytes");
      require(copy.outgoing == 0 || copy.readable(), "a transfer reads a copy that is there");
    }
    require(!chunk.being_read || chunk.at(Tier::host).readable(), "what is read on the host is there");
    being_read += chunk.being_read ? 1 : 0;
    require(!chunk.waits_for_update || chunk.at(Tier::device).readable(), "what waits on the device is there");
  }
  require(being_read == under_reading_, "every chunk being read is counted");
  require(arriving == in_flight_, "every transfer in flight arrives somewhere");
  require(outgoing <= in_flight_, "every copy being read is read by a transfer");
  for (const Tier tier : all_tiers) {
    const std::vector<ChunkId>& guests = guests_[index_of(tier)];
    const auto is_guest = [&](ChunkId id) {
      return chunks_[id].info().home != tier && chunks_[id].at(tier).state != CopyState::absent;
    };
    std::size_t count = 0;
    for (ChunkId id = 0; id < chunks_.size(); ++id) {
      count += is_guest(id) ? 1 : 0;
    }
    require(count == guests.size() && std::all_of(guests.begin(), guests.end(), is_guest),
            "the guests of a tier are the chunks with a copy there and another home");
  }
  require(sending == sending_bytes_, "sending bytes are those of the copies being read");
  require(leaving == leaving_bytes_, "leaving bytes are those of the leaving copies");
  for (const Tier tier : all_tiers) {
    const std::size_t at = index_of(tier);
    require(rooms[at] == chunk_bytes_[at], "chunk bytes are the rooms of the copies");
    require(budgets_[at]->used() >= chunk_bytes_[at], "chunk bytes are counted in the budget");
    require(budgets_[at]->used() <= budgets_[at]->capacity(), "no tier is over its budget");
  }
  require(limited <= limited_bytes_ && limited_bytes_ <= limited + limited_coming_ &&
              limited_coming_ <= vacating_bytes_[index_of(Tier::device)] + leaving_bytes_[index_of(Tier::device)],
          "limited bytes are the rooms of copies on the device that are no activations");
  require(limited_bytes_ <= device_chunk_limit_, "device chunks stay within their limit");
  for (const Tier tier : all_tiers) {
    const std::size_t at = index_of(tier);
    std::uint64_t held = 0;
    for (const Residency& chunk : chunks_) {
      const bool rests = chunk.info().home == tier && chunk.at(tier).state != CopyState::absent;
      held += rests || chunk.at(tier).pins > 0 ? chunk.info().room_bytes[at] : 0;
    }
    // What the program uses is counted without the driver's lock, and changes while this looks.
    require(held <= budgets_[at]->held_chunk_bytes() && budgets_[at]->held_chunk_bytes() <= held + vacating_bytes_[at],
            "held is what rests on a tier and what is pinned there");
    require(budgets_[at]->needed() <= budgets_[at]->capacity(), "no tier was needed beyond its budget");
  }
  const bool something_comes =
      in_flight_ > 0 || under_reading_ > 0 || vacating_bytes_ != std::array<std::uint64_t, tier_count>{};
  const Lane& host = lanes_[index_of(Tier::host)];
  const bool can_wait = waiting() == host.queue.size() && !host.queue.empty() && is_patient(*host.queue.front());
  require(waiting() == 0 || something_comes || can_wait, "who waits, waits for something in flight");
  std::size_t ahead = 0;
  for (const Lane& lane : lanes_) {
    ahead += lane.ahead;
    for (std::size_t i = 1; i < lane.queue.size(); ++i) {
      require(lane.queue[i]->held.empty(), "only the first of a lane holds pins");
    }
    require(lane.ahead <= prefetch_depth_, "no more is fetched ahead at once than is allowed");
  }
  require(ahead <= in_flight_, "what is fetched ahead is in flight");
  if (is_settled_) {
    check_settled();
  }
}

}  // namespace terrace
