/// What the update's kernels run with on this CPU.
#pragma once

namespace terrace {

/// Notes a fallback where the CPU lacks fused multiply-add: the update is slower there, and its moments are rounded
/// once more.
void note_instruction_set();

}  // namespace terrace
