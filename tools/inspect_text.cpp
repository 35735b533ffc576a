#include <string_view>
#include <utility>
#include <vector>

#include "base/machine.h"
#include "base/units.h"
#include "tools/inspect_report.h"
#include "tools/text_table.h"

namespace terrace {
namespace {

using Rows = std::vector<std::pair<std::string, std::string>>;

constexpr const char* kNotMeasured = "not measured (terrace inspect --probe)";

/// Pairs of a name and what it is, below a title.
class Section {
 public:
  explicit Section(const std::string& title) : rows_{{title, ""}} {}
  void add(const std::string& name, std::string what) { rows_.emplace_back("  " + name, std::move(what)); }
  const Rows& rows() const { return rows_; }

 private:
  Rows rows_;
};

std::string count(std::size_t number, const std::string& thing) {
  return std::to_string(number) + " " + thing + (number == 1 ? "" : "s");
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) {
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  }
  return text;
}

std::string or_unknown(std::string text) { return text.empty() ? "unknown" : std::move(text); }

std::string rate(double bytes_per_second) { return format_bytes(static_cast<std::uint64_t>(bytes_per_second)) + "/s"; }

Rows build_rows(const Inspection& found) {
  Section section("build");
  section.add("Terrace", found.build.terrace);
  section.add("LibTorch", found.build.libtorch);
  section.add("CUDA", found.build.cuda ? "in this build" : "not in this build");
  section.add("compiler", found.build.compiler);
  section.add("libraries", joined({"liburing " + or_unknown(found.build.liburing), found.topology.library}));
  section.add("kernel", or_unknown(found.build.kernel));
  return section.rows();
}

std::string cores_text(const Topology& topology) {
  const std::string usable = topology.usable_threads == topology.threads
                                 ? "all usable"
                                 : std::to_string(topology.usable_threads) + " usable by this process";
  return joined({count(topology.packages, "package"), count(topology.cores, "core"),
                 count(topology.threads, "hardware thread") + " (" + usable + ")"});
}

std::string memory_text(const Inspection& found) {
  const auto& limit = found.memory.limit_bytes;
  return joined({format_bytes(machine_memory_bytes()), format_bytes(found.memory.available_bytes) + " available",
                 limit ? "limited to " + format_bytes(*limit) + " by a control group" : "no limit of a control group"});
}

std::string attached_text(const Topology::Attached& device) {
  return or_unknown(joined({device.model, device.numa_node ? "NUMA node " + std::to_string(*device.numa_node) : ""}));
}

Rows machine_rows(const Inspection& found) {
  const Topology& topology = found.topology;
  Section section("machine");
  section.add("processor", or_unknown(cpu_model()));
  section.add("cores", cores_text(topology));
  std::vector<std::string> caches;
  for (const Topology::Cache& cache : topology.caches) {
    caches.push_back("level " + std::to_string(cache.level) + ": " + std::to_string(cache.count) + " of " +
                     format_bytes(cache.bytes));
  }
  section.add("caches", or_unknown(joined(caches)));
  section.add("memory", memory_text(found));
  for (const Topology::NumaNode& node : topology.numa_nodes) {
    section.add("NUMA node " + std::to_string(node.number),
                joined({format_bytes(node.memory_bytes), count(node.threads, "hardware thread")}));
  }
  for (const Topology::Attached& device : topology.attached) {
    section.add((device.kind == Topology::Attached::Kind::gpu ? "GPU " : "drive ") + device.name,
                attached_text(device));
  }
  return section.rows();
}

Rows tier_rows(const Inspection& found) {
  Section section("tiers");
  for (const Inspection::OfTier& tier : found.tiers) {
    section.add(std::string(name_of(tier.tier)),
                (tier.budget_bytes == 0 ? "none" : format_bytes(tier.budget_bytes)) + " (" + tier.reason + ")");
  }
  section.add("chunks", "up to " + format_bytes(found.plan.chunk_bytes) + " of parameters each, at most " +
                            format_bytes(found.plan.device_chunk_limit) + " of chunks on the device");
  section.add("granules", format_bytes(found.plan.granule_bytes) + " on host and NVMe, " +
                              format_bytes(found.plan.staging_bytes()) + " of them staging");
  return section.rows();
}

std::string link_rates_text(const Inspection& found) {
  const auto rates = found.rates.links.find(found.device.rates_key);
  if (rates == found.rates.links.end()) return kNotMeasured;
  return rate(rates->second.in) + " in, " + rate(rates->second.out) + " out (" + rates->second.measured_at + ")";
}

void add_cuda(const Inspection::CudaInfo& cuda, Section& section) {
  const CudaProperties& properties = cuda.properties;
  section.add("name", properties.name + ", compute capability " + std::to_string(properties.compute_major) + "." +
                          std::to_string(properties.compute_minor) + ", at " + properties.pci_address);
  section.add("memory", format_bytes(cuda.memory.free_bytes) + " free of " + format_bytes(cuda.memory.total_bytes));
  if (!cuda.state) return;
  section.add("driver", or_unknown(cuda.state->driver_version));
  if (const auto& link = cuda.state->link_at_most) {
    section.add("link", "PCIe " + std::to_string(link->generation) + ", " + std::to_string(link->width) + " lanes");
  }
}

Rows device_rows(const Inspection& found) {
  Section section("device");
  section.add("kind", found.device.kind + " (" + found.device.reason + ")");
  if (found.device.cuda) {
    add_cuda(*found.device.cuda, section);
    section.add("achieved", link_rates_text(found));
    return section.rows();
  }
  section.add("link", (found.device.link ? format_bytes(*found.device.link) + "/s" : "unlimited") + " each way" +
                          (found.device.latency_us > 0 ? ", " + std::to_string(found.device.latency_us) + "us" : ""));
  section.add("achieved", link_rates_text(found));
  return section.rows();
}

std::string drive_text(const Volume& volume) {
  if (volume.drive.empty()) return "none that is seen";
  const std::string turns = volume.rotational ? (*volume.rotational ? "rotational" : "not rotational") : "";
  return joined({volume.drive, volume.model, turns});
}

std::string drive_rates_text(const Rates& all, const std::filesystem::path& folder) {
  const auto found = all.paths.find(path_key(folder));
  if (found == all.paths.end()) return kNotMeasured;
  const DriveRates& rates = found->second;
  return rate(rates.read) + " read, " + rate(rates.write) + " written, by " + rates.engine + ", " +
         std::to_string(rates.depth) + " blocks of " + format_bytes(rates.block_bytes) +
         (rates.direct ? "" : " through the page cache") + " (" + rates.measured_at + ")";
}

Rows path_rows(const Inspection& found, const Inspection::Path& path) {
  Section section("nvme " + path.folder.string());
  const Volume& volume = path.volume;
  section.add("file system", or_unknown(volume.file_system) + ", " + format_bytes(volume.free_bytes) + " free of " +
                                 format_bytes(volume.total_bytes));
  section.add("drive", drive_text(volume));
  section.add("O_DIRECT", path.direct ? "yes" : "no");
  section.add("space", path.space_is_guaranteed ? "set aside before it is used" : "not set aside");
  section.add("achieved", drive_rates_text(found.rates, path.folder));
  return section.rows();
}

std::string share_text(const CoreShares::Share& share) {
  if (share.processors.empty()) return "any hardware thread";
  std::string nodes;
  for (const unsigned node : share.numa_nodes) nodes += (nodes.empty() ? "" : " and ") + std::to_string(node);
  return "hardware thread" + std::string(share.processors.size() == 1 ? " " : "s ") + ranges_of(share.processors) +
         (nodes.empty() ? "" : (share.numa_nodes.size() == 1 ? " near NUMA node " : " near NUMA nodes ") + nodes);
}

Rows work_rows(const Inspection& found) {
  Section section("work");
  if (found.nvme) {
    section.add("I/O engine", found.nvme->engine + ", " + std::to_string(found.plan.nvme_depth) + " blocks of " +
                                  format_bytes(found.plan.granule_bytes) + " at once each way");
  }
  const auto threads = [](int number) { return count(static_cast<std::size_t>(number), "thread"); };
  const CoreShares& cores = found.cores;
  section.add("compute", threads(found.threads) +
                             (cores.compute.processors.empty() ? ", on " : ", to which updates leave ") +
                             share_text(cores.compute));
  section.add("update",
              found.update.instruction_set + (found.update.uses_fma ? "" : ", without fused multiply-add") + ", " +
                  threads(cores.update_threads) +
                  (cores.update_in_background ? ", beside computation"
                                              : ", while the program waits for it, as compute takes every core") +
                  ", on " + share_text(cores.update));
  section.add("transfers", threads(found.transfer_threads) + ", one a link, on " + share_text(cores.transfers));
  const auto& memory = found.rates.memory;
  section.add("memory", !memory ? kNotMeasured
                                : "copy " + rate(memory->copy_one_core) + " by one core, " + rate(memory->copy) +
                                      " by all; read " + rate(memory->read) + ", write " + rate(memory->write) + " (" +
                                      memory->measured_at + ")");
  return section.rows();
}

std::string fallbacks_text(const std::vector<Fallback>& fallbacks) {
  if (fallbacks.empty()) return "fallbacks: none\n";
  std::string text = "fallbacks\n";
  for (const Fallback& fallback : fallbacks) text += "  " + fallback.what + ",\n    because " + fallback.reason + "\n";
  return text;
}

}  // namespace

std::string to_text(const Inspection& found) {
  Rows rows;
  const auto add = [&](const Rows& more) { rows.insert(rows.end(), more.begin(), more.end()); };
  add(build_rows(found));
  add(machine_rows(found));
  add(tier_rows(found));
  add(device_rows(found));
  if (found.nvme) {
    for (const Inspection::Path& path : found.nvme->paths) add(path_rows(found, path));
  }
  add(work_rows(found));
  return format_pairs(rows) + fallbacks_text(found.fallbacks);
}

}  // namespace terrace
