/// Activations that may still have to leave the device: saved, and held by the program when they were last looked at.
///
/// Each thread has a list of those that it has saved, at which others work too where room is wanted. What a thread
/// leaves behind as it ends stays known. Thread-safe.
#pragma once

#include <memory>

namespace terrace {

class OffloadedActivation;

/// The calling thread has saved it. Nothing where it is in a list already.
void add_pending(const std::shared_ptr<OffloadedActivation>& activation);
/// Has some leave of what the calling thread has saved, but not what was saved before the backward that runs on it.
/// False if it had nothing.
bool some_pending_leave() noexcept;
/// Has all leave that can, of all threads'. Whether any has left. Nothing while the calling thread does so already:
/// what leaves asks for room itself.
bool all_pending_leave() noexcept;

}  // namespace terrace
