#include "optimizer/instruction_set.h"

#include <string>

#include "base/fallback.h"
#include "optimizer/adamw.h"

namespace terrace {

void note_instruction_set() {
  if (adamw_uses_fma()) return;
  note_fallback("update: kernels run with " + std::string(adamw_instruction_set()) +
                    ", slower, and round twice where others round once",
                "this CPU has no fused multiply-add (AVX2)");
}

}  // namespace terrace
