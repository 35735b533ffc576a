/// The gradients of a step as backwards add them, for an optimizer that updates within backward: which sets of chunks
/// have all theirs, and whose are used up.
///
/// Used under the session's program mutex, which a backward's hooks take too. Ended before it dies,
/// unless the session has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "integration/managed_parameter.h"
#include "integration/optimizer.h"

namespace terrace {

class SessionState;

class BackwardWatch {
 public:
  struct Member {
    ManagedParameter* parameter;
    std::size_t group;     ///< in which it was when the step began
    std::size_t position;  ///< within that
  };
  using Members = std::vector<Member>;  ///< of one set of chunks

  using Gradient = std::function<void(const ManagedParameter&)>;

  /// `optimizer`: in whose name errors speak. `on_gradient`: called after each gradient, with its parameter.
  BackwardWatch(std::string_view optimizer, Gradient on_gradient)
      : optimizer_(optimizer), on_gradient_(std::move(on_gradient)) {}
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  /// Begins another step's count of the gradients of what is in `groups` and has states. Throws LogicError for a
  /// parameter that another one watches, and then watches nothing.
  void begin(SessionState& state, const Optimizer::Groups& groups);
  void end(SessionState& state);

  /// The sets of chunks that can be updated now that the parameter's gradient is there: what was in a group when the
  /// step began has its gradients, but for what is frozen. A set of which a block has read a parameter, and is to run
  /// again, waits for that and then for the next gradient. Throws LogicError for a second gradient since the step
  /// began.
  std::vector<const Members*> completed_by(const ManagedParameter& parameter);
  /// The update queue has the parameter's gradient. Nothing happens for what is not watched.
  void use_up(const ManagedParameter& parameter);

 private:
  struct Set {
    Members members;
    std::size_t missing = 0;  ///< the first whose gradient was missing last
  };
  struct Progress {
    bool has_arrived = false;  ///< its gradient, by backward
    bool is_used_up = false;
  };

  bool is_complete(Set& set) const;

  const std::string_view optimizer_;
  const Gradient on_gradient_;
  std::unordered_map<std::uint32_t, Set> sets_;
  std::vector<std::uint32_t> complete_;  ///< of those: what is to be updated
  std::unordered_map<const ManagedParameter*, Progress> watched_;
};

}  // namespace terrace
