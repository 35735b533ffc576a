/// The configuration: plain values, read from one TOML file.
///
/// Every value has a default. Optional sizes are "auto" in the file: they depend on the machine and are settled by who
/// uses them. What is read has been checked: an unknown key, a wrong type, a value out of range and values that do not
/// go together throw ConfigError, which names the file, the line and the key, what was found and what is accepted.
/// A plain value: copy it, change it, `validate()` it. Paths are kept as they were given.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/log.h"

namespace terrace {

struct Config {
  struct Device {
    std::string kind = "auto";            ///< "auto", "cuda" or "emulated"
    std::optional<std::uint64_t> memory;  ///< budget for everything on the device
    std::optional<std::uint64_t> chunks;  ///< most bytes of chunks on the device; absent: all of `memory`
    std::optional<std::uint64_t> link;    ///< emulated: bytes per second of each direction; absent: unlimited
    std::int64_t latency_us = 0;          ///< emulated: of each direction
    bool operator==(const Device&) const = default;
  };

  struct Host {
    std::optional<std::uint64_t> memory;  ///< budget for everything on the host
    bool operator==(const Host&) const = default;
  };

  struct Nvme {
    std::vector<std::filesystem::path> paths;  ///< folders, several are striped over; none: no NVMe tier
    std::optional<std::uint64_t> memory;       ///< budget for everything on NVMe
    bool operator==(const Nvme&) const = default;
  };

  /// Parts of a kind's chunks that rest on each tier. They sum to 1.
  struct Shares {
    double device = 0;
    double host = 0;
    double nvme = 0;
    bool operator==(const Shares&) const = default;
  };

  /// Where chunks rest; absent shares are "auto".
  struct Placement {
    std::optional<Shares> parameters;
    std::optional<Shares> gradients;
    std::optional<Shares> optimizer;
    std::string activations = "auto";    ///< "auto", "keep", "host", "nvme" or "recompute"
    std::optional<std::uint64_t> chunk;  ///< bytes of a parameter chunk
    /// In which order parameters share chunks: "construction", "use" (as a run before used them first), or "auto".
    std::string order = "auto";
    bool operator==(const Placement&) const = default;
  };

  struct Optimizer {
    std::string update = "deferred";  ///< "deferred": behind the next forward; "immediate": within `step`
    std::string states = "float32";   ///< "float32", "split" or "split_bfloat16": what is kept beside a parameter
    std::string non_finite = "pass";  ///< "pass", "skip" or "error": what a step does whose gradients are not finite
    std::string accumulate = "gradient";  ///< "gradient" or "float32": the type that gradients are summed up in
    bool operator==(const Optimizer&) const = default;
  };

  struct Io {
    static constexpr std::uint64_t block_unit = 4096;  ///< bytes; a block is a multiple of it
    static constexpr std::uint64_t most_block = std::uint64_t{256} << 20U;
    static constexpr std::int64_t most_depth = 4096;

    std::string engine = "auto";         ///< "auto", "io_uring" or "threads"
    std::optional<std::uint64_t> block;  ///< bytes that move at once; absent: as measured, or by a chunk's size
    std::int64_t depth = 0;  ///< blocks that may be with the drives at once, each way; 0: as measured, or by their size
    std::int64_t prefetch = 8;  ///< chunks on their way ahead of need at once; 0: none
    bool operator==(const Io&) const = default;
  };

  struct Timeline {
    static constexpr std::uint64_t least_memory = 16 * 1024;
    static constexpr std::uint64_t default_memory = 256 * 1024;

    /// Bytes of host.memory for what is kept of the past, at least `least_memory`; 0: nothing is kept; absent:
    /// `default_memory`, and more where the command is to write it.
    std::optional<std::uint64_t> memory;
    bool operator==(const Timeline&) const = default;
  };

  struct Log {
    LogLevel level = LogLevel::info;
    bool operator==(const Log&) const = default;
  };

  struct Model {
    std::string family = "gpt";
    std::int64_t layers = 4;
    std::int64_t heads = 4;
    std::int64_t width = 256;
    std::int64_t sequence = 256;    ///< tokens
    std::string dtype = "float32";  ///< "float32" or "bfloat16"
    bool operator==(const Model&) const = default;
  };

  struct Data {
    std::vector<std::filesystem::path> paths;  ///< files or folders
    std::string tokenizer = "bytes";
    bool operator==(const Data&) const = default;
  };

  struct Train {
    std::int64_t steps = 100;
    std::int64_t micro_batch = 4;  ///< sequences in one forward
    std::int64_t accumulate = 1;   ///< micro-batches in one step
    std::uint64_t seed = 1;
    double learning_rate = 1e-3;
    std::int64_t warmup = 0;  ///< steps
    double weight_decay = 0.1;
    double max_gradient_norm = 1.0;  ///< 0: gradients are not clipped
    bool operator==(const Train&) const = default;
  };

  Device device;
  Host host;
  Nvme nvme;
  Placement placement;
  Optimizer optimizer;
  Io io;
  Timeline timeline;
  Log log;
  Model model;
  Data data;
  Train train;

  /// Reads a file, then applies the overrides (see `set`), then validates: an override may complete the file.
  static Config load(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});

  /// The same for text that did not come from a file; `name` stands for it in messages.
  static Config parse(std::string_view text, std::string_view name = "<text>",
                      const std::vector<std::string>& overrides = {});

  /// Sets one key, as in "device.memory=64MiB", and validates. The right side is a TOML value, or else a string that
  /// needs no quotes. Nothing changes if it throws.
  Config& set(std::string_view assignment);

  /// Sets several and validates once, so that they need not go together one by one.
  Config& set_all(const std::vector<std::string>& assignments);

  /// Throws ConfigError unless every value is in range and they go together.
  void validate() const;

  bool operator==(const Config&) const = default;
};

/// All of it as TOML. `Config::parse` gives the same configuration back.
std::string to_toml(const Config& config);

}  // namespace terrace
