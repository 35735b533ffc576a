#include <utility>

#include <nlohmann/json.hpp>

#include "tools/inspect_report.h"
#include "tools/machine.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

/// The format; it goes up when a field changes its meaning.
constexpr int kVersion = 1;

template <class Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

Json build_json(const Inspection& found) {
  return {{"terrace", found.build.terrace},   {"libtorch", found.build.libtorch}, {"cuda", found.build.cuda},
          {"compiler", found.build.compiler}, {"liburing", found.build.liburing}, {"hwloc", found.topology.library},
          {"kernel", found.build.kernel}};
}

Json topology_json(const Topology& topology) {
  Json json{{"packages", topology.packages},
            {"cores", topology.cores},
            {"threads", topology.threads},
            {"usable_threads", topology.usable_threads}};
  json["numa_nodes"] = Json::array();
  for (const auto& node : topology.numa_nodes) {
    json["numa_nodes"].push_back(
        {{"number", node.number}, {"memory_bytes", node.memory_bytes}, {"threads", node.threads}});
  }
  json["caches"] = Json::array();
  for (const auto& cache : topology.caches) {
    json["caches"].push_back({{"level", cache.level}, {"bytes", cache.bytes}, {"count", cache.count}});
  }
  json["attached"] = Json::array();
  for (const auto& device : topology.attached) {
    json["attached"].push_back({{"kind", device.kind == Topology::Attached::Kind::gpu ? "gpu" : "drive"},
                                {"name", device.name},
                                {"model", device.model},
                                {"numa_node", or_null(device.numa_node)}});
  }
  return json;
}

Json tiers_json(const Inspection& found) {
  Json json;
  for (const auto& tier : found.tiers) {
    json[name_of(tier.tier)] = {{"budget_bytes", tier.budget_bytes}, {"reason", tier.reason}};
  }
  return json;
}

Json cuda_json(const Inspection::CudaInfo& cuda) {
  Json json{{"name", cuda.properties.name},
            {"compute_capability",
             std::to_string(cuda.properties.compute_major) + "." + std::to_string(cuda.properties.compute_minor)},
            {"pci_address", cuda.properties.pci_address},
            {"memory_total_bytes", cuda.memory.total_bytes},
            {"memory_free_bytes", cuda.memory.free_bytes}};
  if (cuda.state) {
    const auto link_json = [](const std::optional<GpuState::Link>& link) {
      return link ? Json{{"generation", link->generation}, {"width", link->width}} : Json();
    };
    json["driver_version"] = cuda.state->driver_version;
    json["link_now"] = link_json(cuda.state->link_now);
    json["link_at_most"] = link_json(cuda.state->link_at_most);
    json["power_watts"] = or_null(cuda.state->power_watts);
    json["temperature_celsius"] = or_null(cuda.state->temperature_celsius);
  }
  return json;
}

Json device_json(const Inspection& found, const Json& rates) {
  Json json{{"kind", found.device.kind},
            {"reason", found.device.reason},
            {"link_bytes_per_second", or_null(found.device.link)},
            {"latency_us", found.device.latency_us},
            {"slot_granule_bytes", found.device.slot_granule_bytes},
            {"cuda", found.device.cuda ? cuda_json(*found.device.cuda) : Json()},
            {"rates", nullptr}};
  if (rates.contains(found.device.rates_key)) json["rates"] = rates[found.device.rates_key];
  return json;
}

Json path_json(const Inspection::Path& path, const Json& rates) {
  const std::string key = path_key(path.folder);
  return {{"path", path.folder.string()},
          {"file_system", path.volume.file_system},
          {"total_bytes", path.volume.total_bytes},
          {"free_bytes", path.volume.free_bytes},
          {"drive", path.volume.drive},
          {"model", path.volume.model},
          {"rotational", or_null(path.volume.rotational)},
          {"direct", path.direct},
          {"space_is_guaranteed", path.space_is_guaranteed},
          {"rates", rates.contains(key) ? rates[key] : Json()}};
}

Json nvme_json(const Inspection& found, const Json& rates) {
  if (!found.nvme) return nullptr;
  Json json{{"engine", found.nvme->engine},
            {"block_bytes", found.plan.granule_bytes},
            {"depth", found.plan.nvme_depth},
            {"paths", Json::array()}};
  for (const auto& path : found.nvme->paths) json["paths"].push_back(path_json(path, rates));
  return json;
}

/// Null where they may run on any.
void add_share(const CoreShares::Share& share, Json& json) {
  const bool on_any = share.processors.empty();
  json["hardware_threads"] = on_any ? Json() : Json(ranges_of(share.processors));
  json["numa_nodes"] = on_any ? Json() : Json(share.numa_nodes);
}

}  // namespace

std::string to_json(const Inspection& found) {
  Json machine = machine_json(found.threads);
  machine["available_bytes"] = found.memory.available_bytes;
  machine["limit_bytes"] = or_null(found.memory.limit_bytes);
  machine["topology"] = topology_json(found.topology);
  const Json rates = Json::parse(to_json(found.rates));
  machine["rates"] = rates.contains("memory") ? rates["memory"] : Json();

  Json run;
  run["name"] = "inspect";
  run["build"] = build_json(found);
  run["tiers"] = tiers_json(found);
  run["chunk_bytes"] = found.plan.chunk_bytes;
  run["device_chunk_limit_bytes"] = found.plan.device_chunk_limit;
  run["granule_bytes"] = found.plan.granule_bytes;
  run["staging_bytes"] = found.plan.staging_bytes();
  run["device"] = device_json(found, rates["links"]);
  run["nvme"] = nvme_json(found, rates["paths"]);
  run["compute"] = {{"threads", found.threads}};
  add_share(found.cores.compute, run["compute"]);
  run["update"] = {{"instruction_set", found.update.instruction_set},
                   {"fused_multiply_add", found.update.uses_fma},
                   {"in_background", found.cores.update_in_background},
                   {"threads", found.cores.update_threads}};
  add_share(found.cores.update, run["update"]);
  run["transfers"] = {{"threads", found.transfer_threads}};
  add_share(found.cores.transfers, run["transfers"]);
  run["fallbacks"] = Json::array();
  for (const Fallback& fallback : found.fallbacks) {
    run["fallbacks"].push_back({{"what", fallback.what}, {"reason", fallback.reason}});
  }
  Json json;
  json["version"] = kVersion;
  json["machine"] = std::move(machine);
  json["cases"] = Json::array({std::move(run)});
  return json.dump(2, ' ', false, Json::error_handler_t::replace);  // a path need not be UTF-8
}

}  // namespace terrace
