#include "tools/inspect.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "integration/cuda_program.h"
#include "integration/memory_plan.h"
#include "integration/rates.h"
#include "offload/choose_device.h"
#include "offload/choose_engine.h"
#include "offload/cuda_device.h"
#include "offload/emulated_device.h"
#include "tools/inspect_report.h"
#include "tools/inspection.h"
#include "tools/interrupt.h"
#include "tools/made_folders.h"
#include "tools/probe_drive.h"
#include "tools/probe_link.h"
#include "tools/probe_memory.h"

namespace terrace {
namespace {

/// Large enough that copies are not of what is in a cache.
constexpr std::uint64_t kProbedDevice = std::uint64_t{64} << 20U;

void tell(const std::string& what) { std::fprintf(stderr, "measuring %s ...\n", what.c_str()); }

std::unique_ptr<Device> make_small_device(const Config::Device& config) {
  if (const DeviceChoice choice = choose_device(config, load_cuda_program); choice.driver != nullptr) {
    return std::make_unique<CudaDevice>(choice.driver, kProbedDevice);
  }
  return std::make_unique<EmulatedDevice>(kProbedDevice, emulated_link(config));
}

/// Measures what the configuration uses; rates of other paths and links stay as they were.
void probe(const Config& config, const Inspection& found, const Interrupt& interrupt, Rates& rates) {
  const auto stop = [&] { return interrupt.requested(); };
  tell("the link to the device");
  const std::unique_ptr<Device> device = make_small_device(config.device);
  rates.links[found.device.rates_key] = probe_link(*device, found.plan.granule_bytes, stop);
  tell("memory");
  rates.memory = probe_memory(found.topology, stop);
  if (!found.nvme) return;
  const auto engine = make_io_engine(config.io.engine);
  for (const Inspection::Path& path : found.nvme->paths) {
    if (stop()) return;
    tell(path.folder.string());
    rates.paths[path_key(path.folder)] =
        probe_drive(path.folder, *engine, found.plan.nvme_capacity / found.nvme->paths.size(), stop);
  }
}

}  // namespace

bool inspect(const InspectOptions& options) {
  const Config& config = options.config;
  const MadeFolders made(config.nvme.paths);
  const RatesFile file;
  Rates rates = file.load();
  Inspection found = make_inspection(config, rates);
  if (options.probe) {
    const Interrupt interrupt;
    probe(config, found, interrupt, rates);
    if (interrupt.requested()) {
      std::fputs("terrace: interrupted; nothing was kept of what was measured\n", stderr);
      return false;
    }
    file.save(rates);
    found = make_inspection(config, rates);  // a session will go by them
  }
  std::fputs((options.json ? to_json(found) + "\n" : to_text(found)).c_str(), stdout);
  std::fflush(stdout);
  return true;
}

}  // namespace terrace
