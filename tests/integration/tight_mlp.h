/// Sessions so tight that the chunks of an Mlp move, and what it is trained on.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/base/temporary_folder.h"
#include "tests/integration/mlp.h"
#include "tests/integration/small_gpt.h"

namespace terrace::testing {

using Tensors = std::vector<at::Tensor>;

inline constexpr std::uint64_t chunk_bytes = 16 << 10;
inline constexpr std::int64_t width = Mlp::usual_width;

/// Three chunks fit the device at a time, so that chunks must move.
inline Config tight() {
  Config config;
  config.device.memory = 4 << 20;
  config.device.chunks = 3 * chunk_bytes;
  config.host.memory = 4 << 20;
  config.placement.chunk = chunk_bytes;
  config.log.level = LogLevel::error;
  return config;
}

/// The same with everything at rest on NVMe, and a host that holds little more than one update: in fp32, of a chunk of
/// each kind.
inline Config tight_on_nvme(const TemporaryFolder& folder, std::uint64_t host_chunks = 6) {
  Config config = tight();
  config.host.memory = host_chunks * chunk_bytes;
  config.timeline.memory = 0;
  config.nvme.paths = {folder.path()};
  config.nvme.memory = 4 << 20;
  const Config::Shares on_nvme{.device = 0, .host = 0, .nvme = 1};
  config.placement.parameters = config.placement.gradients = config.placement.optimizer = on_nvme;
  return config;
}

inline at::Tensor batch(at::ScalarType type = at::kFloat) { return torch::randn({8, width}).to(type); }

}  // namespace terrace::testing
