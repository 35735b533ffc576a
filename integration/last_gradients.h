/// Tells when backward probably adds the last gradient of a step to a set of chunks: as many as in the last step that
/// trained it.
///
/// Where a step goes otherwise nobody is told, or too early: what is made of it has to bear that.
///
/// Used under the session's program mutex, which a backward's hooks take too. Ended before it dies, unless the session
/// has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "integration/managed_parameter.h"

namespace terrace {

class SessionState;

class LastGradients {
 public:
  using Last = std::function<void(std::uint32_t chunk_set)>;

  /// `last`: called within the backward, just before the gradient is added.
  explicit LastGradients(Last last) : last_(std::move(last)) {}
  LastGradients(const LastGradients&) = delete;
  LastGradients& operator=(const LastGradients&) = delete;

  /// A step ends, in which these parameters had gradients: they are counted from now on, but for those that another
  /// one watches, and the next step is to go like this one.
  void begin_step(std::span<ManagedParameter* const> trained);
  void end(SessionState& state);

 private:
  struct Count {
    std::uint64_t now = 0;
    std::uint64_t last_one = 0;  ///< of the last step that had any
  };

  void count(std::uint32_t chunk_set);

  const Last last_;
  std::unordered_map<std::uint32_t, Count> counts_;  ///< of gradients, by set of chunks
  std::unordered_set<std::uint64_t> watched_;        ///< numbers of parameters, which may have died since
};

}  // namespace terrace
