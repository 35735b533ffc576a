/// What is known of CPUs' own prefetchers.
#pragma once

namespace terrace {

/// Whether this CPU, where several arrays are walked, brings their next lines into the second cache without being
/// asked, well enough that asking costs more than it gives: AMD's from Zen 5 on (family 1Ah), as measured. Any thread.
bool fills_second_cache_itself() noexcept;

}  // namespace terrace
