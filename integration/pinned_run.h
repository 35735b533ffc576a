/// A run of bytes of a chunk that a pin holds, alone, on the host: piece by piece, as its granules lie.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "memory/access_stream.h"

namespace terrace {

/// Calls `visit(piece, done)` for each piece of `bytes` bytes from `offset` of the chunk; `done` of them came before.
template <class Visit>
void visit_pinned_run(const Pin& pin, std::uint64_t offset, std::uint64_t bytes, Visit&& visit) {
  for (std::uint64_t done = 0; done < bytes;) {
    const std::span<std::byte> rest = pin.host_bytes(0, offset + done);
    const std::span<std::byte> piece = rest.first(std::min<std::uint64_t>(rest.size(), bytes - done));
    visit(piece, done);
    done += piece.size();
  }
}

}  // namespace terrace
